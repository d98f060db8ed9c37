"""Why a task is not running: every condition a claim checks has its sentence."""

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

pytestmark = pytest.mark.spec("ADM-3", "A task's page says in words what the claim would find")


def asked(queue: Queue, task: Task, tenant: TenantSnapshot | None = None) -> str:
    live = selectors.task(queue.tenant, task.id).run_sync()
    return " ".join(explain(tenant or queue.tenant, live, selectors.queue_position(queue.tenant, task.id).run_sync()))


def test_a_running_task_names_its_worker_and_its_deadline(queue: Queue, clock: Clock) -> None:
    task = queue.enqueue(max_attempts=3)
    queue.claim("w7", lease_seconds=300)
    assert "w7 works on it (attempt 1 of 3)" in asked(queue, task)
    assert "expires in 5 minutes" in asked(queue, task)


@pytest.mark.parametrize(("most", "then"), [(3, "the task retries"), (1, "becomes a dead letter")])
def test_a_lease_that_is_over_says_what_comes(queue: Queue, clock: Clock, most: int, then: str) -> None:
    task = queue.enqueue(max_attempts=most)
    queue.claim("w7", lease_seconds=10)
    clock.advance(11)
    assert "ends the attempt" in asked(queue, task)
    assert then in asked(queue, task)


def test_what_stops_all_of_a_queue_comes_first(queue: Queue) -> None:
    task = queue.enqueue()
    services.pause(queue.tenant, "send").run_sync()
    said = asked(queue, task, msgspec.structs.replace(queue.tenant, is_suspended=True))
    assert said.index("Tenant acme is suspended") < said.index("Queue send is paused")
    assert queue.look().tasks == []


def test_a_queue_that_is_as_busy_as_it_may_be_says_so(queue: Queue) -> None:
    queue.enqueue()
    task = queue.enqueue()
    admin_commands.set_policy(engine(), queue.tenant.tid, "send", policy="", max_consumers=1).run_sync()
    assert "policy allows" not in asked(queue, task)
    queue.claim()
    assert "as many tasks in progress as its policy allows (1)" in asked(queue, task)
    assert queue.look().tasks == []


def test_a_task_for_later_says_when(queue: Queue, clock: Clock) -> None:
    task = queue.enqueue(delay_ms=7_200_000)
    assert "Scheduled: it waits until 2030-03-17 19:46:40 UTC, for 2 hours more" in asked(queue, task)
    clock.advance(7200)
    assert "Due: the next claim" in asked(queue, task)


def test_a_failed_task_says_of_what_and_how_often(queue: Queue) -> None:
    task = queue.enqueue(max_attempts=3)
    services.nack(queue.tenant, queue.claim().id, "w1", delay_seconds=90, reason="no disk").run_sync()
    assert "1 of 3 attempts failed (no disk). It waits" in asked(queue, task)


def test_a_task_in_line_counts_who_is_before_it(queue: Queue) -> None:
    queue.enqueue_many(2, priority=5)
    queue.enqueue_many(1)
    task = queue.enqueue()
    said = asked(queue, task)
    assert "2 tasks are of a higher priority than 0 ahead of it" in said
    assert "1 task is of the same priority ahead of it" in said
    assert "No worker is waiting for this queue" in said


def test_the_next_task_is_told_so(queue: Queue) -> None:
    task = queue.enqueue()
    assert "Next: the first worker" in asked(queue, task)
    assert queue.claim().id == task.id


def test_the_ended_say_how(queue: Queue) -> None:
    dead = queue.dead()
    assert "Dead letter: 1 of 1 attempts failed" in asked(queue, dead)
    done, failed, gone = queue.enqueue(), queue.enqueue(), queue.enqueue()
    queue.complete(queue.claim())
    queue.fail(queue.claim())
    services.cancel(queue.tenant, gone.id).run_sync()
    assert [asked(queue, task) for task in (done, failed, gone)] == [
        "Completed: its worker submitted a result.",
        "Failed: its worker submitted an error that is not retried.",
        "Cancelled.",
    ]
