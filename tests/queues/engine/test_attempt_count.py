"""The count of attempts: every kind of failure, in every order, counts as one attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import redis

from codeq_site.devserver.embedded import Valkey
from core import errors
from queues.domain import Task
from queues.engine import dead_letter_commands, maintenance_commands, producer_commands, worker_commands
from tests.queues.engine.checked_engine import DAY_MS, TID, CheckedEngine, Clock, build_task

FAILURES = ("nack", "abandon", "expire", "expire in a claim")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def checked(valkey: Valkey, clock: Clock) -> Iterator[CheckedEngine]:
    with redis.Redis.from_url(valkey.url) as client:
        yield CheckedEngine(client, clock=clock, partitions=1, backoff="fixed", backoff_base_ms=1_000)


def fail_attempt(checked: CheckedEngine, clock: Clock, task: Task, how: str) -> None:
    engine = checked.engine
    if how == "nack":
        worker_commands.nack(
            engine, TID, task.id, "w1", token="", delay_ms=None, reason="", dead_retention_ms=DAY_MS
        ).run_sync()
    elif how == "abandon":
        worker_commands.abandon(engine, TID, task.id, "w1", token="", dead_retention_ms=DAY_MS).run_sync()
    else:
        clock.advance(10)
        if how == "expire":
            maintenance_commands.reap(engine, TID, "send", dead_retention_ms=DAY_MS).run_sync()
        else:
            worker_commands.claim(engine, TID, ["send"], "w1", lease_ms=10_000, limit=1).run_sync()
    clock.advance(5)


@pytest.mark.spec("RET-1", "A task is delivered exactly maxAttempts times, regardless of how its attempts end")
@pytest.mark.parametrize("max_attempts", [1, 2, 3])
def test_task_is_delivered_max_attempts_times(checked: CheckedEngine, clock: Clock, max_attempts: int) -> None:
    for failures in product(FAILURES, repeat=max_attempts):
        checked.client.flushall()
        [made] = producer_commands.enqueue(
            checked.engine, TID, "acme", [build_task(max_attempts=max_attempts)], retention_ms=DAY_MS
        ).run_sync()
        assert not isinstance(made, Exception)
        for delivered, how in enumerate(failures):
            [task] = (
                worker_commands.claim(checked.engine, TID, ["send"], "w1", lease_ms=10_000, limit=1).run_sync().tasks
            )
            assert task.attempts == delivered
            fail_attempt(checked, clock, task, how)
        assert (
            worker_commands.claim(checked.engine, TID, ["send"], "w1", lease_ms=10_000, limit=1).run_sync().tasks == []
        )
        snapshot = checked.check()
        assert snapshot.places[made.task.id] == {"dlq": 1}
        events = [(entry["attempt"], entry["outcome"], entry["status"]) for entry in snapshot.events[made.task.id]]
        words = {"nack": "NACKED", "abandon": "ABANDONED"}
        assert events == [
            (f"{n + 1}", words.get(how, "EXPIRED"), "FAILED" if n + 1 == max_attempts else "PENDING")
            for n, how in enumerate(failures)
        ]


@pytest.mark.spec("RET-4", "A replayed dead letter has all its attempts again, and its history keeps counting")
def test_replayed_task_has_all_its_attempts_again(checked: CheckedEngine, clock: Clock) -> None:
    [made] = producer_commands.enqueue(
        checked.engine, TID, "acme", [build_task(max_attempts=2)], retention_ms=DAY_MS
    ).run_sync()
    assert not isinstance(made, Exception)
    for life in range(3):
        for _ in range(2):
            [task] = (
                worker_commands.claim(checked.engine, TID, ["send"], "w1", lease_ms=10_000, limit=1).run_sync().tasks
            )
            fail_attempt(checked, clock, task, "nack")
        snapshot = checked.check()
        assert snapshot.places[made.task.id] == {"dlq": 1}
        numbers = [entry["attempt"] for entry in snapshot.events[made.task.id] if entry["attempt"] != "0"]
        assert numbers == [f"{n}" for n in range(1, 2 * life + 3)]
        dead_letter_commands.replay(checked.engine, TID, [made.task.id]).run_sync()


@pytest.mark.spec("CLM-4", "A claim that skips ghosts repairs at most its limit of leases, over all its scripts")
def test_claim_past_ghosts_repairs_at_most_its_limit(valkey: Valkey, clock: Clock) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        checked = CheckedEngine(
            client, clock=clock, partitions=1, repair_limit=3, backoff="fixed", backoff_base_ms=60_000
        )
        engine = checked.engine
        made = producer_commands.enqueue(engine, TID, "acme", [build_task()] * 5, retention_ms=DAY_MS).run_sync()
        worker_commands.claim(engine, TID, ["send"], "w1", lease_ms=1_000, limit=4).run_sync()
        last = made[-1]
        assert not isinstance(last, Exception)
        producer_commands.cancel(engine, TID, last.task.id, retention_ms=DAY_MS).run_sync()
        clock.advance(1)
        claimed = worker_commands.claim(engine, TID, ["send"], "w1", lease_ms=1_000, limit=1).run_sync()
        assert (claimed.tasks, claimed.expired) == ([], 3)
        assert claimed.next_due_ms == clock.now_ms  # one expired lease is left: claim again at once
        assert worker_commands.claim(engine, TID, ["send"], "w1", lease_ms=1_000, limit=1).run_sync().expired == 1
        checked.check()


Operation = Callable[[CheckedEngine, Task], object]
LATE_CALLS: dict[str, Operation] = {
    "heartbeat": lambda checked, task: worker_commands.heartbeat(
        checked.engine, TID, task.id, "w1", extend_ms=1, token=task.lease_token or "", progress=""
    ).run_sync(),
    "nack": lambda checked, task: worker_commands.nack(
        checked.engine, TID, task.id, "w1", token=task.lease_token or "", delay_ms=0, reason="", dead_retention_ms=1
    ).run_sync(),
    "abandon": lambda checked, task: worker_commands.abandon(
        checked.engine, TID, task.id, "w1", token=task.lease_token or "", dead_retention_ms=1
    ).run_sync(),
}
MEANWHILE: dict[str, Callable[[CheckedEngine, Clock], object]] = {
    "nothing": lambda checked, clock: None,
    "reaped": lambda checked, clock: maintenance_commands.reap(
        checked.engine, TID, "send", dead_retention_ms=DAY_MS
    ).run_sync(),
    "claimed by the same worker": lambda checked, clock: claim_again(checked, clock, "w1"),
    "claimed by another": lambda checked, clock: claim_again(checked, clock, "w2"),
}


def claim_again(checked: CheckedEngine, clock: Clock, worker: str) -> None:
    maintenance_commands.reap(checked.engine, TID, "send", dead_retention_ms=DAY_MS).run_sync()
    clock.advance(2)
    assert worker_commands.claim(checked.engine, TID, ["send"], worker, lease_ms=10_000, limit=1).run_sync().tasks


@pytest.mark.spec(
    "CLM-7", "A late holder is refused, even if it has claimed the task again and sends the token of the lost lease"
)
@pytest.mark.parametrize("meanwhile", MEANWHILE)
@pytest.mark.parametrize("operation", LATE_CALLS)
def test_late_holder_is_refused(checked: CheckedEngine, clock: Clock, operation: str, meanwhile: str) -> None:
    producer_commands.enqueue(checked.engine, TID, "acme", [build_task(max_attempts=9)], retention_ms=DAY_MS).run_sync()
    [task] = worker_commands.claim(checked.engine, TID, ["send"], "w1", lease_ms=10_000, limit=1).run_sync().tasks
    clock.advance(10)  # to the millisecond at which the lease expires
    MEANWHILE[meanwhile](checked, clock)
    before = checked.check().keyspace
    with pytest.raises((errors.LeaseLost, errors.NotLeaseOwner)):
        LATE_CALLS[operation](checked, task)
    assert checked.check().keyspace == before


def test_holder_is_accepted_one_millisecond_before_the_deadline(checked: CheckedEngine, clock: Clock) -> None:
    producer_commands.enqueue(checked.engine, TID, "acme", [build_task()], retention_ms=DAY_MS).run_sync()
    [task] = worker_commands.claim(checked.engine, TID, ["send"], "w1", lease_ms=10_000, limit=1).run_sync().tasks
    clock.advance(9.999)
    token = task.lease_token or ""
    lease = worker_commands.heartbeat(
        checked.engine, TID, task.id, "w1", extend_ms=10_000, token=token, progress=""
    ).run_sync()
    assert lease.until_ms == clock() + 10_000
