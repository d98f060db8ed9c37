"""Who can tell that a token is genuine: the installation's issuer, the tenants' own, and whoever else is named.

What a token says is not believed here beyond its signature: times, audience, subject and tenant are `tenants.auth.claims`.
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
    """Somebody who can tell whether a token is genuine. Named by dotted path in `auth.validators`, made once.

    `validate` returns the claims it vouches for, None for a token that is none of its business (the next one
    is asked), and raises Unauthenticated for one that is and is not genuine. It runs off the event loop and
    may block; it need not look at times, audience, subject or tenant: that is done for all alike.
    """

    def validate(self, token: str) -> Verified | None: ...


class _Header(msgspec.Struct):
    alg: str
    kid: str | None = None
    crit: msgspec.UnsetType | Any = msgspec.UNSET


class Unverified(msgspec.Struct, frozen=True):
    """What a token says of itself, to choose the keys that can confirm it. Good for nothing else."""

    algorithm: str
    kid: str | None
    issuer: str
    claims: dict[str, Any]


def peek(token: str) -> Unverified | None:
    """What the token says of itself, or None where it is no signed JWT of an algorithm we accept."""
    parts = token.split(".")
    # The library tolerates padding, which would give one token a second spelling, and a second rate limit.
    if len(parts) != 3 or not all(parts) or "=" in token:
        return None
    try:
        header = msgspec.json.decode(jwt.utils.base64url_decode(parts[0]), type=_Header)
        claims = msgspec.json.decode(jwt.utils.base64url_decode(parts[1]), type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    issuer = claims.get("iss")
    # `crit` names extensions that must be understood (RFC 7515 §4.1.11), and we understand none.
    if header.alg not in jwks.ALGORITHMS or header.crit is not msgspec.UNSET or not isinstance(issuer, str):
        return None
    return Unverified(header.alg, header.kid, issuer, claims)


def confirm(token: str, unverified: Unverified, key: jwks.Key | None) -> dict[str, Any]:
    """The claims, once `key` has signed them. Raises Unauthenticated."""
    if key is None or key.algorithm != unverified.algorithm:
        raise Unauthenticated("The token is signed with a key that is not known here.")
    try:
        signed = _JWS.decode_complete(token, key.material, algorithms=[key.algorithm])
        # From the bytes that were signed, and not from what `peek` made of the text.
        return msgspec.json.decode(signed["payload"], type=dict[str, Any])
    except (jwt.PyJWTError, ValueError) as error:
        raise Unauthenticated("The token's signature is not right.") from error


class JwksValidator:
    """The installation's issuer: its JWKS by URL, or this installation's own key pair."""

    def __init__(self, source: jwks.KeySet | None = None) -> None:
        url = conf().auth.jwks_url
        self._keys = source or (keys_at(url) if url else installation_keys.own_keys)

    def validate(self, token: str) -> Verified | None:
        unverified = peek(token)
        auth = conf().auth
        if unverified is None or unverified.issuer != auth.issuer:
            return None
        key = self._keys.find(unverified.kid, unverified.algorithm)
        return Verified(
            claims=confirm(token, unverified, key),
            producer_audience=auth.producer_audience,
            worker_audience=auth.worker_audience,
        )


class TenantKeyValidator:
    """The tenants' own issuers (TenantIssuer rows). Each speaks for its tenant only."""

    def __init__(self) -> None:
        self._sets: dict[str, jwks.KeySet] = {}

    def validate(self, token: str) -> Verified | None:
        unverified = peek(token)
        if unverified is None:
            return None
        named = {value for name in TENANT_CLAIMS if isinstance(value := unverified.claims.get(name), str)}
        if len(named) != 1:
            return None
        slug = named.pop()
        issuer = tenant_cache.issuer(slug, unverified.issuer)
        if issuer is None:
            return None
        if issuer.jwks_url:
            source = self._sets.get(issuer.jwks_url) or self._sets.setdefault(issuer.jwks_url, keys_at(issuer.jwks_url))
            key = source.find(unverified.kid, unverified.algorithm)
        else:
            key = jwks.select(issuer.keys, unverified.kid, unverified.algorithm)
        auth = conf().auth
        return Verified(
            claims=confirm(token, unverified, key),
            tenant=slug,
            producer_audience=issuer.producer_audience or auth.producer_audience,
            worker_audience=issuer.worker_audience or auth.worker_audience,
        )


def keys_at(url: str) -> jwks.KeySet:
    return jwks.KeySet(url, lambda: jwks.keys_of(http_fetch.fetch_json(url)))
