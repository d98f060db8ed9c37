from __future__ import annotations

import msgspec
import pytest

from core import errors
from queues import selectors, services
from queues.domain import Location, TaskStatus
from tests.fixtures.queues import Clock, Queue


@pytest.mark.spec("RET-4", "A dead letter is never claimed; replayed, it is ready again with all its attempts")
def test_a_replayed_task_has_all_its_attempts_again(queue: Queue, clock: Clock) -> None:
    dead = queue.make_dead_letter(priority=3)
    clock.advance(100_000)
    assert queue.try_claim().tasks == []
    task = services.replay(queue.tenant, [dead.id]).run_sync()[0]
    assert not isinstance(task, Exception)
    assert (task.status, task.location, task.attempts) == (TaskStatus.PENDING, Location.PENDING_LIST, 0)
    again = queue.claim()
    assert (again.id, again.priority) == (dead.id, 3)
    queue.complete(again)
    events = [(e["attempt"], e["outcome"], e["status"]) for e in queue.read_events()]
    assert events == [("1", "NACKED", "FAILED"), ("0", "REPLAYED", "PENDING"), ("2", "COMPLETED", "COMPLETED")]


def test_a_second_replay_is_a_conflict(queue: Queue) -> None:
    dead = queue.make_dead_letter()
    answers = services.replay(queue.tenant, [dead.id, dead.id]).run_sync()
    assert isinstance(answers[1], errors.NotDead)
    assert isinstance(services.replay(queue.tenant, [dead.id]).run_sync()[0], errors.NotDead)
    assert len(queue.try_claim(count=10).tasks) == 1


def test_only_dead_letters_of_the_tenant_can_be_replayed(queue: Queue, other_queue: Queue) -> None:
    waiting = queue.enqueue()
    answers = services.replay(other_queue.tenant, [queue.make_dead_letter().id, waiting.id, "nonsense"]).run_sync()
    assert [type(answer) for answer in answers] == [errors.TaskNotFound] * 3
    assert isinstance(services.replay(queue.tenant, [waiting.id]).run_sync()[0], errors.NotDead)


def test_payload_can_be_changed_by_the_replay(queue: Queue) -> None:
    dead = queue.make_dead_letter()
    spec = msgspec.structs.replace(selectors.task(queue.tenant, dead.id).run_sync().spec, payload='{"fixed":1}')
    services.replay(queue.tenant, [dead.id], [spec]).run_sync()
    assert queue.claim().spec.payload == '{"fixed":1}'


@pytest.mark.spec("RET-4", "Dead letters have their own retention; it does not apply to a replayed task")
def test_a_replayed_task_is_not_removed_when_its_old_retention_ends(queue: Queue, clock: Clock) -> None:
    dead = queue.make_dead_letter()
    services.replay(queue.tenant, [dead.id]).run_sync()
    clock.advance(30 * 86_400)
    assert services.cleanup(queue.tenant.tid).run_sync() == 0
    assert queue.claim().id == dead.id
