"""Tells workers that a queue has work again: one try each, off the path of whoever enqueued it."""

from __future__ import annotations

import asyncio
import logging
import ssl
import uuid
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta

import msgspec
from django.db.models import F, Q

from core import tracing
from core.conf import conf
from queues import wakes
from queues.wakes import Depth, Queue
from webhooks import http, metrics, signing, subscriptions
from webhooks.http import Posted
from webhooks.models import Subscription
from webhooks.sender import common_headers, utc_now
from webhooks.services import Secrets

log = logging.getLogger(__name__)

CLAIM_URL = "/v1/codeq/tasks/claim"
DEADLINE_SECONDS = 5.0


class Notice(msgspec.Struct, rename="camel"):
    event_type: str
    available: bool
    queue_depth: int
    claim_url: str
    sent_at: str
    notification_id: str


class Call(msgspec.Struct, frozen=True):
    subscription: Subscription
    queue: Queue
    depth: Depth
    trace: tuple[str, str]  # of the task that is next in line, the one that woke the queue if it is alone there


def notify(
    *, clock: Callable[[], datetime] = utc_now, resolve: http.Resolve | None = None, tls: ssl.SSLContext | None = None
) -> tuple[int, int]:
    """Tell the subscribers of every queue that turned non-empty; how many were told, and of how many tries.

    A subscriber whose interval is not over is told when it is, if there still is work.
    """
    now = clock()
    woken = wakes.take()
    wanted: list[tuple[Subscription, Queue]] = []
    for tid, known in subscriptions.of_tenants({queue.tid for queue in woken}, now).items():
        for queue in woken:
            if queue.tid == tid:
                call, later = subscriptions.chosen(known, queue.command, now)
                wanted += [(each, queue) for each in call]
                _owe(later, queue.command)
    for each in subscriptions.owing(now):
        if subscriptions.may_be_told(each, now):
            wanted += [(each, Queue(each.tenant_id, command)) for command in each.owed]
    calls = _to_make(wanted, now)
    if not calls:
        return 0, 0
    secrets = Secrets()
    secrets.load({_address(call) for call in calls}, now)
    answers = asyncio.run(_make(calls, secrets, now, resolve, tls))
    _keep(calls, answers)
    return sum(answer.is_delivered for answer in answers), len(answers)


def _to_make(wanted: Iterable[tuple[Subscription, Queue]], now: datetime) -> list[Call]:
    """Those that are ours to make: with work in the queue, and taken before anybody else took them."""
    depths: dict[Queue, Depth] = {}
    traces: dict[Queue, tuple[str, str]] = {}
    calls: list[Call] = []
    told: set[uuid.UUID] = set()
    for each, queue in wanted:
        if queue not in depths:
            depths[queue] = wakes.depth(queue)
        if not depths[queue].ready:
            _forget(each, queue.command)
        elif each.pk in told and each.min_interval_seconds:
            _owe([each], queue.command)
        elif _take(each, queue.command, now):
            told.add(each.pk)
            if queue not in traces:
                traces[queue] = wakes.trace(queue)
            calls.append(Call(each, queue, depths[queue], traces[queue]))
        else:
            _owe([each], queue.command)
    return calls


def _take(each: Subscription, command: str, now: datetime) -> bool:
    """Mark a subscriber as told, unless it has been within its interval: two runs never both tell it."""
    since = now - timedelta(seconds=each.min_interval_seconds)
    row = Subscription.objects.filter(Q(notified_at=None) | Q(notified_at__lte=since), pk=each.pk)
    owed = [other for other in each.owed if other != command]
    if not row.update(notified_at=now, notified=F("notified") + 1, owed=owed):
        return False
    each.owed = owed
    return True


def _owe(later: Iterable[Subscription], command: str) -> None:
    for each in later:
        if command not in each.owed:
            each.owed = [*each.owed, command]
            Subscription.objects.filter(pk=each.pk).update(owed=each.owed)


def _forget(each: Subscription, command: str) -> None:
    if command in each.owed:
        each.owed = [other for other in each.owed if other != command]
        Subscription.objects.filter(pk=each.pk).update(owed=each.owed)


async def _make(
    calls: list[Call], secrets: Secrets, now: datetime, resolve: http.Resolve | None, tls: ssl.SSLContext | None
) -> list[Posted]:
    slots = asyncio.Semaphore(conf().webhooks.slots)
    hosts: dict[str, asyncio.Semaphore] = {}

    async def make(call: Call) -> Posted:
        url = call.subscription.callback_url
        host = hosts.setdefault(url.split("/")[2], asyncio.Semaphore(conf().webhooks.slots_per_host))
        notice_id = str(uuid.uuid4())
        body = msgspec.json.encode(
            Notice(
                event_type=call.queue.command,
                available=call.depth.ready > 0,
                queue_depth=call.depth.ready + call.depth.delayed,
                claim_url=CLAIM_URL,
                sent_at=now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
                notification_id=notice_id,
            )
        )
        async with host, slots:
            signed = signing.headers(secrets.of(*_address(call)), notice_id, int(now.timestamp()), body)
            with tracing.span("codeq/notify", *call.trace) as trace:
                headers = common_headers(*trace) | signed
                return await http.post(url, headers, body, deadline_seconds=DEADLINE_SECONDS, resolve=resolve, tls=tls)

    return await asyncio.gather(*(make(call) for call in calls))


def _keep(calls: list[Call], answers: list[Posted]) -> None:
    for call, answer in zip(calls, answers, strict=True):
        metrics.sent("queue_ready", call.queue.command, is_delivered=answer.is_delivered)
        call.subscription.last_status, call.subscription.last_error = answer.status, answer.error
    Subscription.objects.bulk_update([call.subscription for call in calls], ["last_status", "last_error"])


def _address(call: Call) -> tuple[str, str]:
    return call.subscription.tenant_id, call.subscription.callback_url
