from __future__ import annotations

import pytest

from core import errors
from queues import selectors, services
from queues.domain import Location, TaskStatus
from tests.fixtures.queues import Queue


@pytest.mark.spec("RET-3", "An abandoned task is ready at once, as the last of its priority, and the attempt counts")
def test_abandoned_task_is_the_last_of_its_priority(queue: Queue) -> None:
    queue.enqueue("first")
    queue.enqueue("second")
    task = queue.claim()
    assert not services.abandon(queue.tenant, task.id, "w1").run_sync().is_dead
    stored = selectors.task(queue.tenant, task.id).run_sync()
    assert (stored.status, stored.location, stored.attempts) == (TaskStatus.PENDING, Location.PENDING_LIST, 1)
    assert queue.claim_payloads() == ["second", "first"]


@pytest.mark.spec("QUE-3", "A requeued task is the last of its own priority")
def test_an_abandoned_task_keeps_its_priority(queue: Queue) -> None:
    queue.enqueue("urgent", priority=5)
    queue.enqueue("plain")
    services.abandon(queue.tenant, queue.claim().id, "w1").run_sync()
    assert queue.claim_payloads() == ["urgent", "plain"]


def test_abandoning_the_last_attempt_makes_a_dead_letter(queue: Queue) -> None:
    task = queue.enqueue(max_attempts=1)
    assert services.abandon(queue.tenant, queue.claim().id, "w1").run_sync().is_dead
    stored = selectors.task(queue.tenant, task.id).run_sync()
    assert (stored.location, stored.error) == (Location.DLQ_SET, "MAX_ATTEMPTS")


def test_only_the_lease_owner_can_abandon(queue: Queue, other_queue: Queue) -> None:
    queue.enqueue()
    task = queue.claim("w1")
    with pytest.raises(errors.NotLeaseOwner):
        services.abandon(queue.tenant, task.id, "w2").run_sync()
    with pytest.raises(errors.TaskNotFound):
        services.abandon(other_queue.tenant, task.id, "w1").run_sync()
