"""This installation's own key pair: made on first use, and shared by its machines through PostgreSQL."""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jwt
import msgspec
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from django.db import Error, connection, transaction
from jwt.algorithms import ECAlgorithm

from core.errors import Unavailable
from tenants import secret_encryption
from tenants.auth import jwks
from tenants.models import InstallationKey

ALGORITHM = "ES256"
_LOCK = 0x636F6465514B  # an advisory lock's number: "codeQK"


def sign(claims: Mapping[str, object]) -> str:
    """A token of this installation with these claims."""
    row = _newest()
    private = serialization.load_pem_private_key(secret_encryption.decrypt(row.sealed), password=None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    return jwt.encode(dict(claims), private, ALGORITHM, headers={"kid": row.kid})


def document() -> dict[str, list[dict[str, Any]]]:
    """The JWKS document: every public key whose tokens are accepted, newest first."""
    _newest()
    return {"keys": [row.public for row in InstallationKey.objects.all()]}


def rotate() -> str:
    """Sign with a new key, whose kid is returned. Tokens of the former keys stay good until `retire`."""
    row = _make()
    own_keys.forget()
    return row.kid


def retire(kid: str) -> None:
    """Stop accepting tokens signed with this key. On every machine within three minutes: the set of keys and the memory
    of a verified token may be so old together."""
    InstallationKey.objects.filter(kid=kid).delete()
    own_keys.forget()


def _newest() -> InstallationKey:
    row = InstallationKey.objects.first()
    if row is None:
        # Two machines that start at once must end up with one key, or each would refuse the other's tokens at
        # first.
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            row = InstallationKey.objects.first() or _make()
    return row


def _make() -> InstallationKey:
    private = ec.generate_private_key(ec.SECP256R1())
    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = ECAlgorithm.to_jwk(private.public_key(), as_dict=True)
    kid = _thumbprint(public)
    return InstallationKey.objects.create(
        kid=kid,
        sealed=secret_encryption.encrypt(pem),
        public={
            "kty": "EC", "crv": public["crv"], "x": public["x"], "y": public["y"],
            "kid": kid, "use": "sig", "alg": ALGORITHM,
        },
    )  # fmt: skip


def _thumbprint(public: Mapping[str, Any]) -> str:
    """RFC 7638: the same key has the same name everywhere."""
    canonical = msgspec.json.encode({name: public[name] for name in ("crv", "kty", "x", "y")}, order="sorted")
    return base64.urlsafe_b64encode(hashlib.sha256(canonical).digest()).rstrip(b"=").decode("ascii")


def _fetch() -> Mapping[str, jwks.Key]:
    try:
        return jwks.keys_of(document())
    except Error as error:
        raise Unavailable() from error


def _in_a_thread(job: Callable[[], None]) -> None:
    """In one of its own, so that no token waits for a PostgreSQL that does not answer while known keys can tell."""

    def run() -> None:
        try:
            job()
        finally:
            connection.close()

    threading.Thread(target=run, name="own-keys", daemon=True).start()


# Asked more often than a foreign source, so that a key made on another machine is known here at once; and before the
# set is too old to answer. A single token is verified once a minute (`auth.cache_seconds`): that is soon enough, too.
own_keys = jwks.KeySet(
    "this installation", _fetch, pace=jwks.RefreshPolicy(fresh=30, lenient=90, unknown=1, retry=1), start=_in_a_thread
)
