from __future__ import annotations

import msgspec
import pytest
import redis

from core import errors
from queues import selectors, services
from queues.domain import Location, NewResult, TaskStatus
from tests.fixtures.queues import Clock, Queue


@pytest.mark.spec(
    "ACK-1",
    "The owner of a valid lease ends the task: one step stores the result, sets the status and clears the lease",
)
def test_a_result_ends_the_task(queue: Queue, clock: Clock, store: redis.Redis) -> None:
    queue.enqueue()
    task = queue.claim()
    clock.advance(3)
    store.config_resetstat()
    result = queue.complete(task, result=b'{"n":1.10}', lease_token=task.lease_token)
    assert store.info("commandstats")["cmdstat_evalsha"]["calls"] == 1
    assert (result.status, result.worker, result.completed_ms, bytes(result.result)) == (
        TaskStatus.COMPLETED,
        "w1",
        clock.now_ms,
        b'{"n":1.10}',
    )
    ended, read = selectors.result(queue.tenant, task.id).run_sync()
    assert (ended.status, ended.location, ended.lease_until_ms) == (TaskStatus.COMPLETED, Location.NONE, None)
    assert bytes(read.result or b"") == b'{"n":1.10}'
    stats = selectors.queue_stats(queue.tenant, "send").run_sync()
    assert (stats.ready, stats.in_progress, stats.dlq) == (0, 0, 0)


def test_a_failure_by_result_is_final_and_counts_as_an_attempt(queue: Queue) -> None:
    queue.enqueue()
    task = queue.claim()
    assert queue.fail(task, error="no such file").status is TaskStatus.FAILED
    ended, result = selectors.result(queue.tenant, task.id).run_sync()
    assert (ended.status, ended.error, ended.attempts, ended.location) == (
        TaskStatus.FAILED,
        "no such file",
        1,
        Location.NONE,
    )
    assert result.error == "no such file"


@pytest.mark.spec("ACK-3", "The same submission again gets the same answer, and changes nothing")
def test_the_same_submission_again_is_harmless(queue: Queue, clock: Clock) -> None:
    queue.enqueue()
    task = queue.claim(lease_seconds=10)
    first = queue.complete(task)
    clock.advance(3600)
    again = queue.complete(task)
    assert msgspec.json.encode(again) == msgspec.json.encode(first)
    assert [event["outcome"] for event in queue.read_events()] == ["COMPLETED"]


def test_another_submission_for_an_ended_task_is_a_conflict(queue: Queue) -> None:
    queue.enqueue()
    task = queue.claim()
    queue.complete(task)
    assert isinstance(queue.fail(task), errors.AlreadyEnded)
    assert isinstance(queue.complete(task, result=b'{"ok":false}'), errors.AlreadyEnded)
    assert isinstance(queue.complete(task, worker="w2"), errors.AlreadyEnded)
    assert selectors.task(queue.tenant, task.id).run_sync().status is TaskStatus.COMPLETED


@pytest.mark.spec("ACK-2", "A task without a result is ready again after its lease; a late result is refused")
@pytest.mark.parametrize("late", ["not reaped", "reaped", "claimed by another", "ended by another", "dead"])
def test_a_late_result_is_refused(queue: Queue, clock: Clock, late: str) -> None:
    queue.enqueue(max_attempts=1 if late == "dead" else 5)
    task = queue.claim("w1", lease_seconds=10)
    clock.advance(10)
    if late != "not reaped":
        queue.try_claim()
        clock.advance(1000)
    if late in ("claimed by another", "ended by another"):
        other = queue.claim("w2")
        if late == "ended by another":
            queue.complete(other, "w2", result=b'{"by":2}')
    before = selectors.task(queue.tenant, task.id).run_sync()
    answer = queue.complete(task, "w1", result=b'{"by":1}', lease_token=task.lease_token)
    assert isinstance(answer, errors.Conflict | errors.NotLeaseOwner)
    assert selectors.task(queue.tenant, task.id).run_sync() == before


@pytest.mark.spec("CLM-7", "A worker whose lease expired is refused even if the new owner has the same name")
def test_former_owner_with_the_name_of_the_new_owner_is_refused(queue: Queue, clock: Clock) -> None:
    queue.enqueue()
    old = queue.claim("pool", lease_seconds=1)
    clock.advance(2000)
    queue.try_claim("pool")
    clock.advance(2000)
    new = queue.claim("pool")
    assert isinstance(queue.complete(old, "pool", lease_token=old.lease_token), errors.LeaseLost)
    assert queue.complete(new, "pool", lease_token=new.lease_token).status is TaskStatus.COMPLETED


def test_only_the_lease_owner_can_submit(queue: Queue, other_queue: Queue) -> None:
    task = queue.enqueue()
    assert isinstance(queue.complete(task), errors.LeaseLost), "never claimed"
    queue.claim("w1")
    assert isinstance(queue.complete(task, "w2"), errors.NotLeaseOwner)
    assert isinstance(other_queue.complete(task, "w1"), errors.TaskNotFound)


@pytest.mark.spec("ACK-6", "Results in a batch are independent, and answered in order")
def test_results_of_a_batch_are_independent(queue: Queue, other_queue: Queue) -> None:
    queue.enqueue_many(3)
    mine = queue.try_claim(count=3).tasks
    foreign = other_queue.enqueue()
    done = TaskStatus.COMPLETED
    answers = services.submit(
        queue.tenant,
        "w1",
        [
            NewResult(task_id=mine[0].id, status=done, result=b"{}"),
            NewResult(task_id=foreign.id, status=done, result=b"{}"),
            NewResult(task_id="nonsense", status=done, result=b"{}"),
            NewResult(task_id=mine[1].id, status=done, result=b"1" * (256 * 1024 + 1)),
            NewResult(task_id=mine[1].id, status=TaskStatus.FAILED, error="x"),
            NewResult(task_id=mine[2].id, status=done, result=b"1"),
            NewResult(task_id=mine[2].id, status=done, result=b"1"),
            NewResult(task_id=mine[2].id, status=done, result=b"2"),
        ],
    ).run_sync()
    assert [type(answer).__name__ for answer in answers] == [
        "Result",
        "TaskNotFound",
        "TaskNotFound",
        "PayloadTooLarge",
        "Result",
        "Result",
        "Result",
        "AlreadyEnded",
    ]
    assert len(queue.read_events()) == 3


def test_result_that_is_too_large_is_refused_and_the_lease_stays_valid(queue: Queue) -> None:
    queue.enqueue()
    task = queue.claim()
    assert isinstance(queue.complete(task, result=b"1" * (256 * 1024 + 1)), errors.PayloadTooLarge)
    assert queue.complete(task).status is TaskStatus.COMPLETED


def test_every_ended_attempt_is_one_entry_of_the_event_stream(queue: Queue, clock: Clock) -> None:
    queue.enqueue()
    services.nack(queue.tenant, queue.claim().id, "w1", reason="flaky", delay_seconds=0).run_sync()
    services.abandon(queue.tenant, queue.claim("w2").id, "w2").run_sync()
    clock.advance(1)
    queue.claim("w3", lease_seconds=1)
    clock.advance(1)
    queue.try_claim()
    clock.advance(1000)
    task = queue.claim("w4")
    clock.advance(2)
    queue.complete(task, "w4")
    events = [(e["attempt"], e["outcome"], e["status"], e["worker"], e["attempts"]) for e in queue.read_events()]
    assert events == [
        ("1", "NACKED", "PENDING", "w1", "1"),
        ("2", "ABANDONED", "PENDING", "w2", "2"),
        ("3", "EXPIRED", "PENDING", "w3", "3"),
        ("4", "COMPLETED", "COMPLETED", "w4", "3"),
    ]
    last = queue.read_events()[-1]
    assert int(last["ended"]) - int(last["claimed"]) == 2000
    assert [event["error"] for event in queue.read_events()] == ["flaky", "", "LEASE_EXPIRED", ""]
