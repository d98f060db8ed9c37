"""Create and suspend tenants, and issue their signing secrets and tokens.

A change takes effect in this process at once, and in other processes at the next poll of their `TenantCache`, within
two seconds.
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

SECRET_BYTES = 32  # Standard Webhooks requires 24 to 64
SECRET_OVERLAP_SECONDS = 86_400  # how long the previous secret signs beside the new one


def create_tenant(slug: str, *, name: str = "", **limits: float | bool | None) -> Tenant:
    """Create a tenant. Raises InvalidRequest if the slug is taken or invalid."""
    if re.match(SLUG_PATTERN, slug) is None:
        raise InvalidRequest("A tenant's slug must have 1 to 128 characters: letters, digits and _.:@|/+=-")
    while True:
        try:
            with transaction.atomic():
                tenant = Tenant.objects.create(tid=mint_tid(), slug=slug, name=name or slug, **limits)
        except IntegrityError as error:
            if Tenant.objects.filter(slug=slug).exists():
                raise InvalidRequest(f"Tenant {slug} already exists.") from error
            continue  # the random tid was taken: with 10,000 tenants, the probability is one in a hundred million
        _refresh_on_commit(tenant.tid)
        return tenant


def provision(slug: str) -> TenantSnapshot:
    """Return the tenant with this slug, and create it if it does not exist.

    Raises Forbidden if the slug is invalid.
    """
    if re.match(SLUG_PATTERN, slug) is None:
        raise Forbidden("The token's tenant does not exist.")
    try:
        tid = create_tenant(slug).tid
    except InvalidRequest:  # a concurrent request created it
        tid = Tenant.objects.only("tid").get(slug=slug).tid
    tenant_cache.refresh([tid])
    tenant = tenant_cache.get_cached(slug)
    assert tenant is not None
    return tenant


def suspend(slug: str) -> Tenant:
    """Refuse new tasks and claims of a tenant. Its workers may finish claimed tasks."""
    return _set_status(slug, Tenant.Status.SUSPENDED)


def resume(slug: str) -> Tenant:
    """End a suspension."""
    return _set_status(slug, Tenant.Status.ACTIVE)


def _set_status(slug: str, status: Tenant.Status) -> Tenant:
    with transaction.atomic():
        tenant = _get_tenant(slug, lock=True)
        tenant.status = status
        tenant.save(update_fields=["status", "updated_at"])
        _refresh_on_commit(tenant.tid)
    return tenant


def get_or_create_signing_secret(tenant_slug: str) -> str:
    """Return the secret that signs a tenant's webhooks (`whsec_…`).

    Creates one if the tenant has no active secret.
    """
    with transaction.atomic():
        tenant = _get_tenant(tenant_slug, lock=True)
        row = _active_secrets(tenant.tid)[:1] or [_create_secret(tenant)]
        return row[0].reveal()


def signing_secrets(tid: str) -> list[str]:
    """Return the active secrets of a tenant, newest first. Each of them signs every webhook."""
    return [row.reveal() for row in _active_secrets(tid)]


def rotate_signing_secret(tenant_slug: str, *, overlap_seconds: int = SECRET_OVERLAP_SECONDS) -> SigningSecret:
    """Create a secret. The previous one stays active for the overlap; older ones retire now."""
    with transaction.atomic():
        tenant = _get_tenant(tenant_slug, lock=True)
        previous = _active_secrets(tenant.tid)
        row = _create_secret(tenant)
        now = timezone.now()
        for index, secret in enumerate(previous):
            retires_at = now + timedelta(seconds=overlap_seconds) if index == 0 else now
            if secret.retires_at is None or secret.retires_at > retires_at:
                secret.retires_at = retires_at
                secret.save(update_fields=["retires_at"])
        return row


def issue_token(
    tenant_slug: str,
    role: CallerRole | str,
    subject: str | None = None,
    commands: Sequence[str] = ("*",),
    group: str = "",
    ttl_seconds: int = 3600,
) -> str:
    """Issue a token of this installation.

    Creates an unknown tenant if `auth.provision_tenants` is on.

    Raises ConfigError if the installation trusts an external issuer, and NotFound if the tenant does not exist and may
    not be created.
    """
    auth = conf().auth
    if auth.jwks_url:
        raise ConfigError(
            f"This installation trusts the issuer whose keys are at {auth.jwks_url}. To issue its own tokens, leave "
            "CODEQ_AUTH_JWKS_URL empty."
        )
    role = CallerRole(role)
    if not Tenant.objects.filter(slug=tenant_slug).exists():
        if not auth.provision_tenants:
            raise NotFound(f"Tenant {tenant_slug} does not exist.")
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


def _refresh_on_commit(tid: str) -> None:
    transaction.on_commit(lambda: tenant_cache.refresh([tid]))


def _get_tenant(slug: str, *, lock: bool = False) -> Tenant:
    rows = Tenant.objects.select_for_update() if lock else Tenant.objects.all()
    tenant = rows.filter(slug=slug).first()
    if tenant is None:
        raise NotFound(f"Tenant {slug} does not exist.")
    return tenant


def _active_secrets(tid: str) -> list[SigningSecret]:
    is_active = Q(retires_at=None) | Q(retires_at__gt=timezone.now())
    return list(SigningSecret.objects.filter(is_active, tenant_id=tid))


def _create_secret(tenant: Tenant) -> SigningSecret:
    secret = "whsec_" + base64.b64encode(os.urandom(SECRET_BYTES)).decode("ascii")
    return SigningSecret.objects.create(
        tenant=tenant, encrypted_secret=secret_encryption.encrypt(secret.encode()), hint=secret[-5:-1]
    )
