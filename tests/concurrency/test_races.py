"""Two want what only one can have: the race is shown to happen without a guard, then the script decides it."""

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
from queues.domain import Enqueued, NewResult, Result, Status, Task
from queues.engine import dead_letter_commands, maintenance_commands, producer_commands, worker_commands
from queues.engine.base import Engine
from tests.concurrency.crowd import crowd, dawdle, outcome
from tests.fixtures.queues import NOON_MS
from tests.queues.engine.world import DAY_MS, LONG, TID, Clock, World, new

LEASE_MS = 1_000
DEADLINE_MS = NOON_MS + LEASE_MS
OPTIONS: dict[str, Any] = {"partitions": 1, "backoff": "fixed", "max_attempts": 100}
ROUNDS = 1_000 if LONG else 100


@pytest.fixture
def world(valkey: Valkey) -> Iterator[World]:
    with redis.Redis.from_url(valkey.url) as client:
        yield World(client, clock=Clock(), **OPTIONS)


def claimed(world: World, **asked: Any) -> Task:
    """One task at work, its lease over at DEADLINE_MS."""
    producer_commands.enqueue(world.engine, TID, "acme", [new(**asked)], retention_ms=DAY_MS).run_sync()
    [task] = worker_commands.claim(world.engine, TID, ["send"], "w1", lease_ms=LEASE_MS, limit=1).run_sync().tasks
    return task


def answer(task: Task, status: Status = Status.COMPLETED, said: bytes = b"1") -> NewResult:
    is_good = status is Status.COMPLETED
    return NewResult(
        task_id=task.id,
        status=status,
        result=said if is_good else None,
        error=None if is_good else "boom",
        lease_token=task.lease_token,
    )


def submit(engine: Engine, new: NewResult) -> ScriptCall[Any]:
    return worker_commands.submit(engine, TID, "w1", [new], retention_ms=DAY_MS).and_then(lambda items: items[0])


# Idempotency


def test_reading_first_and_writing_then_makes_two_tasks(valkey: Valkey) -> None:
    """What the engine must not do: two round trips, and between them somebody else."""
    read = threading.Barrier(2)

    def naive(world: World) -> str:
        known = world.client.get("idem:key")
        read.wait(10)
        if known:
            return str(known)
        [made] = producer_commands.enqueue(world.engine, TID, "acme", [new()], retention_ms=DAY_MS).run_sync()
        assert isinstance(made, Enqueued)
        world.client.set("idem:key", made.task.id)
        return made.task.id

    assert len(set(crowd(valkey.url, [naive, naive], **OPTIONS))) == 2


@pytest.mark.spec("IDM-1", "A hundred identical requests at once make one task, for each of two hundred keys")
def test_a_hundred_identical_requests_make_one_task(valkey: Valkey, world: World) -> None:
    callers, number_of_keys = 100, 200
    together = threading.Barrier(callers)

    def ask(world: World) -> list[tuple[str, bool]]:
        found = []
        for key in range(number_of_keys):
            together.wait(60)
            [item] = producer_commands.enqueue(
                world.engine, TID, "acme", [new(idempotency_key=f"key {key}")], retention_ms=DAY_MS
            ).run_sync()
            assert isinstance(item, Enqueued)
            assert not item.is_mismatch
            found.append((item.task.id, item.is_replayed))
        return found

    answers = crowd(valkey.url, [ask] * callers, **OPTIONS)
    for key in range(number_of_keys):
        assert len({found[key][0] for found in answers}) == 1
        assert sum(not found[key][1] for found in answers) == 1
    assert len(world.check().tasks) == number_of_keys


# The deadline


@pytest.mark.spec(
    "CLM-7", "A result and the end of its lease arrive together: one of them counts, never both, never none"
)
def test_a_result_and_the_reaper_never_both_win(valkey: Valkey, world: World) -> None:
    won = Counter(
        _duel(
            valkey,
            world,
            lambda w, task: submit(w.engine, answer(task)),
            lambda result: isinstance(result, Result),
            seed,
        )
        for seed in range(ROUNDS)
    )
    assert won.keys() == {"worker", "reaper"}


@pytest.mark.spec(
    "CLM-7", "A heartbeat and the end of its lease arrive together: the lease goes on or is over, never both"
)
def test_a_heartbeat_and_the_reaper_never_both_win(valkey: Valkey, world: World) -> None:
    def beat(w: World, task: Task) -> ScriptCall[Any]:
        return worker_commands.heartbeat(
            w.engine, TID, task.id, "w1", extend_ms=LEASE_MS, token=task.lease_token or "", progress=""
        )

    won = Counter(
        _duel(valkey, world, beat, lambda result: not isinstance(result, Exception), seed) for seed in range(ROUNDS)
    )
    assert won.keys() == {"worker", "reaper"}


def _duel(
    valkey: Valkey,
    world: World,
    act: Callable[[World, Task], ScriptCall[Any]],
    has_won: Callable[[Any], bool],
    seed: int,
) -> str:
    """The worker's word one millisecond before the deadline, by its clock, against reaper and claim at the deadline."""
    world.client.flushall()
    task = claimed(world)
    dice = [random.Random(3 * seed + n) for n in range(3)]

    def worker(w: World) -> bool:
        dawdle(dice[0])
        result = outcome(act(w, task))
        assert has_won(result) or isinstance(result, errors.LeaseLost)
        return has_won(result)

    def reaper(w: World) -> int:
        dawdle(dice[1])
        return maintenance_commands.reap(w.engine, TID, "send", dead_retention_ms=DAY_MS).run_sync()[0]

    def claimer(w: World) -> int:
        dawdle(dice[2])
        return worker_commands.claim(w.engine, TID, ["send"], "w2", lease_ms=LEASE_MS, limit=1).run_sync().expired

    clocks = [lambda: DEADLINE_MS - 1, lambda: DEADLINE_MS, lambda: DEADLINE_MS]
    has_answered, reaped, repaired = crowd(valkey.url, [worker, reaper, claimer], clocks=clocks, **OPTIONS)
    assert has_answered + reaped + repaired == 1
    world.check()
    return "worker" if has_answered else "reaper"


# The end of a task


ENDINGS: dict[str, Callable[[Engine, Task], ScriptCall[Any]]] = {
    "completed": lambda engine, task: submit(engine, answer(task)),
    "failed": lambda engine, task: submit(engine, answer(task, Status.FAILED)),
    "nacked": lambda engine, task: worker_commands.nack(
        engine, TID, task.id, "w1", token=task.lease_token or "", delay_ms=1, reason="", dead_retention_ms=1
    ),
    "abandoned": lambda engine, task: worker_commands.abandon(
        engine, TID, task.id, "w1", token=task.lease_token or "", dead_retention_ms=1
    ),
    "expired": lambda engine, _: maintenance_commands.reap(engine, TID, "send", dead_retention_ms=1),
}


def end(world: World, *, by: str, task: Task, dice: random.Random) -> bool:
    dawdle(dice)
    result = outcome(ENDINGS[by](world.engine, task))
    return result[0] == 1 if isinstance(result, tuple) else not isinstance(result, Exception)


@pytest.mark.spec("ACK-1", "Of all that can end an attempt, arriving together, one does")
def test_one_of_all_endings_wins(valkey: Valkey, world: World) -> None:
    clocks = [lambda: DEADLINE_MS - 1] * 4 + [lambda: DEADLINE_MS]
    won: Counter[str] = Counter()
    for seed in range(ROUNDS):
        world.client.flushall()
        task = claimed(world)
        acts = [partial(end, by=by, task=task, dice=random.Random(f"{seed} {by}")) for by in ENDINGS]
        answers = crowd(valkey.url, acts, clocks=clocks, **OPTIONS)
        winners = [by for by, has_won in zip(ENDINGS, answers, strict=True) if has_won]
        assert len(winners) == 1
        won[winners[0]] += 1
        [entries] = world.check().events.values()
        assert [entry["outcome"].lower() for entry in entries] == winners
    assert len(won) > 1


@pytest.mark.spec("ACK-3", "Fifty identical results at once are one result")
def test_fifty_identical_results_are_one(valkey: Valkey, world: World) -> None:
    task = claimed(world)
    results = crowd(
        valkey.url,
        [lambda w: submit(w.engine, answer(task)).run_sync()] * 50,
        clocks=[lambda: DEADLINE_MS - 1] * 50,
        **OPTIONS,
    )
    assert {(result.completed_ms, result.attempts) for result in results} == {(DEADLINE_MS - 1, 0)}
    [entries] = world.check().events.values()
    assert len(entries) == 1


@pytest.mark.spec("RET-4", "A dead letter replayed by fifty at once is replayed once")
def test_a_dead_letter_is_replayed_once(valkey: Valkey, world: World) -> None:
    task = claimed(world, max_attempts=1)
    worker_commands.nack(
        world.engine, TID, task.id, "w1", token="", delay_ms=None, reason="", dead_retention_ms=DAY_MS
    ).run_sync()
    results = crowd(
        valkey.url,
        [lambda w: dead_letter_commands.replay(w.engine, TID, [task.id]).run_sync()[0]] * 50,
        clocks=[Clock()] * 50,
        **OPTIONS,
    )
    assert sum(isinstance(result, Task) for result in results) == 1
    assert sum(isinstance(result, errors.NotDead) for result in results) == 49
    assert world.check().places[task.id] == {"ready 0": 1}


@pytest.mark.spec("ACK-2", "Many reapers and claims over the same expired leases give each task back once")
def test_expired_leases_are_given_back_once(valkey: Valkey, world: World) -> None:
    tasks = 1_000
    producer_commands.enqueue(world.engine, TID, "acme", [new()] * tasks, retention_ms=DAY_MS).run_sync()
    worker_commands.claim(world.engine, TID, ["send"], "w1", lease_ms=LEASE_MS, limit=tasks).run_sync()

    def reaper(w: World) -> int:
        total = 0
        while (found := maintenance_commands.reap(w.engine, TID, "send", 37, dead_retention_ms=DAY_MS).run_sync())[0]:
            total += found[0]
        return total

    def claimer(w: World) -> int:
        total = 0
        while (
            found := worker_commands.claim(w.engine, TID, ["send"], "w2", lease_ms=LEASE_MS, limit=1).run_sync().expired
        ):
            total += found
        return total

    counts = crowd(valkey.url, [reaper, claimer] * 4, clocks=[lambda: DEADLINE_MS] * 8, **OPTIONS, inspect_limit=29)
    assert sum(counts) == tasks
    found = world.check()
    assert {int(task["attempts"]) for task in found.tasks.values()} == {1}


@pytest.mark.spec("SCH-4", "Many movers over the same due tasks make each ready once")
def test_due_tasks_are_promoted_once(valkey: Valkey, world: World) -> None:
    tasks = 1_000
    producer_commands.enqueue(
        world.engine, TID, "acme", [new(delay_ms=1 + n % 7) for n in range(tasks)], retention_ms=DAY_MS
    ).run_sync()

    def mover(w: World) -> int:
        total = 0
        while moved := maintenance_commands.promote(w.engine, TID, "send", 41).run_sync()[0]:
            total += moved
        return total

    assert sum(crowd(valkey.url, [mover] * 8, clocks=[lambda: NOON_MS + 10] * 8, **OPTIONS)) == tasks
    assert sum(map(len, world.check().ready.values())) == tasks
