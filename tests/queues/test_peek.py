"""The first tasks of a queue and a task's position, as the console shows them."""

from __future__ import annotations

import pytest

from core import errors
from queues import selectors, services
from queues.current_engine import engine
from tests.fixtures.queues import Clock, Queue


@pytest.mark.spec("ADM-3", "A peek shows the next, running and delayed tasks of a queue, and changes nothing")
def test_peek_shows_the_queue_in_the_order_of_its_claims(queue: Queue, clock: Clock) -> None:
    queue.enqueue(priority=9)
    held = queue.claim("w7", lease_seconds=60)
    low, high, low_too = queue.enqueue(), queue.enqueue(priority=4), queue.enqueue()
    later = queue.enqueue(delay_ms=9000)
    before = selectors.queue_stats(queue.tenant, "send").run_sync()
    seen = selectors.peek(queue.tenant, "send").run_sync()
    assert [task.id for task in seen.ready] == [high.id, low.id, low_too.id]
    assert [(task.id, task.worker, task.due_ms) for task in seen.in_progress] == [
        (held.id, "w7", clock.now_ms + 60_000)
    ]
    assert [(task.id, task.due_ms) for task in seen.delayed] == [(later.id, clock.now_ms + 9000)]
    assert selectors.queue_stats(queue.tenant, "send").run_sync() == before
    assert [queue.claim().id for _ in range(3)] == [high.id, low.id, low_too.id]


def test_peek_returns_the_requested_number_without_ended_tasks(queue: Queue) -> None:
    cancelled, *rest = queue.enqueue_many(30)
    services.cancel(queue.tenant, cancelled.id).run_sync()
    seen = selectors.peek(queue.tenant, "send", 5).run_sync()
    assert [task.id for task in seen.ready] == [task.id for task in rest[:5]]


def test_task_has_a_position(queue: Queue) -> None:
    queue.enqueue_many(3)
    task = queue.enqueue()
    queue.enqueue_many(2)
    queue.enqueue_many(4, priority=6)
    place = selectors.queue_position(queue.tenant, task.id).run_sync()
    assert (place.higher, place.ahead, place.is_paused, place.is_awaited) == (4, 3, False, False)
    services.pause(queue.tenant, "send").run_sync()
    assert selectors.queue_position(queue.tenant, task.id).run_sync().is_paused


def test_position_far_back_is_not_counted(queue: Queue) -> None:
    for _ in range(10):
        queue.enqueue_many(1000)
    first, last = queue.try_claim().tasks[0], queue.enqueue_many(3)[-1]
    assert selectors.queue_position(queue.tenant, last.id).run_sync().ahead is None
    assert selectors.queue_position(queue.tenant, first.id).run_sync().ahead is None


def test_position_reports_a_waiting_worker(queue: Queue) -> None:
    task = queue.enqueue(delay_ms=60_000)
    queue.try_claim(wait_ms=10_000)
    assert selectors.queue_position(queue.tenant, task.id).run_sync().is_awaited


def test_tenant_of_a_task_id_is_found(queue: Queue, other_queue: Queue) -> None:
    assert selectors.find_tenant(queue.enqueue().id).run_sync() == queue.tenant.tid
    assert selectors.find_tenant(other_queue.enqueue().id).run_sync() == other_queue.tenant.tid
    assert selectors.find_tenant("01a1edc6-12fd-73ac-9eba-b0c00132dda0").run_sync() is None


@pytest.mark.spec("TEN-3", "A tenant cannot read another tenant's queue or task")
def test_tenant_cannot_peek_another_tenants_queue(queue: Queue, other_queue: Queue) -> None:
    task = other_queue.enqueue()
    assert selectors.peek(queue.tenant, "send").run_sync().ready == []
    with pytest.raises(errors.TaskNotFound):
        selectors.queue_position(queue.tenant, task.id).run_sync()


def test_many_tenants_are_read_in_two_round_trips(
    queue: Queue, other_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.enqueue(command="b")
    queue.enqueue(command="a")
    other_queue.enqueue()
    sent: list[int] = []
    runner = engine().runner
    run_now = runner.run_sync
    monkeypatch.setattr(runner, "run_sync", lambda commands: sent.append(len(commands)) or run_now(commands))
    by_tenant = selectors.queues_of([queue.tenant.tid, other_queue.tenant.tid, "unknown"]).run_sync()
    assert {tid: [stats.command for stats in queues] for tid, queues in by_tenant.items()} == {
        queue.tenant.tid: ["a", "b"], other_queue.tenant.tid: ["send"], "unknown": [],
    }  # fmt: skip
    assert sent == [3, 2]  # first the names of their queues, then their lengths
