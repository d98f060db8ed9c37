from __future__ import annotations

import pytest

from core import errors
from queues import selectors, services
from queues.domain import Location, TaskStatus
from tests.fixtures.queues import Clock, Queue


@pytest.mark.parametrize("delay_ms", [0, 5_000], ids=["ready", "delayed"])
def test_waiting_task_is_cancelled_and_never_delivered(queue: Queue, clock: Clock, delay_ms: int) -> None:
    task = queue.enqueue(delay_ms=delay_ms)
    assert services.cancel(queue.tenant, task.id).run_sync().status is TaskStatus.CANCELLED
    clock.advance(10)
    assert queue.try_claim().tasks == []
    stored = selectors.task(queue.tenant, task.id).run_sync()
    assert (stored.status, stored.location) == (TaskStatus.CANCELLED, Location.NONE)
    assert [(e["attempt"], e["outcome"], e["worker"]) for e in queue.read_events()] == [("0", "CANCELLED", "")]


@pytest.mark.spec("QUE-6", "A cancelled task is not counted as ready any more")
def test_a_cancelled_task_is_not_counted(queue: Queue) -> None:
    tasks = queue.enqueue_many(3, priority=4)
    services.cancel(queue.tenant, tasks[1].id).run_sync()
    assert selectors.queue_stats(queue.tenant, "send").run_sync().ready == 2
    assert queue.claim_payloads() == ["0", "2"]
    assert selectors.queue_stats(queue.tenant, "send").run_sync().ready == 0


def test_next_heartbeat_and_result_of_a_cancelled_task_are_refused(queue: Queue) -> None:
    queue.enqueue()
    task = queue.claim()
    services.cancel(queue.tenant, task.id).run_sync()
    with pytest.raises(errors.TaskCancelled):
        services.heartbeat(queue.tenant, task.id, "w1").run_sync()
    assert isinstance(queue.complete(task), errors.TaskCancelled)
    assert [(e["attempt"], e["outcome"], e["worker"]) for e in queue.read_events()] == [("1", "CANCELLED", "w1")]
    assert selectors.queue_stats(queue.tenant, "send").run_sync().in_progress == 0


def test_second_cancel_returns_the_same_task(queue: Queue) -> None:
    task = queue.enqueue()
    assert services.cancel(queue.tenant, task.id).run_sync() == services.cancel(queue.tenant, task.id).run_sync()
    assert len(queue.read_events()) == 1


def test_ended_task_cannot_be_cancelled(queue: Queue, other_queue: Queue) -> None:
    queue.enqueue()
    done = queue.claim()
    queue.complete(done)
    for task in (done, queue.make_dead_letter()):
        with pytest.raises(errors.AlreadyEnded):
            services.cancel(queue.tenant, task.id).run_sync()
    with pytest.raises(errors.TaskNotFound):
        services.cancel(other_queue.tenant, queue.enqueue().id).run_sync()
