"""A minute's samples: how deep, what came and went, how long it took; and what is made of them."""

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


def minute(clock: Clock) -> tuple[int, int]:
    """A minute passes: what ended is in the audit, the sample is taken."""
    clock.advance(60)
    run_drain(lambda: True)
    return sample(lambda: True, now(clock))


def last() -> QueueSample:
    return QueueSample.objects.latest()


@pytest.mark.spec("ADM-3", "Each minute's depth of every queue, and what came and went in it, is on record")
def test_a_sample_says_what_is_there_and_what_came_and_went(queue: Queue, clock: Clock) -> None:
    queue.enqueue()
    minute(clock)
    queue.enqueue_many(5)
    queue.enqueue(delay_ms=3_600_000)
    queue.complete(queue.claim())
    queue.fail(queue.claim())
    services.nack(queue.tenant, queue.claim().id, "w1", delay_seconds=900).run_sync()
    services.cancel(queue.tenant, queue.enqueue().id).run_sync()
    queue.claim(lease_seconds=3600)
    # Lies in front, so that it is what `dead` claims.
    queue.dead(priority=9)
    minute(clock)
    row = last()
    assert (row.tenant_id, row.command) == (queue.tenant.tid, queue.command)
    assert (row.ready, row.delayed, row.in_progress, row.dead) == (2, 2, 1, 1)
    assert row.oldest_ready_seconds == pytest.approx(60, abs=60)
    # What ended in the last seconds is the next minute's: the audit may not have it yet.
    clock.advance(AUDIT_DELAY.total_seconds())
    minute(clock)
    rows = list(QueueSample.objects.order_by("at"))[1:]
    assert sum(row.arrived for row in rows) == 8
    assert [sum(getattr(row, name) for row in rows) for name in ("completed", "failed", "died", "returned")] == [1] * 4
    assert sum(row.cancelled for row in rows) == 1
    assert histogram.add(row.waits for row in rows).total() == 4


def test_a_minute_is_sampled_once(queue: Queue, clock: Clock) -> None:
    queue.enqueue()
    assert minute(clock)[0] == 1
    assert sample(lambda: True, now(clock)) == (0, 0)
    assert QueueSample.objects.count() == 1


def test_what_does_not_change_is_written_seldom_and_what_is_empty_never(queue: Queue, clock: Clock) -> None:
    queue.enqueue()
    written = [minute(clock)[0] for _ in range(round(UNCHANGED_INTERVAL / MINUTE) + 2)]
    assert sum(written) == 2
    queue.complete(queue.claim())
    minute(clock)
    minute(clock)
    assert last().ready == 0
    assert [minute(clock)[0] for _ in range(round(UNCHANGED_INTERVAL / MINUTE) + 2)].count(1) == 0


def test_old_samples_go(queue: Queue, clock: Clock) -> None:
    queue.enqueue()
    minute(clock)
    clock.advance(RETENTION.total_seconds() + 60)
    assert minute(clock) == (1, 1)


def test_the_pulse_carries_what_did_not_change(queue: Queue, clock: Clock) -> None:
    queue.enqueue_many(3)
    minute(clock)
    for _ in range(9):
        minute(clock)
    queue.complete(queue.claim())
    queue.fail(queue.claim())
    minute(clock)
    clock.advance(AUDIT_DELAY.total_seconds())
    minute(clock)
    found = charts.queue_rates([queue.tenant.tid], now(clock))[queue.tenant.tid, queue.command]
    assert found.ready[-1] == 1
    assert found.ready[-3] == 3
    assert found.ready[0] == 0
    assert found.failure_share == 0.5
    assert found.endings_per_second == pytest.approx(2 / 300)
    assert found.arrivals_per_second == 0


@pytest.mark.parametrize("share", [0.5, 0.95, 0.99])
def test_a_percentile_is_right_to_within_a_fifth(share: float) -> None:
    milliseconds = [1.5 * 1.002**n for n in range(5000)]
    counts = Counter(min(histogram.LAST_BIN, int(2 * math.log2(ms))) for ms in milliseconds)
    exact = milliseconds[int(share * len(milliseconds))] / 1000
    halves = [histogram.pack(counts), histogram.pack(counts)]
    assert histogram.percentile(histogram.add(halves), share) == pytest.approx(exact, rel=0.2)


def test_of_nothing_there_is_no_percentile() -> None:
    assert histogram.percentile(histogram.add([[], []]), 0.5) is None
