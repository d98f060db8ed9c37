"""What the pages say: depths and rates, the machinery's health, payloads that cannot do harm, acts that go wrong."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from codeq_site.beat_schedule import PERIODIC_TASKS
from console import deadletters, overview, search
from console.templatetags.console_words import ago, duration, spark_line
from core import errors
from core.admin.text import error_summary
from queues import health_checks, policies, selectors, services
from queues.current_engine import engine
from queues.deadletters import bulk_jobs, bulk_runner
from queues.deadletters.queries import Filter
from queues.domain import Status
from queues.models import AuditedResult, BeatJob, BulkJob, Quarantine, QueueSample
from queues.policies import Policy
from queues.search import platform_search
from queues.stats.sampler import sample
from tenants.models import Tenant, TenantIssuer
from tests.console.conftest import Login, die, drain, make_queue
from tests.fixtures.queues import Queue

pytestmark = pytest.mark.django_db
NOW = datetime(2026, 10, 1, 12, tzinfo=UTC)


@pytest.fixture
def root(login: Login) -> Client:
    return login("root")


def url(name: str) -> str:
    return reverse(f"console:{name}")


def post(client: Client, name: str, **asked: Any) -> str:
    """Act, with a reason; the sentence that the person is told."""
    answer = client.post(url(name), {"reason": "because", **asked}, follow=True)
    assert answer.status_code == 200
    return " ".join(str(message) for message in answer.context["messages"])


def task_page(client: Client, queue: Queue, task_id: str) -> str:
    answer = client.get(url("task"), {"tenant": queue.tenant.tid, "id": task_id})
    assert answer.status_code == 200
    return answer.content.decode()


# -- overview -------------------------------------------------------------------------------------------------------


@pytest.mark.spec("ADM-3", "The overview has the depths as they are now, and rates from the last minutes")
def test_the_overview_has_depths_and_rates(root: Client, acme: Queue) -> None:
    die(acme)
    acme.enqueue_many(4)
    acme.enqueue(delay_ms=60_000)
    acme.claim()
    tid = acme.tenant.tid
    at = datetime.now(UTC).replace(second=0, microsecond=0)
    counts = {"delayed": 0, "in_progress": 0, "dead": 0, "failed": 0, "returned": 0, "cancelled": 0}
    QueueSample.objects.create(
        tenant_id=tid, command="render", at=at, ready=7, arrived=600, completed=300, died=100, **counts
    )  # fmt: skip
    found = root.get(url("overview-data"), {"pulses": "1"}).json()
    [row] = found["rows"]
    assert (row["ready"], row["delayed"], row["in_progress"], row["dead"]) == (3, 1, 1, 1)
    assert row["tenant"] == "acme"
    assert 0 <= row["oldest_seconds"] < 60
    arrivals, endings, failures, ready = found["pulses"][f"{tid}:render"]
    assert (arrivals, round(endings, 3), failures) == (2.0, 1.333, 0.25)
    assert (len(ready), ready[-1]) == (60, 7)
    assert root.get(url("overview-data")).json()["pulses"] is None


def test_of_many_tenants_the_busiest_are_shown(
    root: Client, acme: Queue, zeta: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "TENANTS", 1)
    acme.enqueue()
    zeta.enqueue_many(5)
    sample(lambda: True, datetime.now(UTC))
    found = root.get(url("overview-data")).json()
    assert found["is_partial"]
    assert [row["tenant"] for row in found["rows"]] == [zeta.tenant.slug]
    named = root.get(url("overview-data"), {"tenant": "acm"}).json()
    assert ([row["tenant"] for row in named["rows"]], named["is_partial"]) == (["acme"], False)


def test_only_the_platforms_operators_see_how_full_it_is(root: Client, login: Login, acme: Queue) -> None:
    assert "Memory" in [sign["name"] for sign in root.get(url("overview-data")).json()["signs"]]
    seen = login("admin").get(url("overview-data")).json()["signs"]
    assert [sign["name"] for sign in seen] == ["Beat", "Audit", "Deliveries", "Durability"]


def test_a_sign_leads_to_what_is_behind_it_and_only_where_one_may_go(root: Client, login: Login, acme: Queue) -> None:
    Quarantine.objects.create(partition=1, stream_id="1-1", reason="odd", raw=b"")
    signs = {sign["name"]: sign for sign in root.get(url("overview-data")).json()["signs"]}
    assert (signs["Quarantine"]["is_well"], signs["Quarantine"]["says"]) == (False, "1 could not be stored")
    for client, names in ((root, {"Beat", "Audit", "Quarantine", "Deliveries"}), (login("viewer"), {"Deliveries"})):
        leading = {
            sign["name"]: sign["url"] for sign in client.get(url("overview-data")).json()["signs"] if sign["url"]
        }
        assert set(leading) == names
        assert {client.get(path).status_code for path in leading.values()} == {200}


def job(name: str, ended_at: datetime, **fields: Any) -> None:
    _, every = PERIODIC_TASKS[name]
    BeatJob.objects.create(
        name=name, task=name, every_seconds=every, started_at=ended_at, ended_at=ended_at, **fields
    )  # fmt: skip


def test_beat_is_well_while_its_jobs_come_in_time() -> None:
    assert not health_checks.beat(NOW).is_well
    job("drain", NOW - timedelta(seconds=25))
    job("cleanup", NOW - timedelta(seconds=170))
    assert health_checks.beat(NOW).is_well
    assert health_checks.beat(NOW + timedelta(seconds=6)).says == "late: drain"
    assert health_checks.beat(NOW + timedelta(seconds=60)).says == "late: cleanup, drain"


def test_beat_is_not_well_while_a_job_fails() -> None:
    job("drain", NOW, failed_at=NOW, failures=1)
    assert health_checks.beat(NOW).says == "failing: drain"


def test_the_audit_says_how_far_it_is_behind(acme: Queue) -> None:
    drain()
    assert health_checks.audit().says == "up to date"
    acme.enqueue_many(3)
    for _ in range(3):
        acme.complete(acme.claim())
    assert health_checks.audit().says == "3 entries behind"
    drain()
    assert health_checks.audit().says == "up to date"


def test_durability_is_said_as_it_is() -> None:
    """The tests' Valkey keeps nothing."""
    assert [(sign.name, sign.is_well) for sign in health_checks.store()] == [("Memory", True), ("Durability", False)]


@pytest.mark.parametrize("name", ["overview", "overview-data", "queue", "queue-data", "task"])
def test_without_redis_a_page_says_so(root: Client, acme: Queue, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(commands: object) -> None:
        raise errors.Unavailable(retry_after_seconds=1)

    task = acme.enqueue()
    asked = {} if "overview" in name else {"tenant": acme.tenant.tid, "command": "render", "id": task.id}
    monkeypatch.setattr(engine().runner, "run_sync", refuse)
    assert root.get(url(name), asked).status_code == 503


# -- tasks ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("ADM-2", "What producers and workers wrote is shown as text, to the last digit")
def test_what_others_wrote_is_text(root: Client, acme: Queue) -> None:
    evil = "<script>alert(1)</script>"
    [task_id] = die(
        acme, payload=json.dumps({"a": evil})[:-1] + ', "n": 1.10, "big": 12345678901234567890}', error=evil
    )
    shown = task_page(root, acme, task_id)
    assert evil not in shown
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in shown
    assert "1.10" in shown
    assert "12345678901234567890" in shown
    for name in ("dead", "dead-list", "bulk-new"):
        asked = {"tenant": acme.tenant.tid, "command": "render"}
        assert evil not in root.get(url(name), asked).content.decode()


def test_an_artifact_leads_only_where_a_browser_may_go(root: Client, acme: Queue) -> None:
    task = acme.enqueue()
    acme.claim()
    named = [{"name": "bad", "url": "javascript:alert(1)"}, {"name": "good", "url": "https://files.example.com/a"}]
    acme.complete(task, artifacts=json.dumps(named).encode())
    shown = task_page(root, acme, task.id)
    assert "javascript:" not in shown
    assert 'href="https://files.example.com/a" rel="noreferrer noopener"' in shown


@pytest.mark.spec("RET-4", "A dead letter can be inspected with its payload and its attempts, and replayed")
def test_a_dead_letter_is_inspected_and_replayed(root: Client, acme: Queue) -> None:
    task = acme.enqueue('{"x":1}', max_attempts=2, priority=4)
    for reason in ("first", "second"):
        services.nack(acme.tenant, acme.claim().id, "w1", reason=reason, delay_seconds=0).run_sync()
    drain()
    said = root.get(url("task"), {"tenant": acme.tenant.tid, "id": task.id}).context
    seen, rows = said["task"], [each["row"] for each in said["attempts"]]
    assert (json.loads(seen.payload), seen.error, seen.attempts, seen.priority) == ({"x": 1}, "second", 2, 4)
    assert [(row.number, row.outcome, row.error) for row in rows] == [(1, "NACKED", "first"), (2, "NACKED", "second")]
    assert said["may_replay"]
    assert "in line again" in post(root, "task-replay", tenant=acme.tenant.tid, id=task.id)
    assert acme.claim().id == task.id


@pytest.mark.spec("ADM-3", "A task that Redis has let go is shown from the audit")
def test_a_task_that_is_gone_is_shown_from_the_audit(root: Client, acme: Queue) -> None:
    task = acme.enqueue('{"kept":"in the audit"}')
    acme.complete(acme.claim())
    drain()
    services.purge(acme.tenant, [task.id]).run_sync()
    shown = task_page(root, acme, task.id)
    assert "this is what the audit remembers" in shown
    assert "in the audit" in shown
    assert "COMPLETED" in shown


@pytest.mark.parametrize("task_id", ["", "no-id", "01a1edc6-12fd-73ac-9eba-b0c00132dda0", "\x00"])
def test_what_is_no_task_is_not_found(root: Client, acme: Queue, task_id: str) -> None:
    assert root.get(url("task"), {"tenant": acme.tenant.tid, "id": task_id}).status_code == 404


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        ("{", "not JSON"),
        ("null", "got `null`"),
        ("[" * 101 + "]" * 101, "Nested deeper"),
        ('"' + "x" * 300_000 + '"', "this tenant may send"),
    ],
    ids=["no JSON", "null", "too deep", "too long"],
)
def test_a_payload_that_cannot_be_is_refused_and_nothing_is_done(
    root: Client, acme: Queue, payload: str, says: str
) -> None:
    [task_id] = die(acme)
    assert says in post(root, "task-replay", tenant=acme.tenant.tid, id=task_id, payload=payload)
    assert selectors.task(acme.tenant, task_id).run_sync().status is Status.FAILED
    assert not LogEntry.objects.exists()


def test_what_is_dead_no_more_is_not_replayed(root: Client, acme: Queue) -> None:
    [task_id] = die(acme)
    assert "in line again" in post(root, "task-replay", tenant=acme.tenant.tid, id=task_id)
    assert "Nothing was done" in post(root, "task-replay", tenant=acme.tenant.tid, id=task_id)
    assert LogEntry.objects.count() == 1


# -- dead letters ---------------------------------------------------------------------------------------------------


@pytest.mark.spec("ADM-2", "Dead letters are grouped by what they died of")
def test_failures_are_grouped_without_what_differs(root: Client, acme: Queue) -> None:
    die(acme, 2, error="order 17 is no more")
    die(acme, 3, error="order 4711 is no more")
    die(acme, 1, error="no disk")
    groups = root.get(url("dead")).context["groups"]
    assert [(each["name"], each["group"].count) for each in groups] == [("order <n> is no more", 5), ("no disk", 1)]
    listed = root.get(groups[0]["url"])
    assert len(listed.context["rows"]) == 5


@pytest.mark.spec("ADM-2", "Dead letters are filtered by text, age, attempts and a path into the payload")
def test_dead_letters_are_filtered(root: Client, acme: Queue) -> None:
    [old] = die(acme, payload='{"customer":{"id":42}}', error="no disk")
    [new] = die(acme, payload='{"customer":{"id":43}}', error="no paper")
    AuditedResult.objects.filter(pk=old).update(ended_at=datetime.now(UTC) - timedelta(days=3))

    def listed(**asked: str) -> list[str]:
        return [row["letter"].id for row in root.get(url("dead-list"), asked).context["rows"]]

    assert listed() == [new, old]
    assert listed(jsonPath="$.customer.id == 42") == [old]
    assert listed(text="paper") == [new]
    assert listed(age="day") == [new]
    assert listed(age="older") == [old]
    assert listed(deliveriesFrom="2") == []
    assert listed(command="other") == []


@pytest.mark.parametrize(
    "asked", [{"jsonPath": "$.["}, {"deliveriesFrom": "many"}, {"cursor": "?"}, {"failure": "x"}], ids=str
)
def test_a_filter_that_means_nothing_is_told(root: Client, acme: Queue, asked: dict[str, str]) -> None:
    die(acme)
    answer = root.get(url("dead-list"), asked)
    assert answer.status_code == 200
    assert answer.context["problem"]
    assert answer.context["rows"] == []
    is_wrong = asked.keys() & {"deliveriesFrom", "failure"}
    assert root.get(url("dead"), asked).status_code == (400 if is_wrong else 200)
    if is_wrong:
        assert root.get(url("dead-export"), asked).status_code == 400


@pytest.mark.spec("ADM-2", "Dead letters are exported as CSV and as JSON Lines")
def test_exports_hold_all_that_match(root: Client, acme: Queue) -> None:
    ids = die(acme, 3, payload='{"n":1.10}', error="=cmd()|' /C calc'!A1")
    die(acme, error="another")
    asked = {"error": "calc"}
    rows = list(
        csv.DictReader(io.StringIO(root.get(url("dead-export"), {**asked, "format": "csv"}).getvalue().decode()))
    )
    assert {row["id"] for row in rows} == set(ids)
    assert {row["error"][0] for row in rows} == {"'"}  # no formula for a spreadsheet
    answer = root.get(url("dead-export"), {**asked, "format": "jsonl"})
    assert answer["Content-Disposition"] == 'attachment; filename="dead-letters.jsonl"'
    lines = [json.loads(line) for line in answer.getvalue().decode().splitlines()]
    assert {line["id"] for line in lines} == set(ids)
    assert lines[0]["payload"] == '{"n":1.10}'


def test_the_selected_are_counted_by_what_became_of_them(root: Client, acme: Queue) -> None:
    ids = die(acme, 3)
    keys = [f"{acme.tenant.tid}:{task_id}" for task_id in ids]
    services.replay(acme.tenant, ids[:1]).run_sync()
    said = post(root, "dead-replay", ids=keys)
    assert said.startswith("2 replayed, 1 skipped: ")


@pytest.mark.parametrize("before", ["2026-01-01T00:00:00%2B19:52", "0001-01-01T00:00:00%2B23:59", "2026-01-01"])
def test_older_bulk_jobs_than_any_moment(root: Client, before: str) -> None:
    assert root.get(f"{url('bulk')}?before={before}").status_code == 200


# -- bulk jobs ------------------------------------------------------------------------------------------------------


@pytest.mark.spec("ADM-2", "A bulk job starts with the rate and the canaries that were asked for")
def test_a_job_is_started_as_asked(root: Client, acme: Queue) -> None:
    die(acme, 2)
    asked = {"tenant": acme.tenant.tid, "command": "render", "kind": "replay"}
    root.post(url("bulk-start"), {**asked, "reason": "go", "rate": "7", "canary": "2", "percent": "0", "seconds": "5"})
    job = BulkJob.objects.get()
    assert (job.rate_per_second, job.canary, job.canary_percent, job.canary_seconds) == (7, 2, 0, 5)
    assert (job.actor, job.reason, job.tenant_id) == ("staff-root", "go", acme.tenant.tid)
    assert job.filter == '{"command":"render"}'


@pytest.mark.parametrize(
    "wrong",
    [{"rate": "fast"}, {"rate": "0"}, {"canary": "-1"}, {"kind": "burn"}, {"percent": "101", "canary": "1"}],
    ids=str,
)
def test_a_job_that_cannot_be_is_not_started(root: Client, acme: Queue, wrong: dict[str, str]) -> None:
    die(acme)
    said = post(root, "bulk-start", **{"tenant": acme.tenant.tid, "kind": "replay", **wrong})
    assert "Nothing was started" in said
    assert not BulkJob.objects.exists()
    assert not LogEntry.objects.exists()


@pytest.mark.spec("ADM-2", "What a replay brought back is taken back again, for a day, by an operator who says why")
def test_a_replay_is_undone_from_its_page(root: Client, acme: Queue) -> None:
    die(acme, 3)
    asked = {"tenant": acme.tenant.tid, "command": "render", "kind": "replay"}
    root.post(url("bulk-start"), {**asked, "reason": "go"})
    job = BulkJob.objects.get()
    assert not root.get(url("bulk-job-data"), {"id": job.pk}).json()["may_be_undone"]
    bulk_runner.run(lambda: True)
    drain()
    assert root.get(url("bulk-job-data"), {"id": job.pk}).json()["may_be_undone"]
    acme.claim()
    answer = root.post(url("bulk-recall"), {"tenant": acme.tenant.tid, "id": job.pk, "reason": "too early"})
    undo = BulkJob.objects.get(kind="recall")
    assert answer["Location"].endswith(f"?id={undo.pk}")
    bulk_runner.run(lambda: True)
    shown = root.get(url("bulk-job"), {"id": undo.pk}).content.decode()
    assert "A replay taken back" in shown
    assert "A worker has claimed it since" in shown
    assert (selectors.queue_stats(acme.tenant, "render").run_sync().dlq, undo.recalls_id) == (2, job.pk)
    # Once all of it is taken back there is nothing left to undo.
    assert not root.get(url("bulk-job-data"), {"id": job.pk}).json()["may_be_undone"]
    assert f"?id={undo.pk}" in root.get(url("bulk-job"), {"id": job.pk}).content.decode()


def test_after_a_day_a_replay_is_not_undone(root: Client, acme: Queue) -> None:
    die(acme)
    job = bulk_jobs.start(acme.tenant, "replay", Filter(), actor="x")
    bulk_runner.run(lambda: True)
    BulkJob.objects.update(ended_at=datetime.now(UTC) - bulk_jobs.UNDO_PERIOD)
    assert not root.get(url("bulk-job-data"), {"id": job.pk}).json()["may_be_undone"]
    assert "more than 24 hours" in post(root, "bulk-recall", tenant=acme.tenant.tid, id=job.pk)
    assert not LogEntry.objects.exists()


def test_a_job_that_failed_says_why(root: Client, acme: Queue) -> None:
    die(acme)
    job = bulk_jobs.start(acme.tenant, "replay", Filter(), actor="x")
    BulkJob.objects.update(state="failed", error="This takes too long to find.", ended_at=datetime.now(UTC))
    assert "This takes too long to find." in root.get(url("bulk")).content.decode()
    assert root.get(url("bulk-job-data"), {"id": job.pk}).json()["error"] == "This takes too long to find."


def test_a_job_needs_one_tenant(root: Client, acme: Queue, zeta: Queue) -> None:
    answer = root.get(url("bulk-new"), follow=True)
    assert "Choose the tenant first" in answer.content.decode()


# -- search ---------------------------------------------------------------------------------------------------------


def test_a_search_looks_into_so_many_tenants(
    root: Client, acme: Queue, zeta: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = acme.enqueue(idempotency_key="k-1"), zeta.enqueue(idempotency_key="k-1")
    found = root.get(url("tasks"), {"q": "k-1"}).context["found"]
    assert {each.task.id for each in found} == {mine.id, theirs.id}
    with monkeypatch.context() as few:
        few.setattr(platform_search, "MAX_TENANTS", 1)
        answer = root.get(url("tasks"), {"q": "k-1"})
    assert [each.task.id for each in answer.context["found"]] == [mine.id]
    assert "the first 1 of your tenants" in answer.content.decode()
    assert "not at all of them: choose a tenant" in answer.content.decode()
    monkeypatch.setattr(search, "TENANTS", 1)
    answer = root.get(url("tasks"), {"status": "PENDING"})
    assert [each.task.id for each in answer.context["found"]] == [mine.id]
    assert "The first 50 of each of the first 1 of your 2 tenants" in answer.content.decode()
    assert root.get(url("tasks"), {"q": theirs.id})["Location"].endswith(theirs.id)


@pytest.mark.spec("ADM-3", "Whosever it is: a key, a worker and words are looked for in all the tenants a person sees")
def test_a_search_without_a_tenant_finds_it_in_any(root: Client, acme: Queue, login: Login) -> None:
    others = [make_queue(f"many-{number:02}", "send") for number in range(30)]
    last = others[-1]
    ended = last.enqueue('{"customer":"wintermute"}')
    last.complete(last.claim("host-1"), "host-1")
    drain()
    held = last.enqueue(idempotency_key="order-4711")
    last.claim("host-7")

    viewer = login("viewer")

    def found(client: Client, **asked: str) -> list[tuple[str, str]]:
        answer = client.get(url("tasks"), asked)
        assert not answer.context["problem"]
        return [(each.slug, each.task.id) for each in answer.context["found"]]

    for words, task in (("order-4711", held), ("host-7", held), ("wintermute", ended), ("host-1", ended)):
        assert found(root, q=words) == [("many-29", task.id)], words
        assert found(root, q=words, status=str(Status.FAILED)) == []
        assert found(viewer, q=words) == []


def test_a_search_of_all_tenants_asks_as_little_of_two_hundred_as_of_two(root: Client, acme: Queue) -> None:
    def cost() -> int:
        with CaptureQueriesContext(connection) as queries:
            assert root.get(url("tasks"), {"q": "nobody"}).status_code == 200
        return len(queries)

    make_queue("one", "send")
    cost()
    few = cost()
    Tenant.objects.bulk_create(Tenant(slug=f"many-{number}") for number in range(198))
    assert cost() == few


def test_of_very_many_tenants_one_is_chosen_by_its_name(
    root: Client, acme: Queue, zeta: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadletters, "TENANTS", 1)
    [theirs], _ = die(zeta), die(acme)
    shown = root.get(url("dead-list"), {"tenant": zeta.tenant.slug})
    assert [row["letter"].id for row in shown.context["rows"]] == [theirs]
    assert f'name="tenant" value="{zeta.tenant.slug}"' in shown.content.decode()
    assert root.get(url("dead-list"), {"tenant": "nobody"}).status_code == 404


@pytest.mark.parametrize(
    "asked", [{"status": "SLEEPING"}, {"q": "x", "command": "a b"}, {"cursor": "?", "q": "x"}], ids=str
)
def test_a_search_that_means_nothing_is_told(root: Client, acme: Queue, asked: dict[str, str]) -> None:
    answer = root.get(url("tasks"), asked)
    assert answer.status_code == 200
    assert answer.context["problem"]


# -- people and the record ------------------------------------------------------------------------------------------


@pytest.mark.spec("ADM-4", "What was done is listed with its reason, to those of the tenant")
def test_the_record_is_read_by_those_it_is_about(login: Login, acme: Queue, zeta: Queue) -> None:
    root = login("root")
    post(root, "queue-pause", tenant=acme.tenant.tid, command="render", reason="the printer burns")
    post(root, "queue-pause", tenant=zeta.tenant.tid, command="send", reason="kanarie")
    listed = reverse("admin:admin_logentry_changelist")
    shown = login("viewer").get(listed).content.decode()
    assert "Paused queue render: the printer burns" in shown
    assert "kanarie" not in shown
    assert "kanarie" in root.get(listed).content.decode()
    assert login(None).get(listed).status_code == 403
    entry = LogEntry.objects.latest("pk")
    assert root.post(reverse("admin:admin_logentry_delete", args=[entry.pk]), {"post": "yes"}).status_code == 403


def test_the_record_of_a_tenants_issuers_is_its_staffs_too(login: Login, acme: Queue, zeta: Queue) -> None:
    root = User.objects.create(username="somebody")
    for queue, issuer in ((acme, "https://mine.example.com"), (zeta, "https://kanarie.example.com")):
        row = TenantIssuer.objects.create(tenant_id=queue.tenant.tid, issuer=issuer, jwks_url=issuer)
        LogEntry.objects.log_actions(root.pk, [row], CHANGE, f"Changed keys of {issuer}", single_object=True)
    listed = reverse("admin:admin_logentry_changelist")
    shown = login("viewer").get(listed).content.decode()
    assert "Changed keys of https://mine.example.com" in shown
    assert "Operators&#x27; actions" in shown  # above the table, as in the sidebar
    assert "Log entries" not in shown
    assert "kanarie" not in shown
    assert "kanarie" in login("root").get(listed).content.decode()


def test_people_are_the_superusers_and_are_not_deleted(login: Login, acme: Queue) -> None:
    root, staff, person = login("root"), login("admin"), User.objects.create(username="somebody")
    listed = reverse("admin:auth_user_changelist")
    shown = root.get(listed).content.decode()
    assert "everything" in shown
    assert "1 tenant" in shown
    assert staff.get(listed).status_code == 403
    assert root.get(reverse("admin:auth_user_change", args=[person.pk])).status_code == 200
    assert root.post(reverse("admin:auth_user_delete", args=[person.pk]), {"post": "yes"}).status_code == 403


@pytest.mark.spec("ADM-1", "Policies are listed to those who see the tenant, and lead to their queues")
def test_policies_are_listed(login: Login, acme: Queue, zeta: Queue) -> None:
    policies.put(acme.tenant, "render", Policy(max_consumers=3, priority_tiers=(0, 5)), actor="x")
    policies.put(zeta.tenant, "kanarie.send", Policy(max_consumers=4), actor="x")
    listed = reverse("admin:queues_queuepolicy_changelist")
    shown = login("viewer").get(listed).content.decode()
    assert "0, 5" in shown
    assert f"/admin/console/queue/?tenant={acme.tenant.tid}&amp;command=render" in shown
    assert "kanarie" not in shown
    assert "kanarie" in login("root").get(listed).content.decode()


# -- words ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "–"),
        (0.0121, "12 ms"),
        (3.42, "3.4 s"),
        (310, "5 min 10 s"),
        (11_520, "3 h 12 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_durations_are_as_exact_as_anybody_needs(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


def test_moments_are_told_by_their_distance() -> None:
    now = datetime.now(UTC)
    assert [ago(now - timedelta(seconds=each)) for each in (5.5, 130, 7300, 90_000)] == [
        "5 s ago", "2 min ago", "2 h ago", "1 d ago",
    ]  # fmt: skip


def test_the_gist_of_a_traceback_is_its_last_line() -> None:
    assert (
        error_summary('Traceback (most recent call last):\n  File "a.py", line 1\nValueError: x\n') == "ValueError: x"
    )
    assert error_summary("two\nlines") == "two\nlines"
    assert error_summary("") == "(no message)"


def test_a_small_curve_stays_in_its_frame() -> None:
    assert spark_line([0, 5, 10]) == "M0.0,26.0L60.0,14.0L120.0,2.0"
    assert spark_line([]) == ""
