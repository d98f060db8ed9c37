"""Order and delay with many claimers and a real clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import pytest
import redis

from codeq_site.devserver.embedded import Valkey
from queues.engine import producer_commands, queries, worker_commands
from tests.concurrency.crowd import crowd
from tests.queues.engine.world import DAY_MS, LONG, TID, World, new

TASKS = 10_000 if LONG else 2_000


@pytest.fixture
def world(valkey: Valkey) -> Iterator[World]:
    with redis.Redis.from_url(valkey.url) as client:
        yield World(client, partitions=1)


def take_all(world: World, commands: list[str]) -> list[int]:
    """The numbers in the payloads, in the order in which this claimer got them."""
    got = []
    while tasks := worker_commands.claim(world.engine, TID, commands, "w1", lease_ms=DAY_MS, limit=1).run_sync().tasks:
        got.append(int(tasks[0].spec.payload))
    return got


@pytest.mark.spec("QUE-3", "Eight claimers share a line and none of them sees a later task before an earlier one")
@pytest.mark.parametrize("claimers", [1, 8])
def test_a_line_is_served_in_order(valkey: Valkey, world: World, claimers: int) -> None:
    for first in range(0, TASKS, 500):
        asked = [new(payload=f"{n}") for n in range(first, first + 500)]
        producer_commands.enqueue(world.engine, TID, "acme", asked, retention_ms=DAY_MS).run_sync()
    got = crowd(valkey.url, [partial(take_all, commands=["send"])] * claimers, partitions=1)
    assert sorted(number for numbers in got for number in numbers) == list(range(TASKS))
    for numbers in got:
        assert all(one < other for one, other in pairwise(numbers))
    world.check()


@pytest.mark.spec("QUE-2", "Higher priority first over all queues asked, whoever asks")
def test_priorities_come_down_for_every_claimer(valkey: Valkey, world: World) -> None:
    for priority in range(10):
        for command in ("send", "mail"):
            asked = [new(command, payload=f"{priority}", priority=priority) for _ in range(20)]
            producer_commands.enqueue(world.engine, TID, "acme", asked, retention_ms=DAY_MS).run_sync()
    got = crowd(valkey.url, [partial(take_all, commands=["mail", "send"])] * 4, partitions=1)
    assert sum(map(len, got)) == 400
    for priorities in got:
        assert priorities == sorted(priorities, reverse=True)


@pytest.mark.real_time
@pytest.mark.spec("SCH-1", "With eight claimers at it all the time no delayed task is seen before its moment")
def test_nothing_delayed_is_seen_early(valkey: Valkey, world: World) -> None:
    tasks = 500
    asked = [new(payload=f"{n}", delay_ms=1 + 2 * n, priority=n % 10) for n in range(tasks)]
    made = producer_commands.enqueue(world.engine, TID, "acme", asked, retention_ms=DAY_MS).run_sync()
    visible = {item.task.id: item.task.visible_ms for item in made if not isinstance(item, Exception)}
    give_up = time.monotonic() + 60

    def claim_on(world: World) -> list[tuple[str, int]]:
        got: list[tuple[str, int]] = []
        while time.monotonic() < give_up:
            claimed = worker_commands.claim(world.engine, TID, ["send"], "w1", lease_ms=DAY_MS, limit=2).run_sync()
            got += [(task.id, claimed.now_ms) for task in claimed.tasks]
            [stats] = queries.stats(world.engine, TID).run_sync()
            if not stats.delayed + stats.ready:
                break
        return got

    got = [one for claims in crowd(valkey.url, [claim_on] * 8, partitions=1) for one in claims]
    assert len(got) == tasks
    assert [task_id for task_id, at_ms in got if at_ms < visible[task_id]] == []
