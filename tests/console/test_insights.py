"""The page of charts: what it shows is what the marts hold, of one tenant, in so many questions to the database."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any
from urllib.parse import quote_plus

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from console import insights
from pipeline.models import Throughput
from tests.console.conftest import Login
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
QUERIES = 18


@pytest.fixture
def root(login: Login) -> Client:
    return login("root")


def at(hour: int, day: date = DAY) -> datetime:
    return datetime(day.year, day.month, day.day, hour, tzinfo=UTC)


def fill(tid: str, word: str = "render", day: date = DAY) -> None:
    """A day of a tenant, in which every word and every number is its own."""
    told = {"command": word, "date": day}
    eight, nine = ({"tenant_id": tid, "hour": at(hour, day)} for hour in (8, 9))
    ThroughputFactory(
        **eight, **told, attempts=10, completed=7, failed=1, nacked=2, abandoned=0, expired=0, retries=3, ended=8
    )
    ThroughputFactory(
        **nine, **told, attempts=5, completed=5, failed=0, nacked=0, abandoned=0, expired=0, retries=0, ended=5, dead=0
    )
    LatencyFactory(**eight, **told, wait_p50_ms=500, wait_p95_ms=2500, wait_p99_ms=9000, run_p50_ms=40)
    LatencyFactory(**nine, **told, wait_p50_ms=700, wait_p95_ms=1500, wait_p99_ms=8000, run_p50_ms=30)
    FailureFactory(tenant_id=tid, **told, fingerprint=f"{word}: disk <n> full", example="e-1")
    UsageFactory(tenant_id=tid, date=day, tasks=13)
    CapacityFactory(**eight, **told)
    LeaseAdviceFactory(tenant_id=tid, **told)
    WebhookHealthFactory(**eight, date=day, endpoint=f"https://{word}.example/hook")


def look(client: Client, **asked: Any) -> Any:
    answer = client.get(reverse("insights:page"), asked)
    assert answer.status_code == 200
    return answer


@pytest.mark.spec("PIP-4", "The charts show the marts: outcomes, waits, runs, workers, worker time, webhooks")
def test_the_charts_are_the_marts(root: Client, acme: Queue) -> None:
    fill(acme.tenant.tid)
    courses = look(root, tenant=acme.tenant.tid, days=1).context["courses"]
    assert {name: len(course["ends_ms"]) for name, course in courses.items()} == {
        "ended": 24, "waited": 24, "ran": 24, "workers": 24, "worked": 1, "answered": 24,
    }  # fmt: skip
    assert courses["ended"]["ends_ms"][8] == at(9).timestamp() * 1000
    values = {name: course["values"] for name, course in courses.items()}
    assert (values["ended"]["completed"][8], values["ended"]["nacked"][8], values["ended"]["completed"][7]) == (7, 2, 0)
    assert (values["waited"]["p95"][8], values["waited"]["p95"][9], values["waited"]["p95"][10]) == (2.5, 1.5, None)
    assert values["ran"]["p50"][8] == 0.04
    assert [values["workers"][name][8] for name in ("within_1s", "within_10s", "within_60s", "load")] == [9, 6, 4, 2.5]
    assert values["worked"]["compute_ms"] == [90.0]
    assert [values["answered"][name][8] for name in ("delivered", "refused", "unreachable")] == [2, 1, 1]


def test_a_longer_step_adds_up_counts_and_shows_the_worst_hour(root: Client, acme: Queue) -> None:
    fill(acme.tenant.tid)
    fill(acme.tenant.tid, day=DAY - timedelta(days=2))
    courses = look(root, tenant=acme.tenant.tid, days=30).context["courses"]
    assert courses["ended"]["step_seconds"] == 86_400
    assert courses["ended"]["values"]["completed"][-3:] == [12, 0, 12]
    assert courses["waited"]["values"]["p50"][-3:] == [pytest.approx(0.7), None, pytest.approx(0.7)]
    assert courses["waited"]["values"]["p95"][-1] == 2.5


@pytest.mark.spec("PIP-4", "Failures with their trend, advised leases and endpoints are listed beside the charts")
def test_the_tables_are_the_marts(root: Client, acme: Queue) -> None:
    fill(acme.tenant.tid)
    fill(acme.tenant.tid, day=DAY - timedelta(days=1))
    shown = look(root, tenant=acme.tenant.tid)
    [(group, url)] = shown.context["groups"]
    assert (group.fingerprint, group.attempts, group.dead) == ("render: disk <n> full", 6, 2)
    assert group.trend == [0, 0, 0, 0, 0, 3, 3]
    assert url.endswith(f"?tenant={acme.tenant.tid}&id=e-1")
    text = shown.content.decode()
    for words in ("render: disk &lt;n&gt; full", "180 s", "https://render.example/hook", "250 ms"):
        assert words in text
    totals = shown.context["totals"]
    assert (totals["attempts"], totals["dead"], totals["all_tasks"]) == (30, 2, 26)


def test_the_busiest_command_is_shown_where_none_is_asked_for(root: Client, acme: Queue) -> None:
    fill(acme.tenant.tid, "rare")
    fill(acme.tenant.tid, "often", DAY - timedelta(days=1))
    Throughput.objects.filter(command="often").update(attempts=1000)
    shown = look(root, tenant=acme.tenant.tid)
    assert (shown.context["command"], shown.context["commands"]) == ("often", ["often", "rare"])
    other = look(root, tenant=acme.tenant.tid, command="rare")
    assert (other.context["command"], other.context["totals"]["attempts"]) == ("rare", 15)


@pytest.mark.spec("PIP-4", "Where there is no history yet, the page says what makes it")
def test_an_empty_page_says_what_to_run(root: Client, acme: Queue) -> None:
    for asked in ({}, {"tenant": acme.tenant.tid}):
        assert "manage.py pipeline run" in look(root, **asked).content.decode()


def test_how_old_the_marts_are_is_said(root: Client, acme: Queue) -> None:
    fill(acme.tenant.tid)
    assert "as of" not in look(root).content.decode()
    ended = datetime.now(UTC) - timedelta(minutes=12)
    RunLogFactory(ended_at=ended)
    assert "as of 12 min ago" in look(root).content.decode()


@pytest.mark.spec("ADM-4", "A tenant's staff sees nothing of another's history")
@pytest.mark.parametrize("role", [None, "viewer", "operator", "admin"])
def test_staff_see_their_tenants_charts_only(login: Login, acme: Queue, zeta: Queue, role: str | None) -> None:
    fill(acme.tenant.tid, "mine")
    fill(zeta.tenant.tid, CANARY)
    client = login(role)
    for asked in ({}, {"tenant": acme.tenant.tid}, {"tenant": acme.tenant.tid, "command": CANARY},
                  {"tenant": zeta.tenant.tid}, {"tenant": zeta.tenant.tid, "command": CANARY}):  # fmt: skip
        answer = client.get(reverse("insights:page"), asked)
        foreign = asked.get("tenant") == zeta.tenant.tid
        nobody = role is None and asked
        assert answer.status_code == (404 if foreign or nobody else 200)
        text = answer.content.decode()
        # A page repeats what it was asked.
        for said in asked.values():
            text = text.replace(f"<option selected>{said}</option>", "").replace(quote_plus(said), "")
        text = text.replace(f"<small>of {CANARY}</small>", "")
        assert CANARY not in text
        if role and asked == {}:
            assert "mine: disk" in text
    assert Client().get(reverse("insights:page")).status_code == 302


def test_a_tenant_behind_the_list_is_found_by_its_link(
    root: Client, acme: Queue, zeta: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(insights, "OFFERED", 1)
    fill(zeta.tenant.tid)
    shown = look(root, tenant=zeta.tenant.tid)
    assert [slug for _, slug in shown.context["tenants"]] == ["acme", zeta.tenant.slug]
    assert shown.context["totals"]["attempts"] == 15


@pytest.mark.parametrize("days", ["0", "2", "-1", "x", "²", "99999999999"])
def test_another_time_is_not_there(root: Client, acme: Queue, days: str) -> None:
    assert root.get(reverse("insights:page"), {"tenant": acme.tenant.tid, "days": days}).status_code == 404


@pytest.mark.parametrize(
    "asked", [{"command": "a\x00b"}, {"command": "x" * 129}, {"tenant": "\x00"}, {"tenant": "nobody"}]
)
def test_what_cannot_be_is_not_there(root: Client, acme: Queue, asked: dict[str, str]) -> None:
    fill(acme.tenant.tid)
    assert root.get(reverse("insights:page"), {"tenant": acme.tenant.tid} | asked).status_code == 404


def test_a_row_from_the_future_does_not_hide_the_present(root: Client, acme: Queue) -> None:
    fill(acme.tenant.tid)
    fill(acme.tenant.tid, day=date(2190, 1, 1))
    assert look(root, tenant=acme.tenant.tid).context["last"] == DAY


def test_however_much_there_is_the_database_is_asked_the_same(root: Client, acme: Queue) -> None:
    fill(acme.tenant.tid)

    def asked() -> int:
        look(root, tenant=acme.tenant.tid)  # fills the tenant cache
        with CaptureQueriesContext(connection) as seen:
            look(root, tenant=acme.tenant.tid, days=90)
        return len(seen)

    before = asked()
    for n in range(1, 40):
        fill(acme.tenant.tid, day=DAY - timedelta(days=n))
    for n in range(60):
        FailureFactory(tenant_id=acme.tenant.tid, fingerprint=f"render: {n}", example="e-1")
    assert asked() == before <= QUERIES


def test_the_sidebar_leads_there(root: Client, acme: Queue) -> None:
    assert reverse("insights:page") in root.get(reverse("console:overview")).content.decode()
