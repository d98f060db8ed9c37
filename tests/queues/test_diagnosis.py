"""Explanations why a task is not running: one for each condition that a claim checks."""

from __future__ import annotations

import msgspec
import pytest

from queues import selectors, services
from queues.current_engine import engine
from queues.diagnosis import explain
from queues.domain import Task
from queues.engine import admin_commands
from tenants.domain import TenantSnapshot
from tests.fixtures.queues import Clock, Queue

pytestmark = pytest.mark.spec("ADM-3", "A task's page explains why the task is not running")


def explain_task(queue: Queue, task: Task, tenant: TenantSnapshot | None = None) -> str:
    live = selectors.task(queue.tenant, task.id).run_sync()
    return " ".join(explain(tenant or queue.tenant, live, selectors.queue_position(queue.tenant, task.id).run_sync()))


def test_running_task_names_its_worker_and_its_deadline(queue: Queue, clock: Clock) -> None:
    task = queue.enqueue(max_attempts=3)
    queue.claim("w7", lease_seconds=300)
    assert "w7 works on it (attempt 1 of 3)" in explain_task(queue, task)
    assert "expires in 5 minutes" in explain_task(queue, task)


@pytest.mark.parametrize(("max_attempts", "next_step"), [(3, "the task is retried"), (1, "becomes a dead letter")])
def test_expired_lease_names_the_next_step(queue: Queue, clock: Clock, max_attempts: int, next_step: str) -> None:
    task = queue.enqueue(max_attempts=max_attempts)
    queue.claim("w7", lease_seconds=10)
    clock.advance(11)
    assert "The attempt ends with the next claim" in explain_task(queue, task)
    assert next_step in explain_task(queue, task)


def test_suspension_and_pause_come_first(queue: Queue) -> None:
    task = queue.enqueue()
    services.pause(queue.tenant, "send").run_sync()
    text = explain_task(queue, task, msgspec.structs.replace(queue.tenant, is_suspended=True))
    assert text.index("Tenant acme is suspended") < text.index("Queue send is paused")
    assert queue.try_claim().tasks == []


def test_queue_at_its_limit_of_consumers_is_named(queue: Queue) -> None:
    queue.enqueue()
    task = queue.enqueue()
    admin_commands.set_policy(engine(), queue.tenant.tid, "send", policy="", max_consumers=1).run_sync()
    assert "policy allows" not in explain_task(queue, task)
    queue.claim()
    assert "as many tasks in progress as its policy allows (1)" in explain_task(queue, task)
    assert queue.try_claim().tasks == []


def test_delayed_task_names_its_due_time(queue: Queue, clock: Clock) -> None:
    task = queue.enqueue(delay_ms=7_200_000)
    assert "Scheduled: it waits until 2030-03-17 19:46:40 UTC, for 2 hours more" in explain_task(queue, task)
    clock.advance(7200)
    assert "Due: the next claim" in explain_task(queue, task)


def test_retried_task_names_its_error_and_its_attempts(queue: Queue) -> None:
    task = queue.enqueue(max_attempts=3)
    services.nack(queue.tenant, queue.claim().id, "w1", delay_seconds=90, reason="no disk").run_sync()
    assert "1 of 3 attempts failed (no disk). It waits" in explain_task(queue, task)


def test_ready_task_names_the_number_of_tasks_ahead(queue: Queue) -> None:
    queue.enqueue_many(2, priority=5)
    queue.enqueue_many(1)
    task = queue.enqueue()
    text = explain_task(queue, task)
    assert "2 tasks are of a higher priority than 0 ahead of it" in text
    assert "1 task is of the same priority ahead of it" in text
    assert "No worker is waiting for this queue" in text


def test_next_task_is_named_as_the_next(queue: Queue) -> None:
    task = queue.enqueue()
    assert "Next: the first worker" in explain_task(queue, task)
    assert queue.claim().id == task.id


def test_task_in_another_queue_is_explained_by_that_queue(queue: Queue) -> None:
    admin_commands.set_policy(
        engine(), queue.tenant.tid, "send", policy="fixed 0 0 inspect", max_consumers=None, dead_letter_queue="inspect"
    ).run_sync()
    task = queue.make_dead_letter()
    text = explain_task(queue, task)
    assert "All its attempts in queue send failed. The policy of that queue moved it to queue inspect." in text
    assert "Next: the first worker that claims from queue inspect gets it." in text
    services.pause(queue.tenant, "send").run_sync()
    assert explain_task(queue, task) == text
    services.pause(queue.tenant, "inspect").run_sync()
    assert "Queue inspect is paused" in explain_task(queue, task)
    assert queue.try_claim(commands=["inspect"]).tasks == []


def test_ended_task_names_its_outcome(queue: Queue) -> None:
    dead = queue.make_dead_letter()
    assert "Dead letter: 1 of 1 attempts failed" in explain_task(queue, dead)
    done, failed, cancelled = queue.enqueue(), queue.enqueue(), queue.enqueue()
    queue.complete(queue.claim())
    queue.fail(queue.claim())
    services.cancel(queue.tenant, cancelled.id).run_sync()
    assert [explain_task(queue, task) for task in (done, failed, cancelled)] == [
        "Completed: its worker submitted a result.",
        "Failed: its worker submitted an error that is not retried.",
        "Cancelled.",
    ]
