"""Ranked queues in Redis: order, locks and delays.

`test_ranked_outbox.py` tests the table from which entries move to Redis.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from codeq_site.devserver.embedded import Valkey
from core import errors
from core.redis.connections import client
from queues.current_engine import engine
from queues.engine import keys
from queues.engine.options import CHUNK
from ranked import engine as ranked_engine
from ranked.services import Rank, RankedQueue
from tenants.domain import TenantSnapshot
from tests.concurrency.threads import run_together
from tests.fixtures.queues import START_MS, Clock
from tests.queues.engine.checked_engine import LONG, TID, CheckedEngine
from tests.waiting import until

HIGH, NORMAL = Rank.HIGH, Rank.NORMAL


@pytest.fixture
def queue(tenant: TenantSnapshot, clock: Clock) -> RankedQueue:
    return RankedQueue(tenant, "reviews")


@pytest.fixture
def other_worker(tenant: TenantSnapshot, clock: Clock) -> RankedQueue:
    """Another worker of the same queue."""
    return RankedQueue(tenant, "reviews")


def enqueue_entries(queue: RankedQueue, *task_ids: str, rank: int = NORMAL) -> list[bool]:
    """Enqueue in Redis, without the database."""
    return ranked_engine.enqueue(
        engine(), queue.tid, queue.name, [(task_id, int(rank)) for task_id in task_ids]
    ).run_sync()


def dequeue_all(queue: RankedQueue) -> list[str]:
    task_ids = []
    while (task_id := queue.dequeue()) is not None:
        task_ids.append(task_id)
    return task_ids


def key_of(queue: RankedQueue, task_id: str | None = None) -> str:
    root = keys.of_partition(engine().partition_of(queue.tid)).root
    name = keys.ranked(root, queue.tid, queue.name)
    return name if task_id is None else f"{name}:lock:{task_id}"


def read_score(queue: RankedQueue, task_id: str) -> float | None:
    return client().zscore(key_of(queue), task_id)


def expire_lock(queue: RankedQueue, clock: Clock, task_id: str) -> None:
    """Move the clock to the expiry of the lock, and delete its key as Redis would."""
    clock.advance(queue.lock_seconds)
    client().delete(key_of(queue, task_id))


@pytest.mark.spec("RNK-2", "Higher ranks are served first; within a rank, entries are served in the order of arrival")
def test_higher_ranks_are_served_first_and_each_rank_in_order(queue: RankedQueue, clock: Clock) -> None:
    for second in range(3):
        for rank in (0, NORMAL, 99, HIGH):
            enqueue_entries(queue, f"{rank:d}-{second}", rank=rank)
        clock.advance(86_400 * 365)
    assert dequeue_all(queue) == [f"{rank:d}-{second}" for rank in (HIGH, 99, NORMAL, 0) for second in range(3)]


@pytest.mark.spec("RNK-2", "Entries of one millisecond are served in the order of arrival, not of their ids")
def test_entries_of_one_millisecond_are_served_in_order(queue: RankedQueue, clock: Clock) -> None:
    ids = [f"{n}" for n in range(300, 0, -1)]
    for task_id in ids[:100]:
        enqueue_entries(queue, task_id)
    enqueue_entries(queue, *ids[100:])
    assert dequeue_all(queue) == ids


@pytest.mark.spec("RNK-2", "A queue is one sorted set, with the score (100 - rank) * 1e13 + ms for every rank")
def test_score_is_the_rank_and_the_time(queue: RankedQueue, clock: Clock) -> None:
    for rank in range(101):
        enqueue_entries(queue, f"t{rank}", rank=rank)
        assert read_score(queue, f"t{rank}") == (100 - rank) * 10**13 + START_MS
    assert client().keys("*ranked*") == [key_of(queue).encode()]
    assert client().type(key_of(queue)) == b"zset"


@pytest.mark.parametrize("ms", [0, START_MS, 10**13 - 1], ids=["1970", "2030", "2286"])
def test_every_possible_score_is_exact_in_a_double(ms: int) -> None:
    highest = 4 * 10**15 + (ms + 400 * 86_400_000) * 101 + 100
    assert highest < 2**53
    assert float(100 * 10**13 + ms) + 1 == float(100 * 10**13 + ms + 1) != float(100 * 10**13 + ms)
    # The scores of ready, delayed and held entries do not overlap.
    assert 100 * 10**13 + ms < 2 * 10**15 <= 2 * 10**15 + (ms + 400 * 86_400_000) * 101 + 100 < 4 * 10**15


@pytest.mark.spec("RNK-3", "A lock is a key that expires after five minutes, with the host and a UUID of its holder")
def test_lock_names_its_holder_and_expires(queue: RankedQueue, other_worker: RankedQueue) -> None:
    enqueue_entries(queue, "t1")
    assert queue.dequeue() == "t1"
    assert client().get(key_of(queue, "t1")) == queue.holder.encode()
    assert 299_000 < client().pttl(key_of(queue, "t1")) <= 300_000
    host, _, uuid = queue.holder.rpartition(":")
    assert host == socket.gethostname()
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", uuid)
    assert other_worker.holder != queue.holder
    assert other_worker.dequeue() is None


@pytest.mark.spec(
    "RNK-4", "An entry that is enqueued again while it is locked keeps its position; the next free one is served"
)
def test_locked_entry_keeps_its_score_and_the_next_one_is_served(queue: RankedQueue, other_worker: RankedQueue) -> None:
    enqueue_entries(queue, "t1", "t2")
    assert queue.dequeue() == "t1"
    assert enqueue_entries(queue, "t1", rank=HIGH) == [True]
    before = read_score(queue, "t1")
    assert other_worker.dequeue() == "t2"
    assert other_worker.dequeue() is None
    assert read_score(queue, "t1") == before
    assert queue.finish("t1")
    assert other_worker.dequeue() == "t1"


@pytest.mark.spec("RNK-4", "A free entry behind thousands of locked ones is served, and the search ends")
def test_free_entry_behind_thousands_of_locked_ones_is_served(queue: RankedQueue, other_worker: RankedQueue) -> None:
    locked_ids = [f"t{n}" for n in range(CHUNK * 2 + 50)]
    for first in range(0, len(locked_ids), CHUNK):
        enqueue_entries(queue, *locked_ids[first : first + CHUNK])
    with client().pipeline() as pipe:
        for task_id in locked_ids:
            pipe.set(key_of(queue, task_id), queue.holder, ex=300)
        pipe.execute()
    assert other_worker.dequeue() is None
    enqueue_entries(queue, "free")
    assert other_worker.dequeue() == "free"
    assert other_worker.dequeue() is None
    assert other_worker.queue_size() == len(locked_ids)


@pytest.mark.spec("RNK-1", "A task that was requeued with a delay is served again at its rank, also to another worker")
@pytest.mark.spec("RNK-5", "A requeue releases the lock at once, and the task is not served a millisecond too early")
def test_requeued_task_is_delayed_to_the_millisecond(
    queue: RankedQueue, other_worker: RankedQueue, clock: Clock
) -> None:
    enqueue_entries(queue, "t1", rank=HIGH)
    enqueue_entries(queue, "t2", "t3")
    assert queue.dequeue() == "t1"
    assert queue.requeue_with_delay("t1", 30)
    assert not queue.is_locked("t1")
    assert not queue.finish("t1")
    # A delayed entry of the highest rank does not block the others.
    assert queue.dequeue() == "t2"
    clock.advance(29.999)
    assert (other_worker.queue_size(), client().zcount(key_of(queue), "-inf", 2e15)) == (2, 1)
    assert other_worker.dequeue() == "t3"
    assert other_worker.dequeue() is None
    clock.advance(0.001)
    enqueue_entries(queue, "t4", rank=HIGH)
    enqueue_entries(queue, "t5", rank=99)
    assert dequeue_all(other_worker) == ["t1", "t4", "t5"]


@pytest.mark.real_time
@pytest.mark.spec("RNK-5", "A delay ends by the clock of Redis")
def test_delay_ends_by_the_clock_of_redis(tenant: TenantSnapshot) -> None:
    queue = RankedQueue(tenant, "reviews")
    enqueue_entries(queue, "t1")
    assert queue.dequeue() == "t1"
    assert queue.requeue_with_delay("t1", 0.2)
    assert queue.dequeue() is None
    assert until(queue.dequeue) == "t1"


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf"), 400 * 86_400])
def test_invalid_delay_is_refused(queue: RankedQueue, delay: float) -> None:
    enqueue_entries(queue, "t1")
    queue.dequeue()
    with pytest.raises(errors.InvalidRequest, match="delay"):
        queue.requeue_with_delay("t1", delay)
    assert queue.is_locked("t1")


@pytest.mark.spec("RNK-6", "Only its holder can finish or requeue a task, or renew its lock")
@pytest.mark.parametrize(
    "act",
    [RankedQueue.finish, RankedQueue.renew_lock, lambda queue, task_id: queue.requeue_with_delay(task_id, 1)],
    ids=["finish", "renew", "requeue"],
)
def test_only_the_holder_can_act_on_a_lock(
    queue: RankedQueue, other_worker: RankedQueue, clock: Clock, act: Callable[[RankedQueue, str], bool]
) -> None:
    enqueue_entries(queue, "t1")
    assert queue.dequeue() == "t1"
    client().pexpire(key_of(queue, "t1"), 100_000)
    before = read_score(queue, "t1")
    assert not act(other_worker, "t1")
    assert not act(queue, "t2")
    assert client().get(key_of(queue, "t1")) == queue.holder.encode()
    assert client().pttl(key_of(queue, "t1")) <= 100_000
    assert read_score(queue, "t1") == before
    assert act(queue, "t1")
    # The lock expired while the worker was slow, and another worker has the task.
    enqueue_entries(queue, "t1")
    client().delete(key_of(queue, "t1"))
    assert other_worker.dequeue() == "t1"
    assert not act(queue, "t1")
    assert other_worker.is_locked("t1")


@pytest.mark.spec("RNK-6", "The size counts waiting and delayed tasks, and not the locked ones")
def test_size_and_lock_follow_the_life_of_a_task(queue: RankedQueue, clock: Clock) -> None:
    assert (queue.queue_size(), queue.is_locked("t1"), queue.dequeue()) == (0, False, None)
    enqueue_entries(queue, "t1", "t2", "t3")
    assert queue.queue_size() == 3
    queue.dequeue()
    assert (queue.queue_size(), queue.is_locked("t1"), queue.is_locked("t2")) == (2, True, False)
    queue.requeue_with_delay("t1", 60)
    assert (queue.queue_size(), queue.is_locked("t1")) == (3, False)
    queue.dequeue()
    assert queue.finish("t2")
    assert (queue.queue_size(), queue.is_locked("t2")) == (2, False)
    assert dequeue_all(queue) == ["t3"]
    expire_lock(queue, clock, "t3")
    assert queue.queue_size() == 2
    assert sorted(dequeue_all(queue)) == ["t1", "t3"]


@pytest.mark.spec("RNK-6", "An operator can break any lock, and the task is ready at once")
def test_task_of_a_broken_lock_is_ready_at_once(queue: RankedQueue, other_worker: RankedQueue) -> None:
    enqueue_entries(queue, "t1", rank=7)
    queue.dequeue()
    assert other_worker.break_lock("t1")
    assert not other_worker.break_lock("t1")
    assert not queue.finish("t1")
    assert read_score(queue, "t1") == 93 * 10**13 + START_MS
    assert other_worker.dequeue() == "t1"


def test_renewed_lock_has_its_full_length_again(queue: RankedQueue, other_worker: RankedQueue, clock: Clock) -> None:
    enqueue_entries(queue, "t1")
    queue.dequeue()
    clock.advance(299)
    client().expire(key_of(queue, "t1"), 1)
    assert queue.renew_lock("t1")
    assert client().pttl(key_of(queue, "t1")) > 299_000
    clock.advance(299)
    assert other_worker.dequeue() is None
    expire_lock(queue, clock, "t1")
    assert other_worker.dequeue() == "t1"


def test_lock_that_was_extended_by_hand_is_respected(
    queue: RankedQueue, other_worker: RankedQueue, clock: Clock
) -> None:
    enqueue_entries(queue, "t1")
    queue.dequeue()
    client().expire(key_of(queue, "t1"), 86_400)
    clock.advance(301)
    assert other_worker.dequeue() is None
    assert queue.finish("t1")
    assert other_worker.dequeue() is None


@pytest.mark.parametrize(
    ("first", "then", "order"),
    [
        (NORMAL, NORMAL, ["t1", "t2", "t3"]),
        (NORMAL, 10, ["t1", "t2", "t3"]),
        (NORMAL, HIGH, ["t3", "t1", "t2"]),
        (NORMAL, 60, ["t3", "t1", "t2"]),
        (10, NORMAL, ["t2", "t3", "t1"]),
    ],
    ids=["the same", "a lower one", "a higher one", "between two", "up among others"],
)
@pytest.mark.spec(
    "RNK-7", "A task that is enqueued twice is in the queue once: at its position, or at the back of a higher rank"
)
def test_second_enqueue_never_makes_a_task_wait_longer(
    queue: RankedQueue, clock: Clock, first: int, then: int, order: list[str]
) -> None:
    twice = "t1" if order[0] == "t1" or order[-1] == "t1" else "t3"
    for task_id in ("t1", "t2", "t3"):
        enqueue_entries(queue, task_id, rank=first if task_id == twice else NORMAL)
        clock.advance(1)
    assert enqueue_entries(queue, twice, rank=then) == [then > first]
    assert queue.queue_size() == 3
    assert dequeue_all(queue) == order


@pytest.mark.spec("RNK-7", "A delayed task that is enqueued again is ready at once")
def test_second_enqueue_ends_a_delay(queue: RankedQueue) -> None:
    enqueue_entries(queue, "t1")
    queue.dequeue()
    queue.requeue_with_delay("t1", 60)
    assert enqueue_entries(queue, "t1") == [True]
    assert dequeue_all(queue) == ["t1"]


@pytest.mark.spec("RNK-7", "A task that is enqueued again while it is locked is served again, also after a crash")
@pytest.mark.parametrize("end", ["release", "requeue", "break", "crash"])
def test_second_enqueue_of_a_locked_task_is_not_lost(
    queue: RankedQueue, other_worker: RankedQueue, clock: Clock, end: str
) -> None:
    enqueue_entries(queue, "t1")
    assert queue.dequeue() == "t1"
    enqueue_entries(queue, "t1")
    if end == "release":
        assert queue.finish("t1")
    elif end == "requeue":
        assert queue.requeue_with_delay("t1", 3600)
    elif end == "break":
        assert other_worker.break_lock("t1")
    else:
        expire_lock(queue, clock, "t1")
    assert other_worker.dequeue() == "t1"
    assert other_worker.finish("t1")
    assert dequeue_all(other_worker) == []
    assert client().keys("*ranked*") == []


@pytest.mark.spec("RNK-7", "An invalid entry, written by hand, is dropped and logged; the entries behind it are served")
def test_invalid_entry_is_dropped_and_does_not_block_others(
    queue: RankedQueue, caplog: pytest.LogCaptureFixture
) -> None:
    enqueue_entries(queue, "t1")
    invalid_ids: list[Any] = ["", "a b", "a:b", b"\xff\x00", "x" * 129, "{1}"]
    client().zadd(key_of(queue), dict.fromkeys(invalid_ids, -1000000.0))
    client().zadd(key_of(queue), {"below": -1, "beyond": 1.5e15, "between": 12.5})
    with caplog.at_level(logging.ERROR):
        assert dequeue_all(queue) == ["below", "between", "t1", "beyond"]
    assert "dropped 6 entries that are not valid ids" in caplog.text
    assert client().zcard(key_of(queue)) == 4
    # A score beyond the ranks counts as the lowest rank, and the entry keeps that rank.
    assert queue.requeue_with_delay("beyond", 0)
    enqueue_entries(queue, "t2", rank=1)
    assert dequeue_all(queue) == ["t2", "beyond"]


@pytest.mark.spec("RNK-7", "An id that is empty or cannot be part of a key is refused before a call to Redis")
@pytest.mark.parametrize("task_id", ["", " ", "a b", "a:b", "{x}", "a\n", "é", "x" * 129])
def test_invalid_id_is_refused(queue: RankedQueue, task_id: str) -> None:
    methods: list[Callable[[str], object]] = [
        *(queue.enqueue, queue.finish, queue.is_locked, queue.renew_lock, queue.break_lock),
        lambda task_id: queue.requeue_with_delay(task_id, 1),
    ]
    for method in methods:
        with pytest.raises(errors.InvalidRequest, match="task_id"):
            method(task_id)


@pytest.mark.parametrize("priority", [-1, 101, 50.0, "50", True, None])
def test_invalid_rank_is_refused(queue: RankedQueue, priority: Any) -> None:
    with pytest.raises(errors.InvalidRequest, match="priority"):
        queue.enqueue("t1", priority)


@pytest.mark.parametrize("options", [{"name": ""}, {"name": "a:b"}, {"name": "q", "lock_seconds": 0}])
def test_invalid_queue_is_refused(tenant: TenantSnapshot, options: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidRequest):
        RankedQueue(tenant, **options)


def test_queues_and_tenants_are_isolated(
    queue: RankedQueue, tenant: TenantSnapshot, other_tenant: TenantSnapshot
) -> None:
    enqueue_entries(queue, "t1")
    queue.dequeue()
    for elsewhere in (RankedQueue(tenant, "builds"), RankedQueue(other_tenant, "reviews")):
        assert not elsewhere.is_locked("t1")
        enqueue_entries(elsewhere, "t1")
        assert elsewhere.dequeue() == "t1"
        assert not elsewhere.finish("t2")
    # All keys of a queue are in one slot of a cluster, regardless of its ids.
    assert {name.partition(b"}")[0] for name in client().keys("*:ranked:acme0001:*")} == {
        key_of(queue).partition("}")[0].encode()
    }
    assert all(keys.KEY_PATTERN.fullmatch(name.decode()) for name in client().keys("*ranked*"))


@pytest.mark.spec(
    "RNK-9", "With a read and a lock in two commands, two workers get the same task; with one script, one does"
)
def test_two_workers_cannot_lock_one_task(queue: RankedQueue, valkey: Valkey) -> None:
    barrier = threading.Barrier(2)

    def read_then_lock(checked: CheckedEngine) -> str | None:
        """Read, lock and remove in three round trips, without a script."""
        store: redis.Redis = checked.engine.runner.client  # type: ignore[attr-defined]
        [task_id] = store.zrange("naive", 0, 0)
        is_free = not store.exists("naive:lock")
        barrier.wait(10)
        store.set("naive:lock", threading.get_ident(), ex=300)
        store.zrem("naive", task_id)
        return task_id.decode() if is_free else None

    client().zadd("naive", {"t1": 1})
    assert run_together(valkey.url, [read_then_lock] * 2) == ["t1", "t1"]

    enqueue_entries(queue, "t1")

    def dequeue(checked: CheckedEngine) -> str | None:
        barrier.wait(10)
        return ranked_engine.dequeue(
            checked.engine, TID, "reviews", f"h:{threading.get_ident()}", lock_seconds=300
        ).run_sync()

    assert sorted(run_together(valkey.url, [dequeue] * 2), key=str) == [None, "t1"]


@pytest.mark.spec("RNK-9", "64 workers share a queue; no task is served twice or lost")
def test_many_workers_share_a_queue(queue: RankedQueue, valkey: Valkey) -> None:
    ids = {f"t{n}" for n in range(960)}
    for rank in (HIGH, NORMAL):
        enqueue_entries(
            queue, *[task_id for task_id in ids if (int(task_id[1:]) % 3 == 0) == (rank is HIGH)], rank=rank
        )

    def work(checked: CheckedEngine) -> list[str]:
        holder, task_ids = f"h:{threading.get_ident()}", list[str]()
        while task_id := ranked_engine.dequeue(checked.engine, TID, "reviews", holder, lock_seconds=300).run_sync():
            task_ids.append(task_id)
            if len(task_ids) % 2:
                assert ranked_engine.finish(checked.engine, TID, "reviews", task_id, holder).run_sync()
        return task_ids

    ids_by_worker = run_together(valkey.url, [work] * 64)
    assert sorted(task_id for task_ids in ids_by_worker for task_id in task_ids) == sorted(ids)
    for task_ids in ids_by_worker:
        are_normal = [int(task_id[1:]) % 3 != 0 for task_id in task_ids]
        assert are_normal == sorted(are_normal)


@pytest.mark.real_time
@pytest.mark.spec("RNK-9", "A crashed worker has a task until its lock expires; then another worker gets it")
def test_task_of_a_crashed_worker_is_served_when_its_lock_expires(tenant: TenantSnapshot) -> None:
    crashed, alive = RankedQueue(tenant, "reviews", lock_seconds=1), RankedQueue(tenant, "reviews")
    enqueue_entries(crashed, "t1", rank=HIGH)
    assert crashed.dequeue() == "t1"
    enqueue_entries(crashed, "t2")
    assert alive.dequeue() == "t2"
    assert alive.dequeue() is None
    assert until(alive.dequeue) == "t1"
    assert not crashed.finish("t1")
    assert alive.finish("t1")


@dataclass
class Model:
    """A ranked queue in plain Python."""

    now: int = START_MS
    ready: dict[str, tuple[int, int]] = field(default_factory=dict)  # 100 - rank, ms
    delayed: dict[str, tuple[int, int]] = field(default_factory=dict)  # due, 100 - rank
    held: dict[str, tuple[int, int]] = field(default_factory=dict)  # until, 100 - rank
    locks: dict[str, tuple[int, int]] = field(default_factory=dict)  # worker, until

    def make_ready(self, task_id: str, reversed_rank: int, ms: int) -> None:
        after_others = (at + 1 for other_rank, at in self.ready.values() if other_rank == reversed_rank)
        self.ready[task_id] = (reversed_rank, max([ms, *after_others]))

    def make_due_ready(self) -> None:
        for entries in (self.delayed, self.held):
            for (at, reversed_rank), task_id in sorted((at, task_id) for task_id, at in entries.items()):
                if at <= self.now:
                    del entries[task_id]
                    self.make_ready(task_id, reversed_rank, at)

    def advance(self, seconds: int) -> list[str]:
        """Return the tasks whose locks expire."""
        self.now += seconds * 1000
        expired = [task_id for task_id, (_, end) in self.locks.items() if end <= self.now]
        for task_id in expired:
            del self.locks[task_id]
        return expired

    def enqueue(self, task_id: str, rank: int) -> bool:
        self.make_due_ready()
        if task_id in self.ready and self.ready[task_id][0] <= 100 - rank:
            return False
        for entries in (self.ready, self.delayed, self.held):
            entries.pop(task_id, None)
        self.make_ready(task_id, 100 - rank, self.now)
        return True

    def dequeue(self, worker: int) -> str | None:
        self.make_due_ready()
        free = [(at, task_id) for task_id, at in self.ready.items() if task_id not in self.locks]
        if not free:
            return None
        (reversed_rank, _), task_id = min(free)
        del self.ready[task_id]
        self.held[task_id] = (self.now + 300_000, reversed_rank)
        self.locks[task_id] = (worker, self.now + 300_000)
        return task_id

    def release(self, task_id: str, worker: int | None, delay: int | None = None) -> bool:
        """Finish or requeue a task as its worker or, with None, break its lock as an operator."""
        if task_id not in self.locks or worker not in (None, self.locks[task_id][0]):
            return False
        del self.locks[task_id]
        if task_id in self.held:
            _, reversed_rank = self.held.pop(task_id)
            if worker is None:
                self.make_ready(task_id, reversed_rank, self.now)
            elif delay is not None:
                self.delayed[task_id] = (self.now + delay * 1000, reversed_rank)
        return True

    def renew(self, task_id: str, worker: int) -> bool:
        if task_id not in self.locks or worker != self.locks[task_id][0]:
            return False
        self.locks[task_id] = (worker, self.now + 300_000)
        if task_id in self.held:
            self.held[task_id] = (self.now + 300_000, self.held[task_id][1])
        return True

    @property
    def size(self) -> int:
        return len(self.ready) + len(self.delayed) + sum(at <= self.now for at, _ in self.held.values())


IDS, WORKERS = st.sampled_from(["1", "2", "10", "x.y", "Z"]), st.integers(0, 1)
STEPS = st.one_of(
    st.tuples(st.just("enqueue"), IDS, st.sampled_from([0, 50, 99, 100])),
    st.tuples(st.just("dequeue"), WORKERS),
    st.tuples(st.just("requeue"), IDS, WORKERS, st.sampled_from([0, 1, 299, 301])),
    st.tuples(st.just("release"), IDS, WORKERS),
    st.tuples(st.just("renew"), IDS, WORKERS),
    st.tuples(st.just("break"), IDS),
    st.tuples(st.just("advance"), st.sampled_from([0, 1, 150, 300])),
)


@pytest.mark.spec("RNK-9", "After any operations in any order, the queue equals a model of a few lines of Python")
@settings(
    max_examples=2_000 if LONG else 60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=st.lists(STEPS, min_size=10, max_size=60))
def test_queue_equals_the_model(tenant: TenantSnapshot, clock: Clock, steps: list[tuple[Any, ...]]) -> None:
    client().flushdb()
    model, clock.now_ms = Model(), START_MS
    workers = [RankedQueue(tenant, "reviews") for _ in range(2)]
    for operation, *words in steps:
        match operation, *words:
            case "enqueue", task_id, rank:
                assert enqueue_entries(workers[0], task_id, rank=rank) == [model.enqueue(task_id, rank)]
            case "dequeue", worker:
                assert workers[worker].dequeue() == model.dequeue(worker)
            case "requeue", task_id, worker, delay:
                assert workers[worker].requeue_with_delay(task_id, delay) == model.release(task_id, worker, delay)
            case "release", task_id, worker:
                assert workers[worker].finish(task_id) == model.release(task_id, worker)
            case "renew", task_id, worker:
                assert workers[worker].renew_lock(task_id) == model.renew(task_id, worker)
            case "break", task_id:
                assert workers[0].break_lock(task_id) == model.release(task_id, None)
            case "advance", seconds:
                clock.advance(seconds)
                for task_id in model.advance(seconds):
                    assert client().delete(key_of(workers[0], task_id))
        assert workers[0].queue_size() == model.size
        for task_id in ("1", "2", "10", "x.y", "Z"):
            assert workers[0].is_locked(task_id) == (task_id in model.locks)
