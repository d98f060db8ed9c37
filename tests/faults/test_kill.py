"""Kill Valkey with SIGKILL under load: it restarts with all acknowledged data."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import redis
from redis.backoff import ConstantBackoff, NoBackoff
from redis.retry import Retry

from codeq_site.devserver.embedded import Valkey
from core import errors
from queues.domain import NewResult, Result, TaskStatus
from queues.engine import producer_commands, worker_commands
from tests.conftest import ValkeyFactory
from tests.queues.engine.checked_engine import DAY_MS, LONG, TID, CheckedEngine, Snapshot, build_task
from tests.waiting import until

SEEDS = 300 if LONG else 20
OPTIONS = {"partitions": 1, "backoff": "fixed", "backoff_base_ms": 1, "max_attempts": 1_000}


@dataclass
class Replies:
    """The replies that clients received. A call without a reply may have been executed or not."""

    created: set[str] = field(default_factory=set)
    completed: dict[str, str] = field(default_factory=dict)
    returned: dict[str, int] = field(default_factory=dict)

    def list_violations(self, snapshot: Snapshot) -> list[str]:
        violations = [f"{task_id} was acknowledged and is missing" for task_id in self.created - snapshot.tasks.keys()]
        for task_id, worker in self.completed.items():
            lease = snapshot.tasks[task_id]["lease"].decode()
            if snapshot.status(task_id) != "COMPLETED" or lease.split()[2] != worker:
                violations.append(f"{task_id} was completed by {worker} and is {snapshot.status(task_id)} ({lease})")
        for task_id, times in self.returned.items():
            if int(snapshot.tasks[task_id].get("attempts", 0)) < times:
                violations.append(f"{task_id} was returned {times} times: {snapshot.tasks[task_id]}")
        return violations


def connect_without_retries(server: Valkey) -> CheckedEngine:
    """Connect a client that sends each command once."""
    client = redis.Redis.from_url(server.url, retry=Retry(NoBackoff(), 0), socket_timeout=5)
    return CheckedEngine(client, **OPTIONS)


def produce(checked: CheckedEngine, replies: Replies, dice: random.Random) -> None:
    keys = [f"{dice.random()}" for _ in range(3)]
    tasks = [
        build_task(priority=dice.randrange(3), idempotency_key=key if dice.random() < 0.2 else None) for key in keys
    ]
    for item in producer_commands.enqueue(checked.engine, TID, "acme", tasks, retention_ms=DAY_MS).run_sync():
        assert not isinstance(item, Exception)
        replies.created.add(item.task.id)


def work(checked: CheckedEngine, replies: Replies, dice: random.Random, name: str) -> None:
    for task in worker_commands.claim(checked.engine, TID, ["send"], name, lease_ms=60_000, limit=2).run_sync().tasks:
        token = task.lease_token or ""
        if dice.random() < 0.3:
            worker_commands.nack(
                checked.engine, TID, task.id, name, token=token, delay_ms=0, reason="", dead_retention_ms=DAY_MS
            ).run_sync()
            replies.returned[task.id] = replies.returned.get(task.id, 0) + 1
            continue
        result = NewResult(task_id=task.id, status=TaskStatus.COMPLETED, result=b"1", lease_token=token)
        [answer] = worker_commands.submit(checked.engine, TID, name, [result], retention_ms=DAY_MS).run_sync()
        assert isinstance(answer, Result)
        replies.completed[task.id] = name


def run_until_killed(
    server: Valkey, actions: list[Callable[[CheckedEngine, Replies], None]], dice: random.Random
) -> Replies:
    """Repeat each action in a thread, kill the server, and wait for all threads to end."""
    replies, problems = Replies(), []

    def loop(action: Callable[[CheckedEngine, Replies], None]) -> None:
        checked = connect_without_retries(server)
        try:
            while True:
                action(checked, replies)
        except errors.Unavailable:
            pass
        except BaseException as problem:  # noqa: BLE001  (reported in the test's thread)
            problems.append(problem)
        finally:
            checked.client.close()

    threads = [threading.Thread(target=loop, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    until(lambda: len(replies.completed) > 3)
    time.sleep(dice.uniform(0, 0.2))
    server.kill()
    for thread in threads:
        thread.join(30)
    assert problems == []
    return replies


@pytest.mark.real_time
@pytest.mark.timeout(0 if LONG else 300)
@pytest.mark.spec(
    "ENQ-2", "After a kill under load with fsync on every write, the server restarts with all acknowledged data"
)
def test_no_acknowledged_data_is_lost_when_valkey_is_killed(valkey_server: ValkeyFactory) -> None:
    server = valkey_server()
    total = 0
    for seed in range(SEEDS):
        dice = random.Random(seed)
        actions: list[Callable[[CheckedEngine, Replies], None]] = []
        for n in range(3):
            own = random.Random(f"{seed} {n}")
            actions.append(lambda checked, replies, own=own: produce(checked, replies, own))
            actions.append(lambda checked, replies, own=own, name=f"w{n}": work(checked, replies, own, name))
        replies = run_until_killed(server, actions, dice)
        server.start()
        with redis.Redis.from_url(server.url) as client:
            checked = CheckedEngine(client, **OPTIONS)
            assert replies.list_violations(checked.check()) == [], f"seed {seed}"
            complete_all(checked)
            client.flushall()
        total += len(replies.created)
    assert total > 10 * SEEDS


def complete_all(checked: CheckedEngine) -> None:
    """Complete all tasks, to show that no task is blocked."""
    while (
        tasks := worker_commands.claim(checked.engine, TID, ["send"], "drain", lease_ms=60_000, limit=500)
        .run_sync()
        .tasks
    ):
        results = [NewResult(task_id=task.id, status=TaskStatus.COMPLETED, result=b"1") for task in tasks]
        worker_commands.submit(checked.engine, TID, "drain", results, retention_ms=DAY_MS).run_sync()
    snapshot = checked.check()
    # A lease that was open when the server was killed is still valid.
    assert {snapshot.status(task_id) for task_id in snapshot.tasks} <= {"COMPLETED", "IN_PROGRESS"}


@pytest.mark.real_time
@pytest.mark.spec("IDM-1", "A client that repeats requests without a reply, through crashes, creates each task once")
def test_repeated_request_is_stored_once_through_crashes(valkey_server: ValkeyFactory) -> None:
    server = valkey_server()
    per_producer, producers = 150, 4
    created: list[str] = []

    def produce_all() -> None:
        # Retry like a cluster client: reconnect and send the same bytes again.
        retry = Retry(ConstantBackoff(0.05), 200)
        with redis.Redis.from_url(server.url, retry=retry) as client:
            engine = CheckedEngine(client, **OPTIONS).engine
            for _ in range(per_producer):
                [item] = producer_commands.enqueue(engine, TID, "acme", [build_task()], retention_ms=DAY_MS).run_sync()
                assert not isinstance(item, Exception)
                created.append(item.task.id)

    threads = [threading.Thread(target=produce_all, daemon=True) for _ in range(producers)]
    for thread in threads:
        thread.start()
    for kill_at in (100, 250, 400):
        until(lambda at=kill_at: len(created) >= at, 30)
        server.kill()
        server.start()
    for thread in threads:
        thread.join(60)
    assert len(created) == per_producer * producers
    with redis.Redis.from_url(server.url) as client:
        snapshot = CheckedEngine(client, **OPTIONS).check()
    assert sorted(snapshot.tasks) == sorted(created)
    assert sorted(snapshot.ready[TID, "send", 0]) == sorted(created)
