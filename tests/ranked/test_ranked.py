"""The line of a ranked queue: order, locks, delays. What is between it and the database: test_ranked_outbox.py."""

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
from tenants.tenant import Tenant
from tests.concurrency.crowd import crowd
from tests.fixtures.queues import NOON_MS, Clock
from tests.queues.engine.world import LONG, TID, World
from tests.waiting import until

HIGH, NORMAL = Rank.HIGH, Rank.NORMAL


@pytest.fixture
def line(tenant: Tenant, clock: Clock) -> RankedQueue:
    return RankedQueue(tenant, "reviews")


@pytest.fixture
def other(tenant: Tenant, clock: Clock) -> RankedQueue:
    """Another worker of the same queue."""
    return RankedQueue(tenant, "reviews")


def put(queue: RankedQueue, *task_ids: str, rank: int = NORMAL) -> list[bool]:
    """As `enqueue`, without the database."""
    return ranked_engine.enqueue(
        engine(), queue.tid, queue.name, [(task_id, int(rank)) for task_id in task_ids]
    ).run_sync()


def take_all(queue: RankedQueue) -> list[str]:
    taken = []
    while (task_id := queue.dequeue()) is not None:
        taken.append(task_id)
    return taken


def key(queue: RankedQueue, task_id: str | None = None) -> str:
    root = keys.of_partition(engine().partition_of(queue.tid)).root
    name = keys.ranked(root, queue.tid, queue.name)
    return name if task_id is None else f"{name}:lock:{task_id}"


def score(queue: RankedQueue, task_id: str) -> float | None:
    return client().zscore(key(queue), task_id)


def end_lock(queue: RankedQueue, clock: Clock, task_id: str) -> None:
    """What time does to a lock."""
    clock.advance(queue.lock_seconds)
    client().delete(key(queue, task_id))


@pytest.mark.spec("RNK-2", "High before normal before what is below, whoever came first; in order inside a rank")
def test_the_highest_rank_is_served_first_and_each_in_order(line: RankedQueue, clock: Clock) -> None:
    for second in range(3):
        for rank in (0, NORMAL, 99, HIGH):
            put(line, f"{rank:d}-{second}", rank=rank)
        clock.advance(86_400 * 365)
    assert take_all(line) == [f"{rank:d}-{second}" for rank in (HIGH, 99, NORMAL, 0) for second in range(3)]


@pytest.mark.spec("RNK-2", "Those of one millisecond are served as they came, whatever their ids")
def test_a_thousand_in_one_millisecond_are_served_as_they_came(line: RankedQueue, clock: Clock) -> None:
    ids = [f"{n}" for n in range(300, 0, -1)]
    for task_id in ids[:100]:
        put(line, task_id)
    put(line, *ids[100:])
    assert take_all(line) == ids


@pytest.mark.spec("RNK-2", "One sorted set; (100 - rank) * 1e13 + ms to the millisecond, for every rank")
def test_the_score_is_the_rank_and_the_moment(line: RankedQueue, clock: Clock) -> None:
    for rank in range(101):
        put(line, f"t{rank}", rank=rank)
        assert score(line, f"t{rank}") == (100 - rank) * 10**13 + NOON_MS
    assert client().keys("*ranked*") == [key(line).encode()]
    assert client().type(key(line)) == b"zset"


@pytest.mark.parametrize("ms", [0, NOON_MS, 10**13 - 1], ids=["1970", "2030", "2286"])
def test_every_score_there_can_be_is_exact_in_a_double(ms: int) -> None:
    highest = 4 * 10**15 + (ms + 400 * 86_400_000) * 101 + 100
    assert highest < 2**53
    assert float(100 * 10**13 + ms) + 1 == float(100 * 10**13 + ms + 1) != float(100 * 10**13 + ms)
    # In line, delayed and held do not overlap.
    assert 100 * 10**13 + ms < 2 * 10**15 <= 2 * 10**15 + (ms + 400 * 86_400_000) * 101 + 100 < 4 * 10**15


@pytest.mark.spec("RNK-3", "The lock is a key of five minutes that says host and uuid of who has it")
def test_the_lock_says_whose_it_is_and_ends(line: RankedQueue, other: RankedQueue) -> None:
    put(line, "t1")
    assert line.dequeue() == "t1"
    assert client().get(key(line, "t1")) == line.holder.encode()
    assert 299_000 < client().pttl(key(line, "t1")) <= 300_000
    host, _, uuid = line.holder.rpartition(":")
    assert host == socket.gethostname()
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", uuid)
    assert other.holder != line.holder
    assert other.dequeue() is None


@pytest.mark.spec("RNK-4", "Enqueued again while somebody is at it, it keeps its place, and the next free one is taken")
def test_a_locked_entry_keeps_its_score_and_the_next_one_is_taken(line: RankedQueue, other: RankedQueue) -> None:
    put(line, "t1", "t2")
    assert line.dequeue() == "t1"
    assert put(line, "t1", rank=HIGH) == [True]
    before = score(line, "t1")
    assert other.dequeue() == "t2"
    assert other.dequeue() is None
    assert score(line, "t1") == before
    assert line.release_lock("t1")
    assert other.dequeue() == "t1"


@pytest.mark.spec("RNK-4", "However many locked ones stand before it, a free one is found, and the search ends")
def test_a_free_entry_behind_a_crowd_of_locked_ones_is_found(line: RankedQueue, other: RankedQueue) -> None:
    crowd_of = [f"t{n}" for n in range(CHUNK * 2 + 50)]
    for first in range(0, len(crowd_of), CHUNK):
        put(line, *crowd_of[first : first + CHUNK])
    with client().pipeline() as pipe:
        for task_id in crowd_of:
            pipe.set(key(line, task_id), line.holder, ex=300)
        pipe.execute()
    assert other.dequeue() is None
    put(line, "free")
    assert other.dequeue() == "free"
    assert other.dequeue() is None
    assert other.queue_size() == len(crowd_of)


@pytest.mark.spec("RNK-1", "What was requeued with a delay comes back at its rank, and another worker may have it")
@pytest.mark.spec("RNK-5", "Requeued, the lock is free at once, and nobody gets it a millisecond before its moment")
def test_a_requeued_task_is_delayed_to_the_millisecond(line: RankedQueue, other: RankedQueue, clock: Clock) -> None:
    put(line, "t1", rank=HIGH)
    put(line, "t2", "t3")
    assert line.dequeue() == "t1"
    assert line.requeue_with_delay("t1", 30)
    assert not line.is_locked("t1")
    assert not line.release_lock("t1")
    # One that waits at the highest rank stands in nobody's way.
    assert line.dequeue() == "t2"
    clock.advance(29.999)
    assert (other.queue_size(), client().zcount(key(line), "-inf", 2e15)) == (2, 1)
    assert other.dequeue() == "t3"
    assert other.dequeue() is None
    clock.advance(0.001)
    put(line, "t4", rank=HIGH)
    put(line, "t5", rank=99)
    assert take_all(other) == ["t1", "t4", "t5"]


@pytest.mark.real_time
@pytest.mark.spec("RNK-5", "On Redis' own clock too")
def test_a_delay_passes_by_itself(tenant: Tenant) -> None:
    queue = RankedQueue(tenant, "reviews")
    put(queue, "t1")
    assert queue.dequeue() == "t1"
    assert queue.requeue_with_delay("t1", 0.2)
    assert queue.dequeue() is None
    assert until(queue.dequeue) == "t1"


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf"), 400 * 86_400])
def test_a_delay_that_cannot_be_is_refused(line: RankedQueue, delay: float) -> None:
    put(line, "t1")
    line.dequeue()
    with pytest.raises(errors.InvalidRequest, match="delay"):
        line.requeue_with_delay("t1", delay)
    assert line.is_locked("t1")


@pytest.mark.spec("RNK-6", "A lock is given up, renewed or requeued by its holder and nobody else")
@pytest.mark.parametrize(
    "act",
    [RankedQueue.release_lock, RankedQueue.renew_lock, lambda queue, task_id: queue.requeue_with_delay(task_id, 1)],
    ids=["release", "renew", "requeue"],
)
def test_only_the_holder_has_a_say(
    line: RankedQueue, other: RankedQueue, clock: Clock, act: Callable[[RankedQueue, str], bool]
) -> None:
    put(line, "t1")
    assert line.dequeue() == "t1"
    client().pexpire(key(line, "t1"), 100_000)
    before = score(line, "t1")
    assert not act(other, "t1")
    assert not act(line, "t2")
    assert client().get(key(line, "t1")) == line.holder.encode()
    assert client().pttl(key(line, "t1")) <= 100_000
    assert score(line, "t1") == before
    assert act(line, "t1")
    # A worker that slept past its lock: the task is somebody else's now.
    put(line, "t1")
    client().delete(key(line, "t1"))
    assert other.dequeue() == "t1"
    assert not act(line, "t1")
    assert other.is_locked("t1")


@pytest.mark.spec("RNK-6", "The size counts who waits, delayed or not, and nobody that is being worked on")
def test_size_and_lock_say_how_it_is(line: RankedQueue, clock: Clock) -> None:
    assert (line.queue_size(), line.is_locked("t1"), line.dequeue()) == (0, False, None)
    put(line, "t1", "t2", "t3")
    assert line.queue_size() == 3
    line.dequeue()
    assert (line.queue_size(), line.is_locked("t1"), line.is_locked("t2")) == (2, True, False)
    line.requeue_with_delay("t1", 60)
    assert (line.queue_size(), line.is_locked("t1")) == (3, False)
    line.dequeue()
    assert line.release_lock("t2")
    assert (line.queue_size(), line.is_locked("t2")) == (2, False)
    assert take_all(line) == ["t3"]
    end_lock(line, clock, "t3")
    assert line.queue_size() == 2
    assert sorted(take_all(line)) == ["t1", "t3"]


@pytest.mark.spec("RNK-6", "An operator breaks any lock, and the task is in line at once")
def test_a_broken_lock_puts_the_task_in_line(line: RankedQueue, other: RankedQueue) -> None:
    put(line, "t1", rank=7)
    line.dequeue()
    assert other.break_lock("t1")
    assert not other.break_lock("t1")
    assert not line.release_lock("t1")
    assert score(line, "t1") == 93 * 10**13 + NOON_MS
    assert other.dequeue() == "t1"


def test_a_lock_that_is_renewed_lasts_as_long_again(line: RankedQueue, other: RankedQueue, clock: Clock) -> None:
    put(line, "t1")
    line.dequeue()
    clock.advance(299)
    client().expire(key(line, "t1"), 1)
    assert line.renew_lock("t1")
    assert client().pttl(key(line, "t1")) > 299_000
    clock.advance(299)
    assert other.dequeue() is None
    end_lock(line, clock, "t1")
    assert other.dequeue() == "t1"


def test_a_lock_that_was_made_to_last_by_hand_is_believed(line: RankedQueue, other: RankedQueue, clock: Clock) -> None:
    put(line, "t1")
    line.dequeue()
    client().expire(key(line, "t1"), 86_400)
    clock.advance(301)
    assert other.dequeue() is None
    assert line.release_lock("t1")
    assert other.dequeue() is None


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
@pytest.mark.spec("RNK-7", "Enqueued twice, a task is in line once: where it was, or at the back of a higher rank")
def test_a_second_enqueue_never_makes_a_task_wait_longer(
    line: RankedQueue, clock: Clock, first: int, then: int, order: list[str]
) -> None:
    twice = "t1" if order[0] == "t1" or order[-1] == "t1" else "t3"
    for task_id in ("t1", "t2", "t3"):
        put(line, task_id, rank=first if task_id == twice else NORMAL)
        clock.advance(1)
    assert put(line, twice, rank=then) == [then > first]
    assert line.queue_size() == 3
    assert take_all(line) == order


@pytest.mark.spec("RNK-7", "A delayed task that is enqueued is in line at once")
def test_enqueueing_what_is_delayed_ends_the_delay(line: RankedQueue) -> None:
    put(line, "t1")
    line.dequeue()
    line.requeue_with_delay("t1", 60)
    assert put(line, "t1") == [True]
    assert take_all(line) == ["t1"]


@pytest.mark.spec(
    "RNK-7", "What was enqueued again while it was worked on is done again, whatever becomes of the first"
)
@pytest.mark.parametrize("end", ["release", "requeue", "break", "crash"])
def test_a_second_enqueue_during_the_work_is_not_lost(
    line: RankedQueue, other: RankedQueue, clock: Clock, end: str
) -> None:
    put(line, "t1")
    assert line.dequeue() == "t1"
    put(line, "t1")
    if end == "release":
        assert line.release_lock("t1")
    elif end == "requeue":
        assert line.requeue_with_delay("t1", 3600)
    elif end == "break":
        assert other.break_lock("t1")
    else:
        end_lock(line, clock, "t1")
    assert other.dequeue() == "t1"
    assert other.release_lock("t1")
    assert take_all(other) == []
    assert client().keys("*ranked*") == []


@pytest.mark.spec("RNK-7", "An entry that is no id, written by hand, is dropped and said aloud; those behind it go on")
def test_a_corrupt_entry_is_dropped_and_blocks_nobody(line: RankedQueue, caplog: pytest.LogCaptureFixture) -> None:
    put(line, "t1")
    rubbish: list[Any] = ["", "a b", "a:b", b"\xff\x00", "x" * 129, "{1}"]
    client().zadd(key(line), dict.fromkeys(rubbish, -1000000.0))
    client().zadd(key(line), {"below": -1, "beyond": 1.5e15, "between": 12.5})
    with caplog.at_level(logging.ERROR):
        assert take_all(line) == ["below", "between", "t1", "beyond"]
    assert "6 entries were no ids" in caplog.text
    assert client().zcard(key(line)) == 4
    # Its rank is the lowest there is, and it keeps it.
    assert line.requeue_with_delay("beyond", 0)
    put(line, "t2", rank=1)
    assert take_all(line) == ["t2", "beyond"]


@pytest.mark.spec("RNK-7", "An id that is empty, or could not stand in a key, is refused before Redis is asked")
@pytest.mark.parametrize("task_id", ["", " ", "a b", "a:b", "{x}", "a\n", "é", "x" * 129])
def test_an_id_that_cannot_be_is_refused(line: RankedQueue, task_id: str) -> None:
    acts: list[Callable[[str], object]] = [
        *(line.enqueue, line.release_lock, line.is_locked, line.renew_lock, line.break_lock),
        lambda task_id: line.requeue_with_delay(task_id, 1),
    ]
    for act in acts:
        with pytest.raises(errors.InvalidRequest, match="task_id"):
            act(task_id)


@pytest.mark.parametrize("priority", [-1, 101, 50.0, "50", True, None])
def test_a_rank_that_cannot_be_is_refused(line: RankedQueue, priority: Any) -> None:
    with pytest.raises(errors.InvalidRequest, match="priority"):
        line.enqueue("t1", priority)


@pytest.mark.parametrize("asked", [{"name": ""}, {"name": "a:b"}, {"name": "q", "lock_seconds": 0}])
def test_a_queue_that_cannot_be_is_refused(tenant: Tenant, asked: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidRequest):
        RankedQueue(tenant, **asked)


def test_queues_and_tenants_do_not_see_each_other(line: RankedQueue, tenant: Tenant, other_tenant: Tenant) -> None:
    put(line, "t1")
    line.dequeue()
    for elsewhere in (RankedQueue(tenant, "builds"), RankedQueue(other_tenant, "reviews")):
        assert not elsewhere.is_locked("t1")
        put(elsewhere, "t1")
        assert elsewhere.dequeue() == "t1"
        assert not elsewhere.release_lock("t2")
    # All of one queue is in one slot of a cluster, whatever its ids are.
    assert {name.partition(b"}")[0] for name in client().keys("*:ranked:acme0001:*")} == {
        key(line).partition("}")[0].encode()
    }
    assert all(keys.KEY_PATTERN.fullmatch(name.decode()) for name in client().keys("*ranked*"))


@pytest.mark.spec("RNK-9", "Without one script for looking and locking, two workers get the same task; with it, one")
def test_two_workers_at_one_task(line: RankedQueue, valkey: Valkey) -> None:
    barrier = threading.Barrier(2)

    def look_then_lock(world: World) -> str | None:
        """As it is done where looking, locking and removing are round trips of their own."""
        store: redis.Redis = world.engine.runner.client  # type: ignore[attr-defined]
        [task_id] = store.zrange("naive", 0, 0)
        is_free = not store.exists("naive:lock")
        barrier.wait(10)
        store.set("naive:lock", threading.get_ident(), ex=300)
        store.zrem("naive", task_id)
        return task_id.decode() if is_free else None

    client().zadd("naive", {"t1": 1})
    assert crowd(valkey.url, [look_then_lock] * 2) == ["t1", "t1"]

    put(line, "t1")

    def dequeue(world: World) -> str | None:
        barrier.wait(10)
        return ranked_engine.dequeue(
            world.engine, TID, "reviews", f"h:{threading.get_ident()}", lock_seconds=300
        ).run_sync()

    assert sorted(crowd(valkey.url, [dequeue] * 2), key=str) == [None, "t1"]


@pytest.mark.spec("RNK-9", "64 workers at one queue, and not a task is given out twice or lost")
def test_many_workers_share_a_queue(line: RankedQueue, valkey: Valkey) -> None:
    ids = {f"t{n}" for n in range(960)}
    for rank in (HIGH, NORMAL):
        put(line, *[task_id for task_id in ids if (int(task_id[1:]) % 3 == 0) == (rank is HIGH)], rank=rank)

    def work(world: World) -> list[str]:
        holder, got = f"h:{threading.get_ident()}", []
        while task_id := ranked_engine.dequeue(world.engine, TID, "reviews", holder, lock_seconds=300).run_sync():
            got.append(task_id)
            if len(got) % 2:
                assert ranked_engine.release(world.engine, TID, "reviews", task_id, holder).run_sync()
        return got

    got = crowd(valkey.url, [work] * 64)
    assert sorted(task_id for of_one in got for task_id in of_one) == sorted(ids)
    for of_one in got:
        normal = [int(task_id[1:]) % 3 != 0 for task_id in of_one]
        assert normal == sorted(normal)


@pytest.mark.real_time
@pytest.mark.spec("RNK-9", "A worker that died holds a task until its lock ends, and then another one has it")
def test_what_a_dead_worker_held_is_in_line_again_when_its_lock_ends(tenant: Tenant) -> None:
    dead, alive = RankedQueue(tenant, "reviews", lock_seconds=1), RankedQueue(tenant, "reviews")
    put(dead, "t1", rank=HIGH)
    assert dead.dequeue() == "t1"
    put(dead, "t2")
    assert alive.dequeue() == "t2"
    assert alive.dequeue() is None
    assert until(alive.dequeue) == "t1"
    assert not dead.release_lock("t1")
    assert alive.release_lock("t1")


@dataclass
class Model:
    """A ranked queue in plain Python."""

    now: int = NOON_MS
    line: dict[str, tuple[int, int]] = field(default_factory=dict)  # 100 - rank, ms
    delayed: dict[str, tuple[int, int]] = field(default_factory=dict)  # due, 100 - rank
    held: dict[str, tuple[int, int]] = field(default_factory=dict)  # until, 100 - rank
    locks: dict[str, tuple[int, int]] = field(default_factory=dict)  # worker, until

    def join(self, task_id: str, low: int, ms: int) -> None:
        self.line[task_id] = (low, max([ms, *(at + 1 for other, at in self.line.values() if other == low)]))

    def settle(self) -> None:
        for place in (self.delayed, self.held):
            for (at, low), task_id in sorted((at, task_id) for task_id, at in place.items()):
                if at <= self.now:
                    del place[task_id]
                    self.join(task_id, low, at)

    def advance(self, seconds: int) -> list[str]:
        self.now += seconds * 1000
        over = [task_id for task_id, (_, end) in self.locks.items() if end <= self.now]
        for task_id in over:
            del self.locks[task_id]
        return over

    def enqueue(self, task_id: str, rank: int) -> bool:
        self.settle()
        if task_id in self.line and self.line[task_id][0] <= 100 - rank:
            return False
        for place in (self.line, self.delayed, self.held):
            place.pop(task_id, None)
        self.join(task_id, 100 - rank, self.now)
        return True

    def dequeue(self, worker: int) -> str | None:
        self.settle()
        free = [(at, task_id) for task_id, at in self.line.items() if task_id not in self.locks]
        if not free:
            return None
        (low, _), task_id = min(free)
        del self.line[task_id]
        self.held[task_id] = (self.now + 300_000, low)
        self.locks[task_id] = (worker, self.now + 300_000)
        return task_id

    def give_up(self, task_id: str, worker: int | None, delay: int | None = None) -> bool:
        if task_id not in self.locks or worker not in (None, self.locks[task_id][0]):
            return False
        del self.locks[task_id]
        if task_id in self.held:
            _, low = self.held.pop(task_id)
            if worker is None:
                self.join(task_id, low, self.now)
            elif delay is not None:
                self.delayed[task_id] = (self.now + delay * 1000, low)
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
        return len(self.line) + len(self.delayed) + sum(at <= self.now for at, _ in self.held.values())


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


@pytest.mark.spec("RNK-9", "Whatever is done in whatever order, the queue is where a few lines of Python say")
@settings(
    max_examples=2_000 if LONG else 60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=st.lists(STEPS, min_size=10, max_size=60))
def test_the_queue_does_what_the_model_says(tenant: Tenant, clock: Clock, steps: list[tuple[Any, ...]]) -> None:
    client().flushdb()
    model, clock.now_ms = Model(), NOON_MS
    workers = [RankedQueue(tenant, "reviews") for _ in range(2)]
    for verb, *words in steps:
        match verb, *words:
            case "enqueue", task_id, rank:
                assert put(workers[0], task_id, rank=rank) == [model.enqueue(task_id, rank)]
            case "dequeue", worker:
                assert workers[worker].dequeue() == model.dequeue(worker)
            case "requeue", task_id, worker, delay:
                assert workers[worker].requeue_with_delay(task_id, delay) == model.give_up(task_id, worker, delay)
            case "release", task_id, worker:
                assert workers[worker].release_lock(task_id) == model.give_up(task_id, worker)
            case "renew", task_id, worker:
                assert workers[worker].renew_lock(task_id) == model.renew(task_id, worker)
            case "break", task_id:
                assert workers[0].break_lock(task_id) == model.give_up(task_id, None)
            case "advance", seconds:
                clock.advance(seconds)
                for task_id in model.advance(seconds):
                    assert client().delete(key(workers[0], task_id))
        assert workers[0].queue_size() == model.size
        for task_id in ("1", "2", "10", "x.y", "Z"):
            assert workers[0].is_locked(task_id) == (task_id in model.locks)
