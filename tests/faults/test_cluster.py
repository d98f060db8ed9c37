"""The engine on a Redis Cluster: the same verbs, the same model, and slots that move while it works."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis
import redis.asyncio

from core import errors
from core.redis import partitions
from core.redis.multiplexed_cluster import MultiplexedCluster
from core.redis.runners import AsyncRunner, ClusterRunner, with_slot_guard
from queues.domain import NewResult, Result, Status
from queues.engine import Engine, maintenance_commands, producer_commands, queries, worker_commands
from queues.engine.options import Options
from tests.faults.cluster import Client, Cluster, slot_of
from tests.faults.workload import OPTIONS, Workload
from tests.queues.engine.test_model import run_machine
from tests.queues.engine.world import DAY_MS, LONG, TID, Clock, Places, World, dump, new
from tests.waiting import until

# One worker, one cluster.
pytestmark = pytest.mark.xdist_group("cluster")
PARTITIONS = 16
# Tenants of several partitions, on all three nodes.
TIDS = [f"tenant{n:02}" for n in range(12)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.close()


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with cluster.client() as client:
        client.flushall()
        for node in cluster.nodes:
            node.config_resetstat()
        yield client
        # Nowhere, in no test of this file, was a script sent with keys of two slots.
        assert "CROSSSLOT" not in cluster.errors()


def partition_of(tid: str) -> int:
    return partitions.partition_of(tid, PARTITIONS)


@pytest.mark.spec(
    "QUE-5", "On a Redis Cluster all keys of a tenant are in one slot, and every verb works as on one node"
)
def test_every_verb_works_on_a_cluster(cluster: Cluster, client: Client) -> None:
    for tid in TIDS:
        clock = Clock()
        world = World(client, clock=clock, partitions=PARTITIONS, **OPTIONS)
        assert len(list(Workload(world, clock, tid).steps())) > 30
    world.check()
    used = {cluster.owner(slot_of(partition_of(tid))) for tid in TIDS}
    assert used == {0, 1, 2}
    assert cluster.errors().keys() <= {"NOSCRIPT"}


@pytest.mark.timeout(900)
@pytest.mark.spec("QUE-5", "On a Redis Cluster the model holds too")
def test_the_model_holds_on_a_cluster(client: Client) -> None:
    met = run_machine(client, 500 if LONG else 25, 40)
    assert met["claimed"] > 0


@pytest.mark.spec("QUE-5", "While a slot moves no script begins with part of its keys")
def test_a_script_waits_while_its_slot_moves(cluster: Cluster, client: Client) -> None:
    world = World(client, partitions=PARTITIONS, **OPTIONS)
    engine = world.engine
    producer_commands.enqueue(
        engine, TID, "acme", [new(priority=n % 3) for n in range(20)], retention_ms=DAY_MS
    ).run_sync()
    tasks = worker_commands.claim(engine, TID, ["send"], "w1", lease_ms=60_000, limit=6).run_sync().tasks
    worker_commands.nack(
        engine, TID, tasks[0].id, "w1", token="", delay_ms=60_000, reason="", dead_retention_ms=DAY_MS
    ).run_sync()
    before = dump(client)
    slot = slot_of(partition_of(TID))
    to = (cluster.owner(slot) + 1) % 3
    source = cluster.begin_move(slot, to)
    # All records have gone ahead, all indexes are still here: to a script every task looks like a ghost.
    names = cluster.nodes[source].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 10_000)
    cluster.carry(source, to, [name for name in names if b":task:" in name])

    result = NewResult(task_id=tasks[1].id, status=Status.COMPLETED, result=b"1")
    calls = {
        "enqueue": producer_commands.enqueue(engine, TID, "acme", [new(), new(priority=3)], retention_ms=DAY_MS),
        "claim": worker_commands.claim(engine, TID, ["send"], "w1", lease_ms=1_000, limit=1),
        "heartbeat": worker_commands.heartbeat(engine, TID, tasks[1].id, "w1", extend_ms=1_000, token="", progress="1"),
        "submit": worker_commands.submit(engine, TID, "w1", [result], retention_ms=DAY_MS),
        "abandon": worker_commands.abandon(engine, TID, tasks[2].id, "w1", token="", dead_retention_ms=DAY_MS),
        "cancel": producer_commands.cancel(engine, TID, tasks[3].id, retention_ms=DAY_MS),
        "promote": maintenance_commands.promote(engine, TID, "send"),
        "reap": maintenance_commands.reap(engine, TID, "send"),
        "purge": maintenance_commands.purge(engine, TID, [tasks[4].id]),
        "task": queries.task(engine, TID, tasks[5].id),
        "stats": queries.stats(engine, TID),
    }
    # Without the key that never exists, a script would begin, and find a live lease's record missing.
    script, bound = calls["heartbeat"].commands[0]
    unguarded = cluster.nodes[source].execute_command
    with pytest.raises(redis.ResponseError, match="non local key"):
        unguarded("EVAL", script.source, *bound[1:])
    with pytest.raises(redis.exceptions.TryAgainError):
        unguarded(*with_slot_guard(("EVAL", script.source, *bound[1:])))
    for call in calls.values():
        with pytest.raises(errors.Unavailable):
            call.run_sync()
    rest = cluster.nodes[source].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 10_000)
    cluster.carry(source, to, rest)
    # All keys have arrived, and the source says so: still nobody begins before the target is told that it is its own.
    with pytest.raises(errors.Unavailable):
        calls["claim"].run_sync()
    cluster.end_move(slot, source, to)
    assert dump(client) == before
    for call in calls.values():
        call.run_sync()
    world.check()


@dataclass
class Seen:
    """What the clients of one run were told."""

    made: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    answers: int = 0
    put_off: int = 0

    def missing(self, found: Places) -> list[str]:
        return [task_id for task_id in self.made if task_id not in found.tasks] + [
            task_id for task_id in self.done if found.status(task_id) != "COMPLETED"
        ]


def load(client: Client, stop: threading.Event, seen: Seen, number: int) -> None:
    """Produces and works on all tenants; what is put off is asked again, as a client of the API would."""
    dice, engine = random.Random(number), World(client, partitions=PARTITIONS, **OPTIONS).engine

    def insist(call: Any) -> Any:
        while True:
            try:
                answer = call.run_sync()
            except errors.Unavailable:
                seen.put_off += 1
                time.sleep(0.01)
            else:
                seen.answers += 1
                return answer

    while not stop.is_set():
        tid, name = dice.choice([TIDS[0], dice.choice(TIDS)]), f"w{number}"
        asked = [new(priority=dice.randrange(2)) for _ in range(dice.randint(1, 3))]
        seen.made |= {
            item.task.id for item in insist(producer_commands.enqueue(engine, tid, "acme", asked, retention_ms=DAY_MS))
        }
        for task in insist(worker_commands.claim(engine, tid, ["send"], name, lease_ms=600_000, limit=2)).tasks:
            token = task.lease_token or ""
            insist(worker_commands.heartbeat(engine, tid, task.id, name, extend_ms=600_000, token=token, progress=""))
            insist(maintenance_commands.reap(engine, tid, "send"))
            result = NewResult(task_id=task.id, status=Status.COMPLETED, result=b"1", lease_token=token)
            [answer] = insist(worker_commands.submit(engine, tid, name, [result], retention_ms=DAY_MS))
            assert isinstance(answer, Result)
            seen.done.add(task.id)


def under_load(cluster: Cluster, act: Callable[[], None]) -> tuple[Seen, list[BaseException]]:
    """Run the act while four clients are at it."""
    stop, seen, problems = threading.Event(), Seen(), []

    def run(number: int) -> None:
        try:
            with cluster.client() as client:
                load(client, stop, seen, number)
        except BaseException as problem:  # noqa: BLE001  (shown in the test's own thread)
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: len(seen.done) > 20 or problems, 30)
    try:
        act()
        enough = len(seen.done) + 20
        until(lambda: len(seen.done) > enough or problems, 30)
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    return seen, problems


@pytest.mark.real_time
@pytest.mark.spec("QUE-5", "A slot of a Redis Cluster moved under load, key by key, loses nothing and doubles nothing")
def test_a_slot_moved_key_by_key_under_load_loses_nothing(cluster: Cluster, client: Client) -> None:
    slot, moved = slot_of(partition_of(TIDS[0])), []
    backlog = [new("backlog")] * 200
    producer_commands.enqueue(
        World(client, partitions=PARTITIONS).engine, TIDS[0], "acme", backlog, retention_ms=DAY_MS
    ).run_sync()

    def move_round() -> None:
        for _ in range(9 if LONG else 3):
            moved.append(cluster.move(slot, (cluster.owner(slot) + 1) % 3, pause=0.01))

    seen, problems = under_load(cluster, move_round)
    assert problems == []
    assert min(moved) > 200
    assert cluster.errors()["TRYAGAIN"] > 0  # it did happen under load
    found = World(client, partitions=PARTITIONS).check()
    assert seen.missing(found) == []
    assert len(found.tasks) == len(seen.made) + len(backlog)  # asked again or not, each is stored once


@pytest.mark.real_time
@pytest.mark.spec("QUE-5", "A slot moved in one piece under load is not even noticed")
def test_a_slot_moved_in_one_piece_is_not_noticed(cluster: Cluster, client: Client) -> None:
    slot = slot_of(partition_of(TIDS[0]))

    def move_round() -> None:
        for _ in range(3):
            cluster.move_whole(slot, (cluster.owner(slot) + 1) % 3)

    seen, problems = under_load(cluster, move_round)
    assert problems == []
    assert seen.put_off == 0
    found = World(client, partitions=PARTITIONS).check()
    assert seen.missing(found) == []
    assert len(found.tasks) == len(seen.made)


async def test_nodes_that_announce_no_name_are_on_the_host_that_was_asked(cluster: Cluster, client: Client) -> None:
    for node in cluster.nodes:
        node.config_set("cluster-preferred-endpoint-type", "unknown-endpoint")
    tid = TIDS[0]
    slot = slot_of(partition_of(tid))
    pipes = MultiplexedCluster(client.nodes)
    try:
        with cluster.client() as other:
            world = World(other, partitions=PARTITIONS)
            behind = Engine(AsyncRunner(pipes.send, ClusterRunner(client)), Options(partitions=PARTITIONS))
            await producer_commands.enqueue(behind, tid, "acme", [new()], retention_ms=DAY_MS)
            for _ in range(3):
                cluster.move(slot, (cluster.owner(slot) + 1) % 3)
                # Both learn by MOVED where it is now.
                await producer_commands.enqueue(behind, tid, "acme", [new()], retention_ms=DAY_MS)
                producer_commands.enqueue(world.engine, tid, "acme", [new()], retention_ms=DAY_MS).run_sync()
            assert len(world.check().tasks) == 7
    finally:
        await pipes.close()
        for node in cluster.nodes:
            node.config_set("cluster-preferred-endpoint-type", "ip")


@pytest.mark.real_time
@pytest.mark.spec(
    "ENQ-2", "A node that is away is said to be away; the other partitions go on, and it comes back whole"
)
def test_a_node_that_dies_takes_only_its_partitions_with_it(cluster: Cluster, client: Client) -> None:
    engine = World(client, partitions=PARTITIONS).engine
    for tid in TIDS:
        producer_commands.enqueue(engine, tid, "acme", [new()], retention_ms=DAY_MS).run_sync()
    dead = 1
    lost = {tid for tid in TIDS if cluster.owner(slot_of(partition_of(tid))) == dead}
    assert lost
    assert lost != set(TIDS)
    cluster.servers[dead].kill()
    away = set()
    for tid in TIDS:
        try:
            producer_commands.enqueue(engine, tid, "acme", [new(), new(priority=1)], retention_ms=DAY_MS).run_sync()
        except errors.Unavailable:
            away.add(tid)
    assert away == lost
    cluster.servers[dead].start()
    until(lambda: all(cluster._is_whole(node) for node in cluster.nodes), 30)
    for tid in TIDS:
        until(lambda tid=tid: _answers(engine, tid), 15)
    World(client, partitions=PARTITIONS).check()


def _answers(engine: Engine, tid: str) -> bool:
    try:
        return bool(worker_commands.claim(engine, tid, ["send"], "w1", lease_ms=1_000, limit=1).run_sync().tasks)
    except errors.Unavailable:
        return False


@pytest.mark.spec("ENQ-3", "The pipes to a cluster sends what belongs together in order, and loads what is missing")
async def test_the_pipes_work_on_a_cluster(cluster: Cluster, client: Client) -> None:
    pipes = MultiplexedCluster(client.nodes)
    try:
        engine = Engine(AsyncRunner(pipes.send, ClusterRunner(client)), Options(partitions=PARTITIONS))
        for tid in TIDS:
            asked = [new(priority=1), new(priority=2), new("mail", idempotency_key="k"), new(idempotency_key="k")]
            made = await producer_commands.enqueue(engine, tid, "acme", asked, retention_ms=DAY_MS)
            assert [item.is_replayed for item in made] == [False, False, False, True]  # type: ignore[union-attr]
            [task] = (await worker_commands.claim(engine, tid, ["send"], "w1", lease_ms=9_000, limit=1)).tasks
            assert task.priority == 2
            with pytest.raises(errors.TaskNotFound):
                await worker_commands.heartbeat(engine, "nobody", task.id, "w1", extend_ms=1, token="", progress="")
        World(client, partitions=PARTITIONS).check()
    finally:
        await pipes.close()


def test_a_line_gets_its_last_key_after_the_others() -> None:
    line = ("EVALSHA", "sha", 2, "codeq:{3}:due", "codeq:{3}:events", "argument", "other")
    assert with_slot_guard(line) == (
        "EVALSHA", "sha", 3, "codeq:{3}:due", "codeq:{3}:events", "codeq:{3}:absent", "argument", "other",
    )  # fmt: skip
    one = ("EVAL", "text", 1, "codeq:{12}:due", "argument")
    assert with_slot_guard(one) == ("EVAL", "text", 2, "codeq:{12}:due", "codeq:{12}:absent", "argument")
