"""Valkey killed with SIGKILL while producers and workers are at it; it comes back with all it had acknowledged."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import redis
from redis.backoff import ConstantBackoff, NoBackoff
from redis.retry import Retry

from codeq_site.devserver.embedded import Valkey
from core import errors
from queues.domain import NewResult, Result, Status
from queues.engine import producer_commands, worker_commands
from tests.conftest import ValkeyFactory
from tests.queues.engine.world import DAY_MS, LONG, TID, Places, World, new
from tests.waiting import until

SEEDS = 300 if LONG else 20
OPTIONS = {"partitions": 1, "backoff": "fixed", "backoff_base_ms": 1, "max_attempts": 1_000}


@dataclass
class Told:
    """What clients were told; a call that was not answered may have happened or not."""

    made: set[str] = field(default_factory=set)
    done: dict[str, str] = field(default_factory=dict)
    returned: dict[str, int] = field(default_factory=dict)

    def missing(self, found: Places) -> list[str]:
        wrong = [f"{task_id} was acknowledged and is gone" for task_id in self.made - found.tasks.keys()]
        for task_id, worker in self.done.items():
            lease = found.tasks[task_id]["lease"].decode()
            if found.status(task_id) != "COMPLETED" or lease.split()[2] != worker:
                wrong.append(f"{task_id} was done by {worker} and is {found.status(task_id)} ({lease})")
        for task_id, times in self.returned.items():
            if int(found.tasks[task_id].get("attempts", 0)) < times:
                wrong.append(f"{task_id} was given back {times} times: {found.tasks[task_id]}")
        return wrong


def impatient(server: Valkey) -> World:
    """A client that asks once: what it is not told, it does not know."""
    client = redis.Redis.from_url(server.url, retry=Retry(NoBackoff(), 0), socket_timeout=5)
    return World(client, **OPTIONS)


def produce(world: World, told: Told, dice: random.Random) -> None:
    keys = [f"{dice.random()}" for _ in range(3)]
    asked = [new(priority=dice.randrange(3), idempotency_key=key if dice.random() < 0.2 else None) for key in keys]
    for item in producer_commands.enqueue(world.engine, TID, "acme", asked, retention_ms=DAY_MS).run_sync():
        assert not isinstance(item, Exception)
        told.made.add(item.task.id)


def work(world: World, told: Told, dice: random.Random, name: str) -> None:
    for task in worker_commands.claim(world.engine, TID, ["send"], name, lease_ms=60_000, limit=2).run_sync().tasks:
        token = task.lease_token or ""
        if dice.random() < 0.3:
            worker_commands.nack(
                world.engine, TID, task.id, name, token=token, delay_ms=0, reason="", dead_retention_ms=DAY_MS
            ).run_sync()
            told.returned[task.id] = told.returned.get(task.id, 0) + 1
            continue
        result = NewResult(task_id=task.id, status=Status.COMPLETED, result=b"1", lease_token=token)
        [answer] = worker_commands.submit(world.engine, TID, name, [result], retention_ms=DAY_MS).run_sync()
        assert isinstance(answer, Result)
        told.done[task.id] = name


def until_it_dies(server: Valkey, acts: list[Callable[[World, Told], None]], dice: random.Random) -> Told:
    """Every act in a loop of its own thread until its call goes unanswered; the server is killed meanwhile."""
    told, problems = Told(), []

    def loop(act: Callable[[World, Told], None]) -> None:
        world = impatient(server)
        try:
            while True:
                act(world, told)
        except errors.Unavailable:
            pass
        except BaseException as problem:  # noqa: BLE001  (shown in the test's own thread)
            problems.append(problem)
        finally:
            world.client.close()

    threads = [threading.Thread(target=loop, args=(act,), daemon=True) for act in acts]
    for thread in threads:
        thread.start()
    until(lambda: len(told.done) > 3)
    time.sleep(dice.uniform(0, 0.2))
    server.kill()
    for thread in threads:
        thread.join(30)
    assert problems == []
    return told


@pytest.mark.real_time
@pytest.mark.timeout(0 if LONG else 300)
@pytest.mark.spec(
    "ENQ-2", "Killed under load with fsync on every write, the server comes back with all it acknowledged"
)
def test_nothing_acknowledged_is_lost_when_valkey_is_killed(valkey_server: ValkeyFactory) -> None:
    server = valkey_server()
    made = 0
    for seed in range(SEEDS):
        dice = random.Random(seed)
        acts: list[Callable[[World, Told], None]] = []
        for n in range(3):
            own = random.Random(f"{seed} {n}")
            acts.append(lambda world, told, own=own: produce(world, told, own))
            acts.append(lambda world, told, own=own, name=f"w{n}": work(world, told, own, name))
        told = until_it_dies(server, acts, dice)
        server.start()
        with redis.Redis.from_url(server.url) as client:
            world = World(client, **OPTIONS)
            found = world.check()
            assert told.missing(found) == [], f"seed {seed}"
            drain(world)
            client.flushall()
        made += len(told.made)
    assert made > 10 * SEEDS


def drain(world: World) -> None:
    """Nothing that was there stands in the way of anything: workers bring it all to an end."""
    while (
        tasks := worker_commands.claim(world.engine, TID, ["send"], "drain", lease_ms=60_000, limit=500)
        .run_sync()
        .tasks
    ):
        results = [NewResult(task_id=task.id, status=Status.COMPLETED, result=b"1") for task in tasks]
        worker_commands.submit(world.engine, TID, "drain", results, retention_ms=DAY_MS).run_sync()
    found = world.check()
    # A lease that was open when the server died lives on for its minute.
    assert {found.status(task_id) for task_id in found.tasks} <= {"COMPLETED", "IN_PROGRESS"}


@pytest.mark.real_time
@pytest.mark.spec("IDM-1", "A client that sends again what went unanswered, through crashes, makes each task once")
def test_what_is_sent_again_through_crashes_is_stored_once(valkey_server: ValkeyFactory) -> None:
    server = valkey_server()
    each, producers = 150, 4
    made: list[str] = []

    def produce_all() -> None:
        # As a client of a cluster does by itself: it connects anew and sends the same bytes again.
        patience = Retry(ConstantBackoff(0.05), 200)
        with redis.Redis.from_url(server.url, retry=patience) as client:
            engine = World(client, **OPTIONS).engine
            for _ in range(each):
                [item] = producer_commands.enqueue(engine, TID, "acme", [new()], retention_ms=DAY_MS).run_sync()
                assert not isinstance(item, Exception)
                made.append(item.task.id)

    threads = [threading.Thread(target=produce_all, daemon=True) for _ in range(producers)]
    for thread in threads:
        thread.start()
    for kill_at in (100, 250, 400):
        until(lambda at=kill_at: len(made) >= at, 30)
        server.kill()
        server.start()
    for thread in threads:
        thread.join(60)
    assert len(made) == each * producers
    with redis.Redis.from_url(server.url) as client:
        found = World(client, **OPTIONS).check()
    assert sorted(found.tasks) == sorted(made)
    assert sorted(found.ready[TID, "send", 0]) == sorted(made)
