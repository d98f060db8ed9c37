"""The console's pages: overview, tasks, dead letters, bulk jobs, search, users and the log."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.admin.models import CHANGE, LogEntry
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from codeq_site.beat_schedule import PERIODIC_TASKS
from console import deadletters, overview, search
from console.templatetags.console_filters import ago, duration, spark_line
from core import errors
from core.admin.text import error_summary
from queues import health_checks, policies, selectors, services
from queues.current_engine import engine
from queues.deadletters import bulk_jobs, bulk_runner
from queues.deadletters.queries import Filter
from queues.domain import TaskStatus
from queues.models import AuditedResult, BulkJob
from queues.policies import Policy
from queues.search import platform_search
from queues.stats.sampler import sample
from tenants.models import Tenant
from tests.console.work import Login, create_dead_letters, create_queue, drain_events
from tests.factories import (
    PeriodicTaskRunFactory,
    QuarantineFactory,
    QueueSampleFactory,
    TenantFactory,
    TenantIssuerFactory,
    UserFactory,
)
from tests.fixtures.queues import Queue

pytestmark = pytest.mark.django_db
NOW = datetime(2026, 10, 1, 12, tzinfo=UTC)


@pytest.fixture
def root(login: Login) -> Client:
    return login("root")


def url(name: str) -> str:
    return reverse(f"console:{name}")


def post(client: Client, name: str, **form: Any) -> str:
    """Submit an action with a reason, and return the page's messages."""
    response = client.post(url(name), {"reason": "because", **form}, follow=True)
    assert response.status_code == 200
    return " ".join(str(message) for message in response.context["messages"])


def get_task_page(client: Client, queue: Queue, task_id: str) -> str:
    response = client.get(url("task"), {"tenant": queue.tenant.tid, "id": task_id})
    assert response.status_code == 200
    return response.content.decode()


# --- overview ---


@pytest.mark.spec("ADM-3", "The overview has live depths, and rates of the last minutes")
def test_the_overview_has_depths_and_rates(root: Client, acme: Queue) -> None:
    create_dead_letters(acme)
    acme.enqueue_many(4)
    acme.enqueue(delay_ms=60_000)
    acme.claim()
    tid = acme.tenant.tid
    at = datetime.now(UTC).replace(second=0, microsecond=0)
    QueueSampleFactory(tenant_id=tid, at=at, ready=7, arrived=600, completed=300, died=100)
    data = root.get(url("overview-data"), {"rates": "1"}).json()
    [row] = data["queues"]
    assert (row["ready"], row["delayed"], row["in_progress"], row["dead"]) == (3, 1, 1, 1)
    assert row["tenant"] == "acme"
    assert 0 <= row["oldest_seconds"] < 60
    arrivals, endings, failures, ready = data["rates"][f"{tid}:render"]
    assert (arrivals, round(endings, 3), failures) == (2.0, 1.333, 0.25)
    assert (len(ready), ready[-1]) == (60, 7)
    assert root.get(url("overview-data")).json()["rates"] is None


def test_with_many_tenants_the_busiest_are_shown(
    root: Client, acme: Queue, zeta: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "MAX_TENANTS", 1)
    acme.enqueue()
    zeta.enqueue_many(5)
    sample(lambda: True, datetime.now(UTC))
    data = root.get(url("overview-data")).json()
    assert data["is_partial"]
    assert [row["tenant"] for row in data["queues"]] == [zeta.tenant.slug]
    filtered = root.get(url("overview-data"), {"tenant": "acm"}).json()
    assert ([row["tenant"] for row in filtered["queues"]], filtered["is_partial"]) == (["acme"], False)


def test_only_superusers_see_the_memory_check(root: Client, login: Login, acme: Queue) -> None:
    assert "Memory" in [check["name"] for check in root.get(url("overview-data")).json()["checks"]]
    checks = login("admin").get(url("overview-data")).json()["checks"]
    assert [check["name"] for check in checks] == ["Beat", "Audit", "Deliveries", "Durability"]


def test_a_check_links_only_to_pages_that_the_user_may_open(root: Client, login: Login, acme: Queue) -> None:
    QuarantineFactory()
    checks = {check["name"]: check for check in root.get(url("overview-data")).json()["checks"]}
    assert (checks["Quarantine"]["is_well"], checks["Quarantine"]["message"]) == (False, "1 could not be stored")
    for client, names in ((root, {"Beat", "Audit", "Quarantine", "Deliveries"}), (login("viewer"), {"Deliveries"})):
        links = {
            check["name"]: check["url"] for check in client.get(url("overview-data")).json()["checks"] if check["url"]
        }
        assert set(links) == names
        assert {client.get(path).status_code for path in links.values()} == {200}


def create_periodic_task_run(name: str, ended_at: datetime, **fields: Any) -> None:
    _, every = PERIODIC_TASKS[name]
    PeriodicTaskRunFactory(name=name, every_seconds=every, ended_at=ended_at, **fields)


def test_beat_is_healthy_while_periodic_tasks_run_on_time() -> None:
    assert not health_checks.beat(NOW).is_well
    create_periodic_task_run("drain", NOW - timedelta(seconds=25))
    create_periodic_task_run("cleanup", NOW - timedelta(seconds=170))
    assert health_checks.beat(NOW).is_well
    assert health_checks.beat(NOW + timedelta(seconds=6)).message == "late: drain"
    assert health_checks.beat(NOW + timedelta(seconds=60)).message == "late: cleanup, drain"


def test_beat_is_unhealthy_while_a_periodic_task_fails() -> None:
    create_periodic_task_run("drain", NOW, failed_at=NOW, failures=1)
    assert health_checks.beat(NOW).message == "failing: drain"


def test_the_audit_check_reports_the_lag(acme: Queue) -> None:
    drain_events()
    assert health_checks.audit().message == "up to date"
    acme.enqueue_many(3)
    for _ in range(3):
        acme.complete(acme.claim())
    assert health_checks.audit().message == "3 entries behind"
    drain_events()
    assert health_checks.audit().message == "up to date"


def test_durability_is_unhealthy_without_persistence() -> None:
    """The tests' Valkey writes nothing to disk."""
    assert [(check.name, check.is_well) for check in health_checks.redis_servers()] == [
        ("Memory", True),
        ("Durability", False),
    ]


@pytest.mark.parametrize("name", ["overview", "overview-data", "queue", "queue-data", "task"])
def test_without_redis_a_page_is_a_503(root: Client, acme: Queue, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(commands: object) -> None:
        raise errors.Unavailable(retry_after_seconds=1)

    task = acme.enqueue()
    query = {} if "overview" in name else {"tenant": acme.tenant.tid, "command": "render", "id": task.id}
    monkeypatch.setattr(engine().runner, "run_sync", refuse)
    assert root.get(url(name), query).status_code == 503


# --- tasks ---


@pytest.mark.spec("ADM-2", "Text from producers and workers is escaped, and numbers keep all digits")
def test_text_from_users_is_escaped(root: Client, acme: Queue) -> None:
    evil = "<script>alert(1)</script>"
    [task_id] = create_dead_letters(
        acme, payload=json.dumps({"a": evil})[:-1] + ', "n": 1.10, "big": 12345678901234567890}', error=evil
    )
    text = get_task_page(root, acme, task_id)
    assert evil not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "1.10" in text
    assert "12345678901234567890" in text
    for name in ("dead", "dead-list", "bulk-new"):
        query = {"tenant": acme.tenant.tid, "command": "render"}
        assert evil not in root.get(url(name), query).content.decode()


def test_an_artifact_links_only_to_http_urls(root: Client, acme: Queue) -> None:
    task = acme.enqueue()
    acme.claim()
    named = [{"name": "bad", "url": "javascript:alert(1)"}, {"name": "good", "url": "https://files.example.com/a"}]
    acme.complete(task, artifacts=json.dumps(named).encode())
    text = get_task_page(root, acme, task.id)
    assert "javascript:" not in text
    assert 'href="https://files.example.com/a" rel="noreferrer noopener"' in text


@pytest.mark.spec("RET-4", "A dead letter's payload and attempts can be inspected, and it can be replayed")
def test_a_dead_letter_is_inspected_and_replayed(root: Client, acme: Queue) -> None:
    task = acme.enqueue('{"x":1}', max_attempts=2, priority=4)
    for reason in ("first", "second"):
        services.nack(acme.tenant, acme.claim().id, "w1", reason=reason, delay_seconds=0).run_sync()
    drain_events()
    context = root.get(url("task"), {"tenant": acme.tenant.tid, "id": task.id}).context
    displayed, rows = context["task"], [attempt["row"] for attempt in context["attempts"]]
    assert (json.loads(displayed.payload), displayed.error, displayed.attempts, displayed.priority) == (
        {"x": 1},
        "second",
        2,
        4,
    )
    assert [(row.number, row.outcome, row.error) for row in rows] == [(1, "NACKED", "first"), (2, "NACKED", "second")]
    assert context["may_replay"]
    assert "Task replayed." in post(root, "task-replay", tenant=acme.tenant.tid, id=task.id)
    assert acme.claim().id == task.id


@pytest.mark.spec("ADM-3", "A task that is no longer in Redis is shown from the audit")
def test_a_removed_task_is_shown_from_the_audit(root: Client, acme: Queue) -> None:
    task = acme.enqueue('{"kept":"from the archive"}')
    acme.complete(acme.claim())
    drain_events()
    services.purge(acme.tenant, [task.id]).run_sync()
    text = get_task_page(root, acme, task.id)
    assert "This page shows its copy in the audit." in text
    assert "from the archive" in text
    assert "COMPLETED" in text


@pytest.mark.parametrize("task_id", ["", "no-id", "01a1edc6-12fd-73ac-9eba-b0c00132dda0", "\x00"])
def test_an_unknown_task_id_is_not_found(root: Client, acme: Queue, task_id: str) -> None:
    assert root.get(url("task"), {"tenant": acme.tenant.tid, "id": task_id}).status_code == 404


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ("{", "not JSON"),
        ("null", "got `null`"),
        ("[" * 101 + "]" * 101, "Nested deeper"),
        ('"' + "x" * 300_000 + '"', "the limit of this tenant"),
    ],
    ids=["no JSON", "null", "too deep", "too long"],
)
def test_an_invalid_payload_is_rejected(root: Client, acme: Queue, payload: str, message: str) -> None:
    [task_id] = create_dead_letters(acme)
    assert message in post(root, "task-replay", tenant=acme.tenant.tid, id=task_id, payload=payload)
    assert selectors.task(acme.tenant, task_id).run_sync().status is TaskStatus.FAILED
    assert not LogEntry.objects.exists()


def test_a_replayed_task_is_not_replayed_again(root: Client, acme: Queue) -> None:
    [task_id] = create_dead_letters(acme)
    assert "Task replayed." in post(root, "task-replay", tenant=acme.tenant.tid, id=task_id)
    assert "Nothing was changed" in post(root, "task-replay", tenant=acme.tenant.tid, id=task_id)
    assert LogEntry.objects.count() == 1


# --- dead letters ---


@pytest.mark.spec("ADM-2", "Dead letters are grouped by failure")
def test_failures_are_grouped_regardless_of_numbers(root: Client, acme: Queue) -> None:
    create_dead_letters(acme, 2, error="order 17 is no more")
    create_dead_letters(acme, 3, error="order 4711 is no more")
    create_dead_letters(acme, 1, error="no disk")
    groups = root.get(url("dead")).context["rows"]
    assert [(row["name"], row["group"].count) for row in groups] == [("order <n> is no more", 5), ("no disk", 1)]
    listed = root.get(groups[0]["url"])
    assert len(listed.context["rows"]) == 5


@pytest.mark.spec("ADM-2", "Dead letters are filtered by text, age, attempts and a JSON path in the payload")
def test_dead_letters_are_filtered(root: Client, acme: Queue) -> None:
    [old] = create_dead_letters(acme, payload='{"customer":{"id":42}}', error="no disk")
    [new] = create_dead_letters(acme, payload='{"customer":{"id":43}}', error="no paper")
    AuditedResult.objects.filter(pk=old).update(ended_at=datetime.now(UTC) - timedelta(days=3))

    def list_ids(**query: str) -> list[str]:
        return [row["letter"].id for row in root.get(url("dead-list"), query).context["rows"]]

    assert list_ids() == [new, old]
    assert list_ids(jsonPath="$.customer.id == 42") == [old]
    assert list_ids(text="paper") == [new]
    assert list_ids(age="day") == [new]
    assert list_ids(age="older") == [old]
    assert list_ids(deliveriesFrom="2") == []
    assert list_ids(command="other") == []


@pytest.mark.parametrize(
    "query", [{"jsonPath": "$.["}, {"deliveriesFrom": "many"}, {"cursor": "?"}, {"failure": "x"}], ids=str
)
def test_an_invalid_filter_is_reported(root: Client, acme: Queue, query: dict[str, str]) -> None:
    create_dead_letters(acme)
    response = root.get(url("dead-list"), query)
    assert response.status_code == 200
    assert response.context["problem"]
    assert response.context["rows"] == []
    is_bad_request = query.keys() & {"deliveriesFrom", "failure"}
    assert root.get(url("dead"), query).status_code == (400 if is_bad_request else 200)
    if is_bad_request:
        assert root.get(url("dead-export"), query).status_code == 400


def test_an_error_names_the_field_as_the_page_does(root: Client, acme: Queue) -> None:
    for name, query, label in (
        ("dead-list", {"jsonPath": "$.["}, "JSON path: "),
        ("tasks", {"command": "a b"}, "Queue: "),
    ):
        assert root.get(url(name), query).context["problem"].startswith(label)


@pytest.mark.parametrize("kind", ["replay", "delete"])
def test_a_dry_run_without_a_match_has_no_form(root: Client, acme: Queue, kind: str) -> None:
    query = {"tenant": acme.tenant.tid, "kind": kind, "command": "render", "age": "day", "deliveriesFrom": "2"}
    text = root.get(url("bulk-new"), query).content.decode()
    assert "Filter: queue render, min. attempts 2, last failure in the last day." in text
    assert "Back to the list" in text
    assert url("bulk-start") not in text


@pytest.mark.spec("ADM-2", "Dead letters are exported as CSV and as JSON Lines")
def test_exports_have_all_matching_dead_letters(root: Client, acme: Queue) -> None:
    ids = create_dead_letters(acme, 3, payload='{"n":1.10}', error="=cmd()|' /C calc'!A1")
    create_dead_letters(acme, error="another")
    query = {"error": "calc"}
    rows = list(
        csv.DictReader(io.StringIO(root.get(url("dead-export"), {**query, "format": "csv"}).getvalue().decode()))
    )
    assert {row["id"] for row in rows} == set(ids)
    assert {row["error"][0] for row in rows} == {"'"}  # a spreadsheet must not evaluate it as a formula
    response = root.get(url("dead-export"), {**query, "format": "jsonl"})
    assert response["Content-Disposition"] == 'attachment; filename="dead-letters.jsonl"'
    lines = [json.loads(line) for line in response.getvalue().decode().splitlines()]
    assert {line["id"] for line in lines} == set(ids)
    assert lines[0]["payload"] == '{"n":1.10}'


def test_replaying_selected_dead_letters_reports_the_outcomes(root: Client, acme: Queue) -> None:
    ids = create_dead_letters(acme, 3)
    keys = [f"{acme.tenant.tid}:{task_id}" for task_id in ids]
    services.replay(acme.tenant, ids[:1]).run_sync()
    message = post(root, "dead-replay", ids=keys)
    assert message.startswith("2 replayed, 1 skipped: ")


@pytest.mark.parametrize("before", ["2026-01-01T00:00:00%2B19:52", "0001-01-01T00:00:00%2B23:59", "2026-01-01"])
def test_bulk_jobs_before_any_timestamp(root: Client, before: str) -> None:
    assert root.get(f"{url('bulk')}?before={before}").status_code == 200


# --- bulk jobs ---


@pytest.mark.spec("ADM-2", "A bulk job starts with the requested rate and canaries")
def test_a_job_has_the_requested_rate_and_canaries(root: Client, acme: Queue) -> None:
    create_dead_letters(acme, 2)
    form = {"tenant": acme.tenant.tid, "command": "render", "kind": "replay"}
    root.post(url("bulk-start"), {**form, "reason": "go", "rate": "7", "canary": "2", "percent": "0", "seconds": "5"})
    job = BulkJob.objects.get()
    assert (job.rate_per_second, job.canary, job.canary_percent, job.canary_seconds) == (7, 2, 0, 5)
    assert (job.actor, job.reason, job.tenant_id) == ("staff-root", "go", acme.tenant.tid)
    assert job.filter == '{"command":"render"}'


@pytest.mark.parametrize(
    "invalid",
    [{"rate": "fast"}, {"rate": "0"}, {"canary": "-1"}, {"kind": "burn"}, {"percent": "101", "canary": "1"}],
    ids=str,
)
def test_an_invalid_job_is_not_started(root: Client, acme: Queue, invalid: dict[str, str]) -> None:
    create_dead_letters(acme)
    message = post(root, "bulk-start", **{"tenant": acme.tenant.tid, "kind": "replay", **invalid})
    assert "The bulk job was not started" in message
    assert not BulkJob.objects.exists()
    assert not LogEntry.objects.exists()


@pytest.mark.spec("ADM-2", "An operator can undo a bulk replay within a day, with a reason")
def test_a_replay_is_undone_from_its_page(root: Client, acme: Queue) -> None:
    create_dead_letters(acme, 3)
    form = {"tenant": acme.tenant.tid, "command": "render", "kind": "replay"}
    root.post(url("bulk-start"), {**form, "reason": "go"})
    job = BulkJob.objects.get()
    assert not root.get(url("bulk-job-data"), {"id": job.pk}).json()["can_undo"]
    bulk_runner.run(lambda: True)
    drain_events()
    assert root.get(url("bulk-job-data"), {"id": job.pk}).json()["can_undo"]
    acme.claim()
    response = root.post(url("bulk-recall"), {"tenant": acme.tenant.tid, "id": job.pk, "reason": "too early"})
    undo = BulkJob.objects.get(kind="recall")
    assert response["Location"].endswith(f"?id={undo.pk}")
    bulk_runner.run(lambda: True)
    text = root.get(url("bulk-job"), {"id": undo.pk}).content.decode()
    assert "Undo of a replay" in text
    assert "A worker has claimed the task since" in text
    assert (selectors.queue_stats(acme.tenant, "render").run_sync().dlq, undo.recalls_id) == (2, job.pk)
    # A complete undo cannot be repeated.
    assert not root.get(url("bulk-job-data"), {"id": job.pk}).json()["can_undo"]
    assert f"?id={undo.pk}" in root.get(url("bulk-job"), {"id": job.pk}).content.decode()


def test_a_replay_cannot_be_undone_after_a_day(root: Client, acme: Queue) -> None:
    create_dead_letters(acme)
    job = bulk_jobs.start(acme.tenant, "replay", Filter(), actor="x")
    bulk_runner.run(lambda: True)
    BulkJob.objects.update(ended_at=datetime.now(UTC) - bulk_jobs.UNDO_PERIOD)
    assert not root.get(url("bulk-job-data"), {"id": job.pk}).json()["can_undo"]
    assert "more than 24 hours" in post(root, "bulk-recall", tenant=acme.tenant.tid, id=job.pk)
    assert not LogEntry.objects.exists()


def test_a_failed_job_shows_its_error(root: Client, acme: Queue) -> None:
    create_dead_letters(acme)
    job = bulk_jobs.start(acme.tenant, "replay", Filter(), actor="x")
    BulkJob.objects.update(state="failed", error="This takes too long to find.", ended_at=datetime.now(UTC))
    assert "This takes too long to find." in root.get(url("bulk")).content.decode()
    assert root.get(url("bulk-job-data"), {"id": job.pk}).json()["error"] == "This takes too long to find."


def test_a_job_needs_one_tenant(root: Client, acme: Queue, zeta: Queue) -> None:
    response = root.get(url("bulk-new"), follow=True)
    assert "Select a tenant first" in response.content.decode()


# --- search ---


def test_a_search_covers_a_limited_number_of_tenants(
    root: Client, acme: Queue, zeta: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, other_task = acme.enqueue(idempotency_key="k-1"), zeta.enqueue(idempotency_key="k-1")
    rows = root.get(url("tasks"), {"q": "k-1"}).context["tasks"]
    assert {row.task.id for row in rows} == {task.id, other_task.id}
    with monkeypatch.context() as patch:
        patch.setattr(platform_search, "MAX_TENANTS", 1)
        response = root.get(url("tasks"), {"q": "k-1"})
    assert [row.task.id for row in response.context["tasks"]] == [task.id]
    assert "the first 1 of your tenants" in response.content.decode()
    assert "Some live tasks were left out. Select a tenant" in response.content.decode()
    monkeypatch.setattr(search, "MAX_SAMPLED_TENANTS", 1)
    response = root.get(url("tasks"), {"status": "PENDING"})
    assert [row.task.id for row in response.context["tasks"]] == [task.id]
    assert "Showing the first 50 tasks of each of the first 1 of your 2 tenants" in response.content.decode()
    assert root.get(url("tasks"), {"q": other_task.id})["Location"].endswith(other_task.id)


@pytest.mark.spec("ADM-3", "A search without a tenant covers all tenants that the user sees")
def test_a_search_without_a_tenant_covers_all(root: Client, acme: Queue, login: Login) -> None:
    others = [create_queue(f"many-{number:02}", "send") for number in range(30)]
    last = others[-1]
    ended = last.enqueue('{"customer":"wintermute"}')
    last.complete(last.claim("host-1"), "host-1")
    drain_events()
    held = last.enqueue(idempotency_key="order-4711")
    last.claim("host-7")

    viewer = login("viewer")

    def search_tasks(client: Client, **query: str) -> list[tuple[str, str]]:
        response = client.get(url("tasks"), query)
        assert not response.context["problem"]
        return [(row.slug, row.task.id) for row in response.context["tasks"]]

    for term, task in (("order-4711", held), ("host-7", held), ("wintermute", ended), ("host-1", ended)):
        assert search_tasks(root, q=term) == [("many-29", task.id)], term
        assert search_tasks(root, q=term, status=str(TaskStatus.FAILED)) == []
        assert search_tasks(viewer, q=term) == []


def test_the_queries_of_a_search_do_not_grow_with_the_tenants(root: Client, acme: Queue) -> None:
    def count_queries() -> int:
        with CaptureQueriesContext(connection) as queries:
            assert root.get(url("tasks"), {"q": "nobody"}).status_code == 200
        return len(queries)

    create_queue("one", "send")
    count_queries()
    with_two_tenants = count_queries()
    Tenant.objects.bulk_create(TenantFactory.build_batch(198))
    assert count_queries() == with_two_tenants


def test_with_many_tenants_one_is_selected_by_name(
    root: Client, acme: Queue, zeta: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadletters, "MAX_LISTED_TENANTS", 1)
    [task_id], _ = create_dead_letters(zeta), create_dead_letters(acme)
    page = root.get(url("dead-list"), {"tenant": zeta.tenant.slug})
    assert [row["letter"].id for row in page.context["rows"]] == [task_id]
    assert f'name="tenant" value="{zeta.tenant.slug}"' in page.content.decode()
    assert root.get(url("dead-list"), {"tenant": "nobody"}).status_code == 404


@pytest.mark.parametrize(
    "query", [{"status": "SLEEPING"}, {"q": "x", "command": "a b"}, {"cursor": "?", "q": "x"}], ids=str
)
def test_an_invalid_search_is_reported(root: Client, acme: Queue, query: dict[str, str]) -> None:
    response = root.get(url("tasks"), query)
    assert response.status_code == 200
    assert response.context["problem"]


# --- users and the log ---


@pytest.mark.spec("ADM-4", "Staff of a tenant see the log of actions on it, with reasons")
def test_staff_see_the_log_of_their_tenants(login: Login, acme: Queue, zeta: Queue) -> None:
    root = login("root")
    post(root, "queue-pause", tenant=acme.tenant.tid, command="render", reason="the printer burns")
    post(root, "queue-pause", tenant=zeta.tenant.tid, command="send", reason="kanarie")
    list_url = reverse("admin:admin_logentry_changelist")
    text = login("viewer").get(list_url).content.decode()
    assert "Paused queue render: the printer burns" in text
    assert "kanarie" not in text
    assert "kanarie" in root.get(list_url).content.decode()
    assert login(None).get(list_url).status_code == 403
    entry = LogEntry.objects.latest("pk")
    assert root.post(reverse("admin:admin_logentry_delete", args=[entry.pk]), {"post": "yes"}).status_code == 403


def test_staff_see_the_log_of_their_tenants_issuers(login: Login, acme: Queue, zeta: Queue) -> None:
    root = UserFactory()
    for queue, issuer in ((acme, "https://mine.example.com"), (zeta, "https://kanarie.example.com")):
        row = TenantIssuerFactory(tenant_id=queue.tenant.tid, issuer=issuer)
        LogEntry.objects.log_actions(root.pk, [row], CHANGE, f"Changed keys of {issuer}", single_object=True)
    list_url = reverse("admin:admin_logentry_changelist")
    text = login("viewer").get(list_url).content.decode()
    assert "Changed keys of https://mine.example.com" in text
    assert "Operator actions" in text  # the title of the table, as in the sidebar
    assert "Log entries" not in text
    assert "kanarie" not in text
    assert "kanarie" in login("root").get(list_url).content.decode()


def test_only_superusers_see_users_and_cannot_delete_them(login: Login, acme: Queue) -> None:
    root, staff, person = login("root"), login("admin"), UserFactory(is_staff=False)
    list_url = reverse("admin:auth_user_changelist")
    text = root.get(list_url).content.decode()
    assert "all tenants" in text
    assert "1 tenant" in text
    assert staff.get(list_url).status_code == 403
    assert root.get(reverse("admin:auth_user_change", args=[person.pk])).status_code == 200
    assert root.post(reverse("admin:auth_user_delete", args=[person.pk]), {"post": "yes"}).status_code == 403


@pytest.mark.spec("ADM-1", "The list of policies shows the user's tenants and links to the queues")
def test_policies_are_listed(login: Login, acme: Queue, zeta: Queue) -> None:
    policies.put(acme.tenant, "render", Policy(max_consumers=3, priority_tiers=(0, 5)), actor="x")
    policies.put(zeta.tenant, "kanarie.send", Policy(max_consumers=4), actor="x")
    list_url = reverse("admin:queues_queuepolicy_changelist")
    text = login("viewer").get(list_url).content.decode()
    assert "0, 5" in text
    assert f"/admin/console/queue/?tenant={acme.tenant.tid}&amp;command=render" in text
    assert "kanarie" not in text
    assert "kanarie" in login("root").get(list_url).content.decode()


# --- formats ---


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.0121, "12 ms"),
        (3.42, "3.4 s"),
        (300, "5 min"),
        (310, "5 min 10 s"),
        (11_520, "3 h 12 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_durations_have_at_most_two_units(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_times_are_shown_as_ages() -> None:
    now = datetime.now(UTC)
    assert [ago(now - timedelta(seconds=seconds)) for seconds in (5.5, 130, 7300, 90_000)] == [
        "5 s ago", "2 min ago", "2 h ago", "1 d ago",
    ]  # fmt: skip


def test_the_summary_of_a_traceback_is_its_last_line() -> None:
    assert (
        error_summary('Traceback (most recent call last):\n  File "a.py", line 1\nValueError: x\n') == "ValueError: x"
    )
    assert error_summary("two\nlines") == "two\nlines"
    assert error_summary("") == "(no message)"


def test_a_spark_line_stays_within_its_box() -> None:
    assert spark_line([0, 5, 10]) == "M0.0,26.0L60.0,14.0L120.0,2.0"
    assert spark_line([]) == ""
