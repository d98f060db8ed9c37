"""Show races that happen without a guard, then show that the scripts prevent them."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import redis

from codeq_site.devserver.embedded import Valkey
from core import errors
from core.redis.script_call import ScriptCall
from queues.domain import Enqueued, NewResult, Result, Task, TaskStatus
from queues.engine import Engine, dead_letter_commands, maintenance_commands, producer_commands, worker_commands
from tests.concurrency.threads import result_or_error, run_together, wait_randomly
from tests.fixtures.queues import START_MS
from tests.queues.engine.checked_engine import DAY_MS, LONG, TID, CheckedEngine, Clock, build_task

LEASE_MS = 1_000
DEADLINE_MS = START_MS + LEASE_MS
OPTIONS: dict[str, Any] = {"partitions": 1, "backoff": "fixed", "max_attempts": 100}
ROUNDS = 1_000 if LONG else 100


@pytest.fixture
def checked(valkey: Valkey) -> Iterator[CheckedEngine]:
    with redis.Redis.from_url(valkey.url) as client:
        yield CheckedEngine(client, clock=Clock(), **OPTIONS)


def claim_one(checked: CheckedEngine, **options: Any) -> Task:
    """Enqueue and claim a task whose lease expires at DEADLINE_MS."""
    producer_commands.enqueue(checked.engine, TID, "acme", [build_task(**options)], retention_ms=DAY_MS).run_sync()
    [task] = worker_commands.claim(checked.engine, TID, ["send"], "w1", lease_ms=LEASE_MS, limit=1).run_sync().tasks
    return task


def build_result(task: Task, status: TaskStatus = TaskStatus.COMPLETED, content: bytes = b"1") -> NewResult:
    is_success = status is TaskStatus.COMPLETED
    return NewResult(
        task_id=task.id,
        status=status,
        result=content if is_success else None,
        error=None if is_success else "boom",
        lease_token=task.lease_token,
    )


def submit(engine: Engine, new: NewResult) -> ScriptCall[Any]:
    return worker_commands.submit(engine, TID, "w1", [new], retention_ms=DAY_MS).and_then(lambda items: items[0])


# Idempotency


def test_separate_read_and_write_create_two_tasks(valkey: Valkey) -> None:
    """Show the race that the engine must avoid: another client runs between two round trips."""
    both_have_read = threading.Barrier(2)

    def enqueue_naively(checked: CheckedEngine) -> str:
        existing = checked.client.get("idem:key")
        both_have_read.wait(10)
        if existing:
            return str(existing)
        [item] = producer_commands.enqueue(checked.engine, TID, "acme", [build_task()], retention_ms=DAY_MS).run_sync()
        assert isinstance(item, Enqueued)
        checked.client.set("idem:key", item.task.id)
        return item.task.id

    assert len(set(run_together(valkey.url, [enqueue_naively, enqueue_naively], **OPTIONS))) == 2


@pytest.mark.spec("IDM-1", "A hundred concurrent identical requests create one task, for each of two hundred keys")
def test_hundred_identical_requests_create_one_task(valkey: Valkey, checked: CheckedEngine) -> None:
    clients, number_of_keys = 100, 200
    together = threading.Barrier(clients)

    def enqueue_all(checked: CheckedEngine) -> list[tuple[str, bool]]:
        items = []
        for key in range(number_of_keys):
            together.wait(60)
            [item] = producer_commands.enqueue(
                checked.engine, TID, "acme", [build_task(idempotency_key=f"key {key}")], retention_ms=DAY_MS
            ).run_sync()
            assert isinstance(item, Enqueued)
            assert not item.is_mismatch
            items.append((item.task.id, item.is_repeated))
        return items

    results = run_together(valkey.url, [enqueue_all] * clients, **OPTIONS)
    for key in range(number_of_keys):
        assert len({items[key][0] for items in results}) == 1
        assert sum(not items[key][1] for items in results) == 1
    assert len(checked.check().tasks) == number_of_keys


# The deadline


@pytest.mark.spec("CLM-7", "If a result arrives when its lease expires, exactly one of the two takes effect")
def test_either_a_result_or_the_reaper_wins(valkey: Valkey, checked: CheckedEngine) -> None:
    won = Counter(
        _race_with_expiry(
            valkey,
            checked,
            lambda checked, task: submit(checked.engine, build_result(task)),
            lambda result: isinstance(result, Result),
            seed,
        )
        for seed in range(ROUNDS)
    )
    assert won.keys() == {"worker", "reaper"}


@pytest.mark.spec("CLM-7", "If a heartbeat arrives when its lease expires, the lease is either extended or expired")
def test_either_a_heartbeat_or_the_reaper_wins(valkey: Valkey, checked: CheckedEngine) -> None:
    def send_heartbeat(checked: CheckedEngine, task: Task) -> ScriptCall[Any]:
        return worker_commands.heartbeat(
            checked.engine, TID, task.id, "w1", extend_ms=LEASE_MS, token=task.lease_token or "", progress=""
        )

    won = Counter(
        _race_with_expiry(valkey, checked, send_heartbeat, lambda result: not isinstance(result, Exception), seed)
        for seed in range(ROUNDS)
    )
    assert won.keys() == {"worker", "reaper"}


def _race_with_expiry(
    valkey: Valkey,
    checked: CheckedEngine,
    action: Callable[[CheckedEngine, Task], ScriptCall[Any]],
    has_won: Callable[[Any], bool],
    seed: int,
) -> str:
    """Run the action 1 ms before the deadline, against a reaper and a claim at the deadline.

    Return which side won.
    """
    checked.client.flushall()
    task = claim_one(checked)
    dice = [random.Random(3 * seed + n) for n in range(3)]

    def worker(checked: CheckedEngine) -> bool:
        wait_randomly(dice[0])
        result = result_or_error(action(checked, task))
        assert has_won(result) or isinstance(result, errors.LeaseLost)
        return has_won(result)

    def reaper(checked: CheckedEngine) -> int:
        wait_randomly(dice[1])
        return maintenance_commands.reap(checked.engine, TID, "send", dead_retention_ms=DAY_MS).run_sync()[0]

    def claimer(checked: CheckedEngine) -> int:
        wait_randomly(dice[2])
        return worker_commands.claim(checked.engine, TID, ["send"], "w2", lease_ms=LEASE_MS, limit=1).run_sync().expired

    clocks = [lambda: DEADLINE_MS - 1, lambda: DEADLINE_MS, lambda: DEADLINE_MS]
    has_worker_won, reaped, repaired = run_together(valkey.url, [worker, reaper, claimer], clocks=clocks, **OPTIONS)
    assert has_worker_won + reaped + repaired == 1
    checked.check()
    return "worker" if has_worker_won else "reaper"


# The end of a task


ENDINGS: dict[str, Callable[[Engine, Task], ScriptCall[Any]]] = {
    "completed": lambda engine, task: submit(engine, build_result(task)),
    "failed": lambda engine, task: submit(engine, build_result(task, TaskStatus.FAILED)),
    "nacked": lambda engine, task: worker_commands.nack(
        engine, TID, task.id, "w1", token=task.lease_token or "", delay_ms=1, reason="", dead_retention_ms=1
    ),
    "abandoned": lambda engine, task: worker_commands.abandon(
        engine, TID, task.id, "w1", token=task.lease_token or "", dead_retention_ms=1
    ),
    "expired": lambda engine, _: maintenance_commands.reap(engine, TID, "send", dead_retention_ms=1),
}


def end_task(checked: CheckedEngine, *, by: str, task: Task, dice: random.Random) -> bool:
    wait_randomly(dice)
    result = result_or_error(ENDINGS[by](checked.engine, task))
    return result[0] == 1 if isinstance(result, tuple) else not isinstance(result, Exception)


@pytest.mark.spec("ACK-1", "If all operations that end an attempt arrive together, exactly one succeeds")
def test_exactly_one_ending_wins(valkey: Valkey, checked: CheckedEngine) -> None:
    clocks = [lambda: DEADLINE_MS - 1] * 4 + [lambda: DEADLINE_MS]
    won: Counter[str] = Counter()
    for seed in range(ROUNDS):
        checked.client.flushall()
        task = claim_one(checked)
        actions = [partial(end_task, by=by, task=task, dice=random.Random(f"{seed} {by}")) for by in ENDINGS]
        results = run_together(valkey.url, actions, clocks=clocks, **OPTIONS)
        winners = [by for by, has_won in zip(ENDINGS, results, strict=True) if has_won]
        assert len(winners) == 1
        won[winners[0]] += 1
        [entries] = checked.check().events.values()
        assert [entry["outcome"].lower() for entry in entries] == winners
    assert len(won) > 1


@pytest.mark.spec("ACK-3", "Fifty concurrent identical results count as one")
def test_fifty_identical_results_count_as_one(valkey: Valkey, checked: CheckedEngine) -> None:
    task = claim_one(checked)
    results = run_together(
        valkey.url,
        [lambda checked: submit(checked.engine, build_result(task)).run_sync()] * 50,
        clocks=[lambda: DEADLINE_MS - 1] * 50,
        **OPTIONS,
    )
    assert {(result.completed_ms, result.attempts) for result in results} == {(DEADLINE_MS - 1, 0)}
    [entries] = checked.check().events.values()
    assert len(entries) == 1


@pytest.mark.spec("RET-4", "A dead letter that fifty clients replay at once is replayed once")
def test_dead_letter_is_replayed_once(valkey: Valkey, checked: CheckedEngine) -> None:
    task = claim_one(checked, max_attempts=1)
    worker_commands.nack(
        checked.engine, TID, task.id, "w1", token="", delay_ms=None, reason="", dead_retention_ms=DAY_MS
    ).run_sync()
    results = run_together(
        valkey.url,
        [lambda checked: dead_letter_commands.replay(checked.engine, TID, [task.id]).run_sync()[0]] * 50,
        clocks=[Clock()] * 50,
        **OPTIONS,
    )
    assert sum(isinstance(result, Task) for result in results) == 1
    assert sum(isinstance(result, errors.NotDead) for result in results) == 49
    assert checked.check().places[task.id] == {"ready 0": 1}


@pytest.mark.spec("ACK-2", "Many concurrent reapers and claims return each task with an expired lease once")
def test_task_with_an_expired_lease_is_returned_once(valkey: Valkey, checked: CheckedEngine) -> None:
    task_count = 1_000
    producer_commands.enqueue(checked.engine, TID, "acme", [build_task()] * task_count, retention_ms=DAY_MS).run_sync()
    worker_commands.claim(checked.engine, TID, ["send"], "w1", lease_ms=LEASE_MS, limit=task_count).run_sync()

    def reap_all(checked: CheckedEngine) -> int:
        total = 0
        while (
            result := maintenance_commands.reap(checked.engine, TID, "send", 37, dead_retention_ms=DAY_MS).run_sync()
        )[0]:
            total += result[0]
        return total

    def claim_all(checked: CheckedEngine) -> int:
        total = 0
        while (
            expired := worker_commands.claim(checked.engine, TID, ["send"], "w2", lease_ms=LEASE_MS, limit=1)
            .run_sync()
            .expired
        ):
            total += expired
        return total

    counts = run_together(
        valkey.url, [reap_all, claim_all] * 4, clocks=[lambda: DEADLINE_MS] * 8, **OPTIONS, repair_limit=29
    )
    assert sum(counts) == task_count
    snapshot = checked.check()
    assert {int(task["attempts"]) for task in snapshot.tasks.values()} == {1}


@pytest.mark.spec("SCH-4", "Many concurrent promotions make each due task ready once")
def test_due_tasks_are_promoted_once(valkey: Valkey, checked: CheckedEngine) -> None:
    task_count = 1_000
    producer_commands.enqueue(
        checked.engine, TID, "acme", [build_task(delay_ms=1 + n % 7) for n in range(task_count)], retention_ms=DAY_MS
    ).run_sync()

    def promote_all(checked: CheckedEngine) -> int:
        total = 0
        while moved := maintenance_commands.promote(checked.engine, TID, "send", 41).run_sync()[0]:
            total += moved
        return total

    assert sum(run_together(valkey.url, [promote_all] * 8, clocks=[lambda: START_MS + 10] * 8, **OPTIONS)) == task_count
    assert sum(map(len, checked.check().ready.values())) == task_count
