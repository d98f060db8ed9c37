"""Forged forms: no value in any field of an admin form causes a server error."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any
from unittest import mock

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Model
from django.http import HttpRequest
from django.template import engines
from django.urls import reverse

from tenants.models import TenantMembership
from tests.console.rows import ALL, SUPERUSER_REQUEST, Rows, label_of, url_prefix
from tests.console.work import Login

pytestmark = pytest.mark.django_db
FORGED = pytest.mark.spec("ADM-4", "A forged admin form is rejected on its page and never causes a server error")
JUNK: dict[str, Any] = {
    "text": "text",
    "nul": "a\0b",
    "beyond 64 bits": str(2**70),
    "long": "9" * 5000,
    "nested": "[" * 20_000,
    "closed": "[" * 900 + "]" * 900,
    "json": '{"keys": [{"kty": null}, 7, [[]]]}',
    "not a number": "NaN",
    "the last day": "9999-12-31",
    "markup": "<script>{{ 7 * 7 }}%s\r\n",
    "many": ["1", "text"],
    "empty": "",
}


class Fields(HTMLParser):
    """The values that a browser would send from a page's forms. `names` has all fields."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.sent: dict[str, str] = {}
        self.names: set[str] = set()
        self._field = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        if tag == "option" and self._field and "selected" in attributes:
            self.sent[self._field] = attributes["value"]
        if tag not in {"input", "select", "textarea"} or not (name := attributes.get("name", "")):
            return
        self.names.add(name)
        self._field = "" if tag == "input" else name
        if attributes.get("type") not in {"checkbox", "radio", "submit"} or "checked" in attributes:
            self.sent[name] = attributes.get("value", "")

    def fill_in(self) -> None:
        """Add one row to each inline table, as "Add another" does."""
        self.names = {name.replace("__prefix__", "0") for name in self.names}
        for name, value in list(self.sent.items()):
            self.sent[name.replace("__prefix__", "0")] = value
            if name.endswith("-TOTAL_FORMS"):
                self.sent[name] = str(max(int(value), 1))

    def handle_data(self, data: str) -> None:
        if self.lasttag == "textarea" and self._field:
            self.sent[self._field] += data

    def handle_endtag(self, tag: str) -> None:
        if tag in {"select", "textarea"}:
            self._field = ""


class FieldPage:
    """A template of a form's page with only the parts that depend on one field.

    These are the row of the field, or its inline table, every error, the read-only fields, and the texts about the
    object. The page's own templates and widgets render them. The other fields and the console's frame, which do not
    depend on the field, take most of a page's time.
    """

    template = engines["django"].from_string("""
        {{ title }} {{ subtitle }} {{ original }} {{ errors }} {{ adminform.form.non_field_errors }}
        {% for fieldset in adminform %}{% for line in fieldset %}{{ line.errors }}{% for field in line %}
            {% if field.is_readonly or field.field.html_name in changed %}
                {% if field.is_checkbox %}{% include "unfold/helpers/fieldset_row_checkbox.html" %}
                {% else %}{% include "unfold/helpers/fieldset_row_field.html" %}{% endif %}
            {% endif %}
        {% endfor %}{% endfor %}{% endfor %}
        {% for inline_admin_formset in inline_admin_formsets %}{% with formset=inline_admin_formset.formset %}
            {% if formset.prefix in changed %}{% include inline_admin_formset.opts.template %}{% endif %}
            {{ formset.non_form_errors }} {{ formset.errors }}
        {% endwith %}{% endfor %}
    """)

    def __init__(self, name: str) -> None:
        # A widget with several inputs adds a number to the name of its field, an inline table its own name.
        self.changed = {name, re.sub(r"_\d+$", "", name), name.partition("-")[0]}

    def render(self, context: dict[str, Any], request: HttpRequest) -> str:
        return str(self.template.render({**context, "changed": self.changed}, request))


FORMS = [
    (model, view)
    for model in ALL
    for view, permission in (("add", "has_add_permission"), ("change", "has_change_permission"))
    if getattr(admin.site._registry[model], permission)(SUPERUSER_REQUEST)
]


@FORGED
@pytest.mark.parametrize(("model", "view"), FORMS, ids=label_of)
def test_no_field_of_a_form_crashes_the_page(
    model: type[Model], view: str, mine: Rows, login: Login, subtests: pytest.Subtests
) -> None:
    client, model_admin = login("root"), admin.site._registry[model]
    path = reverse(f"admin:{url_prefix(model)}_{view}", args=[mine.pk(model)] if view == "change" else [])
    page = client.get(path)
    form = Fields(page.content.decode())
    form.fill_in()
    # The page shows a link instead of the password field.
    assert {name.removesuffix("_0") for name in form.names} >= set(page.context["adminform"].form.fields) - {"password"}

    def post(path: str, sent: dict[str, Any]) -> int:
        with transaction.atomic():
            status = client.post(path, sent).status_code
            transaction.set_rollback(True)
        return status

    for label, junk in JUNK.items():
        with subtests.test(label):
            for name in sorted(form.names):
                template = FieldPage(name)
                with mock.patch.multiple(model_admin, add_form_template=template, change_form_template=template):
                    assert post(path, {**form.sent, name: junk}) in {200, 302, 400}, name
            assert post(path, dict.fromkeys(form.names, junk)) in {200, 302, 400}


@FORGED
def test_a_user_is_added(login: Login) -> None:
    """Guard the test above, which would pass if the page had no fields."""
    client, path = login("root"), reverse("admin:auth_user_add")
    values = {"username": "new-person", "password1": "x-9-another-one", "password2": "x-9-another-one"}
    form = Fields(client.get(path).content.decode())
    assert values.keys() <= form.names
    assert client.post(path, {**form.sent, **values, "reason": "new here"}).status_code == 302
    assert User.objects.get(username="new-person").check_password("x-9-another-one")


@FORGED
def test_a_membership_without_an_existing_user_is_a_form_error(mine: Rows, login: Login) -> None:
    client, before = login("root"), TenantMembership.objects.count()
    for user in ("text", "99999999", "1\0"):
        form = {"user": user, "tenant": mine.tenant.pk, "role": "viewer", "reason": "because"}
        response = client.post(reverse("admin:tenants_tenantmembership_add"), form)
        assert response.status_code == 200
        assert response.context["adminform"].form.errors.keys() == {"user"}
    assert TenantMembership.objects.count() == before
