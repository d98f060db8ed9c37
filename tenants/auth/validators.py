"""Validators of token signatures, for the installation's issuer and the tenants' issuers.

The setting CODEQ_AUTH_VALIDATORS lists the validators. Times, audience, subject and tenant of a token are checked in
`tenants.auth.claims`.
"""

from __future__ import annotations

from typing import Any, Protocol

import jwt
import msgspec
from jwt.api_jws import PyJWS

from core.conf import conf
from core.errors import Unauthenticated
from tenants import http_fetch
from tenants.auth import installation_keys, jwks
from tenants.auth.claims import TENANT_CLAIMS, Verified
from tenants.cache import tenant_cache

_JWS = PyJWS(algorithms=list(jwks.ALGORITHMS))


class Validator(Protocol):
    """A verifier of signatures, named by its dotted path in `auth.validators`.

    Each process creates one instance. It need not check times, audience, subject or tenant.
    """

    def validate(self, token: str) -> Verified | None:
        """Return the claims of a token with a valid signature.

        Returns None for a token of another issuer; the next validator receives it. Raises Unauthenticated if the
        signature is invalid. Runs in a thread and may block.
        """


class _Header(msgspec.Struct):
    alg: str
    kid: str | None = None
    crit: msgspec.UnsetType | Any = msgspec.UNSET


class UnverifiedToken(msgspec.Struct, frozen=True):
    """The unverified header and claims of a token. Use them only to choose the key."""

    algorithm: str
    kid: str | None
    issuer: str
    claims: dict[str, Any]


def decode_unverified(token: str) -> UnverifiedToken | None:
    """Decode a token without verifying it.

    Returns None if it is not a signed JWT of an accepted algorithm.
    """
    parts = token.split(".")
    # Refuse padding, which the library tolerates: a padded token would be a second spelling of the same token, and have
    # its own rate limit.
    if len(parts) != 3 or not all(parts) or "=" in token:
        return None
    try:
        header = msgspec.json.decode(jwt.utils.base64url_decode(parts[0]), type=_Header)
        claims = msgspec.json.decode(jwt.utils.base64url_decode(parts[1]), type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    issuer = claims.get("iss")
    # `crit` names extensions that a verifier must support (RFC 7515 §4.1.11). This one supports no extension.
    if header.alg not in jwks.ALGORITHMS or header.crit is not msgspec.UNSET or not isinstance(issuer, str):
        return None
    return UnverifiedToken(header.alg, header.kid, issuer, claims)


def verify_signature(token: str, unverified: UnverifiedToken, key: jwks.Key | None) -> dict[str, Any]:
    """Return the claims of a token that `key` has signed. Raises Unauthenticated."""
    if key is None or key.algorithm != unverified.algorithm:
        raise Unauthenticated("The token is signed with an unknown key.")
    try:
        signed = _JWS.decode_complete(token, key.material, algorithms=[key.algorithm])
        # Return the claims in the signed bytes, not those that `decode_unverified` has read from the text.
        return msgspec.json.decode(signed["payload"], type=dict[str, Any])
    except (jwt.PyJWTError, ValueError) as error:
        raise Unauthenticated("The token's signature is invalid.") from error


class JwksValidator:
    """A validator for tokens of the installation's issuer.

    The keys come from the issuer's JWKS URL, or are the installation's own keys if there is no URL.
    """

    def __init__(self, keys: jwks.KeyCache | None = None) -> None:
        url = conf().auth.jwks_url
        self._keys = keys or (create_key_cache(url) if url else installation_keys.own_keys)

    def validate(self, token: str) -> Verified | None:
        unverified = decode_unverified(token)
        auth = conf().auth
        if unverified is None or unverified.issuer != auth.issuer:
            return None
        key = self._keys.find(unverified.kid, unverified.algorithm)
        return Verified(
            claims=verify_signature(token, unverified, key),
            producer_audience=auth.producer_audience,
            worker_audience=auth.worker_audience,
        )


class TenantKeyValidator:
    """A validator for tokens of the tenants' own issuers (TenantIssuer rows)."""

    def __init__(self) -> None:
        self._caches: dict[str, jwks.KeyCache] = {}  # by URL

    def validate(self, token: str) -> Verified | None:
        unverified = decode_unverified(token)
        if unverified is None:
            return None
        slugs = {value for claim in TENANT_CLAIMS if isinstance(value := unverified.claims.get(claim), str)}
        if len(slugs) != 1:
            return None
        slug = slugs.pop()
        issuer = tenant_cache.find_issuer(slug, unverified.issuer)
        if issuer is None:
            return None
        if issuer.jwks_url:
            url = issuer.jwks_url
            keys = self._caches.get(url) or self._caches.setdefault(url, create_key_cache(url))
            key = keys.find(unverified.kid, unverified.algorithm)
        else:
            key = jwks.select(issuer.keys, unverified.kid, unverified.algorithm)
        auth = conf().auth
        return Verified(
            claims=verify_signature(token, unverified, key),
            tenant=slug,
            producer_audience=issuer.producer_audience or auth.producer_audience,
            worker_audience=issuer.worker_audience or auth.worker_audience,
        )


def create_key_cache(url: str) -> jwks.KeyCache:
    return jwks.KeyCache(url, lambda: jwks.parse_keys(http_fetch.fetch_json(url)))
