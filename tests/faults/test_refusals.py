"""Translation of Redis' error replies, for example of a full, read-only or busy server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import redis

from core import errors
from core.redis.error_replies import parse_error_reply
from core.redis.runners import translate_error
from queues.domain import NewResult, Result, Task, TaskStatus
from queues.engine import (
    admin_commands,
    dead_letter_commands,
    maintenance_commands,
    producer_commands,
    queries,
    worker_commands,
)
from tests.concurrency.threads import result_or_error
from tests.conftest import ValkeyFactory
from tests.queues.engine.checked_engine import DAY_MS, TID, CheckedEngine, Clock, build_task, dump
from tests.waiting import until


@pytest.fixture
def client(valkey_server: ValkeyFactory) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey_server(appendonly="no").url) as client:
        yield client


def build_result(task: Task) -> NewResult:
    return NewResult(task_id=task.id, status=TaskStatus.COMPLETED, result=b"1", lease_token=task.lease_token)


@pytest.mark.parametrize(
    "reply",
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
    ids=lambda reply: reply.split()[0],
)
def test_temporary_error_is_unavailable(reply: str) -> None:
    error = translate_error(parse_error_reply(reply))
    assert isinstance(error, errors.Unavailable)
    assert error.retryable
    assert error.retry_after_seconds


def test_full_server_has_a_separate_error() -> None:
    assert isinstance(
        translate_error(parse_error_reply("OOM command not allowed when used memory > 'maxmemory'.")),
        errors.StoreFull,
    )


@pytest.mark.parametrize(
    "reply", ["CODEQ WRONGTYPE Operation", "ERR unknown command", "BUSYKEY Target key name exists"]
)
def test_programming_error_is_not_translated(reply: str) -> None:
    error = parse_error_reply(reply)
    assert translate_error(error) is error


def make_read_only(client: redis.Redis) -> None:
    client.execute_command("REPLICAOF", "127.0.0.1", "1")


def require_replicas(client: redis.Redis) -> None:
    client.config_set("min-replicas-to-write", 1)


def disconnect_primary(client: redis.Redis) -> None:
    client.config_set("replica-serve-stale-data", "no")
    client.execute_command("REPLICAOF", "127.0.0.1", "1")


@pytest.mark.parametrize("reject_writes", [make_read_only, require_replicas, disconnect_primary])
def test_server_that_rejects_writes_is_unavailable(client: redis.Redis, reject_writes: object) -> None:
    engine = CheckedEngine(client, partitions=1).engine
    producer_commands.enqueue(engine, TID, "acme", [build_task()], retention_ms=DAY_MS).run_sync()
    before = dump(client)
    assert callable(reject_writes)
    reject_writes(client)
    for call in (
        producer_commands.enqueue(engine, TID, "acme", [build_task()], retention_ms=DAY_MS),
        producer_commands.enqueue(engine, TID, "acme", [build_task(), build_task(priority=1)], retention_ms=DAY_MS),
        worker_commands.claim(engine, TID, ["send"], "w1", lease_ms=1, limit=1),
    ):
        with pytest.raises(errors.Unavailable):
            call.run_sync()
    client.config_set("min-replicas-to-write", 0)
    client.execute_command("REPLICAOF", "NO", "ONE")
    assert dump(client) == before
    assert worker_commands.claim(engine, TID, ["send"], "w1", lease_ms=1, limit=1).run_sync().tasks


@pytest.mark.real_time
def test_server_busy_with_a_foreign_script_is_unavailable(client: redis.Redis) -> None:
    client.config_set("busy-reply-threshold", 10)
    engine = CheckedEngine(client, partitions=1).engine
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
@pytest.mark.spec(
    "QUE-5", "Flushing the scripts every 50 ms under load has no effect on clients, and nothing runs twice"
)
def test_flushed_scripts_are_loaded_again(client: redis.Redis) -> None:
    path = client.connection_pool.connection_kwargs["path"]
    stop, problems = threading.Event(), []
    created: set[str] = set()
    completed: list[str] = []

    def work(number: int) -> None:
        try:
            with redis.Redis(unix_socket_path=path) as connection:
                engine = CheckedEngine(connection, partitions=1).engine
                while not stop.is_set():
                    tasks = [build_task(), build_task(), build_task(priority=5)]
                    items = producer_commands.enqueue(engine, TID, "acme", tasks, retention_ms=DAY_MS).run_sync()
                    created.update(item.task.id for item in items if not isinstance(item, Exception))
                    tasks = (
                        worker_commands.claim(engine, TID, ["send"], f"w{number}", lease_ms=60_000, limit=3)
                        .run_sync()
                        .tasks
                    )
                    if not tasks:
                        continue
                    for item in worker_commands.submit(
                        engine, TID, f"w{number}", [build_result(task) for task in tasks], retention_ms=DAY_MS
                    ).run_sync():
                        assert isinstance(item, Result)
                        completed.append(item.task_id)
        except BaseException as problem:  # noqa: BLE001  (reported in the test's thread)
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()

    def flush_scripts() -> bool:
        """Flush the scripts, and return whether more than 80 calls have found no script."""
        time.sleep(0.05)
        client.script_flush()
        return bool(client.info("errorstats").get("errorstat_NOSCRIPT", {}).get("count", 0) > 80)

    until(flush_scripts, 60)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert problems == []
    snapshot = CheckedEngine(client, partitions=1).check()
    assert snapshot.tasks.keys() == created
    assert len(completed) == len(set(completed))
    assert {task_id for task_id in snapshot.tasks if snapshot.status(task_id) == "COMPLETED"} == set(completed)


@pytest.mark.spec("ENQ-2", "A full server rejects only new tasks, and accepts them again when memory is free")
def test_full_server_drains(client: redis.Redis) -> None:
    clock = Clock()
    checked = CheckedEngine(client, clock=clock, partitions=1, backoff="fixed", backoff_base_ms=1_000)
    engine = checked.engine
    payload = "x" * 20_000
    producer_commands.enqueue(
        engine, TID, "acme", [build_task(payload=payload, max_attempts=1) for _ in range(4)], retention_ms=DAY_MS
    ).run_sync()
    for task in worker_commands.claim(engine, TID, ["send"], "w1", lease_ms=9_000, limit=4).run_sync().tasks:
        worker_commands.nack(
            engine, TID, task.id, "w1", token="", delay_ms=None, reason="", dead_retention_ms=DAY_MS
        ).run_sync()
    dead = list(checked.check().tasks)
    producer_commands.enqueue(
        engine, TID, "acme", [build_task(payload=payload) for _ in range(200)], retention_ms=DAY_MS
    ).run_sync()
    producer_commands.enqueue(
        engine, TID, "acme", [build_task(payload=payload, delay_ms=1_000)], retention_ms=DAY_MS
    ).run_sync()
    held = worker_commands.claim(engine, TID, ["send"], "w1", lease_ms=9_000, limit=6).run_sync().tasks
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 200_000)

    results = [
        result_or_error(
            producer_commands.enqueue(
                engine,
                TID,
                "acme",
                [build_task(payload=payload), build_task(payload=payload, priority=1)],
                retention_ms=DAY_MS,
            )
        )
        for _ in range(200)
    ]
    rejected = [result for result in results if isinstance(result, errors.StoreFull)]
    assert 150 < len(rejected) < 200
    assert all(error.retry_after_seconds for error in rejected)
    client.config_set("maxmemory", client.info("memory")["used_memory"] - 1_000_000)  # no memory is left
    checked.check()

    worker_commands.heartbeat(engine, TID, held[0].id, "w1", extend_ms=60_000, token="", progress="50").run_sync()
    worker_commands.nack(
        engine, TID, held[1].id, "w1", token="", delay_ms=None, reason="boom", dead_retention_ms=DAY_MS
    ).run_sync()
    worker_commands.abandon(engine, TID, held[2].id, "w1", token="", dead_retention_ms=DAY_MS).run_sync()
    producer_commands.cancel(engine, TID, held[3].id, retention_ms=DAY_MS).run_sync()
    assert isinstance(
        worker_commands.submit(engine, TID, "w1", [build_result(held[4])], retention_ms=DAY_MS).run_sync()[0], Result
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
        producer_commands.enqueue(engine, TID, "acme", [build_task()], retention_ms=DAY_MS).run_sync()
    while tasks := worker_commands.claim(engine, TID, ["send"], "w1", lease_ms=9_000, limit=50).run_sync().tasks:
        worker_commands.submit(engine, TID, "w1", [build_result(task) for task in tasks], retention_ms=1).run_sync()
        clock.advance(1)
        now_ms, expired_ids = maintenance_commands.expired(engine, TID).run_sync()
        maintenance_commands.purge(engine, TID, expired_ids, before_ms=now_ms).run_sync()
    checked.check()
    producer_commands.enqueue(engine, TID, "acme", [build_task()], retention_ms=DAY_MS).run_sync()
