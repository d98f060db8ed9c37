"""Whatever the admin lets somebody delete, it asks why; in every way there is to ask for it."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import models
from django.db.models import Model
from django.test import Client, RequestFactory
from django.urls import reverse

from core.admin.audit_reason import REASON_CHARS
from tenants.models import TenantIssuer, TenantMembership
from tests.console.conftest import Login
from tests.console.rows import ALL, Rows, label_of, name_of

pytestmark = pytest.mark.django_db
REASONED = pytest.mark.spec("ADM-4", "Nothing is deleted in the admin without a reason, which stays on record")
WHY = "It was never used."

REQUEST = RequestFactory().get("/")
REQUEST.user = User(username="root", is_staff=True, is_superuser=True)
DELETABLE = [model for model in ALL if admin.site._registry[model].has_delete_permission(REQUEST)]


def ask(client: Client, way: str, model: type[Model], row: Any, reason: str | None) -> Any:
    """Confirm a deletion, as the page that asks for it does."""
    said = {"post": "yes"} if reason is None else {"post": "yes", "reason": reason}
    if way == "row":
        return client.post(reverse(f"admin:{name_of(model)}_delete", args=[row.pk]), said, follow=True)
    chosen = {"action": "delete_selected", "_selected_action": [row.pk]}
    return client.post(reverse(f"admin:{name_of(model)}_changelist"), {**chosen, **said}, follow=True)


def is_there(row: Model) -> bool:
    return type(row)._default_manager.filter(pk=row.pk).exists()


@REASONED
def test_something_can_be_deleted() -> None:
    """Without this, a console in which nothing can be would pass the tests below."""
    assert {TenantIssuer, TenantMembership} <= set(DELETABLE)


@REASONED
@pytest.mark.parametrize("model", DELETABLE, ids=label_of)
def test_the_pages_that_ask_before_a_deletion_ask_why(model: type[Model], mine: Rows, login: Login) -> None:
    client, pk = login("root"), mine.pk(model)
    chosen = {"action": "delete_selected", "_selected_action": [pk]}
    for answer in (
        client.get(reverse(f"admin:{name_of(model)}_delete", args=[pk])),
        client.post(reverse(f"admin:{name_of(model)}_changelist"), chosen),
    ):
        assert answer.status_code == 200
        assert f'name="reason" required maxlength="{REASON_CHARS}"' in answer.content.decode()
    assert is_there(mine.rows[model])


@REASONED
@pytest.mark.parametrize("reason", [None, "", "  \t\n", "\0"], ids=["none", "empty", "blank", "nul"])
@pytest.mark.parametrize("way", ["row", "selected"])
@pytest.mark.parametrize("model", DELETABLE, ids=label_of)
def test_a_deletion_without_a_reason_changes_nothing(
    model: type[Model], way: str, reason: str | None, mine: Rows, login: Login
) -> None:
    client, before, told = login("root"), mine.state(), LogEntry.objects.count()
    answer = ask(client, way, model, mine.rows[model], reason)
    assert "Nothing was deleted. Enter a reason" in answer.content.decode()
    assert mine.state() == before
    assert LogEntry.objects.count() == told


@REASONED
@pytest.mark.parametrize("way", ["row", "selected"])
@pytest.mark.parametrize("model", DELETABLE, ids=label_of)
def test_a_deletion_with_a_reason_is_done_and_on_record(model: type[Model], way: str, mine: Rows, login: Login) -> None:
    client, row, told = login("root"), mine.rows[model], LogEntry.objects.count()
    named = f"{model._meta.verbose_name} {row}"
    ask(client, way, model, row, WHY + "\0" + "." * REASON_CHARS)
    assert not is_there(row)
    entry = LogEntry.objects.get(change_message__contains=WHY)
    assert entry.change_message == f"Deleted {named}: {WHY:.<{REASON_CHARS}}"
    assert entry.user.username == "staff-root"
    assert LogEntry.objects.count() == told + 1


@REASONED
@pytest.mark.parametrize("way", ["row", "selected"])
def test_a_deletion_that_fails_leaves_no_record(
    way: str, mine: Rows, login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(models.QuerySet, "delete", fail)
    monkeypatch.setattr(TenantIssuer, "delete", fail)
    client, before = login("root"), mine.state()
    with pytest.raises(RuntimeError):
        ask(client, way, TenantIssuer, mine.rows[TenantIssuer], WHY)
    assert mine.state() == before
    assert not LogEntry.objects.filter(change_message__contains=WHY).exists()


@REASONED
@pytest.mark.parametrize("model", ALL, ids=label_of)
def test_no_row_is_deleted_within_another_rows_form(model: type[Model]) -> None:
    """Such a form has a box to tick and no place for a reason."""
    for inline in admin.site._registry[model].get_inline_instances(REQUEST):
        assert not (inline.can_delete and inline.has_delete_permission(REQUEST, None)), inline


@REASONED
@pytest.mark.parametrize("way", ["row", "selected"])
def test_a_tenants_staff_read_what_was_deleted_and_why(way: str, mine: Rows, foreign: Rows, login: Login) -> None:
    """The row is gone, and with it what said whose it was."""
    client, name = login("admin"), str(mine.rows[TenantIssuer])
    ask(client, way, TenantIssuer, mine.rows[TenantIssuer], WHY)
    ask(client, way, TenantIssuer, foreign.rows[TenantIssuer], "not mine")
    shown = login("viewer").get(reverse("admin:admin_logentry_changelist")).content.decode()
    assert f"Deleted tenant issuer {name}: {WHY}" in shown
    assert f"Deleted tenant issuer {name}: {WHY}" in (
        client.get(reverse("admin:tenants_tenant_history", args=[mine.tenant.pk])).content.decode()
    )
    assert is_there(foreign.rows[TenantIssuer])
