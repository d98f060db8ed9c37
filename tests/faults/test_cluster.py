"""The engine on a Redis Cluster: all operations, the model, and slots moved under load."""

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
from queues.domain import NewResult, Result, TaskStatus
from queues.engine import Engine, maintenance_commands, producer_commands, queries, worker_commands
from queues.engine.options import Options
from tests.faults.cluster import Cluster, FlushableClient, find_slot
from tests.faults.workload import OPTIONS, Workload
from tests.queues.engine.checked_engine import DAY_MS, LONG, TID, CheckedEngine, Clock, Snapshot, build_task, dump
from tests.queues.engine.machine import run_machine
from tests.waiting import until

PARTITIONS = 16
# Tenants in several partitions, on all three nodes.
TIDS = [f"tenant{n:02}" for n in range(12)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.close()


@pytest.fixture
def client(cluster: Cluster) -> Iterator[FlushableClient]:
    with cluster.client() as client:
        client.flushall()
        for node in cluster.nodes:
            node.config_resetstat()
        yield client
        # No test of this file may send a script with keys of two slots.
        assert "CROSSSLOT" not in cluster.count_errors()


def partition_of(tid: str) -> int:
    return partitions.partition_of(tid, PARTITIONS)


@pytest.mark.spec(
    "QUE-5", "On a Redis Cluster, all keys of a tenant are in one slot, and every operation works as on one node"
)
def test_every_operation_works_on_a_cluster(cluster: Cluster, client: FlushableClient) -> None:
    for tid in TIDS:
        clock = Clock()
        checked = CheckedEngine(client, clock=clock, partitions=PARTITIONS, **OPTIONS)
        assert len(list(Workload(checked, clock, tid).steps())) > 30
    checked.check()
    used = {cluster.find_owner(find_slot(partition_of(tid))) for tid in TIDS}
    assert used == {0, 1, 2}
    assert cluster.count_errors().keys() <= {"NOSCRIPT"}


@pytest.mark.timeout(900)
@pytest.mark.spec("QUE-5", "The model also holds on a Redis Cluster")
def test_model_holds_on_a_cluster(client: FlushableClient) -> None:
    covered = run_machine(client, 500 if LONG else 25, 40)
    assert covered["claimed"] > 0


@pytest.mark.spec("QUE-5", "While a slot moves, no script starts with only part of its keys")
def test_script_waits_while_its_slot_moves(cluster: Cluster, client: FlushableClient) -> None:
    checked = CheckedEngine(client, partitions=PARTITIONS, **OPTIONS)
    engine = checked.engine
    producer_commands.enqueue(
        engine, TID, "acme", [build_task(priority=n % 3) for n in range(20)], retention_ms=DAY_MS
    ).run_sync()
    tasks = worker_commands.claim(engine, TID, ["send"], "w1", lease_ms=60_000, limit=6).run_sync().tasks
    worker_commands.nack(
        engine, TID, tasks[0].id, "w1", token="", delay_ms=60_000, reason="", dead_retention_ms=DAY_MS
    ).run_sync()
    before = dump(client)
    slot = find_slot(partition_of(TID))
    to = (cluster.find_owner(slot) + 1) % 3
    source = cluster.begin_move(slot, to)
    # Move the tasks but not the indexes: a script on the source would find the ids, but no task.
    names = cluster.nodes[source].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 10_000)
    cluster.migrate_keys(source, to, [name for name in names if b":task:" in name])

    result = NewResult(task_id=tasks[1].id, status=TaskStatus.COMPLETED, result=b"1")
    calls = {
        "enqueue": producer_commands.enqueue(
            engine, TID, "acme", [build_task(), build_task(priority=3)], retention_ms=DAY_MS
        ),
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
    # Without the guard key, which never exists, a script would start and not find the record of a live lease.
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
    cluster.migrate_keys(source, to, rest)
    # All keys have arrived, but no script may start before the target knows that it owns the slot.
    with pytest.raises(errors.Unavailable):
        calls["claim"].run_sync()
    cluster.end_move(slot, source, to)
    assert dump(client) == before
    for call in calls.values():
        call.run_sync()
    checked.check()


@dataclass
class Replies:
    """The replies that the clients of one run received."""

    created: set[str] = field(default_factory=set)
    completed: set[str] = field(default_factory=set)
    successes: int = 0
    retries: int = 0

    def list_missing(self, snapshot: Snapshot) -> list[str]:
        return [task_id for task_id in self.created if task_id not in snapshot.tasks] + [
            task_id for task_id in self.completed if snapshot.status(task_id) != "COMPLETED"
        ]


def run_client(client: FlushableClient, stop: threading.Event, replies: Replies, number: int) -> None:
    """Enqueue and complete tasks of all tenants, retrying like a client of the API."""
    dice, engine = random.Random(number), CheckedEngine(client, partitions=PARTITIONS, **OPTIONS).engine

    def retry(call: Any) -> Any:
        while True:
            try:
                reply = call.run_sync()
            except errors.Unavailable:
                replies.retries += 1
                time.sleep(0.01)
            else:
                replies.successes += 1
                return reply

    while not stop.is_set():
        tid, name = dice.choice([TIDS[0], dice.choice(TIDS)]), f"w{number}"
        tasks = [build_task(priority=dice.randrange(2)) for _ in range(dice.randint(1, 3))]
        replies.created |= {
            item.task.id for item in retry(producer_commands.enqueue(engine, tid, "acme", tasks, retention_ms=DAY_MS))
        }
        for task in retry(worker_commands.claim(engine, tid, ["send"], name, lease_ms=600_000, limit=2)).tasks:
            token = task.lease_token or ""
            retry(worker_commands.heartbeat(engine, tid, task.id, name, extend_ms=600_000, token=token, progress=""))
            retry(maintenance_commands.reap(engine, tid, "send"))
            result = NewResult(task_id=task.id, status=TaskStatus.COMPLETED, result=b"1", lease_token=token)
            [item] = retry(worker_commands.submit(engine, tid, name, [result], retention_ms=DAY_MS))
            assert isinstance(item, Result)
            replies.completed.add(task.id)


def run_under_load(cluster: Cluster, act: Callable[[], None]) -> tuple[Replies, list[BaseException]]:
    """Run the action while four clients work. Return their replies and exceptions."""
    stop, replies, problems = threading.Event(), Replies(), []

    def run(number: int) -> None:
        try:
            with cluster.client() as client:
                run_client(client, stop, replies, number)
        except BaseException as problem:  # noqa: BLE001  (reported in the test's thread)
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: len(replies.completed) > 20 or problems, 30)
    try:
        act()
        target = len(replies.completed) + 20
        until(lambda: len(replies.completed) > target or problems, 30)
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    return replies, problems


@pytest.mark.real_time
@pytest.mark.spec("QUE-5", "A slot of a Redis Cluster that is moved key by key under load loses and duplicates nothing")
def test_slot_moved_key_by_key_under_load_loses_nothing(cluster: Cluster, client: FlushableClient) -> None:
    slot, moved = find_slot(partition_of(TIDS[0])), []
    backlog = [build_task("backlog")] * 200
    producer_commands.enqueue(
        CheckedEngine(client, partitions=PARTITIONS).engine, TIDS[0], "acme", backlog, retention_ms=DAY_MS
    ).run_sync()

    def move_round() -> None:
        for _ in range(9 if LONG else 3):
            moved.append(cluster.move(slot, (cluster.find_owner(slot) + 1) % 3, pause=0.01))

    replies, problems = run_under_load(cluster, move_round)
    assert problems == []
    assert min(moved) > 200
    assert cluster.count_errors()["TRYAGAIN"] > 0  # the load was affected by the move
    snapshot = CheckedEngine(client, partitions=PARTITIONS).check()
    assert replies.list_missing(snapshot) == []
    assert len(snapshot.tasks) == len(replies.created) + len(backlog)  # each task is stored once, even after retries


@pytest.mark.real_time
@pytest.mark.spec("QUE-5", "A slot that is moved atomically under load does not affect clients")
def test_slot_moved_atomically_does_not_affect_clients(cluster: Cluster, client: FlushableClient) -> None:
    slot = find_slot(partition_of(TIDS[0]))

    def move_round() -> None:
        for _ in range(3):
            cluster.move_atomically(slot, (cluster.find_owner(slot) + 1) % 3)

    replies, problems = run_under_load(cluster, move_round)
    assert problems == []
    assert replies.retries == 0
    snapshot = CheckedEngine(client, partitions=PARTITIONS).check()
    assert replies.list_missing(snapshot) == []
    assert len(snapshot.tasks) == len(replies.created)


async def test_nodes_without_an_announced_name_are_on_the_configured_host(
    cluster: Cluster, client: FlushableClient
) -> None:
    for node in cluster.nodes:
        node.config_set("cluster-preferred-endpoint-type", "unknown-endpoint")
    tid = TIDS[0]
    slot = find_slot(partition_of(tid))
    multiplexed = MultiplexedCluster(client.topology)
    try:
        with cluster.client() as other:
            checked = CheckedEngine(other, partitions=PARTITIONS)
            async_engine = Engine(AsyncRunner(multiplexed.send, ClusterRunner(client)), Options(partitions=PARTITIONS))
            await producer_commands.enqueue(async_engine, tid, "acme", [build_task()], retention_ms=DAY_MS)
            for _ in range(3):
                cluster.move(slot, (cluster.find_owner(slot) + 1) % 3)
                # Both clients learn the new owner from MOVED.
                await producer_commands.enqueue(async_engine, tid, "acme", [build_task()], retention_ms=DAY_MS)
                producer_commands.enqueue(checked.engine, tid, "acme", [build_task()], retention_ms=DAY_MS).run_sync()
            assert len(checked.check().tasks) == 7
    finally:
        await multiplexed.close()
        for node in cluster.nodes:
            node.config_set("cluster-preferred-endpoint-type", "ip")


@pytest.mark.real_time
@pytest.mark.spec(
    "ENQ-2",
    "Requests to an unreachable node fail as unavailable; other partitions continue, and it recovers completely",
)
def test_failed_node_affects_only_its_partitions(cluster: Cluster, client: FlushableClient) -> None:
    engine = CheckedEngine(client, partitions=PARTITIONS).engine
    for tid in TIDS:
        producer_commands.enqueue(engine, tid, "acme", [build_task()], retention_ms=DAY_MS).run_sync()
    failed = 1
    affected = {tid for tid in TIDS if cluster.find_owner(find_slot(partition_of(tid))) == failed}
    assert affected
    assert affected != set(TIDS)
    cluster.servers[failed].kill()
    unavailable = set()
    for tid in TIDS:
        try:
            producer_commands.enqueue(
                engine, tid, "acme", [build_task(), build_task(priority=1)], retention_ms=DAY_MS
            ).run_sync()
        except errors.Unavailable:
            unavailable.add(tid)
    assert unavailable == affected
    cluster.servers[failed].start()
    until(lambda: all(cluster.is_complete(node) for node in cluster.nodes), 30)
    for tid in TIDS:
        until(lambda tid=tid: _can_claim(engine, tid), 15)
    CheckedEngine(client, partitions=PARTITIONS).check()


def _can_claim(engine: Engine, tid: str) -> bool:
    try:
        return bool(worker_commands.claim(engine, tid, ["send"], "w1", lease_ms=1_000, limit=1).run_sync().tasks)
    except errors.Unavailable:
        return False


@pytest.mark.spec("ENQ-3", "The connections to a cluster send related commands in order, and load missing scripts")
async def test_multiplexed_connections_work_on_a_cluster(cluster: Cluster, client: FlushableClient) -> None:
    multiplexed = MultiplexedCluster(client.topology)
    try:
        engine = Engine(AsyncRunner(multiplexed.send, ClusterRunner(client)), Options(partitions=PARTITIONS))
        for tid in TIDS:
            tasks = [
                build_task(priority=1),
                build_task(priority=2),
                build_task("mail", idempotency_key="k"),
                build_task(idempotency_key="k"),
            ]
            items = await producer_commands.enqueue(engine, tid, "acme", tasks, retention_ms=DAY_MS)
            assert [item.is_repeated for item in items] == [False, False, False, True]  # type: ignore[union-attr]
            [task] = (await worker_commands.claim(engine, tid, ["send"], "w1", lease_ms=9_000, limit=1)).tasks
            assert task.priority == 2
            with pytest.raises(errors.TaskNotFound):
                await worker_commands.heartbeat(engine, "nobody", task.id, "w1", extend_ms=1, token="", progress="")
        CheckedEngine(client, partitions=PARTITIONS).check()
    finally:
        await multiplexed.close()


def test_guard_key_is_added_after_the_other_keys() -> None:
    command = ("EVALSHA", "sha", 2, "codeq:{3}:due", "codeq:{3}:events", "argument", "other")
    assert with_slot_guard(command) == (
        "EVALSHA", "sha", 3, "codeq:{3}:due", "codeq:{3}:events", "codeq:{3}:absent", "argument", "other",
    )  # fmt: skip
    eval_command = ("EVAL", "text", 1, "codeq:{12}:due", "argument")
    assert with_slot_guard(eval_command) == ("EVAL", "text", 2, "codeq:{12}:due", "codeq:{12}:absent", "argument")
