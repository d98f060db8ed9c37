"""Order of tasks and delays, with many workers and a real clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import pytest
import redis

from codeq_site.devserver.embedded import Valkey
from queues.engine import producer_commands, queries, worker_commands
from tests.concurrency.threads import run_together
from tests.queues.engine.checked_engine import DAY_MS, LONG, TID, CheckedEngine, build_task

TASKS = 10_000 if LONG else 2_000


@pytest.fixture
def checked(valkey: Valkey) -> Iterator[CheckedEngine]:
    with redis.Redis.from_url(valkey.url) as client:
        yield CheckedEngine(client, partitions=1)


def claim_all(checked: CheckedEngine, commands: list[str]) -> list[int]:
    """Claim all tasks, and return the numbers in their payloads in the order of the claims."""
    numbers = []
    while (
        tasks := worker_commands.claim(checked.engine, TID, commands, "w1", lease_ms=DAY_MS, limit=1).run_sync().tasks
    ):
        numbers.append(int(tasks[0].spec.payload))
    return numbers


@pytest.mark.spec("QUE-3", "With eight workers on one queue, no worker gets a later task before an earlier one")
@pytest.mark.parametrize("claimers", [1, 8])
def test_queue_is_served_in_order(valkey: Valkey, checked: CheckedEngine, claimers: int) -> None:
    for first in range(0, TASKS, 500):
        tasks = [build_task(payload=f"{n}") for n in range(first, first + 500)]
        producer_commands.enqueue(checked.engine, TID, "acme", tasks, retention_ms=DAY_MS).run_sync()
    results = run_together(valkey.url, [partial(claim_all, commands=["send"])] * claimers, partitions=1)
    assert sorted(number for numbers in results for number in numbers) == list(range(TASKS))
    for numbers in results:
        assert all(first < second for first, second in pairwise(numbers))
    checked.check()


@pytest.mark.spec("QUE-2", "Every worker gets higher priorities first, over all requested queues")
def test_every_worker_gets_priorities_in_descending_order(valkey: Valkey, checked: CheckedEngine) -> None:
    for priority in range(10):
        for command in ("send", "mail"):
            tasks = [build_task(command, payload=f"{priority}", priority=priority) for _ in range(20)]
            producer_commands.enqueue(checked.engine, TID, "acme", tasks, retention_ms=DAY_MS).run_sync()
    results = run_together(valkey.url, [partial(claim_all, commands=["mail", "send"])] * 4, partitions=1)
    assert sum(map(len, results)) == 400
    for priorities in results:
        assert priorities == sorted(priorities, reverse=True)


@pytest.mark.real_time
@pytest.mark.spec("SCH-1", "With eight workers claiming continuously, no delayed task is claimed before it is due")
def test_delayed_task_is_not_claimed_early(valkey: Valkey, checked: CheckedEngine) -> None:
    task_count = 500
    tasks = [build_task(payload=f"{n}", delay_ms=1 + 2 * n, priority=n % 10) for n in range(task_count)]
    items = producer_commands.enqueue(checked.engine, TID, "acme", tasks, retention_ms=DAY_MS).run_sync()
    visible = {item.task.id: item.task.visible_ms for item in items if not isinstance(item, Exception)}
    deadline = time.monotonic() + 60

    def claim_until_empty(checked: CheckedEngine) -> list[tuple[str, int]]:
        results: list[tuple[str, int]] = []
        while time.monotonic() < deadline:
            claimed = worker_commands.claim(checked.engine, TID, ["send"], "w1", lease_ms=DAY_MS, limit=2).run_sync()
            results += [(task.id, claimed.now_ms) for task in claimed.tasks]
            [stats] = queries.stats(checked.engine, TID).run_sync()
            if not stats.delayed + stats.ready:
                break
        return results

    results = [claim for claims in run_together(valkey.url, [claim_until_empty] * 8, partitions=1) for claim in claims]
    assert len(results) == task_count
    assert [task_id for task_id, at_ms in results if at_ms < visible[task_id]] == []
