"""Every path of the admin, as it is registered: what it shows of another tenant's, and does to it; what it costs.

A path that is not a model's usual one needs a line in PLAIN or DETAIL, or the first test fails.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import connection, models, transaction
from django.db.models import Model
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from tenants.models import TenantMembership
from tenants.scoping import TenantScopedAdmin
from tests.console.conftest import Login
from tests.console.rows import ALL, CANARY, Rows, label_of, name_of
from tests.console.test_rights import COUNTS, MOST, _is_frame

pytestmark = pytest.mark.django_db
ISOLATED = pytest.mark.spec(
    "ADM-4", "No list, form, history, search, autocomplete or action of the admin tells of another tenant"
)
RIGHTS = pytest.mark.spec("ADM-4", "Who may only look changes nothing in the admin, by form, action or dialog")
ROLES = [None, "viewer", "operator", "admin"]

# About no row of a model.
PLAIN = {
    "index", "login", "logout", "password_change", "password_change_done", "jsi18n", "search", "app_list",
    "autocomplete", "view_on_site",
}  # fmt: skip
# About one row, besides what every model has; asked with these forms.
DETAIL: dict[str, dict[str, str]] = {
    "tenants_tenant_suspend": {"reason": "because"},
    "tenants_tenant_resume": {"reason": "because"},
    "tenants_tenant_rotate_secret": {"reason": "because"},
    "webhooks_endpoint_recover": {"reason": "because", "since_0": "2026-01-01", "since_1": "00:00:00"},
    "webhooks_endpoint_stop": {"reason": "because"},
    "webhooks_endpoint_new_secret": {"reason": "because"},
    "auth_user_password_change": {"password1": "x-9-another-one", "password2": "x-9-another-one"},
}
UNASKABLE = [("", "\0"), ("__exact", "\0"), ("__regex", "("), ("__year", "9" * 12), ("__gt", "9" * 40)]
USUAL = ("changelist", "add", "history", "delete", "change")
OF_TENANTS = [model for model in ALL if isinstance(admin.site._registry[model], TenantScopedAdmin)]
OF_PLATFORM = [model for model in ALL if model not in OF_TENANTS and model is not LogEntry]
EVERY_LIST = [*OF_TENANTS, LogEntry]


def paths(patterns: Any) -> Iterator[str]:
    for pattern in patterns:
        if hasattr(pattern, "url_patterns"):
            yield from paths(pattern.url_patterns)
        elif pattern.name:
            yield pattern.name


def get(client: Any, path: str, **query: str) -> str:
    answer = client.get(path, query)
    assert answer.status_code in {200, 302, 403, 404}, path
    shown = (answer.getvalue() if answer.streaming else answer.content).decode()
    # A page repeats what it was asked; that is no news to who asked.
    for said in query.values():
        shown = shown.replace(f'value="{said}"', "").replace(f"={said}", "").replace(f"%3D{said}", "")
    return shown


def test_every_path_is_known() -> None:
    usual = {f"{name_of(model)}_{what}" for model in ALL for what in USUAL}
    assert set(paths(admin.site.get_urls())) == usual | PLAIN | DETAIL.keys()


# -- whose data -----------------------------------------------------------------------------------------------------


@ISOLATED
@pytest.mark.parametrize("model", EVERY_LIST, ids=label_of)
def test_a_superuser_sees_the_row_in_its_list(model: type[Model], mine: Rows, foreign: Rows, login: Login) -> None:
    """Without this, a list that shows nothing would pass the tests below."""
    listed = reverse(f"admin:{name_of(model)}_changelist")
    shown = get(login("root"), listed)
    assert CANARY in shown
    assert CANARY not in get(login("admin"), listed)


@ISOLATED
@pytest.mark.parametrize("role", ROLES)
def test_no_path_tells_of_another_tenants_row(role: str | None, mine: Rows, foreign: Rows, login: Login) -> None:
    client = login(role)
    for model in ALL:
        name = name_of(model)
        listed = reverse(f"admin:{name}_changelist")
        asked = [
            {},
            {"q": CANARY},
            {"tenant": foreign.tenant.pk},
            {"q": foreign.pk(model)},
            {"_popup": "1"},
            {"all": ""},
        ]
        shown = [get(client, listed, **query) for query in asked]
        shown += [get(client, reverse(f"admin:{name}_{what}", args=[foreign.pk(model)])) for what in USUAL[2:]]
        assert not [each for each in shown if CANARY in each], model
    for name in DETAIL:
        model = next(each for each in ALL if name.startswith(f"{name_of(each)}_"))
        assert CANARY not in get(client, reverse(f"admin:{name}", args=[foreign.pk(model)]))
    for label in {model._meta.app_label for model in ALL}:
        assert CANARY not in get(client, reverse("admin:app_list", args=[label]))
    assert CANARY not in get(client, reverse("admin:search"), s=CANARY)
    for model, row in foreign.rows.items():
        kind = ContentType.objects.get_for_model(model).pk
        assert client.get(reverse("admin:view_on_site", args=[kind, row.pk])).status_code == 404


@pytest.mark.parametrize("role", ["viewer", "root"])
@pytest.mark.parametrize("model", EVERY_LIST, ids=label_of)
def test_a_list_is_filtered_by_what_it_offers(role: str, model: type[Model], mine: Rows, login: Login) -> None:
    """Or whoever may look finds out a hidden column letter by letter, and with an expression stops the database."""
    client, listed = login(role), reverse(f"admin:{name_of(model)}_changelist")
    offered = admin.site._registry[model].list_filter
    asked = [
        f"{field.attname}__{how}"
        for field in model._meta.concrete_fields
        for how in ("startswith", "regex", "gt")
        if field.name not in offered and field.name != admin.site._registry[model].date_hierarchy
    ]
    asked += ["tenant__slug__startswith", "tenant__memberships__user__password__startswith", "user__password__gt"]
    assert not [each for each in asked if client.get(listed, {each: "1"}).status_code == 200]


@pytest.mark.parametrize("model", ALL, ids=label_of)
def test_what_the_database_cannot_answer_is_a_400(model: type[Model], mine: Rows, login: Login) -> None:
    client, listed = login("root"), reverse(f"admin:{name_of(model)}_changelist")
    said = admin.site._registry[model]
    fields = [*(each for each in said.list_filter if isinstance(each, str)), said.date_hierarchy]
    asked = [(f"{field}{how}", value) for field in fields if field for how, value in UNASKABLE]
    for name, value in [*asked, ("q", "\0"), ("tenant", "\0"), ("o", "9" * 40), ("p", "9" * 40)]:
        with transaction.atomic():
            answer = client.get(listed, {name: value})
            transaction.set_rollback(True)
        assert answer.status_code in {200, 302, 400}, (name, value, answer.status_code)


@ISOLATED
@pytest.mark.parametrize("role", [*ROLES, "root"])
def test_no_autocomplete_offers_another_tenants_row(role: str | None, mine: Rows, foreign: Rows, login: Login) -> None:
    """Of every foreign key in any form: what it offers, and what a form may be forged with."""
    client, offered = login(role), 0
    for model in ALL:
        for field in model._meta.concrete_fields:
            if isinstance(field, models.ForeignKey):
                asked = {
                    "app_label": model._meta.app_label,
                    "model_name": model._meta.model_name,
                    "field_name": field.name,
                }
                for term in ("", CANARY):
                    answer = client.get(reverse("admin:autocomplete"), {**asked, "term": term})
                    assert answer.status_code in {200, 403}
                    offered += CANARY in answer.content.decode()
    assert bool(offered) == (role == "root")


# -- who may act ----------------------------------------------------------------------------------------------------


def press_everything(client: Any, rows: Rows) -> None:
    """Send every form, action and dialog there is about these rows."""
    person = TenantMembership.objects.get(tenant=rows.tenant, user__username__endswith="-person").user_id
    known = {"tenant": rows.tenant.pk, "user": person, "role": "admin", "reason": "because"}
    for model in ALL:
        name, pk = name_of(model), rows.pk(model)
        fields = {field.name: CANARY for field in model._meta.concrete_fields if not field.is_relation}
        client.post(reverse(f"admin:{name}_change", args=[pk]), {**fields, **known})
        client.post(reverse(f"admin:{name}_delete", args=[pk]), {"post": "yes", "reason": "because"})
        listed = reverse(f"admin:{name}_changelist")
        actions = {each for each in (admin.site._registry[model].actions or ()) if isinstance(each, str)}
        for action in {*actions, "delete_selected"}:
            form = {
                "action": action,
                "_selected_action": [pk],
                "select_across": "1",
                "reason": "because",
                "post": "yes",
            }
            client.post(listed, form)
    for name, form in DETAIL.items():
        model = next(each for each in ALL if name.startswith(f"{name_of(each)}_"))
        client.post(reverse(f"admin:{name}", args=[rows.pk(model)]), {**form, "_form_submitted": "True"})


@ISOLATED
@pytest.mark.parametrize("role", ROLES)
def test_nothing_reaches_another_tenants_rows(role: str | None, mine: Rows, foreign: Rows, login: Login) -> None:
    client, before = login(role), foreign.state()
    press_everything(client, foreign)
    assert foreign.state() == before


@RIGHTS
@pytest.mark.parametrize("role", [None, "viewer"])
def test_who_may_only_look_changes_nothing(role: str | None, mine: Rows, login: Login) -> None:
    client, before = login(role), mine.state()
    press_everything(client, mine)
    for model in ALL:
        assert client.get(reverse(f"admin:{name_of(model)}_add")).status_code == 403
    assert mine.state() == before


@RIGHTS
def test_the_same_forms_do_something_in_the_hands_of_who_may(mine: Rows, login: Login) -> None:
    """Without this, forms that mean nothing would pass the tests above."""
    before = mine.state()
    press_everything(login("root"), mine)
    after = mine.state()
    changed = {label for label, row in after[0].items() if row != before[0][label]}
    assert {"tenants.Tenant", "tenants.TenantMembership", "tenants.TenantIssuer", "webhooks.Endpoint"} <= changed
    assert after[1] != before[1]  # a new signing secret


@RIGHTS
@pytest.mark.parametrize("model", OF_PLATFORM, ids=label_of)
@pytest.mark.parametrize("role", ROLES)
def test_what_is_the_platforms_is_not_shown_to_staff(
    role: str | None, model: type[Model], mine: Rows, login: Login
) -> None:
    client = login(role)
    assert client.get(reverse(f"admin:{name_of(model)}_changelist")).status_code == 403
    assert client.get(reverse(f"admin:{name_of(model)}_change", args=[mine.pk(model)])).status_code in {302, 403}


# -- what it costs --------------------------------------------------------------------------------------------------


@pytest.mark.spec("ADM-3", "No page asks the database more than 20 questions; each page's number is checked in")
@pytest.mark.parametrize("what", ["changelist", "change"])
@pytest.mark.parametrize("model", ALL, ids=label_of)
def test_a_page_of_the_admin_asks_the_database_so_often(
    model: type[Model], what: str, mine: Rows, foreign: Rows, login: Login
) -> None:
    client = login("root")
    path = reverse(f"admin:{name_of(model)}_{what}", args=[mine.pk(model)] if what == "change" else [])
    client.get(path)  # content types and the like are known from the second request on
    with CaptureQueriesContext(connection) as queries:
        assert client.get(path).status_code == 200
    asked = [query["sql"] for query in queries.captured_queries if not _is_frame(query["sql"])]
    assert len(asked) <= MOST, asked
    known: dict[str, int] = json.loads(COUNTS.read_text())
    page = f"{model._meta.label} {what}"
    if os.environ.get("CODEQ_TEST_WRITE_COUNTS"):  # after a change that is meant
        known[page] = len(asked)
        COUNTS.write_text(json.dumps(dict(sorted(known.items())), indent=2) + "\n")
    assert known.get(page) == len(asked), asked
