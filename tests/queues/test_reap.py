from __future__ import annotations

import pytest
import redis

from queues import selectors
from queues.current_engine import engine
from queues.domain import Location, TaskStatus
from queues.engine import maintenance_commands
from tests.fixtures.queues import Clock, Queue


@pytest.mark.spec("CLM-8", "A lease that its worker does not renew expires exactly at its deadline, without a claim")
def test_expired_lease_is_found_without_a_claim(queue: Queue, clock: Clock) -> None:
    queue.enqueue_many(3)
    queue.try_claim(count=1, lease_seconds=10)
    queue.try_claim(count=2, lease_seconds=20)
    partition = engine().partition_of(queue.tenant.tid)
    clock.advance(9.999)
    assert maintenance_commands.due_queues(engine(), partition).run_sync() == []
    clock.advance(0.001)
    assert maintenance_commands.due_queues(engine(), partition).run_sync() == [(queue.tenant.tid, "send")]
    expired, dead, next_due_ms = maintenance_commands.reap(engine(), queue.tenant.tid, "send").run_sync()
    assert (expired, dead) == (1, 0)
    assert next_due_ms <= clock.now_ms + 10_000
    clock.advance(10)
    assert maintenance_commands.reap(engine(), queue.tenant.tid, "send").run_sync()[0] == 2


@pytest.mark.spec(
    "RET-1", "An expired lease counts as an attempt; the last one makes a dead letter, with LEASE_EXPIRED"
)
def test_expired_lease_counts_and_the_last_one_makes_a_dead_letter(queue: Queue, clock: Clock) -> None:
    task = queue.enqueue(max_attempts=2)
    queue.claim(lease_seconds=1)
    clock.advance(1)
    maintenance_commands.reap(engine(), queue.tenant.tid, "send").run_sync()
    stored = selectors.task(queue.tenant, task.id).run_sync()
    assert (stored.status, stored.attempts, stored.error) == (TaskStatus.PENDING, 1, "LEASE_EXPIRED")
    clock.advance(1000)
    queue.claim(lease_seconds=1)
    clock.advance(1)
    assert maintenance_commands.reap(engine(), queue.tenant.tid, "send").run_sync()[:2] == (1, 1)
    stored = selectors.task(queue.tenant, task.id).run_sync()
    assert (stored.status, stored.location, stored.error) == (TaskStatus.FAILED, Location.DLQ_SET, "LEASE_EXPIRED")


def test_reaping_is_limited_and_continues_at_its_position(queue: Queue, clock: Clock) -> None:
    queue.enqueue_many(100)
    queue.try_claim(count=100, lease_seconds=1)
    clock.advance(1)
    assert [maintenance_commands.reap(engine(), queue.tenant.tid, "send", 40).run_sync()[0] for _ in range(4)] == [
        40,
        40,
        20,
        0,
    ]


def test_live_leases_are_not_read(queue: Queue, clock: Clock, store: redis.Redis) -> None:
    queue.enqueue_many(200)
    queue.try_claim(count=199, lease_seconds=1000)
    queue.claim(lease_seconds=1)
    clock.advance(1)
    maintenance_commands.reap(engine(), queue.tenant.tid, "send").run_sync()
    store.config_resetstat()
    maintenance_commands.reap(engine(), queue.tenant.tid, "send").run_sync()
    assert "cmdstat_hmget" not in store.info("commandstats")
