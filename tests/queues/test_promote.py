from __future__ import annotations

import pytest
import redis

from queues import selectors
from queues.current_engine import engine
from queues.engine import maintenance_commands
from tests.fixtures.queues import Clock, Queue


@pytest.mark.spec("SCH-2", "Due tasks become ready without a claim, and the next due time is returned")
def test_due_tasks_become_ready(queue: Queue, clock: Clock) -> None:
    for delay in (1000, 2000, 9000):
        queue.enqueue(f"{delay}", delay_ms=delay)
    partition = engine().partition_of(queue.tenant.tid)
    assert maintenance_commands.due_queues(engine(), partition).run_sync() == []
    clock.advance(2)
    assert maintenance_commands.due_queues(engine(), partition).run_sync() == [(queue.tenant.tid, "send")]
    moved, next_due_ms = maintenance_commands.promote(engine(), queue.tenant.tid, "send").run_sync()
    assert (moved, next_due_ms) == (2, clock.now_ms + 7000)
    assert maintenance_commands.due_queues(engine(), partition).run_sync() == []
    assert selectors.queue_stats(queue.tenant, "send").run_sync().ready == 2


@pytest.mark.spec(
    "SCH-4", "A promoted task becomes the last of its priority; of several, the one due first comes first"
)
def test_promoted_tasks_are_last_of_their_priority_in_the_order_of_their_due_times(queue: Queue, clock: Clock) -> None:
    queue.enqueue("second", delay_ms=2000, priority=3)
    queue.enqueue("first", delay_ms=1000, priority=3)
    queue.enqueue("waiting already", priority=3)
    queue.enqueue("urgent", delay_ms=2000, priority=9)
    clock.advance(5)
    maintenance_commands.promote(engine(), queue.tenant.tid, "send").run_sync()
    assert queue.claim_payloads() == ["urgent", "waiting already", "first", "second"]


@pytest.mark.spec("SCH-2", "The cost follows the number due, not the number delayed")
def test_tasks_that_are_not_due_are_not_read(queue: Queue, clock: Clock, store: redis.Redis) -> None:
    queue.enqueue_many(500, delay_ms=3_600_000)
    queue.enqueue("due", delay_ms=1000)
    clock.advance(1)
    maintenance_commands.promote(engine(), queue.tenant.tid, "send").run_sync()
    store.config_resetstat()
    queue.enqueue("due", delay_ms=1000)
    clock.advance(1)
    maintenance_commands.promote(engine(), queue.tenant.tid, "send").run_sync()
    assert store.info("commandstats")["cmdstat_hget"]["calls"] == 1


@pytest.mark.spec("SCH-3", "A due task whose record is missing does not stop the others")
def test_deleted_task_does_not_stop_the_other_due_tasks(queue: Queue, clock: Clock, store: redis.Redis) -> None:
    tasks = queue.enqueue_many(5, delay_ms=1000)
    store.delete(f"codeq:{{{engine().partition_of(queue.tenant.tid)}}}:task:{tasks[2].id}")
    clock.advance(1)
    assert queue.claim_payloads() == ["0", "1", "3", "4"]
    assert selectors.queue_stats(queue.tenant, "send").run_sync().delayed == 0
