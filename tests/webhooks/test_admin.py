"""Admin pages of deliveries and endpoints: visible rows, replay, recovery and secrets."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from tenants.models import Tenant
from tests.factories import (
    CircuitFactory,
    DeliveryAttemptFactory,
    EndpointFactory,
    SubscriptionFactory,
    TenantFactory,
    TenantMembershipFactory,
    UserFactory,
)
from tests.webhooks.conftest import MakeDelivery
from webhooks import services
from webhooks.models import Delivery, Endpoint

pytestmark = pytest.mark.django_db
HOOK = "https://example.org/hook"
LIST = "admin:webhooks_delivery_changelist"
Login = Callable[[str], Client]


@pytest.fixture
def login(acme: Tenant) -> Login:
    def as_role(role: str) -> Client:
        user = UserFactory(username=f"staff-{role}", is_superuser=role == "root")
        if role != "root":
            TenantMembershipFactory(tenant=acme, user=user, role=role)
        client = Client()
        client.force_login(user)
        return client

    return as_role


@pytest.fixture
def other() -> Tenant:
    return TenantFactory(slug="other")


def send_again(client: Client, *rows: Delivery, reason: str = "they asked") -> str:
    form = {"action": "replay", "_selected_action": [str(row.pk) for row in rows], "reason": reason}
    return client.post(reverse(LIST), form, follow=True).content.decode()


@pytest.mark.spec("WHK-6", "An operator's replay requires a reason, reports a count and is logged")
def test_replay_reports_a_count_and_is_logged(login: Login, make_delivery: MakeDelivery) -> None:
    done = [make_delivery(HOOK, status=status) for status in ("delivered", "given up", "held")]
    pending = make_delivery(HOOK, due_at=datetime(2030, 1, 1, tzinfo=UTC))
    page = send_again(login("operator"), *done, pending)
    assert "Deliveries to be sent again: 3. Skipped, because pending, refused or not permitted: 1." in page
    assert set(Delivery.objects.exclude(pk=pending.pk).values_list("status", "attempts_since_replay")) == {
        ("pending", 0)
    }
    entry = LogEntry.objects.get()
    assert (entry.object_repr, entry.change_message) == ("acme", "Sent 3 deliveries again: they asked")


def test_replay_requires_a_reason(login: Login, make_delivery: MakeDelivery) -> None:
    row = make_delivery(HOOK, status="delivered")
    assert "Enter a reason" in send_again(login("operator"), row, reason=" ")
    row.refresh_from_db()
    assert row.status == "delivered"


@pytest.mark.spec("ADM-4", "Only operators of a tenant replay its deliveries")
def test_replay_skips_tenants_without_the_operator_role(
    login: Login, make_delivery: MakeDelivery, other: Tenant
) -> None:
    foreign = make_delivery(HOOK, status="delivered", tenant=other)
    own = make_delivery(HOOK, status="delivered")
    send_again(login("operator"), foreign)
    send_again(login("viewer"), own)
    user = User.objects.get(username="staff-operator")
    TenantMembershipFactory(tenant=other, user=user)
    client = Client()
    client.force_login(user)
    assert "Deliveries to be sent again: 1. Skipped, because pending, refused or not permitted: 1." in send_again(
        client, foreign, own
    )
    foreign.refresh_from_db()
    assert foreign.status == "delivered"


@pytest.mark.spec("TEN-3", "Users see only the webhooks of their own tenants")
def test_pages_hide_rows_of_other_tenants(login: Login, make_delivery: MakeDelivery, other: Tenant) -> None:
    rows: dict[str, Any] = {
        "delivery": make_delivery("https://canary.example.org/", tenant=other),
        "endpoint": EndpointFactory(tenant=other, address="https://canary.example.org/"),
        "circuit": CircuitFactory(tenant=other, host="canary.example.org:443"),
        "subscription": SubscriptionFactory(tenant=other, worker="canary", callback_url="https://canary.example.org/"),
    }
    viewer, root = login("viewer"), login("root")
    for model, row in rows.items():
        listed, changed = (
            reverse(f"admin:webhooks_{model}_changelist"),
            reverse(f"admin:webhooks_{model}_change", args=[row.pk]),
        )
        for page in (listed, f"{listed}?tenant={other.pk}", f"{listed}?q={row.pk}", changed):
            answer = viewer.get(page, follow=True)
            assert answer.status_code in {200, 403}
            assert "canary.example.org" not in answer.content.decode(), page
        for page in (listed, changed):
            assert "canary" in root.get(page).content.decode()


def test_attempts_of_a_delivery_are_escaped(login: Login, make_delivery: MakeDelivery) -> None:
    row = make_delivery(HOOK, last_error="HTTP 500")
    DeliveryAttemptFactory(
        delivery=row, duration_ms=1234, status_code=500, error="HTTP 500", answer="<script>alert(1)</script>"
    )
    page = login("viewer").get(reverse("admin:webhooks_delivery_change", args=[row.pk])).content.decode()
    assert "1234" in page
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


def test_list_has_a_constant_number_of_queries(login: Login, make_delivery: MakeDelivery) -> None:
    client = login("root")
    make_delivery(HOOK)
    with CaptureQueriesContext(connection) as few:
        client.get(reverse(LIST))
    for _ in range(10):
        make_delivery(HOOK)
    with CaptureQueriesContext(connection) as many:
        client.get(reverse(LIST))
    assert len(few) == len(many)


def run_action(client: Client, endpoint: Endpoint, name: str, **form: str) -> Any:
    url = reverse("admin:webhooks_endpoint_change", args=[endpoint.pk]).replace("/change/", f"/{name}/")
    return client.post(url, {"_form_submitted": "True", "reason": "as asked", **form})


@pytest.mark.spec("ADM-1", "An endpoint is disabled and recovered since a date, with a reason")
def test_endpoint_is_disabled_and_recovered(login: Login, acme: Tenant, make_delivery: MakeDelivery) -> None:
    endpoint = EndpointFactory(tenant=acme, address=HOOK)
    row = make_delivery(HOOK)
    client = login("operator")
    assert run_action(client, endpoint, "disable").status_code == 200
    row.refresh_from_db()
    endpoint.refresh_from_db()
    assert (row.status, endpoint.is_enabled, endpoint.disabled_because) == ("held", False, "as asked")

    since = row.created_at - timedelta(hours=1)
    run_action(client, endpoint, "recover", since_0=f"{since:%Y-%m-%d}", since_1=f"{since:%H:%M:%S}")
    row.refresh_from_db()
    endpoint.refresh_from_db()
    assert (row.status, endpoint.is_enabled) == ("pending", True)
    assert LogEntry.objects.count() == 2


@pytest.mark.spec("WHK-4", "A tenant's admin creates an endpoint's own secret, which is shown once")
def test_new_secret_is_shown_once_to_an_admin(login: Login, acme: Tenant) -> None:
    endpoint, former = services.register(acme.pk, HOOK)
    assert run_action(login("operator"), endpoint, "new-secret").status_code in {302, 403}
    answer = run_action(login("admin"), endpoint, "new-secret")
    assert "whsec_" in answer.content.decode()
    assert "no-store" in answer["Cache-Control"]
    page = login("root").get(reverse("admin:webhooks_endpoint_change", args=[endpoint.pk])).content.decode()
    endpoint.refresh_from_db()
    for secret in (former, endpoint.encrypted_secret, "whsec_"):
        assert secret not in page


@pytest.mark.parametrize("term", ["https://hooks.example.com/a", str(uuid.uuid4())], ids=["address", "id"])
def test_search_for_deliveries_uses_an_index(login: Login, term: str) -> None:
    login("root")
    request = RequestFactory().get("/")
    request.user = User.objects.get(username="staff-root")
    rows, _ = admin.site._registry[Delivery].get_search_results(request, Delivery.objects.all(), term)
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")  # PostgreSQL scans an empty table otherwise
    assert "Seq Scan on webhooks_delivery" not in rows.explain()
