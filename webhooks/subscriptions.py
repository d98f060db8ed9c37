"""Subscriptions of workers to queues, and the choice of subscribers for a notification."""

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
from tenants.domain import TenantSnapshot
from webhooks.models import Subscription

Mode = Subscription.Mode
ANY_COMMAND = "*"
TTL_LIMIT_SECONDS = 86_400
INTERVAL_LIMIT_SECONDS = 86_400
GROUP_CHARS = 128


def subscribe(
    tenant: TenantSnapshot,
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
    """Subscribe a worker to queues.

    A subscription of the worker with the same URL, mode and group is renewed and updated.

    `worker_group` is the group in the worker's token: if it is set, the default mode is `group`, and another `group`
    is refused. Raises InvalidRequest for bad values, and Forbidden for another group or too many subscriptions.
    """
    url_check.check_url(callback_url)
    mode = mode or (Mode.GROUP if worker_group else Mode.FANOUT)
    group = group or worker_group
    _require(mode in Mode.values, f"deliveryMode: must be one of {', '.join(Mode.values)}")
    _require(mode != Mode.GROUP or bool(group), "groupId: required if deliveryMode is group")
    _require(len(group) <= GROUP_CHARS, f"groupId: must have at most {GROUP_CHARS} characters")
    _require(1 <= ttl_seconds <= TTL_LIMIT_SECONDS, f"ttlSeconds: must be from 1 to {TTL_LIMIT_SECONDS}")
    _require(
        0 <= min_interval_seconds <= INTERVAL_LIMIT_SECONDS,
        f"minIntervalSeconds: must be from 0 to {INTERVAL_LIMIT_SECONDS}",
    )
    _require(bool(event_types), "eventTypes: must not be empty")
    if worker_group and group != worker_group:
        raise Forbidden("groupId: the token belongs to another group")
    identity = {
        "tenant_id": tenant.tid, "worker": worker, "callback_url": callback_url, "mode": mode,
        "group": group if mode == Mode.GROUP else "",
    }  # fmt: skip
    values = {
        "event_types": sorted(set(event_types)),
        "ttl_seconds": ttl_seconds,
        "min_interval_seconds": min_interval_seconds,
        "expires_at": now + timedelta(seconds=ttl_seconds),
    }
    with transaction.atomic():
        if Subscription.objects.filter(**identity).update(**values):
            return Subscription.objects.get(**identity)
        limit = conf().webhooks.subscriptions
        if Subscription.objects.filter(tenant_id=tenant.tid, expires_at__gt=now).count() >= limit:
            raise Forbidden(f"The tenant has reached its limit of {limit} subscriptions.")
        try:
            with transaction.atomic():
                return Subscription.objects.create(**identity, **values)
        except IntegrityError:  # a concurrent request of the same worker created it
            Subscription.objects.filter(**identity).update(**values)
            return Subscription.objects.get(**identity)


def renew(
    tenant: TenantSnapshot, worker: str, subscription_id: str, now: datetime, *, ttl_seconds: int | None = None
) -> Subscription:
    """Extend a subscription to `ttl_seconds` from now; the default is its last TTL.

    Raises NotFound if it has expired or belongs to another worker.
    """
    subscription = _get_own(tenant, worker, subscription_id, now)
    if ttl_seconds is not None:
        _require(1 <= ttl_seconds <= TTL_LIMIT_SECONDS, f"ttlSeconds: must be from 1 to {TTL_LIMIT_SECONDS}")
        subscription.ttl_seconds = ttl_seconds
    subscription.expires_at = now + timedelta(seconds=subscription.ttl_seconds)
    subscription.save(update_fields=["ttl_seconds", "expires_at"])
    return subscription


def unsubscribe(tenant: TenantSnapshot, worker: str, subscription_id: str, now: datetime) -> None:
    """Delete a subscription. Raises NotFound if it has expired or belongs to another worker."""
    _get_own(tenant, worker, subscription_id, now).delete()


def list_own(tenant: TenantSnapshot, worker: str, now: datetime) -> list[Subscription]:
    """Return the worker's live subscriptions, oldest first."""
    rows = Subscription.objects.filter(tenant_id=tenant.tid, worker=worker, expires_at__gt=now)
    return list(rows.order_by("created_at", "pk"))


def remove_expired(now: datetime) -> int:
    """Delete expired subscriptions; return how many."""
    return Subscription.objects.filter(expires_at__lte=now).delete()[0]


def live_by_tenant(tids: Iterable[str], now: datetime) -> dict[str, list[Subscription]]:
    """Return the live subscriptions of these tenants, in one query."""
    by_tenant: dict[str, list[Subscription]] = {}
    for subscription in Subscription.objects.filter(tenant_id__in=set(tids), expires_at__gt=now).order_by("pk"):
        by_tenant.setdefault(subscription.tenant_id, []).append(subscription)
    return by_tenant


def with_deferred_queues(now: datetime) -> list[Subscription]:
    """Return live subscriptions with deferred notifications."""
    return list(Subscription.objects.filter(~Q(deferred_commands=[]), expires_at__gt=now).order_by("pk"))


def select_recipients(
    subscriptions: Iterable[Subscription], command: str, now: datetime
) -> tuple[list[Subscription], list[Subscription]]:
    """Select the subscriptions to notify of a queue now, and those to notify later.

    A subscription is notified later if its minimum interval has not passed. Of each group one member is selected:
    the least recently notified one whose interval has passed, or the least recently notified one if there is none.
    """
    ready: list[Subscription] = []
    deferred: list[Subscription] = []
    groups: dict[str, list[Subscription]] = {}
    hashed: list[Subscription] = []
    for subscription in subscriptions:
        if ANY_COMMAND not in subscription.event_types and command not in subscription.event_types:
            continue
        if subscription.mode == Mode.GROUP:
            groups.setdefault(subscription.group, []).append(subscription)
        elif subscription.mode == Mode.HASH:
            hashed.append(subscription)
        else:
            (ready if is_interval_over(subscription, now) else deferred).append(subscription)
    for members in groups.values():
        members.sort(key=lambda member: (member.notified_at is not None, member.notified_at, member.pk))
        ready_members = [member for member in members if is_interval_over(member, now)]
        (ready if ready_members else deferred).append((ready_members or members)[0])
    if hashed:
        winner = max(hashed, key=lambda subscription: _weight(command, subscription.pk))
        (ready if is_interval_over(winner, now) else deferred).append(winner)
    return ready, deferred


def is_interval_over(subscription: Subscription, now: datetime) -> bool:
    """Whether the minimum interval since the last notification has passed."""
    interval = timedelta(seconds=subscription.min_interval_seconds)
    return subscription.notified_at is None or subscription.notified_at + interval <= now


def _weight(command: str, pk: uuid.UUID) -> bytes:
    """Return the weight of a subscription for a queue. The highest weight is selected.

    This is rendezvous hashing: adding or removing a subscription reassigns only the queues for which its weight is the
    highest.
    """
    return hashlib.blake2b(command.encode(), key=pk.bytes, digest_size=8).digest()


def _get_own(tenant: TenantSnapshot, worker: str, subscription_id: str, now: datetime) -> Subscription:
    try:
        pk = uuid.UUID(subscription_id)
    except ValueError:
        raise NotFound from None
    subscription = Subscription.objects.filter(pk=pk, tenant_id=tenant.tid, worker=worker, expires_at__gt=now).first()
    if subscription is None:
        raise NotFound
    return subscription


def _require(condition: bool, detail: str) -> None:
    if not condition:
        raise InvalidRequest(detail)
