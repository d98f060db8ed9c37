"""Redis, the audit and the marts agree on the number of attempts per tenant and day."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from core.redis.connections import client, reachable_partitions
from pipeline.spark import schemas, sinks
from pipeline.spark.lake import Lake
from queues import periodic_tasks, services
from queues.audit import stream
from queues.audit.events import Event, StreamEntry, parse
from queues.current_engine import engine
from queues.engine import keys
from queues.filters import filters
from tenants.domain import TenantSnapshot
from tests.fixtures.queues import Clock, Queue
from tests.pipeline.history import Audit, count_rows

# The night in which clocks in New York change, at 07:00 UTC. The test starts before midnight UTC.
START = datetime(2026, 3, 7, 23, 59, 50, tzinfo=UTC)
ROUNDS = 60
OUTCOMES = ("COMPLETED", "FAILED", "NACKED", "ABANDONED", "EXPIRED", "CANCELLED")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, valkey: object) -> Iterator[Clock]:
    """The engine's clock, which only advances on request."""
    clock = Clock()
    clock.now_ms = round(START.timestamp() * 1000)
    monkeypatch.setattr(engine(), "clock", clock)
    filters.cache_clear()
    yield clock
    filters.cache_clear()


def run_random_tasks(queue: Queue, clock: Clock, rng: random.Random) -> None:
    """Enqueue some tasks, and end or release them in random ways. Some remain unchanged."""
    count = rng.randrange(1, 5)
    queue.enqueue_many(count, max_attempts=2)
    clock.advance(rng.random() * 20)
    claimed = queue.try_claim(f"w{rng.randrange(3)}", count=count, lease_seconds=60).tasks
    for task in claimed:
        clock.advance(rng.random() * 10)
        action = rng.choice(("complete", "complete", "complete", "fail", "nack", "abandon", "lose", "cancel"))
        if action == "complete":
            queue.complete(task, task.worker)
        elif action == "fail":
            queue.fail(task, task.worker, error="no")
        elif action == "nack":
            services.nack(queue.tenant, task.id, task.worker, reason="later").run_sync()
        elif action == "abandon":
            services.abandon(queue.tenant, task.id, task.worker).run_sync()
        elif action == "cancel":
            services.cancel(queue.tenant, task.id).run_sync()
    if rng.random() < 0.3:
        # A task that was never claimed has no attempt, so it is not counted.
        services.cancel(queue.tenant, queue.enqueue().id).run_sync()


def read_events() -> list[Event]:
    """Read all entries of the event streams in Redis."""
    events = []
    for partition in reachable_partitions():
        for stream_id, fields in client().xrange(keys.of_partition(partition).events):  # type: ignore[union-attr]
            events.append(parse(StreamEntry(partition, stream_id.decode(), fields)))
    return events


def count_per_day(events: list[Event]) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for event in events:
        if event.attempt:
            day = datetime.fromtimestamp(event.ended_ms / 1000, UTC).date()
            counts[f"{day}/{event.tid}", event.outcome] += 1
    return counts


@pytest.mark.spec("PIP-2", "Totals per tenant, day and outcome are the same in Redis, in the audit and in the marts")
def test_redis_the_audit_and_the_marts_agree(run: Any, spark: Any, lake: Lake, audit: Audit, clock: Clock) -> None:
    rng = random.Random(8)
    queues = [Queue(TenantSnapshot(tid=tid, slug=tid), command) for tid in ("acme0001", "beta0002") for command in "ab"]
    for number in range(ROUNDS):
        run_random_tasks(rng.choice(queues), clock, rng)
        # The rounds cover about three days, so that every hour of that night has attempts.
        clock.advance(rng.random() * 2 * 3 * 86_400 / ROUNDS)
        if number == ROUNDS // 2:
            first_events = read_events()
            periodic_tasks.run_drain(lambda: True)
            assert run_and_count(run, lake) == audit.count_per_partition()
            first_counts = count_per_day(first_events)
    events = read_events()
    counted_ids = {(event.partition, event.stream_id) for event in first_events}
    redis = first_counts + count_per_day(
        [event for event in events if (event.partition, event.stream_id) not in counted_ids]
    )
    periodic_tasks.run_drain(lambda: True)
    assert stream.lag() == 0
    assert {outcome for _, outcome in redis} >= {"COMPLETED", "FAILED", "NACKED", "ABANDONED", "EXPIRED"}
    assert len({key for key, _ in redis}) >= 6

    assert run_and_count(run, lake) == audit.count_per_partition()
    audit_rows = audit.query(
        "SELECT (ended_at AT TIME ZONE 'UTC')::date::text || '/' || tenant_id, outcome, count(*)"
        " FROM queues_attempt GROUP BY 1, 2"
    )
    assert {(key, outcome): count for key, outcome, count in audit_rows} == dict(redis)

    manifest = lake.manifest("throughput")
    mart: Counter[tuple[str, str]] = Counter()
    for row in sinks.load(spark, lake, schemas.MARTS["throughput"], manifest, manifest.partitions).collect():
        for outcome in OUTCOMES:
            mart[f"{row['date']}/{row['tenant']}", outcome] += row[outcome.lower()]
    assert +mart == +redis
    published = audit.query("SELECT date::text || '/' || tenant_id, attempts FROM pipeline_usage")
    assert dict(published) == audit.count_per_partition()


def run_and_count(run: Any, lake: Lake) -> dict[str, int]:
    run("ingest", "attempts", "throughput", "usage", "publish")
    return count_rows(lake)
