"""Notify workers of queues that have work again: one attempt, outside the enqueue request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import uuid
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta

import msgspec
from django.db.models import F, Q

from core import tracing, url_check
from core.conf import conf
from core.http_client import Resolve
from webhooks import http, metrics, nonempty_queues, signing, subscriptions
from webhooks.http import PostResult
from webhooks.models import Subscription
from webhooks.nonempty_queues import QueueRef, WaitingTasks
from webhooks.sender import common_headers, utc_now
from webhooks.services import SigningSecrets

log = logging.getLogger(__name__)

CLAIM_URL = "/v1/codeq/tasks/claim"
DEADLINE_SECONDS = 5.0


class NotificationBody(msgspec.Struct, rename="camel"):
    """JSON body of a notification."""

    event_type: str
    available: bool
    queue_depth: int
    claim_url: str
    sent_at: str
    notification_id: str


class NotificationRequest(msgspec.Struct, frozen=True):
    """A notification to send."""

    subscription: Subscription
    queue: QueueRef
    waiting: WaitingTasks
    # Trace context of the next task to be claimed, which may not be the task whose arrival caused the notification.
    trace: tuple[str, str]


def notify(
    *, clock: Callable[[], datetime] = utc_now, resolve: Resolve | None = None, tls: ssl.SSLContext | None = None
) -> tuple[int, int]:
    """Notify the subscribers of queues that turned non-empty.

    Returns the numbers of delivered and attempted notifications. If a subscriber's minimum interval has not passed, its
    notification is deferred until then, and sent if the queue still has work.
    """
    now = clock()
    queues = nonempty_queues.take()
    candidates: list[tuple[Subscription, QueueRef]] = []
    for tid, tenant_subscriptions in subscriptions.live_by_tenant({queue.tid for queue in queues}, now).items():
        for queue in queues:
            if queue.tid == tid:
                ready, deferred = subscriptions.select_recipients(tenant_subscriptions, queue.command, now)
                candidates += [(subscription, queue) for subscription in ready]
                _defer(deferred, queue.command)
    for subscription in subscriptions.with_deferred_queues(now):
        if subscriptions.is_interval_over(subscription, now):
            candidates += [
                (subscription, QueueRef(subscription.tenant_id, command)) for command in subscription.deferred_commands
            ]
    requests = _prepare_requests(candidates, now)
    if not requests:
        return 0, 0
    secrets = SigningSecrets()
    secrets.load({_endpoint(request) for request in requests}, now)
    results = asyncio.run(_send_all(requests, secrets, now, resolve, tls))
    _record_results(requests, results)
    return sum(result.is_delivered for result in results), len(results)


def _prepare_requests(candidates: Iterable[tuple[Subscription, QueueRef]], now: datetime) -> list[NotificationRequest]:
    """Return the notifications to send.

    Skip queues without ready tasks. Defer the notification of a subscription that this run or a concurrent one has just
    notified.
    """
    waiting_by_queue: dict[QueueRef, WaitingTasks] = {}
    traces: dict[QueueRef, tuple[str, str]] = {}
    requests: list[NotificationRequest] = []
    notified_ids: set[uuid.UUID] = set()
    for subscription, queue in candidates:
        if queue not in waiting_by_queue:
            waiting_by_queue[queue] = nonempty_queues.count_waiting(queue)
        if not waiting_by_queue[queue].ready:
            _discard_deferred(subscription, queue.command)
        elif subscription.pk in notified_ids and subscription.min_interval_seconds:
            _defer([subscription], queue.command)
        elif _mark_notified(subscription, queue.command, now):
            notified_ids.add(subscription.pk)
            if queue not in traces:
                traces[queue] = nonempty_queues.get_next_trace(queue)
            requests.append(NotificationRequest(subscription, queue, waiting_by_queue[queue], traces[queue]))
        else:
            _defer([subscription], queue.command)
    return requests


def _mark_notified(subscription: Subscription, command: str, now: datetime) -> bool:
    """Mark a subscription as notified; return False if its interval has not passed.

    The condition is in the UPDATE, so that of two concurrent runs only one notifies the subscriber.
    """
    since = now - timedelta(seconds=subscription.min_interval_seconds)
    rows = Subscription.objects.filter(Q(notified_at=None) | Q(notified_at__lte=since), pk=subscription.pk)
    still_deferred = [deferred for deferred in subscription.deferred_commands if deferred != command]
    if not rows.update(notified_at=now, notified=F("notified") + 1, deferred_commands=still_deferred):
        return False
    subscription.deferred_commands = still_deferred
    return True


def _defer(deferred: Iterable[Subscription], command: str) -> None:
    """Store the queue with the subscriptions, for a notification after their interval."""
    for subscription in deferred:
        if command not in subscription.deferred_commands:
            subscription.deferred_commands = [*subscription.deferred_commands, command]
            Subscription.objects.filter(pk=subscription.pk).update(deferred_commands=subscription.deferred_commands)


def _discard_deferred(subscription: Subscription, command: str) -> None:
    """Remove a deferred queue that has no work any more."""
    if command in subscription.deferred_commands:
        subscription.deferred_commands = [
            deferred for deferred in subscription.deferred_commands if deferred != command
        ]
        Subscription.objects.filter(pk=subscription.pk).update(deferred_commands=subscription.deferred_commands)


async def _send_all(
    requests: list[NotificationRequest],
    secrets: SigningSecrets,
    now: datetime,
    resolve: Resolve | None,
    tls: ssl.SSLContext | None,
) -> list[PostResult]:
    """Send the notifications concurrently; return the results in order.

    The settings `slots` and `slots_per_host` limit them, as they limit deliveries.
    """
    slots = asyncio.Semaphore(conf().webhooks.slots)
    host_slots: dict[str, asyncio.Semaphore] = {}

    async def send(request: NotificationRequest) -> PostResult:
        url = request.subscription.callback_url
        host = host_slots.setdefault(url.split("/")[2], asyncio.Semaphore(conf().webhooks.slots_per_host))
        notification_id = str(uuid.uuid4())
        body = msgspec.json.encode(
            NotificationBody(
                event_type=request.queue.command,
                available=request.waiting.ready > 0,
                queue_depth=request.waiting.ready + request.waiting.delayed,
                claim_url=CLAIM_URL,
                sent_at=now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
                notification_id=notification_id,
            )
        )
        async with host, slots:
            signed = signing.headers(secrets.get(*_endpoint(request)), notification_id, int(now.timestamp()), body)
            with tracing.span("codeq/notify", *request.trace) as trace:
                headers = common_headers(*trace) | signed
                return await http.post(url, headers, body, deadline_seconds=DEADLINE_SECONDS, resolve=resolve, tls=tls)

    return await asyncio.gather(*(send(request) for request in requests))


def _record_results(requests: list[NotificationRequest], results: list[PostResult]) -> None:
    for request, result in zip(requests, results, strict=True):
        metrics.count_post("queue_ready", request.queue.command, is_delivered=result.is_delivered)
        request.subscription.last_status, request.subscription.last_error = result.status, result.error
    Subscription.objects.bulk_update([request.subscription for request in requests], ["last_status", "last_error"])


def _endpoint(request: NotificationRequest) -> tuple[str, str]:
    """Return the pair (tid, URL without its query string), the key of the signing secrets."""
    url = request.subscription.callback_url
    with contextlib.suppress(url_check.AddressRefused):  # the settings have changed since the subscription
        url = url_check.parse(url).endpoint_url
    return request.subscription.tenant_id, url
