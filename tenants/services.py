"""What is done about tenants: made, suspended, given secrets and tokens.

A change is in force in this process at once, and in the others when their directory next looks (two seconds).
"""

from __future__ import annotations

import base64
import os
import re
import time
from collections.abc import Sequence
from datetime import timedelta

from django.db import IntegrityError, transaction
from django.db.models import Q
from django.utils import timezone

from core.conf import conf
from core.errors import ConfigError, Forbidden, InvalidRequest, NotFound
from tenants import secret_encryption
from tenants.auth import installation_keys
from tenants.cache import tenant_cache
from tenants.domain import ADMIN_SCOPE, OPERATOR_SCOPE, WORKER_SCOPES, CallerRole, TenantSnapshot
from tenants.models import SLUG_PATTERN, SigningSecret, Tenant, mint_tid

SECRET_BYTES = 32  # Standard Webhooks asks for 24 to 64
SECRET_OVERLAP_SECONDS = 86_400  # how long the former secret signs beside the new one


def create_tenant(slug: str, *, name: str = "", **limits: float | bool | None) -> Tenant:
    """A new tenant. Raises InvalidRequest when the name is taken or is no name."""
    if re.match(SLUG_PATTERN, slug) is None:
        raise InvalidRequest("A tenant's name is 1 to 128 of the letters, digits and _.:@|/+=-")
    while True:
        try:
            with transaction.atomic():
                tenant = Tenant.objects.create(tid=mint_tid(), slug=slug, name=name or slug, **limits)
        except IntegrityError as error:
            if Tenant.objects.filter(slug=slug).exists():
                raise InvalidRequest(f"There is already a tenant {slug}.") from error
            continue  # the id was taken: with 10,000 tenants once in a hundred million
        _announce(tenant.tid)
        return tenant


def provision(slug: str) -> TenantSnapshot:
    """The tenant of that name, made if need be. Raises Forbidden for what cannot be a name."""
    if re.match(SLUG_PATTERN, slug) is None:
        raise Forbidden("The token's tenant is not known here.")
    try:
        tid = create_tenant(slug).tid
    except InvalidRequest:  # somebody else was first
        tid = Tenant.objects.only("tid").get(slug=slug).tid
    tenant_cache.refresh([tid])
    tenant = tenant_cache.known(slug)
    assert tenant is not None
    return tenant


def suspend(slug: str) -> Tenant:
    """Stop the tenant's new work. What its workers have claimed, they may finish."""
    return _set_status(slug, Tenant.Status.SUSPENDED)


def resume(slug: str) -> Tenant:
    return _set_status(slug, Tenant.Status.ACTIVE)


def _set_status(slug: str, status: Tenant.Status) -> Tenant:
    with transaction.atomic():
        tenant = _tenant(slug, lock=True)
        tenant.status = status
        tenant.save(update_fields=["status", "updated_at"])
        _announce(tenant.tid)
    return tenant


def signing_secret(tenant_slug: str) -> str:
    """The secret that signs the tenant's webhooks (`whsec_…`), made at the first question."""
    with transaction.atomic():
        tenant = _tenant(tenant_slug, lock=True)
        row = _active(tenant.tid)[:1] or [_add_secret(tenant)]
        return row[0].reveal()


def signing_secrets(tid: str) -> list[str]:
    """Every secret in force for the tenant of that id, newest first: a webhook is signed with each."""
    return [row.reveal() for row in _active(tid)]


def rotate_signing_secret(tenant_slug: str, *, overlap_seconds: int = SECRET_OVERLAP_SECONDS) -> SigningSecret:
    """A new secret. The one before stays in force for the overlap, older ones end now: never more than two."""
    with transaction.atomic():
        tenant = _tenant(tenant_slug, lock=True)
        former = _active(tenant.tid)
        row = _add_secret(tenant)
        now = timezone.now()
        for index, each in enumerate(former):
            ends = now + timedelta(seconds=overlap_seconds) if index == 0 else now
            if each.retires_at is None or each.retires_at > ends:
                each.retires_at = ends
                each.save(update_fields=["retires_at"])
        return row


def issue_token(
    tenant_slug: str,
    role: CallerRole | str,
    subject: str | None = None,
    commands: Sequence[str] = ("*",),
    group: str = "",
    ttl_seconds: int = 3600,
) -> str:
    """A token of this installation. An unknown tenant is made where `auth.provision_tenants` is on.

    Raises ConfigError where tokens come from an issuer elsewhere, NotFound for a tenant that may not be made.
    """
    auth = conf().auth
    if auth.jwks_url:
        raise ConfigError(
            f"Tokens come from the issuer whose keys are at {auth.jwks_url}: only an installation with "
            "CODEQ_AUTH_JWKS_URL empty issues its own."
        )
    role = CallerRole(role)
    if not Tenant.objects.filter(slug=tenant_slug).exists():
        if not auth.provision_tenants:
            raise NotFound(f"There is no tenant {tenant_slug}.")
        provision(tenant_slug)
    now = int(time.time())
    claims: dict[str, object] = {
        "iss": auth.issuer,
        "sub": subject or str(role),
        "tenantId": tenant_slug,
        "iat": now,
        "exp": now + ttl_seconds,
        "jti": os.urandom(9).hex(),
    }
    if role is CallerRole.WORKER:
        claims |= {
            "aud": auth.worker_audience,
            "scope": " ".join(WORKER_SCOPES),
            "eventTypes": list(commands),
        }
        if group:
            claims["workerGroup"] = group
    else:
        claims["aud"] = auth.producer_audience
        scopes = {CallerRole.ADMIN: ADMIN_SCOPE, CallerRole.OPERATOR: f"{ADMIN_SCOPE} {OPERATOR_SCOPE}"}
        if role in scopes:
            claims |= {"role": "ADMIN", "scope": scopes[role]}
    return installation_keys.sign(claims)


def _announce(tid: str) -> None:
    transaction.on_commit(lambda: tenant_cache.refresh([tid]))


def _tenant(slug: str, *, lock: bool = False) -> Tenant:
    rows = Tenant.objects.select_for_update() if lock else Tenant.objects.all()
    tenant = rows.filter(slug=slug).first()
    if tenant is None:
        raise NotFound(f"There is no tenant {slug}.")
    return tenant


def _active(tid: str) -> list[SigningSecret]:
    in_force = Q(retires_at=None) | Q(retires_at__gt=timezone.now())
    return list(SigningSecret.objects.filter(in_force, tenant_id=tid))


def _add_secret(tenant: Tenant) -> SigningSecret:
    secret = "whsec_" + base64.b64encode(os.urandom(SECRET_BYTES)).decode("ascii")
    return SigningSecret.objects.create(
        tenant=tenant, sealed=secret_encryption.encrypt(secret.encode()), hint=secret[-5:-1]
    )
