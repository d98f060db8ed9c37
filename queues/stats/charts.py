"""Read the data of charts from the samples: depths, rates, outcomes and times of queues."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import msgspec

from queues.models import QueueSample
from queues.stats import histogram
from queues.stats.sampler import UNCHANGED_INTERVAL, QueueKey

HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)
RATE_PERIOD = timedelta(minutes=5)  # long enough for a steady rate, short enough for a current one

# The spans of charts: the number of steps and the length of a step.
SPANS: Final = {
    "1h": (60, MINUTE),
    "24h": (96, timedelta(minutes=15)),
    "7d": (84, timedelta(hours=2)),
}
PERCENTILES: Final = (0.5, 0.95, 0.99)


class QueueRates(NamedTuple):
    """The current rates of a queue."""

    arrivals_per_second: float
    endings_per_second: float
    failure_share: float | None  # of the tasks that completed, failed or died within the last hour; None without any
    ready: list[int]  # one value for each minute of the last hour, oldest first


class SampledMinute(NamedTuple):
    """The columns of a sample that rates are computed from."""

    at: datetime
    ready: int
    arrived: int
    completed: int
    failed: int
    died: int
    cancelled: int


def queue_rates(tids: Iterable[str], now: datetime) -> dict[QueueKey, QueueRates]:
    """Return the rates of each queue of these tenants that has samples in the last 90 minutes."""
    rows = (
        QueueSample.objects.filter(tenant_id__in=list(tids), at__gt=now - HOUR - UNCHANGED_INTERVAL, at__lte=now)
        .order_by("at")
        .values_list("tenant_id", "command", "at", "ready", "arrived", "completed", "failed", "died", "cancelled")
    )
    by_queue: dict[QueueKey, list[SampledMinute]] = defaultdict(list)
    for tid, command, *columns in rows:
        by_queue[str(tid), command].append(SampledMinute._make(columns))
    return {queue: _compute_rates(minutes, now) for queue, minutes in by_queue.items()}


def _compute_rates(minutes: list[SampledMinute], now: datetime) -> QueueRates:
    arrived = ended = succeeded = failed = 0
    for minute in minutes:
        if minute.at > now - HOUR:
            succeeded += minute.completed
            failed += minute.failed + minute.died
        if minute.at > now - RATE_PERIOD:
            arrived += minute.arrived
            ended += minute.completed + minute.failed + minute.died + minute.cancelled
    seconds = RATE_PERIOD.total_seconds()
    return QueueRates(
        arrivals_per_second=max(0, arrived) / seconds,
        endings_per_second=ended / seconds,
        failure_share=failed / (succeeded + failed) if succeeded + failed else None,
        ready=_carry_forward([(minute.at, minute.ready) for minute in minutes], now - HOUR, MINUTE, 60),
    )


class TimeSeries(msgspec.Struct, frozen=True, kw_only=True):
    """The values of one queue for each step, oldest first. A depth is the maximum in its step."""

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
    """Return the depths, outcomes and times of a queue over one of SPANS."""
    count, step = SPANS[span]
    start = now - count * step
    rows = list(
        QueueSample.objects.filter(
            tenant_id=tid, command=command, at__gt=start - 2 * UNCHANGED_INTERVAL, at__lte=now
        ).order_by("at")
    )  # fmt: skip
    steps: list[list[QueueSample]] = [[] for _ in range(count)]
    for row in rows:
        if row.at > start:
            # The division rounds up, because a step includes its end and not its start.
            number = -((start - row.at) // step)
            steps[number - 1].append(row)

    def max_depths(name: str) -> list[int]:
        last_depths = _carry_forward([(row.at, getattr(row, name)) for row in rows], start, step, count)
        return [
            max([last_depth, *(getattr(row, name) for row in samples)])
            for last_depth, samples in zip(last_depths, steps, strict=True)
        ]

    def percentiles(name: str) -> list[list[float | None]]:
        histograms = [histogram.add(getattr(row, name) for row in samples) for samples in steps]
        return [[histogram.percentile(counts, share) for counts in histograms] for share in PERCENTILES]

    return TimeSeries(
        step_seconds=round(step.total_seconds()),
        ends_ms=[round((start + number * step).timestamp() * 1000) for number in range(1, count + 1)],
        **{name: max_depths(name) for name in DEPTHS},
        **{name: [sum(getattr(row, name) for row in samples) for samples in steps] for name in COUNTS},
        waits=percentiles("waits"),
        runs=percentiles("runs"),
    )


def _carry_forward(samples: list[tuple[datetime, int]], start: datetime, step: timedelta, count: int) -> list[int]:
    """Return the value of the last sample before the end of each step, or 0 if it is too old.

    A queue that does not change has a sample only every half hour, and an empty queue has no samples.
    """
    values, value, sampled_at, index = [], 0, start, 0
    for number in range(1, count + 1):
        until = start + number * step
        while index < len(samples) and samples[index][0] <= until:
            sampled_at, value = samples[index]
            index += 1
        values.append(value if until - sampled_at <= 2 * UNCHANGED_INTERVAL else 0)
    return values
