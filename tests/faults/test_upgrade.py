"""Upgrade an installation in place, with processes of both releases side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.conf import settings
from django.db import connection

from codeq_site.devserver.embedded import PostgreSQL
from queues.models import Attempt, AuditedResult
from ranked.models import RankedEntry
from tenants.models import Tenant
from tests.faults.deployment import Deployment, database_at
from tests.faults.load import Client
from tests.waiting import until
from tests.webhooks.receiver import Receiver, status
from webhooks.models import Delivery, Subscription

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]

# The packages of the release that an installation upgrades from. With each release:
# git archive COMMIT codeq_site queues … manage.py | xz -9e > tests/faults/former_release.tar.xz
FORMER_RELEASE = Path(__file__).with_name("former_release.tar.xz")
TASKS = "/v1/codeq/tasks"
# Rows for which the former release has no command.
ROWS = """
from queues.models import RankedEntry
from tenants import services
tenant = services.create_tenant("acme")
RankedEntry.objects.create(tenant=tenant, queue="reviews", task_id="t-1", rank=7)
RankedEntry.objects.create(tenant=tenant, queue="reviews", task_id="t-2", rank=3)
"""

DEQUEUE = """
from ranked.services import RankedQueue
from tenants.cache import tenant_cache
queue = RankedQueue(tenant_cache.find("acme"), "reviews")
print(queue.dequeue(), queue.dequeue())
"""


@pytest.fixture(scope="module")
def former_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of the former release."""
    directory = tmp_path_factory.mktemp("former")
    with tarfile.open(FORMER_RELEASE) as tar:
        tar.extractall(directory, filter="data")
    return directory


@pytest.fixture
def server(postgres_server: Callable[..., PostgreSQL]) -> Iterator[PostgreSQL]:
    server = postgres_server(fsync="off")
    with database_at(server.url):
        yield server


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    # Before the upgrade, the endpoint is down: deliveries wait.
    receiver = Receiver(answer=status(503)).start()
    yield receiver
    receiver.stop()


class Release:
    """One release: its processes, its commands and clients of its API."""

    def __init__(self, source: Path, directory: Path, database_url: str) -> None:
        directory.mkdir()
        self.source = source
        self.deployment = Deployment(directory, database_url, source=source)
        self.clients: dict[str, Client] = {}

    def manage(self, *arguments: str) -> str:
        process = subprocess.run(
            [sys.executable, "-W", "ignore", "manage.py", *arguments],
            cwd=self.source, env={**self.deployment.environment, "PATH": os.environ["PATH"]},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert process.returncode == 0, process.stderr
        return process.stdout.strip()

    def start(self) -> None:
        self.deployment.web()
        self.deployment.worker(2)
        self.deployment.beat()
        self.deployment.wait_until_it_accepts_connections()

    def connect(self, tokens: dict[str, str]) -> None:
        self.clients = {role: Client(self.deployment.port, [token], []) for role, token in tokens.items()}

    def request(self, role: str, method: str, path: str, body: object = None, *, expected: int = 200) -> Any:
        received, answer = self.clients[role].request(method, path, body)
        assert received == expected, (received, answer)
        return answer

    def enqueue(self, command: str, **fields: Any) -> str:
        body = {"command": command, "payload": {"n": 1}, **fields}
        task_id: str = self.request("producer", "POST", TASKS, body, expected=202)["id"]
        return task_id

    def claim(self, command: str, lease_seconds: int = 600) -> Any:
        body = {"commands": [command], "leaseSeconds": lease_seconds, "waitSeconds": 10}
        return self.request("worker", "POST", f"{TASKS}/claim", body)

    def submit(self, task: Any) -> None:
        body = {"status": "COMPLETED", "result": {"ok": True}, "leaseToken": task["leaseToken"]}
        self.request("worker", "POST", f"{TASKS}/{task['id']}/result", body)

    def read(self, task_id: str) -> Any:
        return self.request("producer", "GET", f"{TASKS}/{task_id}")

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
        self.deployment.close()


@pytest.fixture
def releases(former_source: Path, tmp_path: Path, server: PostgreSQL) -> Iterator[tuple[Release, Release]]:
    former = Release(former_source, tmp_path / "former", server.url)
    present = Release(settings.BASE_DIR, tmp_path / "present", server.url)
    with closing(former), closing(present):
        yield former, present


def count_callbacks(receiver: Receiver) -> Counter[str]:
    return Counter(json.loads(request.body)["taskId"] for request in receiver.requests)


def count_rows() -> dict[str, int]:
    """Return the number of rows of each table, without those whose names start with `django_`."""
    with connection.cursor() as cursor:
        names = [name for name in connection.introspection.table_names(cursor) if not name.startswith("django_")]
        rows = {}
        for name in names:
            cursor.execute(f'SELECT count(*) FROM "{name}"')
            rows[name] = cursor.fetchone()[0]
    return rows


@pytest.mark.real_time
@pytest.mark.timeout(300)
@pytest.mark.spec("QUE-5", "A former release with live tasks, leases and callbacks upgrades in place, side by side")
def test_installation_of_the_former_release_upgrades_in_place(
    releases: tuple[Release, Release], receiver: Receiver, server: PostgreSQL
) -> None:
    former, present = releases
    former.manage("migrate", "-v0")
    former.manage("shell", "-v0", "-c", ROWS)
    # While these rows are locked, the former release does not move them to Redis.
    lock = psycopg.connect(server.url)
    assert lock.execute("SELECT id FROM queues_rankedentry FOR UPDATE").rowcount == 2
    roles = ("producer", "worker", "admin")
    tokens = {role: former.manage("token", "--tenant", "acme", "--role", role) for role in roles}
    former.start()
    former.connect(tokens)

    # Live tasks of every kind.
    webhook = receiver.url("/callback")
    waiting = former.enqueue("waiting", webhook=webhook, idempotencyKey="key-1", priority=3)
    delayed = former.enqueue("delayed", delaySeconds=20, webhook=webhook)
    leased_id = former.enqueue("leased", webhook=webhook)
    leased = former.claim("leased")
    dead = former.enqueue("dead", maxAttempts=1, webhook=webhook)
    nacked = former.claim("dead")
    former.request("worker", "POST", f"{TASKS}/{dead}/nack", {"leaseToken": nacked["leaseToken"], "reason": "broken"})
    retried = former.enqueue("retried")
    first_attempt = former.claim("retried")
    former.request(
        "worker", "POST", f"{TASKS}/{retried}/nack", {"leaseToken": first_attempt["leaseToken"], "delaySeconds": 1}
    )
    completed = former.enqueue("completed", webhook=webhook)
    former.submit(former.claim("completed"))
    former.request("admin", "PUT", "/v1/codeq/admin/topics/limited", {"maxAttempts": 2}, expected=201)
    former.request("admin", "POST", "/v1/codeq/admin/queues/waiting/pause")
    body = {"callbackUrl": receiver.url("/wake"), "eventTypes": ["later"], "ttlSeconds": 3600}
    former.request("worker", "POST", "/v1/codeq/workers/subscriptions", body)
    until(lambda: Delivery.objects.filter(status="pending", attempts__gte=1).count() >= 2, 60, every=0.1)
    until(lambda: AuditedResult.objects.count() >= 2, 60, every=0.1)

    # `migrate` runs while the former release serves requests, and keeps every row.
    before = count_rows()
    present.manage("migrate", "-v0")
    after = count_rows()
    fixed = [name for name in before if name.startswith(("tenants_", "queues_ranked", "queues_topic", "webhooks_sub"))]
    assert {name: after[name] for name in fixed} == {name: before[name] for name in fixed}
    assert all(after[name] >= rows for name, rows in before.items() if name.startswith(("queues_", "webhooks_")))
    assert Tenant.objects.get(slug="acme").status == "active"
    assert list(RankedEntry.objects.order_by("task_id").values_list("task_id", "rank")) == [("t-1", 7), ("t-2", 3)]
    lock.close()
    assert {str(row.task_id) for row in Attempt.objects.all()} >= {completed, dead}
    assert Subscription.objects.get().event_types == ["later"]

    # Both releases serve the same queues, each other's tokens and each other's leases.
    present.start()
    present.connect(tokens)
    both = [former, present]
    for number in range(20):
        producer, claimer, submitter = (both[number >> bit & 1] for bit in range(3))
        task_id = producer.enqueue("shared")
        task = claimer.claim("shared")
        assert task["id"] == task_id
        heartbeat = {"leaseToken": task["leaseToken"], "extendSeconds": 60}
        submitter.request("worker", "POST", f"{TASKS}/{task_id}/heartbeat", heartbeat)
        submitter.submit(task)
        assert producer.read(task_id)["status"] == "COMPLETED"
    # A long poll of each release is woken by an enqueue in the other one.
    for poller, producer in ((former, present), (present, former)):
        task_id = producer.enqueue("polled", delaySeconds=1)
        assert poller.claim("polled")["id"] == task_id
    present.request("worker", "POST", f"{TASKS}/{leased_id}/heartbeat", {"leaseToken": leased["leaseToken"]})
    present.submit(leased)
    assert present.enqueue("waiting", webhook=webhook, idempotencyKey="key-1", priority=3) == waiting
    assert present.request("worker", "POST", f"{TASKS}/claim", {"commands": ["waiting"]}, expected=204) is None

    # Without the former release, everything that it left is finished.
    former.close()
    receiver.answer = status(200)
    present.request("admin", "POST", "/v1/codeq/admin/queues/waiting/resume")
    for command, task_id in (("waiting", waiting), ("retried", retried)):
        task = present.claim(command)
        assert task["id"] == task_id
        present.submit(task)
    present.request("admin", "POST", "/v1/codeq/admin/dlq/dead/replay", {"ids": [dead]}, expected=202)
    for command, task_id in (("dead", dead), ("delayed", delayed)):
        task = until(lambda name=command: present.clients["worker"].request(  # type: ignore[misc]
            "POST", f"{TASKS}/claim", {"commands": [name], "waitSeconds": 5})[1], 60, every=0.1)  # fmt: skip
        assert task["id"] == task_id
        present.submit(task)
    assert present.request("admin", "GET", "/v1/codeq/admin/topics/limited")["maxAttempts"] == 2
    with_callback = {waiting, delayed, leased_id, dead, completed}
    until(lambda: set(count_callbacks(receiver)) >= with_callback, 120, every=0.2)
    until(lambda: AuditedResult.objects.filter(status="COMPLETED").count() == 26, 60, every=0.2)
    until(lambda: not Delivery.objects.filter(status="pending").exists(), 120, every=0.2)
    assert {present.read(task_id)["status"] for task_id in [*with_callback, retried]} == {"COMPLETED"}
    until(lambda: not RankedEntry.objects.exists(), 60, every=0.2)
    assert present.manage("shell", "-v0", "-c", DEQUEUE).split() == ["t-1", "t-2"]
    for release in (former, present):
        assert "Traceback" not in "".join(log.read_text() for log in release.deployment.directory.glob("*.log"))
