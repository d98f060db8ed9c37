"""The charts page: values from the marts, isolation of tenants, number of queries."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any
from urllib.parse import quote_plus

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from console import charts
from pipeline.models import Throughput
from tests.console.work import Login
from tests.factories import (
    DAY,
    CapacityFactory,
    FailureFactory,
    LatencyFactory,
    LeaseAdviceFactory,
    RunLogFactory,
    ThroughputFactory,
    UsageFactory,
    WebhookHealthFactory,
)
from tests.fixtures.queues import Queue

pytestmark = pytest.mark.django_db
CANARY = "kanarie"
QUERY_LIMIT = 18


@pytest.fixture
def root(login: Login) -> Client:
    return login("root")


def at(hour: int, day: date = DAY) -> datetime:
    return datetime(day.year, day.month, day.day, hour, tzinfo=UTC)


def fill(tid: str, word: str = "render", day: date = DAY) -> None:
    """Write one day of a tenant to every mart, with distinct texts and numbers."""
    key = {"command": word, "date": day}
    eight, nine = ({"tenant_id": tid, "hour": at(hour, day)} for hour in (8, 9))
    ThroughputFactory(
        **eight, **key, attempts=10, completed=7, failed=1, nacked=2, abandoned=0, expired=0, retries=3, ended=8
    )
    ThroughputFactory(
        **nine, **key, attempts=5, completed=5, failed=0, nacked=0, abandoned=0, expired=0, retries=0, ended=5, dead=0
    )
    LatencyFactory(**eight, **key, wait_p50_ms=500, wait_p95_ms=2500, wait_p99_ms=9000, run_p50_ms=40)
    LatencyFactory(**nine, **key, wait_p50_ms=700, wait_p95_ms=1500, wait_p99_ms=8000, run_p50_ms=30)
    FailureFactory(tenant_id=tid, **key, fingerprint=f"{word}: disk <n> full", example="e-1")
    UsageFactory(tenant_id=tid, date=day, tasks=13)
    CapacityFactory(**eight, **key)
    LeaseAdviceFactory(tenant_id=tid, **key)
    WebhookHealthFactory(**eight, date=day, endpoint=f"https://{word}.example/hook")


def get_page(client: Client, **query: Any) -> Any:
    response = client.get(reverse("charts:page"), query)
    assert response.status_code == 200
    return response


@pytest.mark.spec("PIP-4", "Charts of the marts: outcomes, wait times, run times, workers, worker time, webhooks")
def test_the_charts_show_the_marts(root: Client, acme: Queue) -> None:
    fill(acme.tenant.tid)
    series = get_page(root, tenant=acme.tenant.tid, days=1).context["time_series"]
    assert {name: len(chart["ends_ms"]) for name, chart in series.items()} == {
        "ended": 24, "wait_time": 24, "run_time": 24, "workers": 24, "worker_time": 1, "deliveries": 24,
    }  # fmt: skip
    assert series["ended"]["ends_ms"][8] == at(9).timestamp() * 1000
    values = {name: chart["values"] for name, chart in series.items()}
    assert (values["ended"]["completed"][8], values["ended"]["nacked"][8], values["ended"]["completed"][7]) == (7, 2, 0)
    assert values["wait_time"]["p95"][8:11] == [2.5, 1.5, None]
    assert values["run_time"]["p50"][8] == 0.04
    assert [values["workers"][name][8] for name in ("within_1s", "within_10s", "within_60s", "load")] == [9, 6, 4, 2.5]
    assert values["worker_time"]["compute_ms"] == [90.0]
    assert [values["deliveries"][name][8] for name in ("delivered", "refused", "unreachable")] == [2, 1, 1]


def test_a_longer_step_adds_up_counts_and_shows_the_worst_hour(root: Client, acme: Queue) -> None:
    fill(acme.tenant.tid)
    fill(acme.tenant.tid, day=DAY - timedelta(days=2))
    series = get_page(root, tenant=acme.tenant.tid, days=30).context["time_series"]
    assert series["ended"]["step_seconds"] == 86_400
    assert series["ended"]["values"]["completed"][-3:] == [12, 0, 12]
    assert series["wait_time"]["values"]["p50"][-3:] == [pytest.approx(0.7), None, pytest.approx(0.7)]
    assert series["wait_time"]["values"]["p95"][-1] == 2.5


@pytest.mark.spec("PIP-4", "Tables of failures with their trend, recommended leases, and endpoints")
def test_the_tables_show_the_marts(root: Client, acme: Queue) -> None:
    fill(acme.tenant.tid)
    fill(acme.tenant.tid, day=DAY - timedelta(days=1))
    page = get_page(root, tenant=acme.tenant.tid)
    [(group, url)] = page.context["groups"]
    assert (group.fingerprint, group.attempts, group.dead) == ("render: disk <n> full", 6, 2)
    assert group.trend == [0, 0, 0, 0, 0, 3, 3]
    assert url.endswith(f"?tenant={acme.tenant.tid}&id=e-1")
    text = page.content.decode()
    for words in ("render: disk &lt;n&gt; full", "180 s", "https://render.example/hook", "250 ms"):
        assert words in text
    totals = page.context["totals"]
    assert (totals["attempts"], totals["dead"], totals["all_tasks"]) == (30, 2, 26)


def test_the_busiest_queue_is_the_default(root: Client, acme: Queue) -> None:
    fill(acme.tenant.tid, "rare")
    fill(acme.tenant.tid, "often", DAY - timedelta(days=1))
    Throughput.objects.filter(command="often").update(attempts=1000)
    page = get_page(root, tenant=acme.tenant.tid)
    assert (page.context["command"], page.context["commands"]) == ("often", ["often", "rare"])
    other = get_page(root, tenant=acme.tenant.tid, command="rare")
    assert (other.context["command"], other.context["totals"]["attempts"]) == ("rare", 15)


@pytest.mark.spec("PIP-4", "Without history the page shows the command that creates it")
def test_an_empty_page_names_the_command_to_run(root: Client, acme: Queue) -> None:
    for query in ({}, {"tenant": acme.tenant.tid}):
        assert "manage.py pipeline run" in get_page(root, **query).content.decode()


def test_the_page_shows_the_age_of_the_marts(root: Client, acme: Queue) -> None:
    fill(acme.tenant.tid)
    assert "Updated" not in get_page(root).content.decode()
    ended = datetime.now(UTC) - timedelta(minutes=12)
    RunLogFactory(ended_at=ended)
    assert "Updated 12 min ago." in get_page(root).content.decode()


@pytest.mark.spec("ADM-4", "Staff of a tenant cannot see another tenant's history")
@pytest.mark.parametrize("role", [None, "viewer", "operator", "admin"])
def test_staff_see_the_charts_of_their_tenants_only(login: Login, acme: Queue, zeta: Queue, role: str | None) -> None:
    fill(acme.tenant.tid, "mine")
    fill(zeta.tenant.tid, CANARY)
    client = login(role)
    for query in ({}, {"tenant": acme.tenant.tid}, {"tenant": acme.tenant.tid, "command": CANARY},
                  {"tenant": zeta.tenant.tid}, {"tenant": zeta.tenant.tid, "command": CANARY}):  # fmt: skip
        response = client.get(reverse("charts:page"), query)
        is_foreign = query.get("tenant") == zeta.tenant.tid
        has_no_role = role is None and query
        assert response.status_code == (404 if is_foreign or has_no_role else 200)
        text = response.content.decode()
        # A page repeats the values of its query string.
        for value in query.values():
            text = text.replace(f"<option selected>{value}</option>", "").replace(quote_plus(value), "")
        text = text.replace(f"<small>in {CANARY}</small>", "")
        assert CANARY not in text
        if role and query == {}:
            assert "mine: disk" in text
    assert Client().get(reverse("charts:page")).status_code == 302


def test_a_tenant_beyond_the_list_is_found_by_its_link(
    root: Client, acme: Queue, zeta: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "MAX_LISTED_TENANTS", 1)
    fill(zeta.tenant.tid)
    page = get_page(root, tenant=zeta.tenant.tid)
    assert [slug for _, slug in page.context["tenants"]] == ["acme", zeta.tenant.slug]
    assert page.context["totals"]["attempts"] == 15


@pytest.mark.parametrize("days", ["0", "2", "-1", "x", "²", "99999999999"])
def test_an_unknown_period_is_not_found(root: Client, acme: Queue, days: str) -> None:
    assert root.get(reverse("charts:page"), {"tenant": acme.tenant.tid, "days": days}).status_code == 404


@pytest.mark.parametrize(
    "query", [{"command": "a\x00b"}, {"command": "x" * 129}, {"tenant": "\x00"}, {"tenant": "nobody"}]
)
def test_an_invalid_tenant_or_queue_is_not_found(root: Client, acme: Queue, query: dict[str, str]) -> None:
    fill(acme.tenant.tid)
    assert root.get(reverse("charts:page"), {"tenant": acme.tenant.tid} | query).status_code == 404


def test_a_row_from_the_future_does_not_hide_the_present(root: Client, acme: Queue) -> None:
    fill(acme.tenant.tid)
    fill(acme.tenant.tid, day=date(2190, 1, 1))
    assert get_page(root, tenant=acme.tenant.tid).context["last"] == DAY


def test_the_number_of_queries_does_not_grow_with_the_history(root: Client, acme: Queue) -> None:
    fill(acme.tenant.tid)

    def count_queries() -> int:
        get_page(root, tenant=acme.tenant.tid)  # fills the tenant cache
        with CaptureQueriesContext(connection) as queries:
            get_page(root, tenant=acme.tenant.tid, days=90)
        return len(queries)

    before = count_queries()
    for n in range(1, 40):
        fill(acme.tenant.tid, day=DAY - timedelta(days=n))
    for n in range(60):
        FailureFactory(tenant_id=acme.tenant.tid, fingerprint=f"render: {n}", example="e-1")
    assert count_queries() == before <= QUERY_LIMIT


def test_the_sidebar_links_to_the_page(root: Client, acme: Queue) -> None:
    assert reverse("charts:page") in root.get(reverse("console:overview")).content.decode()
