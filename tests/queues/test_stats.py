from __future__ import annotations

import pytest
import redis

from queues import selectors
from tests.queues.conftest import Clock, Queue


@pytest.mark.spec("QUE-6", "Stats are exact in every state")
def test_stats_are_exact(queue: Queue, clock: Clock) -> None:
    queue.dead()
    for priority in (0, 0, 7):
        queue.enqueue(priority=priority)
    queue.enqueue(delay_ms=1000)
    clock.advance(0.5)
    queue.claim()
    stats = selectors.queue_stats(queue.tenant, "send").now()
    assert (stats.ready, stats.delayed, stats.in_progress, stats.dlq) == (2, 1, 1, 1)
    assert stats.ready_by_priority == [2, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert stats.oldest_ready_ms == clock.now_ms - 500


@pytest.mark.spec("QUE-6", "Stats cost the same at any length")
def test_stats_do_not_walk_the_queue(queue: Queue, store: redis.Redis) -> None:
    queue.enqueue_many(1000)
    selectors.queue_stats(queue.tenant, "send").now()
    store.config_resetstat()
    selectors.queue_stats(queue.tenant, "send").now()
    calls = {name: stat["calls"] for name, stat in store.info("commandstats").items() if name != "cmdstat_info"}
    assert sum(calls.values()) < 25
    assert "cmdstat_lrange" not in calls


@pytest.mark.spec("TEN-3", "A tenant sees its own queues and no other")
def test_a_tenant_sees_its_own_queues(queue: Queue, other_queue: Queue) -> None:
    queue.enqueue(command="b")
    queue.enqueue(command="a")
    other_queue.enqueue(command="c")
    assert [found.command for found in selectors.queues(queue.tenant).now()] == ["a", "b"]
    assert selectors.queue_stats(queue.tenant, "c").now().ready == 0
