from __future__ import annotations

import pytest
import redis

from core import errors
from queues import selectors, services
from queues.domain import TaskStatus
from queues.filters import filters
from tests.fixtures.queues import Clock, Queue

DAY = 86_400


@pytest.mark.spec(
    "CLN-1", "Ended tasks are kept for the retention; then record, indexes and mapping are removed, in limited batches"
)
def test_ended_task_is_removed_after_its_retention(queue: Queue, clock: Clock, store: redis.Redis) -> None:
    for number in range(5):
        queue.enqueue(idempotency_key=f"{number}")
        queue.complete(queue.claim())
    clock.advance(DAY - 0.001)
    assert services.cleanup(queue.tenant.tid).run_sync() == 0
    clock.advance(0.001)
    assert services.cleanup(queue.tenant.tid, limit=3).run_sync() == 3
    assert services.cleanup(queue.tenant.tid).run_sync() == 2
    left = {key.decode().split("}:")[1].split(":")[0] for key in store.keys("*")}
    assert left <= {"tenants", "queues", "events", "woken", "due"}


@pytest.mark.spec("CLN-1", "With `before`, only tasks whose retention ended before that time are removed")
def test_before_does_not_remove_tasks_within_their_retention(queue: Queue, clock: Clock) -> None:
    queue.enqueue()
    queue.complete(queue.claim())
    retention_end_ms = clock.now_ms + DAY * 1000
    assert services.cleanup(queue.tenant.tid, before_ms=retention_end_ms + 10**9).run_sync() == 0
    clock.advance(DAY + 10)
    assert services.cleanup(queue.tenant.tid, before_ms=retention_end_ms - 1).run_sync() == 0
    assert services.cleanup(queue.tenant.tid, before_ms=retention_end_ms).run_sync() == 1


@pytest.mark.spec("CLN-2", "Live tasks are never removed, regardless of their age or due time")
def test_live_tasks_are_never_removed(queue: Queue, clock: Clock) -> None:
    running = queue.enqueue()
    queue.claim(lease_seconds=43_200)
    delayed = queue.enqueue(delay_ms=300 * DAY * 1000)
    waiting = queue.enqueue()
    clock.advance(100 * DAY)
    assert services.cleanup(queue.tenant.tid).run_sync() == 0
    ids = [running.id, delayed.id, waiting.id]
    assert services.purge(queue.tenant, ids).run_sync() == 0
    assert [selectors.task(queue.tenant, task_id).run_sync().id for task_id in ids] == ids


@pytest.mark.spec("RET-4", "Dead letters have a retention of their own")
def test_dead_letters_stay_for_their_own_retention(queue: Queue, clock: Clock) -> None:
    dead = queue.make_dead_letter()
    clock.advance(6 * DAY)
    assert services.cleanup(queue.tenant.tid).run_sync() == 0
    clock.advance(DAY)
    assert services.cleanup(queue.tenant.tid).run_sync() == 1
    assert selectors.queue_stats(queue.tenant, "send").run_sync().dlq == 0
    with pytest.raises(errors.TaskNotFound):
        selectors.task(queue.tenant, dead.id).run_sync()


def test_an_operator_deletes_dead_letters_of_one_tenant_at_once(queue: Queue, other_queue: Queue) -> None:
    dead, other_dead = queue.make_dead_letter(), other_queue.make_dead_letter()
    assert services.purge(queue.tenant, [dead.id, other_dead.id, dead.id]).run_sync() == 1
    assert selectors.task(other_queue.tenant, other_dead.id).run_sync().status is TaskStatus.FAILED
    assert selectors.queue_stats(queue.tenant, "send").run_sync().dlq == 0


def test_idempotency_key_of_a_deleted_task_can_be_used_again(queue: Queue) -> None:
    queue.enqueue("1", idempotency_key="k", max_attempts=1)
    dead = queue.claim()
    services.nack(queue.tenant, dead.id, "w1").run_sync()
    services.purge(queue.tenant, [dead.id]).run_sync()
    assert queue.enqueue("1", idempotency_key="k").id != dead.id


def test_cancelled_task_can_be_deleted_while_its_id_is_still_in_the_ready_list(queue: Queue) -> None:
    first, second = queue.enqueue("1"), queue.enqueue("2")
    services.cancel(queue.tenant, first.id).run_sync()
    assert services.purge(queue.tenant, [first.id]).run_sync() == 1
    assert selectors.queue_stats(queue.tenant, "send").run_sync().ready == 1
    assert queue.claim().id == second.id
    assert selectors.queue_stats(queue.tenant, "send").run_sync().ready == 0


@pytest.mark.spec("BLM-3", "A task that the cleanup filter skips by mistake is removed in the next pass")
def test_a_false_positive_of_the_cleanup_filter_waits_for_one_pass(queue: Queue, clock: Clock) -> None:
    queue.enqueue()
    task = queue.claim()
    queue.complete(task)
    clock.advance(DAY)
    filters().cleanup.add(f"{queue.tenant.tid} {task.id}")
    assert [services.cleanup(queue.tenant.tid).run_sync() for _ in range(3)] == [0, 1, 0]
