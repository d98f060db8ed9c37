"""Workers that want to be told: subscribed, renewed, ended; and which of them is told of what."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from django.db import IntegrityError, transaction
from django.db.models import Q

from core import url_check
from core.conf import conf
from core.errors import Forbidden, InvalidRequest, NotFound
from tenants.tenant import Tenant
from webhooks.models import Subscription

Mode = Subscription.Mode
ANY = "*"
TTL_LIMIT_SECONDS = 86_400
INTERVAL_LIMIT_SECONDS = 86_400
GROUP_CHARS = 128


def subscribe(
    tenant: Tenant,
    worker: str,
    callback_url: str,
    event_types: Sequence[str],
    *,
    now: datetime,
    ttl_seconds: int = 300,
    mode: str | None = None,
    group: str = "",
    min_interval_seconds: int = 5,
    worker_group: str = "",
) -> Subscription:
    """Subscribe a worker, or renew the same subscription with what it says now.

    `worker_group` is the token's: the mode is then `group` unless another is asked for, and the group must be that.
    Raises InvalidRequest, and Forbidden where the group is another or the tenant has too many.
    """
    url_check.check_url(callback_url)
    mode = mode or (Mode.GROUP if worker_group else Mode.FANOUT)
    group = group or worker_group
    _require(mode in Mode.values, f"deliveryMode: one of {', '.join(Mode.values)}")
    _require(mode != Mode.GROUP or bool(group), "groupId: deliveryMode group needs one")
    _require(len(group) <= GROUP_CHARS, f"groupId: {GROUP_CHARS} characters at most")
    _require(1 <= ttl_seconds <= TTL_LIMIT_SECONDS, f"ttlSeconds: 1 to {TTL_LIMIT_SECONDS}")
    _require(0 <= min_interval_seconds <= INTERVAL_LIMIT_SECONDS, f"minIntervalSeconds: 0 to {INTERVAL_LIMIT_SECONDS}")
    _require(bool(event_types), "eventTypes: at least one")
    if worker_group and group != worker_group:
        raise Forbidden("groupId: the token is of another group")
    same = {
        "tenant_id": tenant.tid, "worker": worker, "callback_url": callback_url, "mode": mode,
        "group": group if mode == Mode.GROUP else "",
    }  # fmt: skip
    says = {
        "event_types": sorted(set(event_types)),
        "ttl_seconds": ttl_seconds,
        "min_interval_seconds": min_interval_seconds,
        "expires_at": now + timedelta(seconds=ttl_seconds),
    }
    with transaction.atomic():
        if Subscription.objects.filter(**same).update(**says):
            return Subscription.objects.get(**same)
        if (
            Subscription.objects.filter(tenant_id=tenant.tid, expires_at__gt=now).count()
            >= conf().webhooks.subscriptions
        ):
            raise Forbidden("This tenant has as many subscriptions as it may have.")
        try:
            with transaction.atomic():
                return Subscription.objects.create(**same, **says)
        except IntegrityError:  # the same worker, twice at once
            Subscription.objects.filter(**same).update(**says)
            return Subscription.objects.get(**same)


def renew(
    tenant: Tenant, worker: str, subscription_id: str, now: datetime, *, ttl_seconds: int | None = None
) -> Subscription:
    """Let a subscription live on from now. One that has expired is gone: NotFound, as for anybody else's."""
    row = _own(tenant, worker, subscription_id, now)
    if ttl_seconds is not None:
        _require(1 <= ttl_seconds <= TTL_LIMIT_SECONDS, f"ttlSeconds: 1 to {TTL_LIMIT_SECONDS}")
        row.ttl_seconds = ttl_seconds
    row.expires_at = now + timedelta(seconds=row.ttl_seconds)
    row.save(update_fields=["ttl_seconds", "expires_at"])
    return row


def end(tenant: Tenant, worker: str, subscription_id: str, now: datetime) -> None:
    _own(tenant, worker, subscription_id, now).delete()


def own(tenant: Tenant, worker: str, now: datetime) -> list[Subscription]:
    """The worker's live subscriptions, oldest first."""
    rows = Subscription.objects.filter(tenant_id=tenant.tid, worker=worker, expires_at__gt=now)
    return list(rows.order_by("created_at", "pk"))


def remove_expired(now: datetime) -> int:
    return Subscription.objects.filter(expires_at__lte=now).delete()[0]


def of_tenants(tids: Iterable[str], now: datetime) -> dict[str, list[Subscription]]:
    """The live subscriptions of these tenants."""
    found: dict[str, list[Subscription]] = {}
    for row in Subscription.objects.filter(tenant_id__in=set(tids), expires_at__gt=now).order_by("pk"):
        found.setdefault(row.tenant_id, []).append(row)
    return found


def owing(now: datetime) -> list[Subscription]:
    """Live subscriptions that were not told of something, because they had just been told of something else."""
    return list(Subscription.objects.filter(~Q(owed=[]), expires_at__gt=now).order_by("pk"))


def chosen(
    subscriptions: Iterable[Subscription], command: str, now: datetime
) -> tuple[list[Subscription], list[Subscription]]:
    """Who is told that a queue has work: those to call now, and those whose interval is not over yet.

    Of a group one that may be called now, the one that was called longest ago; it is owed to one of them if none may.
    """
    listening = [each for each in subscriptions if ANY in each.event_types or command in each.event_types]
    call: list[Subscription] = []
    later: list[Subscription] = []
    groups: dict[str, list[Subscription]] = {}
    hashed: list[Subscription] = []
    for each in listening:
        if each.mode == Mode.GROUP:
            groups.setdefault(each.group, []).append(each)
        elif each.mode == Mode.HASH:
            hashed.append(each)
        else:
            (call if may_be_told(each, now) else later).append(each)
    for members in groups.values():
        members.sort(key=lambda each: (each.notified_at is not None, each.notified_at, each.pk))
        free = [each for each in members if may_be_told(each, now)]
        (call if free else later).append((free or members)[0])
    if hashed:
        winner = max(hashed, key=lambda each: _weight(command, each.pk))
        (call if may_be_told(winner, now) else later).append(winner)
    return call, later


def may_be_told(each: Subscription, now: datetime) -> bool:
    return each.notified_at is None or each.notified_at + timedelta(seconds=each.min_interval_seconds) <= now


def _weight(command: str, pk: uuid.UUID) -> bytes:
    """Rendezvous: the heaviest wins, so that one who comes or goes moves only the queues it wins or had won."""
    return hashlib.blake2b(command.encode(), key=pk.bytes, digest_size=8).digest()


def _own(tenant: Tenant, worker: str, subscription_id: str, now: datetime) -> Subscription:
    try:
        pk = uuid.UUID(subscription_id)
    except ValueError:
        raise NotFound from None
    row = Subscription.objects.filter(pk=pk, tenant_id=tenant.tid, worker=worker, expires_at__gt=now).first()
    if row is None:
        raise NotFound
    return row


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvalidRequest(otherwise)
