"""The audit in the admin: the operator's tenants only, escaped payloads, indexed lists."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from queues.models import Attempt, AuditedResult, Quarantine
from tenants.models import Tenant
from tests.factories import (
    AttemptFactory,
    AuditedResultFactory,
    PeriodicTaskRunFactory,
    QuarantineFactory,
    TenantFactory,
    TenantMembershipFactory,
    UserFactory,
)

pytestmark = pytest.mark.django_db
NOON = datetime(2026, 10, 1, 12, tzinfo=UTC)

Audited = Callable[..., AuditedResult]


@pytest.fixture
def acme() -> Tenant:
    return TenantFactory(slug="acme")


@pytest.fixture
def audited(acme: Tenant) -> Audited:
    def make(**fields: Any) -> AuditedResult:
        return AuditedResultFactory(**({"tenant": acme, "ended_at": NOON} | fields))

    return make


@pytest.fixture
def root() -> Client:
    client = Client()
    client.force_login(UserFactory(is_superuser=True))
    return client


@pytest.fixture
def staff_of_acme(acme: Tenant) -> Client:
    client = Client()
    client.force_login(TenantMembershipFactory(tenant=acme).user)
    return client


RESULTS = "admin:queues_auditedresult_changelist"


@pytest.mark.spec("ADM-1", "An audited result is found in the admin by its id, with its payload escaped")
def test_result_is_found_by_its_id_and_shown_escaped(root: Client, audited: Audited) -> None:
    row = audited(payload='{"x":"<script>alert(1)</script>","n":1.10}', result="not json <b>")
    audited(worker="somebody-else")
    page = root.get(reverse(RESULTS), {"q": str(row.pk)}).content.decode()
    assert str(row.pk) in page
    assert "somebody-else" not in page
    detail = root.get(reverse("admin:queues_auditedresult_change", args=[row.pk])).content.decode()
    assert "<script>alert" not in detail
    assert "&lt;script&gt;alert" in detail
    assert "1.10" in detail
    assert "not json &lt;b&gt;" in detail


@pytest.mark.spec("ADM-1", "A search of the audit is answered by an index")
@pytest.mark.parametrize(
    ("model", "term", "index"),
    [(AuditedResult, "blender-7", "audited_worker"), (AuditedResult, str(uuid.uuid4()), "audited_worker"),
     (Attempt, str(uuid.uuid4()), "attempt_of_task")],
    ids=["worker", "task id", "attempts of a task id"],
)  # fmt: skip
def test_a_search_is_answered_by_an_index(model: Any, term: str, index: str) -> None:
    searching = admin.site._registry[model]
    rows, _ = searching.get_search_results(RequestFactory().get("/"), model.objects.all(), term)
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")  # the planner would scan an empty table
    assert index in rows.explain()
    assert "Seq Scan" not in rows.explain()


def test_list_runs_no_count_and_no_query_per_row(root: Client, audited: Audited) -> None:
    audited()
    with CaptureQueriesContext(connection) as few:
        root.get(reverse(RESULTS))
    for _ in range(20):
        audited()
    with CaptureQueriesContext(connection) as many:
        root.get(reverse(RESULTS))
    assert len(many) == len(few)
    statements = [query["sql"] for query in many if "auditedresult" in query["sql"]]
    assert not [sql for sql in statements if "COUNT(" in sql or "DISTINCT" in sql]


def test_date_hierarchy_has_the_days_from_the_first_to_the_last(root: Client, audited: Audited) -> None:
    audited(ended_at=NOON - timedelta(days=2))
    audited(ended_at=NOON)
    with CaptureQueriesContext(connection) as captured:
        shown = root.get(reverse(RESULTS), {"ended_at__year": "2026"}).content.decode()
    assert "September 2026" in shown
    assert "October 2026" in shown
    assert "August 2026" not in shown
    assert not [query for query in captured if "DISTINCT" in query["sql"]]
    shown = root.get(reverse(RESULTS), {"ended_at__year": "2026", "ended_at__month": "9"}).content.decode()
    assert "September 29" in shown
    assert "September 28" not in shown


def test_row_of_a_deleted_tenant_is_still_listed(root: Client, audited: Audited) -> None:
    audited(tenant=None, tenant_id="gone0000")
    assert "gone0000" in root.get(reverse(RESULTS)).content.decode()


@pytest.mark.spec("TEN-3", "Staff see their own tenants' audit and no other")
@pytest.mark.parametrize("model", ["auditedresult", "attempt"])
def test_staff_see_their_tenants_rows_only(staff_of_acme: Client, audited: Audited, acme: Tenant, model: str) -> None:
    other = TenantFactory(slug="other")
    rows = {
        tenant: audited(tenant=tenant, worker=f"worker-of-{tenant.slug}", error=f"canary-of-{tenant.slug}")
        if model == "auditedresult"
        else AttemptFactory(tenant=tenant, worker=f"worker-of-{tenant.slug}", error=f"canary-of-{tenant.slug}")
        for tenant in (acme, other)
    }
    listed = reverse(f"admin:queues_{model}_changelist")
    for query in ({}, {"q": "worker-of-other"}, {"tenant": other.pk}, {"q": str(rows[other].task_id)}):
        assert "canary-of-other" not in staff_of_acme.get(listed, query).content.decode()
    assert "canary-of-acme" in staff_of_acme.get(listed).content.decode()
    assert staff_of_acme.get(reverse(f"admin:queues_{model}_change", args=[rows[other].pk])).status_code == 302


def test_audit_cannot_be_changed_in_the_admin(root: Client, audited: Audited) -> None:
    row = audited()
    assert root.get(reverse("admin:queues_auditedresult_add")).status_code == 403
    assert (
        root.post(reverse("admin:queues_auditedresult_change", args=[row.pk]), {"status": "FAILED"}).status_code == 403
    )
    assert root.post(reverse("admin:queues_auditedresult_delete", args=[row.pk]), {"post": "yes"}).status_code == 403
    row.refresh_from_db()
    assert row.status == "COMPLETED"


def test_only_the_platform_sees_quarantine_and_periodic_tasks(root: Client, staff_of_acme: Client) -> None:
    QuarantineFactory(reason="odd")
    PeriodicTaskRunFactory(name="drain")
    for model, text in (("quarantine", "odd"), ("periodictaskrun", "drain")):
        listed = reverse(f"admin:queues_{model}_changelist")
        assert text in root.get(listed).content.decode()
        assert staff_of_acme.get(listed).status_code == 403


@pytest.mark.spec(
    "BEA-1", "The admin shows the last run of each periodic task, its duration and outcome, and the next run"
)
def test_list_of_periodic_tasks_shows_the_last_runs(root: Client) -> None:
    started = NOON + timedelta(minutes=17, seconds=3)
    PeriodicTaskRunFactory(
        name="drain", every_seconds=90, started_at=started,
        ended_at=started + timedelta(milliseconds=1234), outcome="7 stored, 0 in quarantine", runs=41, failures=2,
        failed_at=NOON, error="OperationalError: the connection is lost",
    )  # fmt: skip
    page = root.get(reverse("admin:queues_periodictaskrun_changelist")).content.decode()
    shown = " ".join(re.sub(r"<[^>]+>", " ", page).split())
    for words in ("12:17:04", "1234 ms", "7 stored, 0 in quarantine", "12:18:33", "OperationalError", " 41 2 "):
        assert words in shown, words
    assert root.get(reverse("admin:queues_periodictaskrun_add")).status_code == 403


@pytest.mark.spec("ADM-4", "A retry of quarantined entries is recorded with its operator and reason")
def test_retry_of_the_quarantine_is_recorded(root: Client) -> None:
    row = QuarantineFactory()
    form = {"action": "retry", "_selected_action": [row.pk]}
    listed = reverse("admin:queues_quarantine_changelist")
    assert "Enter a reason" in root.post(listed, form, follow=True).content.decode()
    assert not LogEntry.objects.exists()
    form["reason"] = "the column is wider now"
    shown = root.post(listed, form, follow=True).content.decode()
    assert "Entries stored: 0. Still in quarantine: 1." in shown
    assert Quarantine.objects.filter(pk=row.pk).exists()
    assert LogEntry.objects.get().change_message == ("Retried 1 quarantined entries, 0 stored: the column is wider now")
