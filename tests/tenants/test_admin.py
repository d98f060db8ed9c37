"""The console of this room: whose rows are seen, who may act, and that a secret is shown once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import AnonymousUser, User
from django.http import HttpResponse
from django.test import Client
from django.urls import reverse

from tenants import scoping, services
from tenants.admin import TenantAdmin
from tenants.models import SigningSecret, Tenant, TenantIssuer, TenantMembership
from tests.factories import TenantIssuerFactory, TenantMembershipFactory, UserFactory
from tests.tenants.minting import Signer

pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.tenants.urls")]

ISOLATED = pytest.mark.spec("ADM-4", "Staff see and touch the tenants of their memberships, and no others")
AUDITED = pytest.mark.spec("ADM-4", "An operator's act asks for a reason and leaves a row")
ONCE = pytest.mark.spec("TEN-5", "A secret is shown once, when it is made")

Login = Callable[..., Client]
CANARY = "canary-of-another-tenant"


@pytest.fixture
def foreign(signer: Signer) -> dict[str, Any]:
    """A tenant of somebody else with a row of every kind, each with a name that must not show."""
    tenant = services.create_tenant(CANARY)
    services.signing_secret(CANARY)
    person = UserFactory(username=f"{CANARY}-person")
    return {
        "tenant": tenant,
        "tenantmembership": TenantMembershipFactory(tenant=tenant, user=person),
        "tenantissuer": TenantIssuerFactory(tenant=tenant, issuer=CANARY, jwks={"keys": [signer.jwk]}),
        "signingsecret": SigningSecret.objects.get(tenant=tenant),
    }


@pytest.fixture
def login(acme: Tenant) -> Login:
    """`login("admin")`: a client of staff with this role for acme; `login(None)` without any; `login("root")`."""

    def as_role(role: str | None, *, enforce_csrf_checks: bool = False) -> Client:
        user = UserFactory(username=f"staff-{role}", is_superuser=role == "root")
        if role not in {None, "root"}:
            TenantMembershipFactory(tenant=acme, user=user, role=role)
        client = Client(enforce_csrf_checks=enforce_csrf_checks)
        client.force_login(user)
        return client

    return as_role


def url(model: str, view: str, *args: object) -> str:
    return reverse(f"admin:tenants_{model}_{view}", args=args)


def issuer_form(tenant: Tenant, **changes: str) -> dict[str, str]:
    return {"tenant": tenant.tid, "issuer": "idp", "jwks": "", "jwks_url": "", "reason": "because", **changes}


WHY = {"reason": "because"}
MODELS = ["tenant", "tenantmembership", "tenantissuer", "signingsecret"]
ROLES = ["viewer", "operator", "admin"]


# -- what is seen ---------------------------------------------------------------------------------------------------


@ISOLATED
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("role", [None, *ROLES])
def test_no_page_shows_another_tenants_rows(
    role: str | None, model: str, login: Login, foreign: dict[str, Any]
) -> None:
    client, pk = login(role), foreign[model].pk
    pages = [
        url(model, "changelist"),
        url(model, "changelist") + f"?q={CANARY[:10]}",  # would find it, and is not what is looked for below
        url(model, "changelist") + f"?q={foreign['tenant'].tid}",
        url(model, "changelist") + f"?tenant={foreign['tenant'].tid}",
        url(model, "changelist") + f"?tenant__tid__exact={foreign['tenant'].tid}",
        url(model, "change", pk),
        url(model, "history", pk),
        url(model, "delete", pk),
        url(model, "add"),
        reverse("admin:index"),
        reverse("admin:app_list", args=["tenants"]),
    ]
    for page in pages:
        answer = client.get(page, follow=True)
        assert answer.status_code in {200, 400, 403, 404}, page
        assert CANARY not in answer.content.decode(), page


@ISOLATED
@pytest.mark.parametrize("role", [None, *ROLES])
def test_autocomplete_names_no_foreign_tenant(role: str | None, login: Login, foreign: dict[str, Any]) -> None:
    answer = login(role).get(
        reverse("admin:autocomplete"),
        {"app_label": "tenants", "model_name": "tenantmembership", "field_name": "tenant", "term": ""},
    )
    if role is None:
        assert answer.status_code == 403
    else:
        assert [each["text"] for each in answer.json()["results"]] == ["acme"]


@ISOLATED
@pytest.mark.parametrize("model", MODELS)
def test_superusers_see_everything(model: str, login: Login, foreign: dict[str, Any]) -> None:
    client = login("root")
    assert CANARY in client.get(url(model, "changelist")).content.decode()
    assert CANARY in client.get(url(model, "changelist") + f"?q={CANARY[:10]}").content.decode()
    assert client.get(url(model, "change", foreign[model].pk)).status_code == 200


@ISOLATED
@pytest.mark.parametrize(("role", "status"), [("viewer", 403), ("operator", 403), ("admin", 200), (None, 403)])
def test_secrets_are_listed_for_a_tenants_admins_only(role: str | None, status: int, login: Login) -> None:
    services.signing_secret("acme")
    assert login(role).get(url("signingsecret", "changelist")).status_code == status


# -- what is touched ------------------------------------------------------------------------------------------------


@ISOLATED
@pytest.mark.parametrize("role", ROLES)
def test_forged_forms_change_nothing_foreign(
    role: str, login: Login, foreign: dict[str, Any], signer: Signer, acme: Tenant
) -> None:
    client, tid = login(role), foreign["tenant"].tid
    before = snapshot(foreign)
    own = TenantIssuerFactory(tenant=acme, issuer="own", jwks={"keys": [signer.jwk]})
    key = '{"keys": [' + str(signer.jwk).replace("'", '"') + "]}"
    posts: list[tuple[str, dict[str, Any]]] = [
        (url("tenantissuer", "add"), issuer_form(foreign["tenant"], jwks=key)),
        (url("tenantissuer", "change", foreign["tenantissuer"].pk), issuer_form(acme, jwks=key)),
        (url("tenantissuer", "change", own.pk), issuer_form(foreign["tenant"], jwks=key)),
        (url("tenantissuer", "delete", foreign["tenantissuer"].pk), {"post": "yes", "reason": "because"}),
        (
            url("tenantissuer", "changelist"),
            {
                "action": "delete_selected",
                "_selected_action": [foreign["tenantissuer"].pk],
                "post": "yes",
                "reason": "because",
            },
        ),
        (url("tenant", "change", tid), {"slug": "mine"}),
        (url("tenant", "delete", tid), {"post": "yes", "reason": "because"}),
        (url("tenantmembership", "add"), {"tenant": tid, "user": client.session["_auth_user_id"], "role": "admin"}),
        (url("tenantmembership", "change", foreign["tenantmembership"].pk), {"tenant": tid, "role": "admin"}),
        (url("signingsecret", "change", foreign["signingsecret"].pk), {"retires_at": ""}),
        (url("signingsecret", "delete", foreign["signingsecret"].pk), {"post": "yes", "reason": "because"}),
        (f"/admin/tenants/tenant/{tid}/suspend/", {"reason": "x", "_form_submitted": "True"}),
        (f"/admin/tenants/tenant/{tid}/rotate-secret/", {"reason": "x", "_form_submitted": "True"}),
    ]
    for path, data in posts:
        answer = client.post(path, {"reason": "because", **data}, follow=True)
        assert answer.status_code in {200, 403, 404}, path
        assert "whsec_" not in answer.content.decode()
    assert snapshot(foreign) == before


def snapshot(rows: dict[str, Any]) -> list[dict[str, Any]]:
    models = (Tenant, TenantMembership, TenantIssuer, SigningSecret)
    tid = rows["tenant"].tid
    return [row for model in models for row in model.objects.filter(**{tid_path(model): tid}).values()]


def tid_path(model: type[Any]) -> str:
    return "tid" if model is Tenant else "tenant_id"


@ISOLATED
def test_an_admin_of_one_tenant_does_not_delete_where_they_only_look(
    login: Login, foreign: dict[str, Any], acme: Tenant, signer: Signer
) -> None:
    client = login("admin")
    user = User.objects.get(pk=client.session["_auth_user_id"])
    TenantMembershipFactory(tenant=foreign["tenant"], user=user)
    own = TenantIssuerFactory(tenant=acme, issuer="own", jwks={"keys": [signer.jwk]})
    both = [own.pk, foreign["tenantissuer"].pk]
    client.post(
        url("tenantissuer", "changelist"),
        {"action": "delete_selected", "_selected_action": both, "post": "yes", "reason": "because"},
        follow=True,
    )
    assert TenantIssuer.objects.filter(pk__in=both).count() == 2
    client.post(url("tenantissuer", "delete", own.pk), {"post": "yes", "reason": "because"})
    assert not TenantIssuer.objects.filter(pk=own.pk).exists()


@ISOLATED
@pytest.mark.parametrize(("role", "may"), [("viewer", False), ("operator", False), ("admin", True), ("root", True)])
def test_issuers_are_added_by_a_tenants_admins(
    role: str, may: bool, login: Login, acme: Tenant, signer: Signer
) -> None:
    key = '{"keys": [' + str(signer.jwk).replace("'", '"') + "]}"
    login(role).post(url("tenantissuer", "add"), issuer_form(acme, jwks=key))
    assert TenantIssuer.objects.filter(tenant=acme).exists() is may


@pytest.mark.spec("AUT-1", "Where keys are fetched from is said by superusers: the servers fetch it from inside")
@pytest.mark.parametrize(("role", "may"), [("admin", False), ("root", True)])
def test_only_superusers_name_a_url_to_fetch(role: str, may: bool, login: Login, acme: Tenant) -> None:
    inside = "http://169.254.169.254/latest/meta-data"
    login(role).post(url("tenantissuer", "add"), issuer_form(acme, jwks_url=inside))
    assert TenantIssuer.objects.filter(jwks_url=inside).exists() is may


@pytest.mark.spec("ADM-4", "A forged form of the admin is refused on its page; none is a server's error")
@pytest.mark.parametrize(
    "junk",
    ["NaN", "1e999", "9" * 5000, '"\\u0000"', '"\\ud800"', '{"a":' * 600 + "0" + "}" * 600, "[" * 5000],
    ids=["nan", "infinite", "digits", "nul", "surrogate", "nested", "open"],
)
def test_keys_that_cannot_be_kept_are_an_error_of_the_form(
    junk: str, login: Login, acme: Tenant, signer: Signer
) -> None:
    client, key = login("admin"), json.dumps(signer.jwk)

    def send(extra: str) -> HttpResponse:
        form = issuer_form(acme, jwks=f'{{"keys": [{key}], "extra": {extra}}}')
        return client.post(url("tenantissuer", "add"), form)

    answer = send(junk)
    assert answer.status_code == 200
    assert "Enter a valid JSON." in answer.content.decode()
    assert not TenantIssuer.objects.exists()
    assert send('"all is well"').status_code == 302


@ISOLATED
@pytest.mark.parametrize("role", ROLES)
def test_nobody_raises_their_own_limits(role: str, login: Login, acme: Tenant) -> None:
    answer = login(role).post(url("tenant", "change", acme.tid), {"slug": "acme", "payload_bytes": 10**9, **WHY})
    assert answer.status_code == 403
    acme.refresh_from_db()
    assert acme.payload_bytes is None


@ISOLATED
@pytest.mark.parametrize("role", ROLES)
def test_nobody_makes_tenants_or_members(role: str, login: Login, acme: Tenant) -> None:
    client = login(role)
    assert client.post(url("tenant", "add"), {"slug": "mine", **WHY}).status_code == 403
    me = client.session["_auth_user_id"]
    assert client.post(url("tenantmembership", "add"), {"tenant": acme.tid, "user": me, **WHY}).status_code == 403
    own = TenantMembership.objects.get(user_id=me)
    client.post(url("tenantmembership", "change", own.pk), {"tenant": acme.tid, "user": me, "role": "admin", **WHY})
    own.refresh_from_db()
    assert own.role == role


@ISOLATED
def test_no_tenant_is_deleted(login: Login, acme: Tenant) -> None:
    assert (
        login("root").post(url("tenant", "delete", acme.tid), {"post": "yes", "reason": "because"}).status_code == 403
    )


@ISOLATED
def test_a_superuser_edits_limits_and_a_suspension_made_meanwhile_stays(
    login: Login, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = TenantAdmin.save_model

    def suspended_meanwhile(self: Any, request: Any, obj: Any, form: Any, change: bool) -> None:
        Tenant.objects.filter(pk=obj.pk).update(status="suspended")
        save(self, request, obj, form, change)

    monkeypatch.setattr(TenantAdmin, "save_model", suspended_meanwhile)
    answer = login("root").post(
        url("tenant", "change", acme.tid),
        {"slug": "acme", "name": "acme", "create_per_second": "12.5", "is_idempotency_strict": "unknown"}
        | {"is_lease_token_required": "true", **WHY},
    )
    assert answer.status_code == 302, answer.context["errors"]
    acme.refresh_from_db()
    assert (acme.create_per_second, acme.is_lease_token_required, acme.status) == (12.5, True, "suspended")
    said = LogEntry.objects.get().get_change_message()
    assert said == "Changed Create per second and Lease token required: because"


@pytest.mark.spec("ADM-4", "What is saved in the admin is saved for a reason, and the record keeps it")
def test_nothing_is_saved_without_a_reason(login: Login, acme: Tenant) -> None:
    client = login("root")
    answer = client.post(url("tenant", "change", acme.tid), {"slug": "acme", "name": "other", "reason": " "})
    assert answer.context["adminform"].form.errors == {"reason": ["This field is required."]}
    page = answer.content.decode()
    assert "This field is required." in page
    assert 'name="reason"' in page
    acme.refresh_from_db()
    assert (acme.name, LogEntry.objects.count()) == ("acme", 0)
    form = {"slug": "new", "name": "new", "is_idempotency_strict": "unknown", "is_lease_token_required": "unknown"}
    assert client.post(url("tenant", "add"), {**form, "reason": "they signed"}).status_code == 302
    assert LogEntry.objects.get().get_change_message() == "Added: they signed"
    assert 'name="reason"' not in login("viewer").get(url("tenant", "change", acme.tid)).content.decode()


# -- acts -----------------------------------------------------------------------------------------------------------


def act(client: Client, tenant: Tenant, what: str, reason: str | None = "as agreed") -> HttpResponse:
    data = {"_form_submitted": "True"} | ({} if reason is None else {"reason": reason})
    return client.post(f"/admin/tenants/tenant/{tenant.tid}/{what}/", data)


@AUDITED
def test_suspending_asks_why_and_leaves_a_row(login: Login, acme: Tenant) -> None:
    client = login("root")
    path = f"/admin/tenants/tenant/{acme.tid}/suspend/"
    for answer in (client.get(path), client.get(path + "?reason=x"), act(client, acme, "suspend", None)):
        assert "reason" in answer.content.decode()
        acme.refresh_from_db()
        assert not acme.is_suspended
    assert act(client, acme, "suspend", " ").status_code == 200
    acme.refresh_from_db()
    assert not acme.is_suspended
    assert act(client, acme, "suspend", "unpaid since May").headers["HX-Redirect"]
    acme.refresh_from_db()
    assert acme.is_suspended
    act(client, acme, "resume", "paid")
    acme.refresh_from_db()
    assert not acme.is_suspended
    rows = [(row.object_id, row.user.username, row.get_change_message()) for row in LogEntry.objects.order_by("pk")]
    assert rows == [
        (acme.tid, "staff-root", "Suspended: unpaid since May"),
        (acme.tid, "staff-root", "Resumed: paid"),
    ]


@AUDITED
@pytest.mark.parametrize("what", ["suspend", "resume"])
@pytest.mark.parametrize("role", [None, *ROLES])
def test_only_superusers_suspend(role: str | None, what: str, login: Login, acme: Tenant) -> None:
    assert act(login(role), acme, what).status_code == 403
    assert not LogEntry.objects.exists()


@AUDITED
@pytest.mark.parametrize("what", ["suspend", "resume", "rotate-secret"])
def test_acts_need_the_csrf_token(what: str, login: Login, acme: Tenant) -> None:
    assert act(login("root", enforce_csrf_checks=True), acme, what).status_code == 403


@ONCE
@pytest.mark.parametrize("role", ["admin", "root"])
def test_a_new_secret_is_shown_once(role: str, login: Login, acme: Tenant) -> None:
    client = login(role)
    answer = act(client, acme, "rotate-secret", "the old one leaked")
    (secret,) = services.signing_secrets(acme.tid)
    assert secret in answer.content.decode()
    assert "no-store" in answer["Cache-Control"]
    assert not answer.cookies
    row = SigningSecret.objects.get()
    for page in (
        url("tenant", "change", acme.tid),
        url("tenant", "history", acme.tid),
        url("signingsecret", "changelist"),
        url("signingsecret", "change", row.pk),
        reverse("admin:index"),
    ):
        shown = client.get(page).content.decode()
        assert secret not in shown
        assert row.sealed not in shown
    assert "whsec_…" in client.get(url("signingsecret", "changelist")).content.decode()
    assert "the old one leaked" in LogEntry.objects.get().get_change_message()
    assert secret not in LogEntry.objects.get().get_change_message()


@ONCE
@pytest.mark.parametrize("role", [None, "viewer", "operator"])
def test_secrets_are_made_by_a_tenants_admins(role: str | None, login: Login, acme: Tenant) -> None:
    assert act(login(role), acme, "rotate-secret").status_code == 403
    assert not SigningSecret.objects.exists()


# -- scoping --------------------------------------------------------------------------------------------------------


@ISOLATED
def test_rights_follow_the_roles(acme: Tenant, other: Tenant) -> None:
    person = UserFactory()
    TenantMembershipFactory(tenant=acme, user=person, role="operator")
    TenantMembershipFactory(tenant=other, user=person)
    assert set(scoping.tenants_of(person)) == {acme, other}
    assert set(scoping.tenants_of(person, scoping.Role.OPERATOR)) == {acme}
    assert set(scoping.tenants_of(person, scoping.Role.ADMIN)) == set()
    assert scoping.has_role(person, acme.tid, scoping.Role.OPERATOR)
    assert not scoping.has_role(person, other.tid, scoping.Role.OPERATOR)
    assert scoping.has_role(person, None, scoping.Role.OPERATOR)
    assert not scoping.has_role(person, None, scoping.Role.ADMIN)
    assert not scoping.has_role(person, "aaaaaaaa")
    assert not scoping.has_role(person, "")


@ISOLATED
def test_who_is_nobody_sees_nothing(acme: Tenant) -> None:
    gone = UserFactory(is_active=False, is_superuser=True)
    for nobody in (gone, AnonymousUser(), UserFactory()):
        assert not scoping.tenants_of(nobody).exists()
        assert not scoping.has_role(nobody, acme.tid)
        assert not scoping.has_role(nobody, None)
