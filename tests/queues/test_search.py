"""Finding a tenant's tasks, live and ended, page by page, with bounded work."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection

from core import errors
from core.redis.connections import client
from queues import periodic_tasks, services
from queues.audit import audit_reader
from queues.current_engine import engine
from queues.deadletters import queries as dead_letters
from queues.domain import Location, Status, Task
from queues.engine import queries
from queues.models import AuditedResult
from queues.search import pagination, tenant_search
from queues.search.tenant_search import TaskQuery
from tenants.domain import TenantSnapshot
from tests.fixtures.queues import Queue, plan

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def queue(tenant: TenantSnapshot) -> Queue:
    """On Redis' own clock: the audit goes by that."""
    return Queue(tenant, "render")


def walk(tenant: TenantSnapshot, limit: int = 3, **asked: Any) -> Iterator[list[Task]]:
    cursor = None
    for _ in range(1000):
        page = tenant_search.page(tenant, TaskQuery(**asked), cursor=cursor, limit=limit)
        assert len(page.tasks) <= limit
        yield page.tasks
        cursor = page.cursor
        if cursor is None:
            return
    raise AssertionError("the pages do not end")


def found(tenant: TenantSnapshot, **asked: Any) -> list[str]:
    return [task.id for page in walk(tenant, **asked) for task in page]


class World:
    """A tenant with a task of every kind in two queues, by name."""

    def __init__(self, tenant: TenantSnapshot) -> None:
        render, mail = Queue(tenant, "render"), Queue(tenant, "mail.v-2")
        self.ids: dict[str, str] = {}
        done = render.enqueue('{"customer":"Jansen"}')
        render.complete(render.claim("host-7"), "host-7")
        failed = render.enqueue('{"customer":"Öztürk"}')
        render.fail(render.claim("host-8"), "host-8", "the printer is on fire")
        dead = mail.enqueue("1", max_attempts=1)
        services.nack(tenant, mail.claim().id, "w1", reason="no route to printer").run_sync()
        cancelled = mail.enqueue("2")
        services.cancel(tenant, cancelled.id).run_sync()
        replayed = mail.enqueue("3", max_attempts=1)
        services.nack(tenant, mail.claim().id, "w1", reason="no route").run_sync()
        periodic_tasks.run_drain(lambda: True)
        dead_letters.replay(tenant, [replayed.id])
        held = render.enqueue("4", idempotency_key="order 17")
        render.claim("host-9")
        low, high = render.enqueue("5"), render.enqueue("6", priority=9)
        later = render.enqueue("7", delay_ms=3_600_000)
        for name, task in locals().items():
            if isinstance(task, Task):
                self.ids[name] = task.id
        self.names = {task_id: name for name, task_id in self.ids.items()}

    def found(self, tenant: TenantSnapshot, **asked: Any) -> list[str]:
        return [self.names[task_id] for task_id in found(tenant, **asked)]


@pytest.fixture
def world(tenant: TenantSnapshot) -> World:
    return World(tenant)


ENDED = ["cancelled", "dead", "failed", "done"]


@pytest.mark.spec("ADM-3", "Tasks are listed live and audited, by command, status and age; each once")
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, ["replayed", "held", "later", "high", "low", *ENDED]),
        ({"command": "render"}, ["held", "later", "high", "low", "failed", "done"]),
        ({"command": "mail.v-2"}, ["replayed", "cancelled", "dead"]),
        ({"command": "never"}, []),
        ({"status": Status.PENDING}, ["replayed", "later", "high", "low"]),
        ({"status": Status.IN_PROGRESS}, ["held"]),
        ({"status": Status.COMPLETED}, ["done"]),
        ({"status": Status.FAILED}, ["dead", "failed"]),
        ({"status": Status.CANCELLED}, ["cancelled"]),
        ({"status": Status.FAILED, "command": "render"}, ["failed"]),
        ({"status": Status.COMPLETED, "command": "mail.v-2"}, []),
        ({"status": Status.PENDING, "command": "render"}, ["later", "high", "low"]),
        ({"created_after": datetime(2199, 1, 1, tzinfo=UTC)}, []),
        ({"created_after": datetime(2001, 1, 1, tzinfo=UTC), "command": "mail.v-2"}, ["replayed", "cancelled", "dead"]),
        ({"q": "printer"}, ["dead", "failed"]),
        ({"q": "printer FIRE"}, ["failed"]),
        ({"q": "print"}, ["dead", "failed"]),
        ({"q": "rint"}, []),
        ({"q": "jansen"}, ["done"]),
        ({"q": "öztürk"}, ["failed"]),
        ({"q": "host-7"}, ["done"]),
        ({"q": "host-9"}, ["held"]),
        ({"q": "order 17"}, ["held"]),
        ({"q": "order 18"}, []),
        ({"q": "printer", "command": "render"}, ["failed"]),
        ({"q": "printer", "status": Status.COMPLETED}, []),
        ({"q": "host-9", "status": Status.PENDING}, []),
        ({"q": "-"}, []),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("limit", [1, 50])
def test_tasks_are_found_by_what_is_known_of_them(
    tenant: TenantSnapshot, world: World, asked: dict[str, Any], expected: list[str], limit: int
) -> None:
    assert world.found(tenant, limit=limit, **asked) == expected


@pytest.mark.spec("ADM-3", "A task is found by its id, live or audited")
def test_a_task_is_found_by_its_id(tenant: TenantSnapshot, world: World) -> None:
    for name, task_id in world.ids.items():
        assert world.found(tenant, q=task_id) == [name]
        assert world.found(tenant, q=task_id.upper()) == [name]
    client().flushdb()
    assert world.found(tenant, q=world.ids["done"]) == ["done"]
    assert world.found(tenant, q=world.ids["low"]) == []
    assert world.found(tenant, q=world.ids["done"], status=Status.FAILED) == []
    assert found(tenant, q=str(uuid.uuid4())) == []


def test_an_ended_task_is_shown_as_it_ended(tenant: TenantSnapshot, world: World) -> None:
    [done] = tenant_search.page(tenant, TaskQuery(q="Jansen")).tasks
    assert (done.status, done.location, done.spec.payload, done.worker) == (
        Status.COMPLETED, Location.NONE, '{"customer":"Jansen"}', "host-7",
    )  # fmt: skip
    assert done.spec.tenant == tenant.slug
    [dead] = tenant_search.page(tenant, TaskQuery(status=Status.FAILED, command="mail.v-2")).tasks
    assert (dead.location, dead.error) == (Location.DLQ_SET, "no route to printer")


@pytest.mark.spec("TEN-3", "No search finds another tenant's task, whatever is asked")
def test_nobody_finds_another_tenants_tasks(tenant: TenantSnapshot, other_tenant: TenantSnapshot, world: World) -> None:
    assert list(walk(other_tenant)) == [[]]
    for status in Status:
        assert found(other_tenant, status=status) == []
    for q in ("printer", "host-7", "host-9", "order 17", *world.ids.values()):
        assert found(other_tenant, q=q) == []
    assert found(other_tenant, command="render") == []
    # A cursor is no key: the tenant is the caller's.
    cursor = tenant_search.page(tenant, TaskQuery(), limit=1).cursor
    assert tenant_search.page(other_tenant, TaskQuery(), cursor=cursor).tasks == []


def test_many_live_tasks_are_each_on_one_page(tenant: TenantSnapshot, queue: Queue) -> None:
    tasks = queue.enqueue_many(60)
    tasks += queue.enqueue_many(25, priority=5, delay_ms=1_000_000)
    held = {task.id for task in queue.look(count=10).tasks}
    seen = found(tenant, limit=7)
    assert sorted(seen) == sorted(task.id for task in tasks)
    assert set(seen[:10]) == held


@pytest.mark.spec("ADM-3", "Pages of live tasks go on where they were, while tasks come and go")
def test_what_comes_and_goes_meanwhile_moves_no_page(tenant: TenantSnapshot, queue: Queue) -> None:
    tasks = queue.enqueue_many(20)
    newest_first = [task.id for task in reversed(tasks)]
    seen, cursor = [], None
    while len(seen) < 12:
        page = tenant_search.page(tenant, TaskQuery(status=Status.PENDING), cursor=cursor, limit=3)
        seen += [task.id for task in page.tasks]
        cursor = page.cursor
        queue.enqueue_many(4)  # new ones come in at the front …
        queue.claim()  # … and the oldest goes
    assert seen == newest_first[:12]


def test_pages_of_delayed_tasks_survive_the_one_they_stopped_at(tenant: TenantSnapshot, queue: Queue) -> None:
    tasks = [queue.enqueue(delay_ms=1_000_000 + 1000 * number) for number in range(9)]
    page = tenant_search.page(tenant, TaskQuery(status=Status.PENDING), limit=4)
    assert [task.id for task in page.tasks] == [task.id for task in tasks[:4]]
    services.cancel(tenant, tasks[3].id).run_sync()
    services.cancel(tenant, tasks[1].id).run_sync()
    rest = tenant_search.page(tenant, TaskQuery(status=Status.PENDING), cursor=page.cursor, limit=50)
    assert [task.id for task in rest.tasks] == [task.id for task in tasks[4:]]


def test_ghosts_and_lost_records_are_not_listed(tenant: TenantSnapshot, queue: Queue) -> None:
    tasks = queue.enqueue_many(5)
    services.cancel(tenant, tasks[1].id).run_sync()
    services.purge(tenant, [tasks[1].id]).run_sync()
    services.cancel(tenant, tasks[3].id).run_sync()
    assert found(tenant, status=Status.PENDING) == [tasks[4].id, tasks[2].id, tasks[0].id]


def test_many_queues_are_looked_into_a_piece_at_a_time(tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_search, "QUEUES", 4)
    monkeypatch.setattr(tenant_search, "QUEUES_AT_ONCE", 2)
    tasks = [Queue(tenant, f"q{number:02}").enqueue() for number in range(0, 15, 5)]
    for number in range(15):
        services.pause(tenant, f"q{number:02}").run_sync()
    sizes = [len(page) for page in walk(tenant, limit=50)]
    assert found(tenant, limit=50) == [task.id for task in tasks]
    assert sizes == [1, 1, 1, 0]


@pytest.mark.spec("ADM-3", "One page of a search never does unbounded work: it ends early and says where to go on")
def test_a_page_looks_at_so_many_live_tasks_and_no_more(
    tenant: TenantSnapshot, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_search, "IDS", 10)
    monkeypatch.setattr(tenant_search, "IDS_AT_ONCE", 5)
    queue.enqueue_many(40)
    held = [queue.claim(f"worker-{number}") for number in range(35)]
    pages_seen = list(walk(tenant, q="worker-34"))
    assert [task.id for page in pages_seen for task in page] == [held[34].id]
    assert len(pages_seen) >= 4


def test_one_page_asks_redis_a_bounded_number_of_times(tenant: TenantSnapshot, queue: Queue) -> None:
    queue.enqueue_many(300)
    tenant_search.page(tenant, TaskQuery())
    client().config_resetstat()
    assert len(tenant_search.page(tenant, TaskQuery(), limit=50).tasks) == 50
    calls = client().info("commandstats")
    assert calls["cmdstat_evalsha"]["calls"] <= 50 + 5
    assert "cmdstat_keys" not in calls


@pytest.mark.spec("ADM-3", "Searches of what has ended are answered by an index")
@pytest.mark.parametrize(
    ("asked", "index"),
    [
        ({"status": Status.COMPLETED}, "audited_tenant_ended"),
        ({"command": "rare", "status": Status.COMPLETED}, "audited_command_ended"),
        ({"status": Status.FAILED}, "audited_not_completed"),
        ({"command": "rare", "status": Status.FAILED}, "audited_not_completed"),
        ({"status": Status.COMPLETED, "q": "needle"}, "audited_words"),
    ],
    ids=str,
)
def test_what_has_ended_is_found_by_an_index(tenant: TenantSnapshot, asked: dict[str, Any], index: str) -> None:
    now = datetime.now(UTC)
    AuditedResult.objects.bulk_create(
        AuditedResult(
            task_id=uuid.uuid4(), tenant_id=tenant.tid if number % 100 == 0 else f"other{number % 100:03}",
            command="rare" if number % 2000 == 0 else "render", priority=0, payload=f'"common {number}"',
            status="FAILED" if number % 1000 == 0 else "COMPLETED",
            outcome="FAILED" if number % 1000 == 0 else "COMPLETED", is_dead=False, attempts=0, deliveries=1,
            max_attempts=5, created_at=now, ended_at=now - timedelta(seconds=number), position=1,
        )
        for number in range(20_000)
    )  # fmt: skip
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE queues_auditedresult")
    told = plan(lambda: tenant_search.page(tenant, TaskQuery(**asked)))
    assert f"{index} " in told
    assert "Seq Scan on queues_auditedresult" not in told


def test_common_words_are_walked_and_rare_ones_looked_up(
    tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagination, "WORDS_ROWS", 20)
    monkeypatch.setattr(pagination, "SCAN_LIMIT", 30)
    monkeypatch.setattr(pagination, "WINDOW", 10)
    queue = Queue(tenant, "render")
    expected = []
    for number in range(40):
        task = queue.enqueue(f'"common {"rare" if number % 20 == 0 else "x"}"')
        queue.complete(queue.claim())
        expected.append(task.id)
    periodic_tasks.run_drain(lambda: True)
    assert found(tenant, q="common", limit=9) == expected[::-1]
    assert list(walk(tenant, q="rare"))[-1][-1].id == expected[0]
    assert found(tenant, q="rare") == [expected[20], expected[0]]


@pytest.mark.parametrize(
    "cursor",
    [
        "nonsense", "render:nowhere:0:", "a b:delayed:0:", "render:ready:10:0:", "render:delayed:-1:", "ended:x",
        "ended:1-1", "render:delayed:" + "9" * 17 + ":", "render:delayed:0:" + "g" * 36, "", "render:delayed:0:\n",
    ],
)  # fmt: skip
def test_a_cursor_that_no_page_gave_is_refused(tenant: TenantSnapshot, cursor: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="cursor"):
        tenant_search.page(tenant, TaskQuery(), cursor=cursor)


def test_a_made_up_cursor_finds_nothing_it_should_not(tenant: TenantSnapshot, queue: Queue) -> None:
    task = queue.enqueue()
    for cursor in ("render:ready:0:9999999999999999:" + "a" * 36, "zzz:delayed:5:", "render:inprog:0:" + "-" * 36):
        page = tenant_search.page(tenant, TaskQuery(status=Status.PENDING), cursor=cursor)
        assert {each.id for each in page.tasks} <= {task.id}


@pytest.mark.parametrize("command", ["", "a b", "x" * 129, "a\n"])
def test_a_command_that_is_none_is_refused(tenant: TenantSnapshot, command: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="command"):
        tenant_search.page(tenant, TaskQuery(command=command))


def test_a_task_that_ended_a_moment_ago_is_read_from_redis_by_its_id(tenant: TenantSnapshot, queue: Queue) -> None:
    task = queue.enqueue()
    queue.complete(queue.claim())
    [seen] = tenant_search.page(tenant, TaskQuery(q=task.id)).tasks
    assert seen.status is Status.COMPLETED
    with pytest.raises(errors.TaskNotFound):
        audit_reader.audited_task(tenant, task.id)


def test_scanning_needs_no_queue(tenant: TenantSnapshot) -> None:
    assert queries.scan(engine(), tenant.tid, "never", "delayed").run_sync() == []
    assert queries.list_queues(engine(), tenant.tid).run_sync() == []
