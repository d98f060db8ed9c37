"""Search of a tenant's live and ended tasks, page by page, with limited work."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connection

from core import errors
from core.redis.connections import client
from queues import periodic_tasks, services
from queues.audit import audit_reader
from queues.current_engine import engine
from queues.deadletters import queries as dead_letters
from queues.domain import Location, Task, TaskStatus
from queues.engine import queries
from queues.models import AuditedResult
from queues.search import pagination, platform_search, tenant_search
from queues.search.tenant_search import TaskQuery
from tenants.domain import TenantSnapshot
from tests.fixtures.queues import Queue, explain_queries

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def queue(tenant: TenantSnapshot) -> Queue:
    """A queue on Redis' own clock, whose times the audit stores."""
    return Queue(tenant, "render")


def read_pages(tenant: TenantSnapshot, limit: int = 3, **conditions: Any) -> Iterator[list[Task]]:
    cursor = None
    for _ in range(1000):
        page = tenant_search.page(tenant, TaskQuery(**conditions), cursor=cursor, limit=limit)
        assert len(page.tasks) <= limit
        yield page.tasks
        cursor = page.cursor
        if cursor is None:
            return
    raise AssertionError("the pages do not end")


def search_ids(tenant: TenantSnapshot, **conditions: Any) -> list[str]:
    return [task.id for page in read_pages(tenant, **conditions) for task in page]


class TasksOfEveryKind:
    """One task of each kind, in two queues of a tenant, by name."""

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

    def search(self, tenant: TenantSnapshot, **conditions: Any) -> list[str]:
        return [self.names[task_id] for task_id in search_ids(tenant, **conditions)]


@pytest.fixture
def named_tasks(tenant: TenantSnapshot) -> TasksOfEveryKind:
    return TasksOfEveryKind(tenant)


ENDED = ["cancelled", "dead", "failed", "done"]


@pytest.mark.spec("ADM-3", "Tasks are listed live and audited, by command, status and age; each once")
@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, ["replayed", "held", "later", "high", "low", *ENDED]),
        ({"command": "render"}, ["held", "later", "high", "low", "failed", "done"]),
        ({"command": "mail.v-2"}, ["replayed", "cancelled", "dead"]),
        ({"command": "never"}, []),
        ({"status": TaskStatus.PENDING}, ["replayed", "later", "high", "low"]),
        ({"status": TaskStatus.IN_PROGRESS}, ["held"]),
        ({"status": TaskStatus.COMPLETED}, ["done"]),
        ({"status": TaskStatus.FAILED}, ["dead", "failed"]),
        ({"status": TaskStatus.CANCELLED}, ["cancelled"]),
        ({"status": TaskStatus.FAILED, "command": "render"}, ["failed"]),
        ({"status": TaskStatus.COMPLETED, "command": "mail.v-2"}, []),
        ({"status": TaskStatus.PENDING, "command": "render"}, ["later", "high", "low"]),
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
        ({"q": "printer", "status": TaskStatus.COMPLETED}, []),
        ({"q": "host-9", "status": TaskStatus.PENDING}, []),
        ({"q": "-"}, []),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("limit", [1, 50])
def test_tasks_are_found_by_conditions(
    tenant: TenantSnapshot, named_tasks: TasksOfEveryKind, conditions: dict[str, Any], expected: list[str], limit: int
) -> None:
    assert named_tasks.search(tenant, limit=limit, **conditions) == expected


@pytest.mark.spec("ADM-3", "A task is found by its id, live or audited")
def test_task_is_found_by_its_id(tenant: TenantSnapshot, named_tasks: TasksOfEveryKind) -> None:
    for name, task_id in named_tasks.ids.items():
        assert named_tasks.search(tenant, q=task_id) == [name]
        assert named_tasks.search(tenant, q=task_id.upper()) == [name]
    client().flushdb()
    assert named_tasks.search(tenant, q=named_tasks.ids["done"]) == ["done"]
    assert named_tasks.search(tenant, q=named_tasks.ids["low"]) == []
    assert named_tasks.search(tenant, q=named_tasks.ids["done"], status=TaskStatus.FAILED) == []
    assert search_ids(tenant, q=str(uuid.uuid4())) == []


def test_ended_task_is_returned_with_its_data(tenant: TenantSnapshot, named_tasks: TasksOfEveryKind) -> None:
    [done] = tenant_search.page(tenant, TaskQuery(q="Jansen")).tasks
    assert (done.status, done.location, done.spec.payload, done.worker) == (
        TaskStatus.COMPLETED, Location.NONE, '{"customer":"Jansen"}', "host-7",
    )  # fmt: skip
    assert done.spec.tenant == tenant.slug
    [dead] = tenant_search.page(tenant, TaskQuery(status=TaskStatus.FAILED, command="mail.v-2")).tasks
    assert (dead.location, dead.error) == (Location.DLQ_SET, "no route to printer")


@pytest.mark.spec("TEN-3", "No search finds another tenant's task, regardless of its conditions")
def test_search_does_not_find_another_tenants_tasks(
    tenant: TenantSnapshot, other_tenant: TenantSnapshot, named_tasks: TasksOfEveryKind
) -> None:
    assert list(read_pages(other_tenant)) == [[]]
    for status in TaskStatus:
        assert search_ids(other_tenant, status=status) == []
    for q in ("printer", "host-7", "host-9", "order 17", *named_tasks.ids.values()):
        assert search_ids(other_tenant, q=q) == []
    assert search_ids(other_tenant, command="render") == []
    # A cursor gives no access: the tenant is always the caller's.
    cursor = tenant_search.page(tenant, TaskQuery(), limit=1).cursor
    assert tenant_search.page(other_tenant, TaskQuery(), cursor=cursor).tasks == []


def test_each_live_task_is_on_one_page(tenant: TenantSnapshot, queue: Queue) -> None:
    tasks = queue.enqueue_many(60)
    tasks += queue.enqueue_many(25, priority=5, delay_ms=1_000_000)
    held = {task.id for task in queue.try_claim(count=10).tasks}
    seen = search_ids(tenant, limit=7)
    assert sorted(seen) == sorted(task.id for task in tasks)
    assert set(seen[:10]) == held


@pytest.mark.spec("ADM-3", "Pages of live tasks continue at their position while tasks arrive and end")
def test_arriving_and_claimed_tasks_do_not_shift_the_next_page(tenant: TenantSnapshot, queue: Queue) -> None:
    tasks = queue.enqueue_many(20)
    newest_first = [task.id for task in reversed(tasks)]
    seen, cursor = [], None
    while len(seen) < 12:
        page = tenant_search.page(tenant, TaskQuery(status=TaskStatus.PENDING), cursor=cursor, limit=3)
        seen += [task.id for task in page.tasks]
        cursor = page.cursor
        queue.enqueue_many(4)  # new tasks are listed first
        queue.claim()  # the oldest task is claimed
    assert seen == newest_first[:12]


def test_next_page_of_delayed_tasks_does_not_need_the_task_of_its_cursor(tenant: TenantSnapshot, queue: Queue) -> None:
    tasks = [queue.enqueue(delay_ms=1_000_000 + 1000 * number) for number in range(9)]
    page = tenant_search.page(tenant, TaskQuery(status=TaskStatus.PENDING), limit=4)
    assert [task.id for task in page.tasks] == [task.id for task in tasks[:4]]
    services.cancel(tenant, tasks[3].id).run_sync()
    services.cancel(tenant, tasks[1].id).run_sync()
    rest = tenant_search.page(tenant, TaskQuery(status=TaskStatus.PENDING), cursor=page.cursor, limit=50)
    assert [task.id for task in rest.tasks] == [task.id for task in tasks[4:]]


def test_ghosts_and_lost_records_are_not_listed(tenant: TenantSnapshot, queue: Queue) -> None:
    tasks = queue.enqueue_many(5)
    services.cancel(tenant, tasks[1].id).run_sync()
    services.purge(tenant, [tasks[1].id]).run_sync()
    services.cancel(tenant, tasks[3].id).run_sync()
    assert search_ids(tenant, status=TaskStatus.PENDING) == [tasks[4].id, tasks[2].id, tasks[0].id]


def test_page_reads_a_limited_number_of_queues(tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_search, "MAX_QUEUES", 4)
    monkeypatch.setattr(tenant_search, "QUEUES_PER_CALL", 2)
    tasks = [Queue(tenant, f"q{number:02}").enqueue() for number in range(0, 15, 5)]
    for number in range(15):
        services.pause(tenant, f"q{number:02}").run_sync()
    sizes = [len(page) for page in read_pages(tenant, limit=50)]
    assert search_ids(tenant, limit=50) == [task.id for task in tasks]
    assert sizes == [1, 1, 1, 0]


@pytest.mark.spec("ADM-3", "The work for a page of a search is limited: the page ends early, with a cursor to continue")
def test_page_scans_a_limited_number_of_live_tasks(
    tenant: TenantSnapshot, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_search, "MAX_IDS", 10)
    monkeypatch.setattr(tenant_search, "IDS_PER_CALL", 5)
    queue.enqueue_many(40)
    held = [queue.claim(f"worker-{number}") for number in range(35)]
    pages = list(read_pages(tenant, q="worker-34"))
    assert [task.id for page in pages for task in page] == [held[34].id]
    assert len(pages) >= 4


def test_page_calls_redis_a_limited_number_of_times(tenant: TenantSnapshot, queue: Queue) -> None:
    queue.enqueue_many(300)
    tenant_search.page(tenant, TaskQuery())
    client().config_resetstat()
    assert len(tenant_search.page(tenant, TaskQuery(), limit=50).tasks) == 50
    calls = client().info("commandstats")
    assert calls["cmdstat_evalsha"]["calls"] <= 50 + 5
    assert "cmdstat_keys" not in calls


INDEXED_SEARCHES: list[tuple[dict[str, Any], str]] = [
    ({"status": TaskStatus.COMPLETED}, "audited_tenant_ended"),
    ({"command": "rare", "status": TaskStatus.COMPLETED}, "audited_command_ended"),
    ({"status": TaskStatus.FAILED}, "audited_not_completed"),
    ({"command": "rare", "status": TaskStatus.FAILED}, "audited_not_completed"),
    ({"status": TaskStatus.COMPLETED, "q": "needle"}, "audited_words"),
]


@pytest.mark.spec("ADM-3", "An index answers searches of ended tasks")
def test_ended_tasks_are_found_by_an_index(tenant: TenantSnapshot, subtests: pytest.Subtests) -> None:
    # Rows that earlier tests deleted would still take up pages, which the planner counts.
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE queues_auditedresult")
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
    for conditions, index in INDEXED_SEARCHES:
        with subtests.test(conditions=conditions):
            query_plan = explain_queries(partial(tenant_search.page, tenant, TaskQuery(**conditions)))
            assert f"{index} " in query_plan
            assert "Seq Scan on queues_auditedresult" not in query_plan


def test_common_words_are_found_by_a_scan_and_rare_ones_by_index(
    tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagination, "MAX_WORD_MATCHES", 20)
    monkeypatch.setattr(pagination, "SCAN_LIMIT", 30)
    monkeypatch.setattr(pagination, "WINDOW", 10)
    queue = Queue(tenant, "render")
    expected = []
    for number in range(40):
        task = queue.enqueue(f'"common {"rare" if number % 20 == 0 else "x"}"')
        queue.complete(queue.claim())
        expected.append(task.id)
    periodic_tasks.run_drain(lambda: True)
    assert search_ids(tenant, q="common", limit=9) == expected[::-1]
    assert list(read_pages(tenant, q="rare"))[-1][-1].id == expected[0]
    assert search_ids(tenant, q="rare") == [expected[20], expected[0]]


@pytest.mark.parametrize(
    "cursor",
    [
        "nonsense", "render:nowhere:0:", "a b:delayed:0:", "render:ready:10:0:", "render:delayed:-1:", "ended:x",
        "ended:1-1", "render:delayed:" + "9" * 17 + ":", "render:delayed:0:" + "g" * 36, "", "render:delayed:0:\n",
    ],
)  # fmt: skip
def test_invalid_cursor_is_refused(tenant: TenantSnapshot, cursor: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="cursor"):
        tenant_search.page(tenant, TaskQuery(), cursor=cursor)


def test_forged_cursor_finds_only_the_tenants_tasks(tenant: TenantSnapshot, queue: Queue) -> None:
    task = queue.enqueue()
    for cursor in ("render:ready:0:9999999999999999:" + "a" * 36, "zzz:delayed:5:", "render:inprog:0:" + "-" * 36):
        page = tenant_search.page(tenant, TaskQuery(status=TaskStatus.PENDING), cursor=cursor)
        assert {listed.id for listed in page.tasks} <= {task.id}


@pytest.mark.parametrize("command", ["", "a b", "x" * 129, "a\n"])
def test_invalid_command_is_refused(tenant: TenantSnapshot, command: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="command"):
        tenant_search.page(tenant, TaskQuery(command=command))


def test_task_that_the_drain_has_not_stored_is_found_by_its_id(tenant: TenantSnapshot, queue: Queue) -> None:
    task = queue.enqueue()
    queue.complete(queue.claim())
    [ended] = tenant_search.page(tenant, TaskQuery(q=task.id)).tasks
    assert ended.status is TaskStatus.COMPLETED
    with pytest.raises(errors.TaskNotFound):
        audit_reader.audited_task(tenant, task.id)


def test_scan_of_an_unknown_queue_is_empty(tenant: TenantSnapshot) -> None:
    assert queries.scan(engine(), tenant.tid, "never", "delayed").run_sync() == []
    assert queries.list_queues(engine(), tenant.tid).run_sync() == []


@pytest.mark.spec("ADM-3", "A search of all tenants reports that a limit left out live tasks of one tenant")
@pytest.mark.parametrize(("count", "is_cut"), [(3, False), (4, True)])
def test_search_reports_that_a_limit_left_out_tasks(
    queue: Queue, count: int, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagination, "PAGE", 3)
    queue.enqueue_many(count)
    queue.try_claim("host-7", count=count)
    tids = [queue.tenant.tid]
    page = platform_search.page(tids, tids, TaskQuery(q="host-7"), limit=10)
    assert (len(page.results), page.is_cut) == (3, is_cut)
