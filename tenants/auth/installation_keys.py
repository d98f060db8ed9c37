"""The key pairs that sign this installation's own tokens.

The first is created on first use. PostgreSQL stores them, so all machines share them.
"""

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
    """Return a token with these claims, signed with the newest key."""
    row = _newest()
    private = serialization.load_pem_private_key(secret_encryption.decrypt(row.encrypted_private_key), password=None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    return jwt.encode(dict(claims), private, ALGORITHM, headers={"kid": row.kid})


def document() -> dict[str, list[dict[str, Any]]]:
    """Return the JWKS document: the public keys, newest first. Create a key if there is none."""
    _newest()
    return {"keys": [row.public for row in InstallationKey.objects.all()]}


def rotate() -> str:
    """Create a key and return its kid.

    It signs from now on. Tokens of the older keys remain valid until `retire`.
    """
    row = _create()
    own_keys.forget()
    return row.kid


def retire(kid: str) -> None:
    """Stop accepting tokens that this key has signed.

    It takes effect on every machine within three minutes, the sum of the lifetimes of cached keys and cached tokens.
    """
    InstallationKey.objects.filter(kid=kid).delete()
    own_keys.forget()


def _newest() -> InstallationKey:
    row = InstallationKey.objects.first()
    if row is None:
        # Two machines that start at the same time must create one key only, or each would at first refuse the tokens
        # of the other.
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            row = InstallationKey.objects.first() or _create()
    return row


def _create() -> InstallationKey:
    private = ec.generate_private_key(ec.SECP256R1())
    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = ECAlgorithm.to_jwk(private.public_key(), as_dict=True)
    kid = _thumbprint(public)
    return InstallationKey.objects.create(
        kid=kid,
        encrypted_private_key=secret_encryption.encrypt(pem),
        public={
            "kty": "EC", "crv": public["crv"], "x": public["x"], "y": public["y"],
            "kid": kid, "use": "sig", "alg": ALGORITHM,
        },
    )  # fmt: skip


def _thumbprint(public: Mapping[str, Any]) -> str:
    """Return the key's thumbprint (RFC 7638), which names it."""
    canonical = msgspec.json.encode({name: public[name] for name in ("crv", "kty", "x", "y")}, order="sorted")
    return base64.urlsafe_b64encode(hashlib.sha256(canonical).digest()).rstrip(b"=").decode("ascii")


def _fetch() -> Mapping[str, jwks.Key]:
    try:
        return jwks.parse_keys(document())
    except Error as error:
        raise Unavailable() from error


def _run_in_thread(job: Callable[[], None]) -> None:
    """Run in a thread: tokens of cached keys must not wait while PostgreSQL does not respond."""

    def run() -> None:
        try:
            job()
        finally:
            connection.close()

    threading.Thread(target=run, name="own-keys", daemon=True).start()


# The keys are fetched more often than those of other issuers: a key created on another machine is accepted within a
# second. A key retired elsewhere is refused after 90 seconds, plus the lifetime of a cached token
# (`auth.cache_seconds`).
own_keys = jwks.KeyCache(
    "this installation",
    _fetch,
    policy=jwks.RefreshPolicy(
        fresh_seconds=30, serve_stale_seconds=90, unknown_key_interval_seconds=1, retry_interval_seconds=1
    ),
    start=_run_in_thread,
)
