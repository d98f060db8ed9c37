"""Kill web processes during requests: clients repeat requests without a response."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from core.redis.connections import client
from queues import selectors
from queues.current_engine import engine
from queues.domain import TaskStatus
from queues.engine import keys
from tenants import services
from tenants.auth import installation_keys as signing
from tenants.cache import tenant_cache
from tenants.domain import CallerRole, TenantSnapshot
from tests.faults.deployment import Deployment, get_database_url, kill
from tests.faults.load import TASKS, Client
from tests.queues.engine.checked_engine import LONG

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]
KILLS = 60 if LONG else 8


class RetryingClient(Client):
    """A client that repeats a request until it gets a response."""

    def request_until_answered(self, path: str, body: object) -> tuple[int, Any]:
        deadline = time.monotonic() + 60
        while True:
            status, answer = self.request("POST", path, body)
            if status and status != 503:
                return status, answer
            assert time.monotonic() < deadline, "no response within the deadline"
            time.sleep(0.01)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    signing.own_keys.forget()
    deployment = Deployment(tmp_path, get_database_url())
    yield deployment
    deployment.close()
    signing.own_keys.forget()
    tenant_cache.stop()


@pytest.mark.real_time
@pytest.mark.timeout(0 if LONG else 300)
@pytest.mark.spec("QUE-5", "Web processes killed during requests: no task is lost, created twice or ended twice")
def test_web_processes_killed_during_requests_lose_and_duplicate_nothing(deployment: Deployment) -> None:
    row = services.create_tenant("north")
    producer = services.issue_token("north", CallerRole.PRODUCER)
    worker = services.issue_token("north", CallerRole.WORKER, subject="w")
    created: dict[str, str] = {}
    unanswered: list[Any] = []
    completed: list[str] = []
    problems: list[BaseException] = []
    numbers, is_ending, all_created = itertools.count(), threading.Event(), threading.Event()

    def produce(connection: RetryingClient) -> None:
        while not is_ending.is_set():
            number = next(numbers)
            body = {"command": "render", "payload": number, "idempotencyKey": f"key-{number}", "maxAttempts": 1000}
            status, task = connection.request_until_answered(TASKS, body)
            assert status == 202, task
            created[f"key-{number}"] = task["id"]

    def work(connection: RetryingClient) -> None:
        body = {"commands": ["render"], "leaseSeconds": 2, "count": 3}
        while not (all_created.is_set() and len(completed) >= len(created)):
            # A claim is not repeated: tasks of a lost response become available when their leases expire.
            status, answer = connection.request("POST", f"{TASKS}/claim/batch", body)
            for task in answer["tasks"] if status == 200 else ():
                result = {"status": "COMPLETED", "result": {}, "leaseToken": task["leaseToken"]}
                status, result_answer = connection.request_until_answered(f"{TASKS}/{task['id']}/result", result)
                # 409: the lease expired before a response came, and another worker has claimed the task.
                assert status in (200, 409), result_answer
                if status == 200:
                    completed.append(task["id"])
            if status != 200:
                time.sleep(0.01)

    def run(action: Callable[[RetryingClient], None], token: str) -> None:
        records: list[Any] = []
        try:
            with closing(RetryingClient(deployment.port, [token], records)) as connection:
                action(connection)
        except BaseException as problem:  # noqa: BLE001  (reported in the test's thread)
            problems.append(problem)
        unanswered.extend(record for record in records if not record.status)

    webs = [deployment.web(), deployment.web()]
    deployment.wait_until_it_accepts_connections()
    producers = [threading.Thread(target=run, args=(produce, producer), daemon=True) for _ in range(2)]
    workers = [threading.Thread(target=run, args=(work, worker), daemon=True) for _ in range(4)]
    for thread in (*producers, *workers):
        thread.start()
    dice = random.Random(4)
    for number in range(KILLS):
        deployment.wait_until_it_accepts_connections(webs)
        time.sleep(dice.uniform(0.5, 1.5))
        victim = number % 2
        kill(webs[victim])
        webs[victim] = deployment.web()
    is_ending.set()
    for thread in producers:
        thread.join(60)
    all_created.set()
    for thread in workers:
        thread.join(60)
    assert problems == []
    print(f"{len(created)} tasks, {KILLS} kills, {len(unanswered)} requests unanswered")
    assert len(unanswered) >= KILLS // 2, "the kills interrupted no request"

    assert len(created) == len(set(created.values())) > 100 * KILLS
    assert Counter(completed) == Counter(created.values())
    tenant = TenantSnapshot(tid=row.tid, slug=row.slug)
    for task_id in created.values():
        assert selectors.task(tenant, task_id).run_sync().status is TaskStatus.COMPLETED
    [stats] = selectors.queues(tenant).run_sync()
    assert (stats.ready, stats.delayed, stats.in_progress, stats.dlq) == (0, 0, 0, 0)
    entries = client().xrange(keys.of_partition(engine().partition_of(tenant.tid)).events)
    ended = Counter(fields[b"id"].decode() for _, fields in entries if fields[b"status"] == b"COMPLETED")
    assert ended == Counter(created.values())
