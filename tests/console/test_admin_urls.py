"""Every URL of the admin: isolation of tenants, permissions, number of database queries.

A URL besides the usual ones of a model needs a line in PLAIN or DETAIL, or the first test fails.
"""

from __future__ import annotations

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
from tests.console.query_counts import assert_query_count
from tests.console.rows import ALL, CANARY, Rows, label_of, url_prefix
from tests.console.work import Login

pytestmark = pytest.mark.django_db
ISOLATED = pytest.mark.spec(
    "ADM-4", "No list, form, history, search, autocomplete or action of the admin shows another tenant's data"
)
RIGHTS = pytest.mark.spec("ADM-4", "A viewer cannot change anything in the admin by a form, an action or a dialog")
ROLES = [None, "viewer", "operator", "admin"]

# URLs that do not belong to a row.
PLAIN = {
    "index", "login", "logout", "password_change", "password_change_done", "jsi18n", "search", "app_list",
    "autocomplete", "view_on_site",
}  # fmt: skip
# URLs of one row besides the usual ones, and the form to send.
DETAIL: dict[str, dict[str, str]] = {
    "tenants_tenant_suspend": {"reason": "because"},
    "tenants_tenant_resume": {"reason": "because"},
    "tenants_tenant_rotate_secret": {"reason": "because"},
    "webhooks_endpoint_recover": {"reason": "because", "since_0": "2026-01-01", "since_1": "00:00:00"},
    "webhooks_endpoint_stop": {"reason": "because"},
    "webhooks_endpoint_new_secret": {"reason": "because"},
    "auth_user_password_change": {"password1": "x-9-another-one", "password2": "x-9-another-one"},
}
REJECTED_BY_POSTGRESQL = [("", "\0"), ("__exact", "\0"), ("__regex", "("), ("__year", "9" * 12), ("__gt", "9" * 40)]
USUAL = ("changelist", "add", "history", "delete", "change")
OF_TENANTS = [model for model in ALL if isinstance(admin.site._registry[model], TenantScopedAdmin)]
OF_PLATFORM = [model for model in ALL if model not in OF_TENANTS and model is not LogEntry]
EVERY_LIST = [*OF_TENANTS, LogEntry]


def url_names(patterns: Any) -> Iterator[str]:
    for pattern in patterns:
        if hasattr(pattern, "url_patterns"):
            yield from url_names(pattern.url_patterns)
        elif pattern.name:
            yield pattern.name


def get(client: Any, path: str, **query: str) -> str:
    response = client.get(path, query)
    assert response.status_code in {200, 302, 403, 404}, path
    text = (response.getvalue() if response.streaming else response.content).decode()
    # A page repeats the values of its query string, which the client already has.
    for value in query.values():
        text = text.replace(f'value="{value}"', "").replace(f"={value}", "").replace(f"%3D{value}", "")
    return text


def test_every_url_is_listed() -> None:
    usual = {f"{url_prefix(model)}_{view}" for model in ALL for view in USUAL}
    assert set(url_names(admin.site.get_urls())) == usual | PLAIN | DETAIL.keys()


# --- isolation ---


@ISOLATED
@pytest.mark.parametrize("model", EVERY_LIST, ids=label_of)
def test_a_superuser_sees_the_row_in_its_list(model: type[Model], mine: Rows, foreign: Rows, login: Login) -> None:
    """Guard the tests below, which would pass if the lists were empty."""
    url = reverse(f"admin:{url_prefix(model)}_changelist")
    assert CANARY in get(login("root"), url)
    assert CANARY not in get(login("admin"), url)


@ISOLATED
@pytest.mark.parametrize("role", ROLES)
def test_no_url_shows_another_tenants_row(role: str | None, mine: Rows, foreign: Rows, login: Login) -> None:
    client = login(role)
    for model in ALL:
        name = url_prefix(model)
        url = reverse(f"admin:{name}_changelist")
        queries = [
            {},
            {"q": CANARY},
            {"tenant": foreign.tenant.pk},
            {"q": foreign.pk(model)},
            {"_popup": "1"},
            {"all": ""},
        ]
        pages = [get(client, url, **query) for query in queries]
        pages += [get(client, reverse(f"admin:{name}_{view}", args=[foreign.pk(model)])) for view in USUAL[2:]]
        assert not [page for page in pages if CANARY in page], model
    for name in DETAIL:
        model = next(model for model in ALL if name.startswith(f"{url_prefix(model)}_"))
        assert CANARY not in get(client, reverse(f"admin:{name}", args=[foreign.pk(model)]))
    for label in {model._meta.app_label for model in ALL}:
        assert CANARY not in get(client, reverse("admin:app_list", args=[label]))
    assert CANARY not in get(client, reverse("admin:search"), s=CANARY)
    for model, row in foreign.rows.items():
        kind = ContentType.objects.get_for_model(model).pk
        assert client.get(reverse("admin:view_on_site", args=[kind, row.pk])).status_code == 404


@pytest.mark.parametrize("role", ["viewer", "root"])
@pytest.mark.parametrize("model", EVERY_LIST, ids=label_of)
def test_a_list_is_filtered_by_its_own_filters_only(role: str, model: type[Model], mine: Rows, login: Login) -> None:
    """Other filters reveal a hidden column letter by letter, or run a slow regex."""
    client, url = login(role), reverse(f"admin:{url_prefix(model)}_changelist")
    filters = admin.site._registry[model].list_filter
    lookups = [
        f"{field.attname}__{lookup}"
        for field in model._meta.concrete_fields
        for lookup in ("startswith", "regex", "gt")
        if field.name not in filters and field.name != admin.site._registry[model].date_hierarchy
    ]
    lookups += ["tenant__slug__startswith", "tenant__memberships__user__password__startswith", "user__password__gt"]
    assert not [lookup for lookup in lookups if client.get(url, {lookup: "1"}).status_code == 200]


@pytest.mark.parametrize("model", ALL, ids=label_of)
def test_values_that_postgresql_rejects_are_not_a_server_error(model: type[Model], mine: Rows, login: Login) -> None:
    client, url = login("root"), reverse(f"admin:{url_prefix(model)}_changelist")
    model_admin = admin.site._registry[model]
    fields = [*(name for name in model_admin.list_filter if isinstance(name, str)), model_admin.date_hierarchy]
    queries = [(f"{field}{lookup}", value) for field in fields if field for lookup, value in REJECTED_BY_POSTGRESQL]
    for name, value in [*queries, ("q", "\0"), ("tenant", "\0"), ("o", "9" * 40), ("p", "9" * 40)]:
        with transaction.atomic():
            response = client.get(url, {name: value})
            transaction.set_rollback(True)
        assert response.status_code in {200, 302, 400}, (name, value, response.status_code)


@ISOLATED
@pytest.mark.parametrize("role", [*ROLES, "root"])
def test_no_autocomplete_offers_another_tenants_row(role: str | None, mine: Rows, foreign: Rows, login: Login) -> None:
    """The choices of a foreign key are also the values that a forged form may contain."""
    client, offered = login(role), 0
    for model in ALL:
        for field in model._meta.concrete_fields:
            if isinstance(field, models.ForeignKey):
                query = {
                    "app_label": model._meta.app_label,
                    "model_name": model._meta.model_name,
                    "field_name": field.name,
                }
                for term in ("", CANARY):
                    response = client.get(reverse("admin:autocomplete"), {**query, "term": term})
                    assert response.status_code in {200, 403}
                    offered += CANARY in response.content.decode()
    assert bool(offered) == (role == "root")


# --- permissions ---


def submit_everything(client: Any, rows: Rows) -> None:
    """Send every form, action and dialog of these rows."""
    person = TenantMembership.objects.get(tenant=rows.tenant, user__username__endswith="-person").user_id
    known = {"tenant": rows.tenant.pk, "user": person, "role": "admin", "reason": "because"}
    for model in ALL:
        name, pk = url_prefix(model), rows.pk(model)
        fields = {field.name: CANARY for field in model._meta.concrete_fields if not field.is_relation}
        client.post(reverse(f"admin:{name}_change", args=[pk]), {**fields, **known})
        client.post(reverse(f"admin:{name}_delete", args=[pk]), {"post": "yes", "reason": "because"})
        url = reverse(f"admin:{name}_changelist")
        actions = {name for name in (admin.site._registry[model].actions or ()) if isinstance(name, str)}
        for action in {*actions, "delete_selected"}:
            form = {
                "action": action,
                "_selected_action": [pk],
                "select_across": "1",
                "reason": "because",
                "post": "yes",
            }
            client.post(url, form)
    for name, form in DETAIL.items():
        model = next(model for model in ALL if name.startswith(f"{url_prefix(model)}_"))
        client.post(reverse(f"admin:{name}", args=[rows.pk(model)]), {**form, "_form_submitted": "True"})


@ISOLATED
@pytest.mark.parametrize("role", ROLES)
def test_nothing_reaches_another_tenants_rows(role: str | None, mine: Rows, foreign: Rows, login: Login) -> None:
    client, before = login(role), foreign.state()
    submit_everything(client, foreign)
    assert foreign.state() == before


@RIGHTS
@pytest.mark.parametrize("role", [None, "viewer"])
def test_a_viewer_changes_nothing(role: str | None, mine: Rows, login: Login) -> None:
    client, before = login(role), mine.state()
    submit_everything(client, mine)
    for model in ALL:
        assert client.get(reverse(f"admin:{url_prefix(model)}_add")).status_code == 403
    assert mine.state() == before


@RIGHTS
def test_the_same_forms_of_a_superuser_take_effect(mine: Rows, login: Login) -> None:
    """Guard the tests above, which would pass if the forms were invalid."""
    before = mine.state()
    submit_everything(login("root"), mine)
    after = mine.state()
    changed = {label for label, row in after[0].items() if row != before[0][label]}
    assert {"tenants.Tenant", "tenants.TenantMembership", "tenants.TenantIssuer", "webhooks.Endpoint"} <= changed
    assert after[1] != before[1]  # a new signing secret


@RIGHTS
@pytest.mark.parametrize("model", OF_PLATFORM, ids=label_of)
@pytest.mark.parametrize("role", ROLES)
def test_models_of_the_platform_are_hidden_from_staff(
    role: str | None, model: type[Model], mine: Rows, login: Login
) -> None:
    client = login(role)
    assert client.get(reverse(f"admin:{url_prefix(model)}_changelist")).status_code == 403
    assert client.get(reverse(f"admin:{url_prefix(model)}_change", args=[mine.pk(model)])).status_code in {302, 403}


# --- query counts ---


@pytest.mark.spec("ADM-3", "No page needs more than 20 database queries; the number of each page is recorded")
@pytest.mark.parametrize("view", ["changelist", "change"])
@pytest.mark.parametrize("model", ALL, ids=label_of)
def test_the_number_of_queries_of_an_admin_page(
    model: type[Model], view: str, mine: Rows, foreign: Rows, login: Login
) -> None:
    client = login("root")
    path = reverse(f"admin:{url_prefix(model)}_{view}", args=[mine.pk(model)] if view == "change" else [])
    client.get(path)  # the first request fills caches, for example of content types
    with CaptureQueriesContext(connection) as queries:
        assert client.get(path).status_code == 200
    assert_query_count(f"{model._meta.label} {view}", queries)
