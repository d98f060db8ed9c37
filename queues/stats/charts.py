"""The reads from PostgreSQL for people: how deep queues were, how fast they move, how attempts went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import msgspec

from queues.models import QueueSample
from queues.stats import histogram
from queues.stats.sampler import UNCHANGED, Queue

HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)
RATE = timedelta(minutes=5)  # long enough to be steady, short enough to be now


# What a chart may reach back, in how many steps.
SPANS: Final = {
    "1h": (60, MINUTE),
    "24h": (96, timedelta(minutes=15)),
    "7d": (84, timedelta(hours=2)),
}
PERCENTILES: Final = (0.5, 0.95, 0.99)


class QueueRates(NamedTuple):
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


def queue_rates(tids: Iterable[str], now: datetime) -> dict[Queue, QueueRates]:
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


def _pulse(rows: list[Sampled], now: datetime) -> QueueRates:
    arrived = ended = good = bad = 0
    for at, _, came, completed, failed, died, cancelled in rows:
        if at > now - HOUR:
            good += completed
            bad += failed + died
        if at > now - RATE:
            arrived += came
            ended += completed + failed + died + cancelled
    seconds = RATE.total_seconds()
    return QueueRates(
        arrivals_per_second=max(0, arrived) / seconds,
        endings_per_second=ended / seconds,
        failure_share=bad / (good + bad) if good + bad else None,
        ready=carried([(row.at, row.ready) for row in rows], now - HOUR, MINUTE, 60),
    )


class TimeSeries(msgspec.Struct, frozen=True, kw_only=True):
    """How one queue fared: a value a step, oldest first. Depths are the most in each step."""

    step_seconds: int
    ends_ms: list[int]
    ready: list[int]
    delayed: list[int]
    in_progress: list[int]
    dead: list[int]
    completed: list[int]
    failed: list[int]
    returned: list[int]
    died: list[int]
    cancelled: list[int]
    waits: list[list[float | None]]  # seconds, for each of PERCENTILES
    runs: list[list[float | None]]


DEPTHS = ("ready", "delayed", "in_progress", "dead")
COUNTS = ("completed", "failed", "returned", "died", "cancelled")


def time_series(tid: str, command: str, span: str, now: datetime) -> TimeSeries:
    """The depths, outcomes and times of one queue over one of SPANS."""
    count, step = SPANS[span]
    start = now - count * step
    rows = list(
        QueueSample.objects.filter(
            tenant_id=tid, command=command, at__gt=start - 2 * UNCHANGED, at__lte=now
        ).order_by("at")
    )  # fmt: skip
    steps: list[list[QueueSample]] = [[] for _ in range(count)]
    for row in rows:
        if row.at > start:
            # A step holds what came after its start, up to its end.
            steps[-((start - row.at) // step) - 1].append(row)

    def depth(name: str) -> list[int]:
        at_the_end = carried([(row.at, getattr(row, name)) for row in rows], start, step, count)
        return [
            max([end, *(getattr(row, name) for row in found)])
            for end, found in zip(at_the_end, steps, strict=True)
        ]  # fmt: skip

    def spreads(name: str) -> list[list[float | None]]:
        counts = [histogram.add(getattr(row, name) for row in found) for found in steps]
        return [[histogram.percentile(found, share) for found in counts] for share in PERCENTILES]

    return TimeSeries(
        step_seconds=round(step.total_seconds()),
        ends_ms=[round((start + number * step).timestamp() * 1000) for number in range(1, count + 1)],
        **{name: depth(name) for name in DEPTHS},
        **{name: [sum(getattr(row, name) for row in found) for found in steps] for name in COUNTS},
        waits=spreads("waits"),
        runs=spreads("runs"),
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
