"""What Redis counted, what the audit holds and what the marts say are one number, per tenant and day."""

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
from queues.audit.events import Entry, Event, parse
from queues.current_engine import engine
from queues.engine import keys
from queues.filters import filters
from tenants.tenant import Tenant
from tests.fixtures.queues import Clock, Queue
from tests.pipeline.history import Audit, counts

# The night in which the clocks of New York jump; it ends at 07:00 UTC and begins before midnight.
START = datetime(2026, 3, 7, 23, 59, 50, tzinfo=UTC)
ROUNDS = 60
OUTCOMES = ("COMPLETED", "FAILED", "NACKED", "ABANDONED", "EXPIRED", "CANCELLED")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, valkey: object) -> Iterator[Clock]:
    """Redis' time, which only moves when told."""
    clock = Clock()
    clock.now_ms = round(START.timestamp() * 1000)
    monkeypatch.setattr(engine(), "clock", clock)
    filters.cache_clear()
    yield clock
    filters.cache_clear()


def work(queue: Queue, clock: Clock, rng: random.Random) -> None:
    """Some tasks, each ended or given back in one of the ways there are; some are left as they are."""
    count = rng.randrange(1, 5)
    queue.enqueue_many(count, max_attempts=2)
    clock.advance(rng.random() * 20)
    claimed = queue.look(f"w{rng.randrange(3)}", count=count, lease_seconds=60).tasks
    for task in claimed:
        clock.advance(rng.random() * 10)
        way = rng.choice(("complete", "complete", "complete", "fail", "nack", "abandon", "lose", "cancel"))
        if way == "complete":
            queue.complete(task, task.worker)
        elif way == "fail":
            queue.fail(task, task.worker, error="no")
        elif way == "nack":
            services.nack(queue.tenant, task.id, task.worker, reason="later").run_sync()
        elif way == "abandon":
            services.abandon(queue.tenant, task.id, task.worker).run_sync()
        elif way == "cancel":
            services.cancel(queue.tenant, task.id).run_sync()
    if rng.random() < 0.3:
        # One that nobody ever had: no attempt, and so in no count of attempts.
        services.cancel(queue.tenant, queue.enqueue().id).run_sync()


def told() -> list[Event]:
    """Every entry of Redis' streams: what it counted itself."""
    found = []
    for partition in reachable_partitions():
        for stream_id, fields in client().xrange(keys.of_partition(partition).events):  # type: ignore[union-attr]
            found.append(parse(Entry(partition, stream_id.decode(), fields)))
    return found


def per_day(events: list[Event]) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for event in events:
        if event.attempt:
            day = datetime.fromtimestamp(event.ended_ms / 1000, UTC).date()
            found[f"{day}/{event.tid}", event.outcome] += 1
    return found


@pytest.mark.spec("PIP-2", "Totals per tenant, day and outcome are the same in Redis, in the audit and in the marts")
def test_redis_the_audit_and_the_marts_say_the_same(
    run: Any, spark: Any, lake: Lake, audit: Audit, clock: Clock
) -> None:
    rng = random.Random(8)
    queues = [Queue(Tenant(tid=tid, slug=tid), command) for tid in ("acme0001", "beta0002") for command in "ab"]
    for number in range(ROUNDS):
        work(rng.choice(queues), clock, rng)
        # Three days in all, so that every hour of the night of the jump sees something.
        clock.advance(rng.random() * 2 * 3 * 86_400 / ROUNDS)
        if number == ROUNDS // 2:
            before = told()
            periodic_tasks.run_drain(lambda: True)
            assert counts_of(run, lake) == audit.totals()
            seen = per_day(before)
    rest = told()
    known = {(each.partition, each.stream_id) for each in before}
    redis = seen + per_day([event for event in rest if (event.partition, event.stream_id) not in known])
    periodic_tasks.run_drain(lambda: True)
    assert stream.lag() == 0
    assert {outcome for _, outcome in redis} >= {"COMPLETED", "FAILED", "NACKED", "ABANDONED", "EXPIRED"}
    assert len({key for key, _ in redis}) >= 6

    assert counts_of(run, lake) == audit.totals()
    asked = audit.ask(
        "SELECT (ended_at AT TIME ZONE 'UTC')::date::text || '/' || tenant_id, outcome, count(*)"
        " FROM queues_attempt GROUP BY 1, 2"
    )
    assert {(key, outcome): count for key, outcome, count in asked} == dict(redis)

    manifest = lake.manifest("throughput")
    mart: Counter[tuple[str, str]] = Counter()
    for row in sinks.load(spark, lake, schemas.MARTS["throughput"], manifest, manifest.partitions).collect():
        for outcome in OUTCOMES:
            mart[f"{row['date']}/{row['tenant']}", outcome] += row[outcome.lower()]
    assert +mart == +redis
    published = audit.ask("SELECT date::text || '/' || tenant_id, attempts FROM pipeline_usage")
    assert dict(published) == audit.totals()


def counts_of(run: Any, lake: Lake) -> dict[str, int]:
    run("ingest", "attempts", "throughput", "usage", "publish")
    return counts(lake)
