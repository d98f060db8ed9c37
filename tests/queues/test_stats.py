from __future__ import annotations

from collections.abc import Sequence

import pytest
import redis

from core.redis.script_call import ScriptCall
from queues import selectors
from queues.domain import QueueStats
from queues.engine import Engine, queries
from tests.fixtures.queues import Clock, Queue


@pytest.mark.spec("QUE-6", "Stats are exact in every state")
def test_stats_are_exact(queue: Queue, clock: Clock) -> None:
    queue.make_dead_letter()
    for priority in (0, 0, 7):
        queue.enqueue(priority=priority)
    queue.enqueue(delay_ms=1000)
    clock.advance(0.5)
    queue.claim()
    stats = selectors.queue_stats(queue.tenant, "send").run_sync()
    assert (stats.ready, stats.delayed, stats.in_progress, stats.dlq) == (2, 1, 1, 1)
    assert stats.ready_by_priority == [2, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert stats.oldest_ready_ms == clock.now_ms - 500


@pytest.mark.spec("QUE-6", "The cost of stats does not depend on the length of the queue")
def test_stats_do_not_read_the_tasks_of_the_queue(queue: Queue, store: redis.Redis) -> None:
    queue.enqueue_many(1000)
    selectors.queue_stats(queue.tenant, "send").run_sync()
    store.config_resetstat()
    selectors.queue_stats(queue.tenant, "send").run_sync()
    calls = {name: stat["calls"] for name, stat in store.info("commandstats").items() if name != "cmdstat_info"}
    assert sum(calls.values()) < 25
    assert "cmdstat_lrange" not in calls


@pytest.mark.spec("TEN-3", "A tenant sees its own queues and no other")
def test_a_tenant_sees_its_own_queues(queue: Queue, other_queue: Queue) -> None:
    queue.enqueue(command="b")
    queue.enqueue(command="a")
    other_queue.enqueue(command="c")
    assert [stats.command for stats in selectors.queues(queue.tenant).run_sync()] == ["a", "b"]
    assert selectors.queue_stats(queue.tenant, "c").run_sync().ready == 0


@pytest.mark.spec("TEN-3", "Reading the lengths of thousands of queues does not block Redis for long")
def test_lengths_of_many_queues_are_read_in_several_calls(
    queue: Queue, other_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call for 20,000 queues blocked Redis for half a second."""
    sizes: list[int] = []
    real = queries.stats

    def record_size(engine: Engine, tid: str, commands: Sequence[str] = ()) -> ScriptCall[list[QueueStats]]:
        sizes.append(len(commands))
        return real(engine, tid, commands)

    monkeypatch.setattr(queries, "stats", record_size)
    monkeypatch.setattr(selectors, "QUEUES_AT_ONCE", 4)
    names = [f"q{number:02}" for number in range(10)]
    for name in names:
        queue.enqueue(command=name)
    other_queue.enqueue(command="b")
    by_tenant = selectors.queues_of([queue.tenant.tid, other_queue.tenant.tid, "unknown"]).run_sync()
    assert [(stats.command, stats.ready) for stats in by_tenant[queue.tenant.tid]] == [(name, 1) for name in names]
    assert [stats.command for stats in by_tenant[other_queue.tenant.tid]] == ["b"]
    assert by_tenant["unknown"] == []
    assert sizes == [4, 4, 2, 1]
    assert len(selectors.queues(queue.tenant).run_sync()) == 10
