"""What Redis says when it cannot: full, read-only, busy, without its scripts. Clients hear it in our words."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import redis
from redis._parsers import BaseParser

from core import errors
from core.redis.runners import translate_error
from queues.domain import NewResult, Result, Status, Task
from queues.engine import (
    admin_commands,
    dead_letter_commands,
    maintenance_commands,
    producer_commands,
    queries,
    worker_commands,
)
from tests.concurrency.crowd import outcome
from tests.conftest import ValkeyFactory
from tests.queues.engine.world import DAY_MS, TID, Clock, World, dump, new
from tests.waiting import until


@pytest.fixture
def client(valkey_server: ValkeyFactory) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey_server(appendonly="no").url) as client:
        yield client


def done(task: Task) -> NewResult:
    return NewResult(task_id=task.id, status=Status.COMPLETED, result=b"1", lease_token=task.lease_token)


@pytest.mark.parametrize(
    "said",
    [
        "MISCONF Valkey is configured to save RDB snapshots, but it's currently unable to persist to disk.",
        "READONLY You can't write against a read only replica.",
        "NOREPLICAS Not enough good replicas to write.",
        "CLUSTERDOWN The cluster is down",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "BUSY Valkey is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
        "LOADING Valkey is loading the dataset in memory",
        "MOVED 3999 127.0.0.1:6381",
        "ASK 3999 127.0.0.1:6381",
    ],
    ids=lambda said: said.split()[0],
)
def test_a_refusal_that_passes_is_unavailable(said: str) -> None:
    error = translate_error(BaseParser.parse_error(said))
    assert isinstance(error, errors.Unavailable)
    assert error.retryable
    assert error.retry_after_seconds


def test_a_full_server_has_a_word_of_its_own() -> None:
    assert isinstance(
        translate_error(BaseParser.parse_error("OOM command not allowed when used memory > 'maxmemory'.")),
        errors.StoreFull,
    )


@pytest.mark.parametrize("said", ["CODEQ WRONGTYPE Operation", "ERR unknown command", "BUSYKEY Target key name exists"])
def test_a_fault_of_ours_stays_what_it_is(said: str) -> None:
    error = BaseParser.parse_error(said)
    assert translate_error(error) is error


def refuse_read_only(client: redis.Redis) -> None:
    client.execute_command("REPLICAOF", "127.0.0.1", "1")


def refuse_without_replicas(client: redis.Redis) -> None:
    client.config_set("min-replicas-to-write", 1)


def refuse_without_primary(client: redis.Redis) -> None:
    client.config_set("replica-serve-stale-data", "no")
    client.execute_command("REPLICAOF", "127.0.0.1", "1")


@pytest.mark.parametrize("refuse", [refuse_read_only, refuse_without_replicas, refuse_without_primary])
def test_a_server_that_takes_no_writes_is_unavailable(client: redis.Redis, refuse: object) -> None:
    engine = World(client, partitions=1).engine
    producer_commands.enqueue(engine, TID, "acme", [new()], retention_ms=DAY_MS).run_sync()
    before = dump(client)
    assert callable(refuse)
    refuse(client)
    for call in (
        producer_commands.enqueue(engine, TID, "acme", [new()], retention_ms=DAY_MS),
        producer_commands.enqueue(engine, TID, "acme", [new(), new(priority=1)], retention_ms=DAY_MS),
        worker_commands.claim(engine, TID, ["send"], "w1", lease_ms=1, limit=1),
    ):
        with pytest.raises(errors.Unavailable):
            call.run_sync()
    client.config_set("min-replicas-to-write", 0)
    client.execute_command("REPLICAOF", "NO", "ONE")
    assert dump(client) == before
    assert worker_commands.claim(engine, TID, ["send"], "w1", lease_ms=1, limit=1).run_sync().tasks


@pytest.mark.real_time
def test_a_server_busy_with_somebody_elses_script_is_unavailable(client: redis.Redis) -> None:
    client.config_set("busy-reply-threshold", 10)
    engine = World(client, partitions=1).engine
    url = client.connection_pool.connection_kwargs["path"]

    def loop() -> None:
        with redis.Redis(unix_socket_path=url) as other, pytest.raises(redis.ResponseError, match="killed"):
            other.eval("while true do end", 0)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()

    def is_busy() -> bool:
        try:
            queries.stats(engine, TID).run_sync()
        except errors.Unavailable:
            return True
        return False

    until(is_busy)
    client.script_kill()
    thread.join(10)
    assert queries.stats(engine, TID).run_sync() == []


@pytest.mark.real_time
@pytest.mark.spec("QUE-5", "Scripts flushed from the server every 50 ms under load: nobody notices, nothing runs twice")
def test_flushed_scripts_are_sent_again_unnoticed(client: redis.Redis) -> None:
    path = client.connection_pool.connection_kwargs["path"]
    stop, problems = threading.Event(), []
    made: set[str] = set()
    completed: list[str] = []

    def work(number: int) -> None:
        try:
            with redis.Redis(unix_socket_path=path) as own:
                engine = World(own, partitions=1).engine
                while not stop.is_set():
                    asked = [new(), new(), new(priority=5)]
                    items = producer_commands.enqueue(engine, TID, "acme", asked, retention_ms=DAY_MS).run_sync()
                    made.update(item.task.id for item in items if not isinstance(item, Exception))
                    tasks = (
                        worker_commands.claim(engine, TID, ["send"], f"w{number}", lease_ms=60_000, limit=3)
                        .run_sync()
                        .tasks
                    )
                    if not tasks:
                        continue
                    for answer in worker_commands.submit(
                        engine, TID, f"w{number}", [done(task) for task in tasks], retention_ms=DAY_MS
                    ).run_sync():
                        assert isinstance(answer, Result)
                        completed.append(answer.task_id)
        except BaseException as problem:  # noqa: BLE001  (shown in the test's own thread)
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()

    def are_missed() -> bool:
        time.sleep(0.05)
        client.script_flush()
        return bool(client.info("errorstats").get("errorstat_NOSCRIPT", {}).get("count", 0) > 80)

    until(are_missed, 60)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert problems == []
    found = World(client, partitions=1).check()
    assert found.tasks.keys() == made
    assert len(completed) == len(set(completed))
    assert {task_id for task_id in found.tasks if found.status(task_id) == "COMPLETED"} == set(completed)


@pytest.mark.spec("ENQ-2", "A full server refuses new tasks and nothing else, and takes them again when it has drained")
def test_a_full_server_drains(client: redis.Redis) -> None:
    clock = Clock()
    world = World(client, clock=clock, partitions=1, backoff="fixed", backoff_base_ms=1_000)
    engine = world.engine
    load = "x" * 20_000
    producer_commands.enqueue(
        engine, TID, "acme", [new(payload=load, max_attempts=1) for _ in range(4)], retention_ms=DAY_MS
    ).run_sync()
    for task in worker_commands.claim(engine, TID, ["send"], "w1", lease_ms=9_000, limit=4).run_sync().tasks:
        worker_commands.nack(
            engine, TID, task.id, "w1", token="", delay_ms=None, reason="", dead_retention_ms=DAY_MS
        ).run_sync()
    dead = list(world.check().tasks)
    producer_commands.enqueue(
        engine, TID, "acme", [new(payload=load) for _ in range(200)], retention_ms=DAY_MS
    ).run_sync()
    producer_commands.enqueue(engine, TID, "acme", [new(payload=load, delay_ms=1_000)], retention_ms=DAY_MS).run_sync()
    held = worker_commands.claim(engine, TID, ["send"], "w1", lease_ms=9_000, limit=6).run_sync().tasks
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 200_000)

    answers = [
        outcome(
            producer_commands.enqueue(
                engine, TID, "acme", [new(payload=load), new(payload=load, priority=1)], retention_ms=DAY_MS
            )
        )
        for _ in range(200)
    ]
    refused = [answer for answer in answers if isinstance(answer, errors.StoreFull)]
    assert 150 < len(refused) < 200
    assert all(full.retry_after_seconds for full in refused)
    client.config_set("maxmemory", client.info("memory")["used_memory"] - 1_000_000)  # not a byte to spare
    world.check()

    worker_commands.heartbeat(engine, TID, held[0].id, "w1", extend_ms=60_000, token="", progress="50").run_sync()
    worker_commands.nack(
        engine, TID, held[1].id, "w1", token="", delay_ms=None, reason="boom", dead_retention_ms=DAY_MS
    ).run_sync()
    worker_commands.abandon(engine, TID, held[2].id, "w1", token="", dead_retention_ms=DAY_MS).run_sync()
    producer_commands.cancel(engine, TID, held[3].id, retention_ms=DAY_MS).run_sync()
    assert isinstance(
        worker_commands.submit(engine, TID, "w1", [done(held[4])], retention_ms=DAY_MS).run_sync()[0], Result
    )
    assert isinstance(dead_letter_commands.replay(engine, TID, dead[:1]).run_sync()[0], Task)
    admin_commands.pause(engine, TID, "send").run_sync()
    admin_commands.resume(engine, TID, "send").run_sync()
    clock.advance(10)
    assert maintenance_commands.promote(engine, TID, "send").run_sync()[0] == 2
    assert maintenance_commands.reap(engine, TID, "send").run_sync()[0] == 1
    queries.task(engine, TID, held[0].id, watch=True).run_sync()
    assert queries.stats(engine, TID).run_sync()[0].dlq == 3
    assert maintenance_commands.purge(engine, TID, dead[1:]).run_sync() == [True] * 3
    with pytest.raises(errors.StoreFull):
        producer_commands.enqueue(engine, TID, "acme", [new()], retention_ms=DAY_MS).run_sync()
    while tasks := worker_commands.claim(engine, TID, ["send"], "w1", lease_ms=9_000, limit=50).run_sync().tasks:
        worker_commands.submit(engine, TID, "w1", [done(task) for task in tasks], retention_ms=1).run_sync()
        clock.advance(1)
        now_ms, over = maintenance_commands.expired(engine, TID).run_sync()
        maintenance_commands.purge(engine, TID, over, before_ms=now_ms).run_sync()
    world.check()
    producer_commands.enqueue(engine, TID, "acme", [new()], retention_ms=DAY_MS).run_sync()
