"""Forged forms: whatever is sent in any field of any form of the admin, the answer is a page and never a crash."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Model
from django.urls import reverse

from tenants.models import TenantMembership
from tests.console.conftest import Login
from tests.console.rows import ALL, Rows, label_of, name_of
from tests.console.test_admin_deletion import REQUEST

pytestmark = pytest.mark.django_db
FORGED = pytest.mark.spec("ADM-4", "A forged form of the admin is refused on its page; none is a server's error")
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
    """What a browser would send of a page's forms; in `names` what it could."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.sent: dict[str, str] = {}
        self.names: set[str] = set()
        self._in = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = {name: value or "" for name, value in attrs}
        if tag == "option" and self._in and "selected" in said:
            self.sent[self._in] = said["value"]
        if tag not in {"input", "select", "textarea"} or not (name := said.get("name", "")):
            return
        self.names.add(name)
        self._in = "" if tag == "input" else name
        if said.get("type") not in {"checkbox", "radio", "submit"} or "checked" in said:
            self.sent[name] = said.get("value", "")

    def fill_in(self) -> None:
        """As if "add another" had been pressed once for each table of rows within the form."""
        self.names = {name.replace("__prefix__", "0") for name in self.names}
        for name, value in list(self.sent.items()):
            self.sent[name.replace("__prefix__", "0")] = value
            if name.endswith("-TOTAL_FORMS"):
                self.sent[name] = str(max(int(value), 1))

    def handle_data(self, data: str) -> None:
        if self.lasttag == "textarea" and self._in:
            self.sent[self._in] += data

    def handle_endtag(self, tag: str) -> None:
        if tag in {"select", "textarea"}:
            self._in = ""


FORMS = [
    (model, what)
    for model in ALL
    for what, may in (("add", "has_add_permission"), ("change", "has_change_permission"))
    if getattr(admin.site._registry[model], may)(REQUEST)
]


@FORGED
@pytest.mark.parametrize(("model", "what"), FORMS, ids=label_of)
def test_no_field_of_a_form_crashes_the_page(
    model: type[Model], what: str, mine: Rows, login: Login, subtests: pytest.Subtests
) -> None:
    client = login("root")
    path = reverse(f"admin:{name_of(model)}_{what}", args=[mine.pk(model)] if what == "change" else [])
    page = client.get(path)
    form = Fields(page.content.decode())
    form.fill_in()
    # A password that cannot be seen is a link.
    assert {name.removesuffix("_0") for name in form.names} >= set(page.context["adminform"].form.fields) - {"password"}

    def post(path: str, sent: dict[str, Any]) -> int:
        with transaction.atomic():
            status = client.post(path, sent).status_code
            transaction.set_rollback(True)
        return status

    for label, junk in JUNK.items():
        with subtests.test(label):
            # As in a pop-up: the same form without the console's frame, which costs most of a page's time.
            for name in sorted(form.names):
                assert post(f"{path}?_popup=1", {**form.sent, name: junk}) in {200, 302, 400}, name
            assert post(path, dict.fromkeys(form.names, junk)) in {200, 302, 400}


@FORGED
def test_a_person_is_added(login: Login) -> None:
    """Without this, a page without any field of a person would pass the test above."""
    client, path = login("root"), reverse("admin:auth_user_add")
    said = {"username": "new-person", "password1": "x-9-another-one", "password2": "x-9-another-one"}
    form = Fields(client.get(path).content.decode())
    assert said.keys() <= form.names
    assert client.post(path, {**form.sent, **said, "reason": "new here"}).status_code == 302
    assert User.objects.get(username="new-person").check_password("x-9-another-one")


@FORGED
def test_a_membership_of_nobody_is_an_error_of_the_form(mine: Rows, login: Login) -> None:
    client, before = login("root"), TenantMembership.objects.count()
    for who in ("text", "99999999", "1\0"):
        form = {"user": who, "tenant": mine.tenant.pk, "role": "viewer", "reason": "because"}
        answer = client.post(reverse("admin:tenants_tenantmembership_add"), form)
        assert answer.status_code == 200
        assert answer.context["adminform"].form.errors.keys() == {"user"}
    assert TenantMembership.objects.count() == before
