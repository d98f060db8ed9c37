"""What operators and beat do about callbacks: replay, recover, disable, register, rotate, clean up."""

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
from tenants import services as tenants
from tenants.models import Tenant
from webhooks import record, signing
from webhooks.models import Delivery, Endpoint

SECRET_BYTES = 32
# How long the former secret of an endpoint signs beside the new one.
OVERLAP = timedelta(days=1)
CHUNK = 5000


def replay(deliveries: QuerySet[Delivery], now: datetime) -> int:
    """Send deliveries that have ended once more, each under its own id; how many. Those under way are left alone."""
    over = deliveries.exclude(status=Delivery.Status.PENDING).exclude(host="")
    return over.order_by().update(status=Delivery.Status.PENDING, tries=0, due_at=now, reservation=None, ended_at=None)


def enable(endpoint: Endpoint) -> None:
    """Call an endpoint again, from its next event on; `recover` brings what it missed."""
    endpoint.is_enabled, endpoint.disabled_at, endpoint.disabled_because = True, None, ""
    endpoint.failing_since = None
    endpoint.save(update_fields=["is_enabled", "disabled_at", "disabled_because", "failing_since"])


@transaction.atomic
def recover(endpoint: Endpoint, since: datetime, now: datetime) -> int:
    """Enable an endpoint and send all it has not taken since a moment; how many that is."""
    enable(endpoint)
    missed = Delivery.objects.filter(tenant_id=endpoint.tenant_id, address=endpoint.address, created_at__gte=since)
    return replay(missed.exclude(status=Delivery.Status.DELIVERED), now)


def register(tid: str, url: str, description: str = "") -> tuple[Endpoint, str]:
    """Give an endpoint a secret of its own, in place of its tenant's. The secret is shown here and never again."""
    address = url_check.check_url(url).endpoint
    secret = _new_secret()
    with transaction.atomic():
        endpoint, _ = Endpoint.objects.select_for_update().get_or_create(tenant_id=tid, address=address)
        endpoint.sealed, endpoint.former_sealed, endpoint.former_until = (
            secret_encryption.encrypt(secret.encode()),
            "",
            None,
        )
        endpoint.description = description
        endpoint.save()
    return endpoint, secret


def rotate(endpoint: Endpoint, now: datetime) -> str:
    """A new secret for a registered endpoint; for a day the former one signs beside it."""
    secret = _new_secret()
    with transaction.atomic():
        row = Endpoint.objects.select_for_update().get(pk=endpoint.pk)
        row.former_sealed, row.former_until = row.sealed, now + OVERLAP
        row.sealed = secret_encryption.encrypt(secret.encode())
        row.save(update_fields=["sealed", "former_sealed", "former_until"])
    return secret


def _new_secret() -> str:
    return signing.PREFIX + base64.b64encode(os.urandom(SECRET_BYTES)).decode()


class Secrets:
    """The secrets in force, read once for as long as one sender works."""

    def __init__(self) -> None:
        self._of_tenant: dict[str, list[str]] = {}
        self._of_endpoint: dict[tuple[str, str], list[str]] = {}

    def load(self, endpoints: Iterable[tuple[str, str]], now: datetime) -> None:
        """Read what is needed to sign for these (tid, address)."""
        new = {pair for pair in endpoints if pair not in self._of_endpoint}
        if not new:
            return
        rows = Endpoint.objects.filter(
            tenant_id__in={tid for tid, _ in new}, address__in={address for _, address in new}
        ).exclude(sealed="")
        own = {(row.tenant_id, row.address): _secrets_of(row, now) for row in rows}
        for tid, address in new:
            self._of_endpoint[tid, address] = own.get((tid, address)) or self._tenants(tid)

    def of(self, tid: str, address: str) -> list[str]:
        return self._of_endpoint[tid, address]

    def _tenants(self, tid: str) -> list[str]:
        if tid not in self._of_tenant:
            found = tenants.signing_secrets(tid)
            slug = None if found else Tenant.objects.filter(pk=tid).values_list("slug", flat=True).first()
            # A tenant that is gone has no secret any more; what it still has coming cannot be forged by anybody.
            self._of_tenant[tid] = found or [tenants.signing_secret(slug) if slug else _new_secret()]
        return self._of_tenant[tid]


def _secrets_of(row: Endpoint, now: datetime) -> list[str]:
    sealed = [row.sealed]
    if row.former_sealed and row.former_until and row.former_until > now:
        sealed.append(row.former_sealed)
    return [secret_encryption.decrypt(each).decode() for each in sealed]


def disable_failing(now: datetime) -> int:
    """Stop calling endpoints that have failed for days on end; how many."""
    since = now - timedelta(seconds=conf().webhooks.disable_after_seconds)
    failing = Endpoint.objects.filter(is_enabled=True, failing_since__lte=since)
    for endpoint in failing:
        days = (now - (endpoint.failing_since or now)).days
        record.disable(endpoint.tenant_id, endpoint.address, f"it failed for {days} days", now)
    return len(failing)


def cleanup(now: datetime) -> int:
    """Forget deliveries that ended long ago, with their attempts, a bounded number at a time; how many went."""
    before = now - timedelta(seconds=conf().webhooks.retention_seconds)
    old = Delivery.objects.filter(ended_at__lt=before).order_by("ended_at").values_list("pk", flat=True)[:CHUNK]
    ids: list[uuid.UUID] = list(old)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("DELETE FROM webhooks_deliveryattempt WHERE delivery_id = ANY(%s)", [ids])
        cursor.execute("DELETE FROM webhooks_delivery WHERE id = ANY(%s) AND ended_at < %s", [ids, before])
        gone: int = cursor.rowcount
    # Endpoints nobody registered and nothing is known about any more.
    Endpoint.objects.filter(Q(sealed="", is_enabled=True, failing_since=None, description="")).delete()
    return gone
