"""A tenant with a queue, a clock that only moves when told, and the verbs in the words tests speak."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from django.db import connection
from django.test.utils import CaptureQueriesContext

from codeq_site.redis import client, engine
from queues import services
from queues.filters import filters
from queues.task import Claimed, NewResult, NewTask, Status, Task
from tenants.tenant import Tenant

NOON_MS = 1_900_000_000_000


class Clock:
    """Stands in for Redis' own time."""

    def __init__(self) -> None:
        self.now_ms = NOON_MS

    def advance(self, seconds: float) -> None:
        self.now_ms += round(seconds * 1000)

    def __call__(self) -> int:
        return self.now_ms


def plan(work: Callable[[], object]) -> str:
    """How PostgreSQL would answer what `work` asks of the audited results."""
    with CaptureQueriesContext(connection) as asked:
        work()
    lines = []
    with connection.cursor() as cursor:
        for query in asked:
            if "queues_auditedresult" in query["sql"]:
                cursor.execute("EXPLAIN " + query["sql"])
                lines += [line for (line,) in cursor.fetchall()]
    return "\n".join(lines)


class Queue:
    """One queue of one tenant, seen by producers and workers."""

    def __init__(self, tenant: Tenant, command: str = "send") -> None:
        self.tenant, self.command = tenant, command

    def enqueue(self, payload: str = "{}", **asked: Any) -> Task:
        item = services.enqueue(self.tenant, [NewTask(**{"command": self.command, "payload": payload, **asked})]).now()[
            0
        ]
        if isinstance(item, Exception):
            raise item
        return item.task

    def enqueue_many(self, count: int, **asked: Any) -> list[Task]:
        new = [NewTask(**{"command": self.command, "payload": f"{n}", **asked}) for n in range(count)]
        return [item.task for item in services.enqueue(self.tenant, new).now() if not isinstance(item, Exception)]

    def look(self, worker: str = "w1", *, commands: list[str] | None = None, **asked: Any) -> Claimed:
        return services.claim(self.tenant, commands or [self.command], worker, **asked).now()

    def claim(self, worker: str = "w1", **asked: Any) -> Task:
        tasks = self.look(worker, **asked).tasks
        assert len(tasks) == 1, "expected a task to claim"
        return tasks[0]

    def payloads(self, **asked: Any) -> list[str]:
        """Everything there is to claim, in the order in which it is claimed one by one."""
        found = []
        while tasks := self.look(**asked).tasks:
            found.append(tasks[0].spec.payload)
        return found

    def complete(self, task: Task, worker: str = "w1", result: bytes = b'{"ok":true}', **asked: Any) -> Any:
        new = NewResult(task_id=task.id, status=Status.COMPLETED, result=result, **asked)
        return services.submit(self.tenant, worker, [new]).now()[0]

    def fail(self, task: Task, worker: str = "w1", error: str = "boom") -> Any:
        new = NewResult(task_id=task.id, status=Status.FAILED, error=error)
        return services.submit(self.tenant, worker, [new]).now()[0]

    def dead(self, **asked: Any) -> Task:
        """A task that has used up its only attempt."""
        task = self.enqueue(max_attempts=1, **asked)
        services.nack(self.tenant, self.claim().id, "w1", reason="boom").now()
        return task

    def events(self) -> list[dict[str, str]]:
        """The outbox: what audit and webhooks will be told."""
        partition = engine().partition_of(self.tenant.tid)
        entries = client().xrange(f"codeq:{{{partition}}}:events")
        return [{k.decode(): v.decode() for k, v in fields.items()} for _, fields in entries]  # type: ignore[union-attr]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(engine(), "_clock", clock)
    return clock


@pytest.fixture(autouse=True)
def _fresh_filters() -> Iterator[None]:
    filters.cache_clear()
    yield
    filters.cache_clear()


@pytest.fixture
def tenant() -> Tenant:
    return Tenant(tid="acme0001", slug="acme")


@pytest.fixture
def other_tenant() -> Tenant:
    return Tenant(tid="zeta0002", slug="zeta")


@pytest.fixture
def queue(tenant: Tenant, clock: Clock) -> Queue:
    return Queue(tenant)


@pytest.fixture
def other_queue(other_tenant: Tenant, clock: Clock) -> Queue:
    """The queue of the same name that another tenant has."""
    return Queue(other_tenant)


@pytest.fixture
def store() -> redis.Redis:
    return client()
