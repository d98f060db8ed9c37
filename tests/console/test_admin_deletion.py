"""Every deletion in the admin needs a reason, on every page that can delete."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.db import models
from django.db.models import Model
from django.test import Client
from django.urls import reverse

from core.admin.audit_reason import REASON_CHARS
from tenants.models import TenantIssuer, TenantMembership
from tests.console.rows import ALL, SUPERUSER_REQUEST, Rows, label_of, url_prefix
from tests.console.work import Login

pytestmark = pytest.mark.django_db
REASONED = pytest.mark.spec("ADM-4", "The admin deletes nothing without a reason, which is recorded")
REASON = "It was never used."
DELETABLE = [model for model in ALL if admin.site._registry[model].has_delete_permission(SUPERUSER_REQUEST)]


def delete(client: Client, page: str, model: type[Model], row: Any, reason: str | None) -> Any:
    """Submit the form of the page that confirms a deletion."""
    form = {"post": "yes"} if reason is None else {"post": "yes", "reason": reason}
    if page == "row":
        return client.post(reverse(f"admin:{url_prefix(model)}_delete", args=[row.pk]), form, follow=True)
    selection = {"action": "delete_selected", "_selected_action": [row.pk]}
    return client.post(reverse(f"admin:{url_prefix(model)}_changelist"), {**selection, **form}, follow=True)


def is_stored(row: Model) -> bool:
    return type(row)._default_manager.filter(pk=row.pk).exists()


@REASONED
def test_issuers_and_memberships_can_be_deleted() -> None:
    """Guard the tests below, which would pass if no model could be deleted."""
    assert {TenantIssuer, TenantMembership} <= set(DELETABLE)


@REASONED
@pytest.mark.parametrize("model", DELETABLE, ids=label_of)
def test_pages_that_confirm_a_deletion_require_a_reason(model: type[Model], mine: Rows, login: Login) -> None:
    client, pk = login("root"), mine.pk(model)
    selection = {"action": "delete_selected", "_selected_action": [pk]}
    for response in (
        client.get(reverse(f"admin:{url_prefix(model)}_delete", args=[pk])),
        client.post(reverse(f"admin:{url_prefix(model)}_changelist"), selection),
    ):
        assert response.status_code == 200
        assert f'name="reason" required maxlength="{REASON_CHARS}"' in response.content.decode()
    assert is_stored(mine.rows[model])


@REASONED
@pytest.mark.parametrize("reason", [None, "", "  \t\n", "\0"], ids=["none", "empty", "blank", "nul"])
@pytest.mark.parametrize("page", ["row", "selected"])
@pytest.mark.parametrize("model", DELETABLE, ids=label_of)
def test_a_deletion_without_a_reason_changes_nothing(
    model: type[Model], page: str, reason: str | None, mine: Rows, login: Login
) -> None:
    client, before, entries = login("root"), mine.state(), LogEntry.objects.count()
    response = delete(client, page, model, mine.rows[model], reason)
    assert "Nothing was deleted. Enter a reason" in response.content.decode()
    assert mine.state() == before
    assert LogEntry.objects.count() == entries


@REASONED
@pytest.mark.parametrize("page", ["row", "selected"])
@pytest.mark.parametrize("model", DELETABLE, ids=label_of)
def test_a_deletion_with_a_reason_is_done_and_recorded(model: type[Model], page: str, mine: Rows, login: Login) -> None:
    client, row, entries = login("root"), mine.rows[model], LogEntry.objects.count()
    named = f"{model._meta.verbose_name} {row}"
    delete(client, page, model, row, REASON + "\0" + "." * REASON_CHARS)
    assert not is_stored(row)
    entry = LogEntry.objects.get(change_message__contains=REASON)
    assert entry.change_message == f"Deleted {named}: {REASON:.<{REASON_CHARS}}"
    assert entry.user.username == "staff-root"
    assert LogEntry.objects.count() == entries + 1


@REASONED
@pytest.mark.parametrize("page", ["row", "selected"])
def test_a_deletion_that_fails_leaves_no_record(
    page: str, mine: Rows, login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(models.QuerySet, "delete", fail)
    monkeypatch.setattr(TenantIssuer, "delete", fail)
    client, before = login("root"), mine.state()
    with pytest.raises(RuntimeError):
        delete(client, page, TenantIssuer, mine.rows[TenantIssuer], REASON)
    assert mine.state() == before
    assert not LogEntry.objects.filter(change_message__contains=REASON).exists()


@REASONED
@pytest.mark.parametrize("model", ALL, ids=label_of)
def test_no_row_is_deleted_within_another_rows_form(model: type[Model]) -> None:
    """Such a form has a check box and no field for a reason."""
    for inline in admin.site._registry[model].get_inline_instances(SUPERUSER_REQUEST):
        assert not (inline.can_delete and inline.has_delete_permission(SUPERUSER_REQUEST, None)), inline


@REASONED
@pytest.mark.parametrize("page", ["row", "selected"])
def test_staff_of_a_tenant_see_its_deletions_and_reasons(page: str, mine: Rows, foreign: Rows, login: Login) -> None:
    """After the deletion of the row, only the log entry names its tenant."""
    client, name = login("admin"), str(mine.rows[TenantIssuer])
    delete(client, page, TenantIssuer, mine.rows[TenantIssuer], REASON)
    delete(client, page, TenantIssuer, foreign.rows[TenantIssuer], "not mine")
    text = login("viewer").get(reverse("admin:admin_logentry_changelist")).content.decode()
    assert f"Deleted tenant issuer {name}: {REASON}" in text
    assert f"Deleted tenant issuer {name}: {REASON}" in (
        client.get(reverse("admin:tenants_tenant_history", args=[mine.tenant.pk])).content.decode()
    )
    assert is_stored(foreign.rows[TenantIssuer])
