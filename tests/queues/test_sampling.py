"""The samples of each minute (depths, counts, durations) and the rates made of them."""

from __future__ import annotations

import math
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from queues import services
from queues.models import QueueSample
from queues.periodic_tasks import run_drain
from queues.stats import charts, histogram
from queues.stats.sampler import AUDIT_DELAY, RETENTION, UNCHANGED_INTERVAL, sample
from tests.fixtures.queues import Clock, Queue

pytestmark = pytest.mark.django_db
MINUTE = timedelta(minutes=1)


def now(clock: Clock) -> datetime:
    return datetime.fromtimestamp(clock.now_ms / 1000, UTC)


def advance_minute(clock: Clock) -> tuple[int, int]:
    """Advance the clock by a minute, drain the events, take a sample."""
    clock.advance(60)
    run_drain(lambda: True)
    return sample(lambda: True, now(clock))


def latest_sample() -> QueueSample:
    return QueueSample.objects.latest()


@pytest.mark.spec("ADM-3", "The depths of every queue, its arrivals and its outcomes are recorded each minute")
def test_a_sample_has_depths_arrivals_and_outcomes(queue: Queue, clock: Clock) -> None:
    queue.enqueue()
    advance_minute(clock)
    queue.enqueue_many(5)
    queue.enqueue(delay_ms=3_600_000)
    queue.complete(queue.claim())
    queue.fail(queue.claim())
    services.nack(queue.tenant, queue.claim().id, "w1", delay_seconds=900).run_sync()
    services.cancel(queue.tenant, queue.enqueue().id).run_sync()
    queue.claim(lease_seconds=3600)
    # `make_dead_letter` claims a task: the priority makes it claim the new one.
    queue.make_dead_letter(priority=9)
    advance_minute(clock)
    row = latest_sample()
    assert (row.tenant_id, row.command) == (queue.tenant.tid, queue.command)
    assert (row.ready, row.delayed, row.in_progress, row.dead) == (2, 2, 1, 1)
    assert row.oldest_ready_seconds == pytest.approx(60, abs=60)
    # Tasks that ended in the last seconds count for the next minute: the audit may not have them yet.
    clock.advance(AUDIT_DELAY.total_seconds())
    advance_minute(clock)
    rows = list(QueueSample.objects.order_by("at"))[1:]
    assert sum(row.arrived for row in rows) == 8
    assert [sum(getattr(row, name) for row in rows) for name in ("completed", "failed", "died", "returned")] == [1] * 4
    assert sum(row.cancelled for row in rows) == 1
    assert histogram.add(row.waits for row in rows).total() == 4


def test_a_minute_is_sampled_once(queue: Queue, clock: Clock) -> None:
    queue.enqueue()
    assert advance_minute(clock)[0] == 1
    assert sample(lambda: True, now(clock)) == (0, 0)
    assert QueueSample.objects.count() == 1


def test_unchanged_queues_are_sampled_seldom_and_empty_queues_never(queue: Queue, clock: Clock) -> None:
    queue.enqueue()
    written = [advance_minute(clock)[0] for _ in range(round(UNCHANGED_INTERVAL / MINUTE) + 2)]
    assert sum(written) == 2
    queue.complete(queue.claim())
    advance_minute(clock)
    advance_minute(clock)
    assert latest_sample().ready == 0
    assert [advance_minute(clock)[0] for _ in range(round(UNCHANGED_INTERVAL / MINUTE) + 2)].count(1) == 0


def test_old_samples_are_deleted(queue: Queue, clock: Clock) -> None:
    queue.enqueue()
    advance_minute(clock)
    clock.advance(RETENTION.total_seconds() + 60)
    assert advance_minute(clock) == (1, 1)


def test_rates_fill_the_gaps_of_unchanged_queues(queue: Queue, clock: Clock) -> None:
    queue.enqueue_many(3)
    advance_minute(clock)
    for _ in range(9):
        advance_minute(clock)
    queue.complete(queue.claim())
    queue.fail(queue.claim())
    advance_minute(clock)
    clock.advance(AUDIT_DELAY.total_seconds())
    advance_minute(clock)
    rates = charts.queue_rates([queue.tenant.tid], now(clock))[queue.tenant.tid, queue.command]
    assert rates.ready[-1] == 1
    assert rates.ready[-3] == 3
    assert rates.ready[0] == 0
    assert rates.failure_share == 0.5
    assert rates.endings_per_second == pytest.approx(2 / 300)
    assert rates.arrivals_per_second == 0


@pytest.mark.parametrize("share", [0.5, 0.95, 0.99])
def test_a_percentile_is_accurate_to_20_percent(share: float) -> None:
    milliseconds = [1.5 * 1.002**n for n in range(5000)]
    counts = Counter(min(histogram.LAST_BIN, int(2 * math.log2(ms))) for ms in milliseconds)
    exact = milliseconds[int(share * len(milliseconds))] / 1000
    halves = [histogram.pack(counts), histogram.pack(counts)]
    assert histogram.percentile(histogram.add(halves), share) == pytest.approx(exact, rel=0.2)


def test_an_empty_histogram_has_no_percentile() -> None:
    assert histogram.percentile(histogram.add([[], []]), 0.5) is None
