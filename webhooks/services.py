"""Operations on deliveries and endpoints: replay, recover, disable, register, clean up."""

from __future__ import annotations

import base64
import os
import uuid
from collections.abc import Iterable
from datetime import datetime, timedelta

from django.db import connection, transaction
from django.db.models import Q, QuerySet

from core import url_check
from core.conf import conf
from tenants import secret_encryption
from tenants import services as tenant_services
from tenants.models import Tenant
from webhooks import delivery_results, signing
from webhooks.models import Delivery, Endpoint

SECRET_BYTES = 32
# How long requests are also signed with the former secret of an endpoint.
ROTATION_OVERLAP = timedelta(days=1)
CHUNK = 5000


def replay(deliveries: QuerySet[Delivery], now: datetime) -> int:
    """Send ended deliveries again under their ids; return how many.

    Pending deliveries are left alone, and so are those with a refused URL, which have no host.
    """
    ended = deliveries.exclude(status=Delivery.Status.PENDING).exclude(host="")
    return ended.order_by().update(
        status=Delivery.Status.PENDING, attempts_since_replay=0, due_at=now, reservation=None, ended_at=None
    )


def enable(endpoint: Endpoint) -> None:
    """Enable an endpoint for future events. `recover` also sends the deliveries that it missed."""
    endpoint.is_enabled, endpoint.disabled_at, endpoint.disabled_because = True, None, ""
    endpoint.failing_since = None
    endpoint.save(update_fields=["is_enabled", "disabled_at", "disabled_because", "failing_since"])


@transaction.atomic
def recover(endpoint: Endpoint, since: datetime, now: datetime) -> int:
    """Enable an endpoint and replay the deliveries it missed since a time; return how many."""
    enable(endpoint)
    missed = Delivery.objects.filter(tenant_id=endpoint.tenant_id, address=endpoint.address, created_at__gte=since)
    return replay(missed.exclude(status=Delivery.Status.DELIVERED), now)


def register(tid: str, url: str, description: str = "") -> tuple[Endpoint, str]:
    """Give an endpoint its own secret instead of its tenant's; return the endpoint and secret.

    The secret cannot be read later.
    """
    address = url_check.check_url(url).endpoint_url
    secret = _new_secret()
    with transaction.atomic():
        endpoint, _ = Endpoint.objects.select_for_update().get_or_create(tenant_id=tid, address=address)
        endpoint.encrypted_secret = secret_encryption.encrypt(secret.encode())
        endpoint.previous_encrypted_secret, endpoint.previous_secret_expires_at = "", None
        endpoint.description = description
        endpoint.save()
    return endpoint, secret


def rotate(endpoint: Endpoint, now: datetime) -> str:
    """Give an endpoint a new secret and return it.

    If the endpoint has its own secret already, requests are signed with both secrets for a day.
    """
    secret = _new_secret()
    with transaction.atomic():
        row = Endpoint.objects.select_for_update().get(pk=endpoint.pk)
        row.previous_encrypted_secret = row.encrypted_secret
        row.previous_secret_expires_at = now + ROTATION_OVERLAP
        row.encrypted_secret = secret_encryption.encrypt(secret.encode())
        row.save(update_fields=["encrypted_secret", "previous_encrypted_secret", "previous_secret_expires_at"])
    return secret


def _new_secret() -> str:
    return signing.PREFIX + base64.b64encode(os.urandom(SECRET_BYTES)).decode()


class SigningSecrets:
    """Cache of the valid signing secrets, for one run of a sender."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, list[str]] = {}
        self._by_endpoint: dict[tuple[str, str], list[str]] = {}

    def load(self, endpoints: Iterable[tuple[str, str]], now: datetime) -> None:
        """Read the secrets of these (tid, address) pairs, unless they are cached."""
        missing = {endpoint for endpoint in endpoints if endpoint not in self._by_endpoint}
        if not missing:
            return
        rows = Endpoint.objects.filter(
            tenant_id__in={tid for tid, _ in missing}, address__in={address for _, address in missing}
        ).exclude(encrypted_secret="")
        own = {(row.tenant_id, row.address): _decrypt_secrets(row, now) for row in rows}
        for tid, address in missing:
            self._by_endpoint[tid, address] = own.get((tid, address)) or self._tenant_secrets(tid)

    def get(self, tid: str, address: str) -> list[str]:
        """Return the loaded secrets of an endpoint, newest first."""
        return self._by_endpoint[tid, address]

    def _tenant_secrets(self, tid: str) -> list[str]:
        if tid not in self._by_tenant:
            secrets = tenant_services.signing_secrets(tid)
            slug = None if secrets else Tenant.objects.filter(pk=tid).values_list("slug", flat=True).first()
            # A deleted tenant has no secret. Sign its remaining deliveries with a random one, so that
            # their signatures cannot be forged.
            self._by_tenant[tid] = secrets or [
                tenant_services.get_or_create_signing_secret(slug) if slug else _new_secret()
            ]
        return self._by_tenant[tid]


def _decrypt_secrets(row: Endpoint, now: datetime) -> list[str]:
    encrypted = [row.encrypted_secret]
    expires_at = row.previous_secret_expires_at
    if row.previous_encrypted_secret and expires_at and expires_at > now:
        encrypted.append(row.previous_encrypted_secret)
    return [secret_encryption.decrypt(value).decode() for value in encrypted]


def disable_failing(now: datetime) -> int:
    """Disable endpoints that have failed for `disable_after_seconds`; return how many."""
    since = now - timedelta(seconds=conf().webhooks.disable_after_seconds)
    failing = Endpoint.objects.filter(is_enabled=True, failing_since__lte=since)
    for endpoint in failing:
        days = (now - (endpoint.failing_since or now)).days
        reason = f"The endpoint failed for {days} days."
        delivery_results.disable_endpoint(endpoint.tenant_id, endpoint.address, reason, now)
    return len(failing)


def cleanup(now: datetime) -> int:
    """Delete at most `CHUNK` ended deliveries whose retention has expired; return how many.

    Also delete their attempts, and the rows of enabled endpoints that have no secret, no description and no failures.
    """
    before = now - timedelta(seconds=conf().webhooks.retention_seconds)
    old = Delivery.objects.filter(ended_at__lt=before).order_by("ended_at").values_list("pk", flat=True)[:CHUNK]
    ids: list[uuid.UUID] = list(old)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("DELETE FROM webhooks_deliveryattempt WHERE delivery_id = ANY(%s)", [ids])
        cursor.execute("DELETE FROM webhooks_delivery WHERE id = ANY(%s) AND ended_at < %s", [ids, before])
        deleted: int = cursor.rowcount
    Endpoint.objects.filter(Q(encrypted_secret="", is_enabled=True, failing_since=None, description="")).delete()
    return deleted
