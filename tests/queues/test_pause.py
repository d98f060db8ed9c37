from __future__ import annotations

import pytest

from core import errors
from queues import selectors, services
from queues.current_engine import engine
from queues.engine import maintenance_commands
from tests.fixtures.queues import Clock, Queue


@pytest.mark.spec("ADM-5", "A paused queue accepts tasks but returns none to claims, until it is resumed")
def test_paused_queue_returns_no_tasks(queue: Queue, clock: Clock) -> None:
    queue.enqueue("running")
    running = queue.claim()
    services.pause(queue.tenant, "send").run_sync()
    queue.enqueue("waiting")
    assert selectors.queue_stats(queue.tenant, "send").run_sync().is_paused
    assert queue.try_claim().tasks == []
    queue.complete(running)
    services.resume(queue.tenant, "send").run_sync()
    assert queue.claim_payloads() == ["waiting"]


def test_pause_does_not_affect_other_queues(queue: Queue, other_queue: Queue) -> None:
    services.pause(queue.tenant, "send").run_sync()
    queue.enqueue("stays")
    queue.enqueue("goes", command="mail")
    other_queue.enqueue("theirs")
    assert queue.claim_payloads(commands=["send", "mail"]) == ["goes"]
    assert other_queue.claim_payloads() == ["theirs"]


def test_a_paused_queue_is_still_repaired(queue: Queue, clock: Clock) -> None:
    queue.enqueue()
    queue.claim(lease_seconds=1)
    services.pause(queue.tenant, "send").run_sync()
    clock.advance(1)
    assert maintenance_commands.reap(engine(), queue.tenant.tid, "send").run_sync()[0] == 1


def test_a_queue_can_be_paused_before_it_has_a_task(queue: Queue) -> None:
    services.pause(queue.tenant, "send").run_sync()
    queue.enqueue()
    assert queue.try_claim().tasks == []


def test_invalid_command_is_refused(queue: Queue) -> None:
    with pytest.raises(errors.InvalidRequest):
        services.pause(queue.tenant, "a b")
