"""Web processes killed with SIGKILL in the middle of requests; clients send again what went unanswered."""

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
from queues.domain import Status
from queues.engine import keys
from tenants import services
from tenants.auth import installation_keys as signing
from tenants.cache import tenant_cache
from tenants.tenant import Role, Tenant
from tests.faults.deployment import Deployment, kill, own_database
from tests.faults.load import TASKS, Client
from tests.queues.engine.world import LONG

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]
KILLS = 60 if LONG else 8


class Persistent(Client):
    """Sends a request until it is answered."""

    def until_answered(self, path: str, body: object) -> tuple[int, Any]:
        deadline = time.monotonic() + 60
        while True:
            status, answer = self.ask("POST", path, body)
            if status and status != 503:
                return status, answer
            assert time.monotonic() < deadline, "nobody answers any more"
            time.sleep(0.01)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    signing.own_keys.forget()
    deployment = Deployment(tmp_path, own_database())
    yield deployment
    deployment.close()
    signing.own_keys.forget()
    tenant_cache.stop()


@pytest.mark.real_time
@pytest.mark.timeout(0 if LONG else 300)
@pytest.mark.spec("QUE-5", "Web processes killed in mid-request: no task lost, none made twice, none ended twice (B-4)")
def test_web_processes_killed_in_the_middle_of_requests_lose_and_double_nothing(deployment: Deployment) -> None:
    row = services.create_tenant("north")
    producer = services.issue_token("north", Role.PRODUCER)
    worker = services.issue_token("north", Role.WORKER, subject="w")
    made: dict[str, str] = {}
    unanswered: list[Any] = []
    done: list[str] = []
    problems: list[BaseException] = []
    numbers, enough, all_made = itertools.count(), threading.Event(), threading.Event()

    def produce(link: Persistent) -> None:
        while not enough.is_set():
            number = next(numbers)
            body = {"command": "render", "payload": number, "idempotencyKey": f"key-{number}", "maxAttempts": 1000}
            status, task = link.until_answered(TASKS, body)
            assert status == 202, task
            made[f"key-{number}"] = task["id"]

    def work(link: Persistent) -> None:
        asked = {"commands": ["render"], "leaseSeconds": 2, "count": 3}
        while not (all_made.is_set() and len(done) >= len(made)):
            # A claim is not sent again: what its lost answer held comes back when the lease is over.
            status, answer = link.ask("POST", f"{TASKS}/claim/batch", asked)
            for task in answer["tasks"] if status == 200 else ():
                result = {"status": "COMPLETED", "result": {}, "leaseToken": task["leaseToken"]}
                status, answered = link.until_answered(f"{TASKS}/{task['id']}/result", result)
                # 409: its lease ran out while nobody answered, and somebody else has it.
                assert status in (200, 409), answered
                if status == 200:
                    done.append(task["id"])
            if status != 200:
                time.sleep(0.01)

    def run(act: Callable[[Persistent], None], token: str) -> None:
        heard: list[Any] = []
        try:
            with closing(Persistent(deployment.port, [token], heard)) as link:
                act(link)
        except BaseException as problem:  # noqa: BLE001  (shown in the test's own thread)
            problems.append(problem)
        unanswered.extend(each for each in heard if not each.status)

    webs = [deployment.web(), deployment.web()]
    deployment.until_it_answers()
    producers = [threading.Thread(target=run, args=(produce, producer), daemon=True) for _ in range(2)]
    workers = [threading.Thread(target=run, args=(work, worker), daemon=True) for _ in range(4)]
    for thread in (*producers, *workers):
        thread.start()
    dice = random.Random(4)
    for number in range(KILLS):
        deployment.until_it_answers(webs)
        time.sleep(dice.uniform(0.5, 1.5))
        victim = number % 2
        kill(webs[victim])
        webs[victim] = deployment.web()
    enough.set()
    for thread in producers:
        thread.join(60)
    all_made.set()
    for thread in workers:
        thread.join(60)
    assert problems == []
    print(f"{len(made)} tasks, {KILLS} kills, {len(unanswered)} requests unanswered")
    assert len(unanswered) >= KILLS // 2, "the kills hit no request"

    assert len(made) == len(set(made.values())) > 100 * KILLS
    assert Counter(done) == Counter(made.values())
    tenant = Tenant(tid=row.tid, slug=row.slug)
    for task_id in made.values():
        assert selectors.task(tenant, task_id).run_sync().status is Status.COMPLETED
    [stats] = selectors.queues(tenant).run_sync()
    assert (stats.ready, stats.delayed, stats.in_progress, stats.dlq) == (0, 0, 0, 0)
    entries = client().xrange(keys.of_partition(engine().partition_of(tenant.tid)).events)
    ended = Counter(fields[b"id"].decode() for _, fields in entries if fields[b"status"] == b"COMPLETED")
    assert ended == Counter(made.values())
