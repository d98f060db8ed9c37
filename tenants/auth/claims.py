"""The claims of a token with a valid signature, as an identity with roles and scopes.

A malformed claim is an error. It is never ignored, because that could grant a permission.
"""

from __future__ import annotations

from typing import Any

import msgspec

from core.conf import Auth
from core.errors import Forbidden, Unauthenticated
from tenants.domain import ADMIN_SCOPE, ANY_COMMAND, OPERATOR_SCOPE, WORKER_SCOPES, CallerRole

TENANT_CLAIMS = ("tid", "tenantId", "tenant_id", "organizationId", "organization_id")
_SUBJECT_LENGTH = 255
_GROUP_LENGTH = 128


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """The claims of a token whose signature a validator has verified.

    `tenant` is set if the issuer belongs to one tenant. Then the claims must name that tenant.
    """

    claims: dict[str, Any]
    tenant: str | None = None
    producer_audience: str
    worker_audience: str


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The validated claims in codeQ's terms. `slug` is the tenant's name."""

    slug: str
    subject: str
    roles: frozenset[CallerRole]
    scopes: frozenset[str]
    commands: frozenset[str]
    group: str
    expires_at: float


def parse_identity(verified: Verified, auth: Auth, now: float) -> Identity:
    """Return the identity that the claims describe.

    Raises Unauthenticated if the token is malformed, expired, not valid yet or for another audience, and Forbidden if
    its claims grant no access.
    """
    claims = verified.claims
    expires_at = _check_times(claims, auth.leeway_seconds, now)
    subject = claims.get("sub")
    if not isinstance(subject, str) or not 0 < len(subject) <= _SUBJECT_LENGTH or not subject.isprintable():
        raise Unauthenticated("The token's `sub` must be a non-empty string.")
    audiences = _audiences(claims.get("aud"))
    is_producer, is_worker = verified.producer_audience in audiences, verified.worker_audience in audiences
    if not is_producer and not is_worker:
        raise Unauthenticated("The token is for another audience.")
    slug = _tenant(claims, subject if auth.single_tenant else None)
    if verified.tenant is not None and slug != verified.tenant:
        # A tenant's own issuer must not issue tokens for another tenant.
        raise Forbidden("The token's issuer belongs to another tenant.")

    scopes = frozenset(_text(claims, "scope").split())
    role_claim = _text(claims, "role")
    commands = _commands(claims.get("eventTypes"))
    group = _text(claims, "workerGroup")
    if len(group) > _GROUP_LENGTH or not group.isprintable():
        raise Forbidden("The token's `workerGroup` is too long or has unprintable characters.")

    roles = set()
    if is_producer:
        roles.add(CallerRole.PRODUCER)
        if role_claim == "ADMIN" or ADMIN_SCOPE in scopes:
            roles.add(CallerRole.ADMIN)
        # A tenant's own issuer must not grant access to all tenants.
        if OPERATOR_SCOPE in scopes and verified.tenant is None:
            roles.add(CallerRole.OPERATOR)
        if auth.producer_as_worker and not is_worker:
            roles.add(CallerRole.WORKER)
            scopes |= frozenset(WORKER_SCOPES)
            commands = commands or frozenset({ANY_COMMAND})
    if is_worker:
        roles.add(CallerRole.WORKER)
    return Identity(
        slug=slug,
        subject=subject,
        roles=frozenset(roles),
        scopes=scopes,
        commands=commands,
        group=group,
        expires_at=expires_at,
    )


def _check_times(claims: dict[str, Any], leeway: int, now: float) -> float:
    expires_at = _time(claims.get("exp"))
    if expires_at is None:
        raise Unauthenticated("The token has no `exp`: tokens must expire.")
    if now >= expires_at + leeway:
        raise Unauthenticated("The token has expired.")
    for name in ("nbf", "iat"):
        if name in claims:
            moment = _time(claims[name])
            if moment is None or now < moment - leeway:
                raise Unauthenticated(f"The token's `{name}` is not in the past.")
    return expires_at


def _time(value: object) -> float | None:
    # `True` is an int in Python, and some libraries accept "12". Neither is a NumericDate (RFC 7519).
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 2**53:
        return None
    return float(value)


def _audiences(value: object) -> frozenset[str]:
    if isinstance(value, str):
        return frozenset({value})
    if isinstance(value, list) and all(isinstance(audience, str) for audience in value):
        return frozenset(value)
    raise Unauthenticated("The token's `aud` must be a string or a list of strings.")


def _tenant(claims: dict[str, Any], fallback: str | None) -> str:
    names: set[str] = set()
    for claim in TENANT_CLAIMS:
        if claim in claims:
            value = claims[claim]
            if not isinstance(value, str) or not value:
                raise Forbidden(f"The token's `{claim}` must be a non-empty string.")
            names.add(value)
    if len(names) > 1:
        raise Forbidden("The token names more than one tenant.")
    if names:
        return names.pop()
    if fallback is None:
        raise Forbidden("The token names no tenant.")
    return fallback


def _text(claims: dict[str, Any], name: str) -> str:
    value = claims.get(name, "")
    if not isinstance(value, str):
        raise Forbidden(f"The token's `{name}` must be a string.")
    return value


def _commands(value: object) -> frozenset[str]:
    if value is None:
        return frozenset()
    if not isinstance(value, list) or not all(isinstance(command, str) and command for command in value):
        raise Forbidden("The token's `eventTypes` must be a list of strings.")
    return frozenset(value)
