"""The reads from PostgreSQL for people: how deep queues were, how fast they move, how attempts went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

from queues.models import QueueSample
from queues.sampling import UNCHANGED, Queue

HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)
RATE = timedelta(minutes=5)  # long enough to be steady, short enough to be now


class Pulse(NamedTuple):
    """How one queue has been doing lately."""

    arrivals_per_second: float
    endings_per_second: float
    failure_share: float | None  # of what ended within the hour; None = nothing did
    ready: list[int]  # a value a minute for the last hour, oldest first


class Sampled(NamedTuple):
    at: datetime
    ready: int
    arrived: int
    completed: int
    failed: int
    died: int
    cancelled: int


def pulse(tids: Iterable[str], now: datetime) -> dict[Queue, Pulse]:
    """The last hour of every queue of these tenants that had anything in it."""
    rows = (
        QueueSample.objects.filter(tenant_id__in=list(tids), at__gt=now - HOUR - UNCHANGED, at__lte=now)
        .order_by("at")
        .values_list("tenant_id", "command", "at", "ready", "arrived", "completed", "failed", "died", "cancelled")
    )
    by_queue: dict[Queue, list[Sampled]] = defaultdict(list)
    for tid, command, *sampled in rows:
        by_queue[str(tid), command].append(Sampled._make(sampled))
    return {queue: _pulse(found, now) for queue, found in by_queue.items()}


def _pulse(rows: list[Sampled], now: datetime) -> Pulse:
    arrived = ended = good = bad = 0
    for at, _, came, completed, failed, died, cancelled in rows:
        if at > now - HOUR:
            good += completed
            bad += failed + died
        if at > now - RATE:
            arrived += came
            ended += completed + failed + died + cancelled
    seconds = RATE.total_seconds()
    return Pulse(
        arrivals_per_second=max(0, arrived) / seconds,
        endings_per_second=ended / seconds,
        failure_share=bad / (good + bad) if good + bad else None,
        ready=carried([(row.at, row.ready) for row in rows], now - HOUR, MINUTE, 60),
    )


def carried(rows: list[tuple[datetime, int]], start: datetime, step: timedelta, count: int) -> list[int]:
    """The value that held at the end of each step: an unchanged queue has few rows, and one that ran empty none."""
    values, known, since, at = [], 0, start, 0
    for number in range(1, count + 1):
        until = start + number * step
        while at < len(rows) and rows[at][0] <= until:
            since, known = rows[at]
            at += 1
        values.append(known if until - since <= 2 * UNCHANGED else 0)
    return values
