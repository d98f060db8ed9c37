"""Admin pages of tenants: visible rows, permissions, reasons and secrets."""

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

ISOLATED = pytest.mark.spec("ADM-4", "Users see and change only the tenants of their memberships")
AUDITED = pytest.mark.spec("ADM-4", "An operator's action requires a reason and writes a log entry")
ONCE = pytest.mark.spec("TEN-5", "A secret is shown once, when it is created")

Login = Callable[..., Client]
CANARY = "canary-of-another-tenant"


@pytest.fixture
def foreign(signer: Signer) -> dict[str, Any]:
    """Another tenant with a row of every model. `CANARY` is in the name of each."""
    tenant = services.create_tenant(CANARY)
    services.get_or_create_signing_secret(CANARY)
    user = UserFactory(username=f"{CANARY}-user")
    return {
        "tenant": tenant,
        "tenantmembership": TenantMembershipFactory(tenant=tenant, user=user),
        "tenantissuer": TenantIssuerFactory(tenant=tenant, issuer=CANARY, jwks={"keys": [signer.jwk]}),
        "signingsecret": SigningSecret.objects.get(tenant=tenant),
    }


@pytest.fixture
def login(acme: Tenant) -> Login:
    """`login("admin")` returns the client of a user with this role for acme.

    `login(None)` is a user without a role, `login("root")` a superuser.
    """

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


REASON = {"reason": "because"}
MODELS = ["tenant", "tenantmembership", "tenantissuer", "signingsecret"]
ROLES = ["viewer", "operator", "admin"]


# -- visible rows ----------------------------------------------------------------------------------------------------


@ISOLATED
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("role", [None, *ROLES])
def test_pages_hide_rows_of_other_tenants(role: str | None, model: str, login: Login, foreign: dict[str, Any]) -> None:
    client, pk = login(role), foreign[model].pk
    pages = [
        url(model, "changelist"),
        url(model, "changelist")
        + f"?q={CANARY[:10]}",  # the search term is in the page, so it is only a part of CANARY
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
def test_autocomplete_hides_other_tenants(role: str | None, login: Login, foreign: dict[str, Any]) -> None:
    answer = login(role).get(
        reverse("admin:autocomplete"),
        {"app_label": "tenants", "model_name": "tenantmembership", "field_name": "tenant", "term": ""},
    )
    if role is None:
        assert answer.status_code == 403
    else:
        assert [result["text"] for result in answer.json()["results"]] == ["acme"]


@ISOLATED
@pytest.mark.parametrize("model", MODELS)
def test_superusers_see_everything(model: str, login: Login, foreign: dict[str, Any]) -> None:
    client = login("root")
    assert CANARY in client.get(url(model, "changelist")).content.decode()
    assert CANARY in client.get(url(model, "changelist") + f"?q={CANARY[:10]}").content.decode()
    assert client.get(url(model, "change", foreign[model].pk)).status_code == 200


@ISOLATED
@pytest.mark.parametrize(("role", "status"), [("viewer", 403), ("operator", 403), ("admin", 200), (None, 403)])
def test_only_admins_of_a_tenant_list_its_secrets(role: str | None, status: int, login: Login) -> None:
    services.get_or_create_signing_secret("acme")
    assert login(role).get(url("signingsecret", "changelist")).status_code == status


# -- changes ---------------------------------------------------------------------------------------------------------


@ISOLATED
@pytest.mark.parametrize("role", ROLES)
def test_forged_forms_do_not_change_other_tenants(
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
def test_bulk_delete_requires_the_admin_role_for_every_row(
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
def test_only_admins_of_a_tenant_add_issuers(role: str, may: bool, login: Login, acme: Tenant, signer: Signer) -> None:
    key = '{"keys": [' + str(signer.jwk).replace("'", '"') + "]}"
    login(role).post(url("tenantissuer", "add"), issuer_form(acme, jwks=key))
    assert TenantIssuer.objects.filter(tenant=acme).exists() is may


@pytest.mark.spec("AUT-1", "Only superusers set the JWKS URL, because the servers fetch it from inside the network")
@pytest.mark.parametrize(("role", "may"), [("admin", False), ("root", True)])
def test_only_superusers_set_the_jwks_url(role: str, may: bool, login: Login, acme: Tenant) -> None:
    inside = "http://169.254.169.254/latest/meta-data"
    login(role).post(url("tenantissuer", "add"), issuer_form(acme, jwks_url=inside))
    assert TenantIssuer.objects.filter(jwks_url=inside).exists() is may


@pytest.mark.spec("ADM-4", "A forged admin form shows an error on its page and never causes a server error")
@pytest.mark.parametrize(
    "junk",
    ["NaN", "1e999", "9" * 5000, '"\\u0000"', '"\\ud800"', '{"a":' * 600 + "0" + "}" * 600, "[" * 5000],
    ids=["nan", "infinite", "digits", "nul", "surrogate", "nested", "open"],
)
def test_keys_that_cannot_be_stored_are_a_form_error(junk: str, login: Login, acme: Tenant, signer: Signer) -> None:
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
def test_members_cannot_change_limits(role: str, login: Login, acme: Tenant) -> None:
    answer = login(role).post(url("tenant", "change", acme.tid), {"slug": "acme", "payload_bytes": 10**9, **REASON})
    assert answer.status_code == 403
    acme.refresh_from_db()
    assert acme.payload_bytes is None


@ISOLATED
@pytest.mark.parametrize("role", ROLES)
def test_members_cannot_create_tenants_or_memberships(role: str, login: Login, acme: Tenant) -> None:
    client = login(role)
    assert client.post(url("tenant", "add"), {"slug": "mine", **REASON}).status_code == 403
    me = client.session["_auth_user_id"]
    assert client.post(url("tenantmembership", "add"), {"tenant": acme.tid, "user": me, **REASON}).status_code == 403
    own = TenantMembership.objects.get(user_id=me)
    client.post(url("tenantmembership", "change", own.pk), {"tenant": acme.tid, "user": me, "role": "admin", **REASON})
    own.refresh_from_db()
    assert own.role == role


@ISOLATED
def test_tenants_cannot_be_deleted(login: Login, acme: Tenant) -> None:
    assert (
        login("root").post(url("tenant", "delete", acme.tid), {"post": "yes", "reason": "because"}).status_code == 403
    )


@ISOLATED
def test_form_does_not_undo_a_concurrent_suspension(
    login: Login, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = TenantAdmin.save_model

    def suspend_and_save(self: Any, request: Any, obj: Any, form: Any, change: bool) -> None:
        Tenant.objects.filter(pk=obj.pk).update(status="suspended")
        save(self, request, obj, form, change)

    monkeypatch.setattr(TenantAdmin, "save_model", suspend_and_save)
    answer = login("root").post(
        url("tenant", "change", acme.tid),
        {"slug": "acme", "name": "acme", "create_per_second": "12.5", "is_idempotency_strict": "unknown"}
        | {"is_lease_token_required": "true", **REASON},
    )
    assert answer.status_code == 302, answer.context["errors"]
    acme.refresh_from_db()
    assert (acme.create_per_second, acme.is_lease_token_required, acme.status) == (12.5, True, "suspended")
    assert LogEntry.objects.get().get_change_message() == "Changed Create per second and Lease token required: because"


@pytest.mark.spec("ADM-4", "Every change in the admin requires a reason, which the log entry keeps")
def test_change_requires_a_reason(login: Login, acme: Tenant) -> None:
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


# -- actions ---------------------------------------------------------------------------------------------------------


def run_action(client: Client, tenant: Tenant, action: str, reason: str | None = "as agreed") -> HttpResponse:
    data = {"_form_submitted": "True"} | ({} if reason is None else {"reason": reason})
    return client.post(f"/admin/tenants/tenant/{tenant.tid}/{action}/", data)


@AUDITED
def test_suspension_requires_a_reason_and_is_logged(login: Login, acme: Tenant) -> None:
    client = login("root")
    path = f"/admin/tenants/tenant/{acme.tid}/suspend/"
    for answer in (client.get(path), client.get(path + "?reason=x"), run_action(client, acme, "suspend", None)):
        assert "reason" in answer.content.decode()
        acme.refresh_from_db()
        assert not acme.is_suspended
    assert run_action(client, acme, "suspend", " ").status_code == 200
    acme.refresh_from_db()
    assert not acme.is_suspended
    assert run_action(client, acme, "suspend", "unpaid since May").headers["HX-Redirect"]
    acme.refresh_from_db()
    assert acme.is_suspended
    run_action(client, acme, "resume", "paid")
    acme.refresh_from_db()
    assert not acme.is_suspended
    rows = [(row.object_id, row.user.username, row.get_change_message()) for row in LogEntry.objects.order_by("pk")]
    assert rows == [
        (acme.tid, "staff-root", "Suspended: unpaid since May"),
        (acme.tid, "staff-root", "Resumed: paid"),
    ]


@AUDITED
@pytest.mark.parametrize("action", ["suspend", "resume"])
@pytest.mark.parametrize("role", [None, *ROLES])
def test_only_superusers_suspend_tenants(role: str | None, action: str, login: Login, acme: Tenant) -> None:
    assert run_action(login(role), acme, action).status_code == 403
    assert not LogEntry.objects.exists()


@AUDITED
@pytest.mark.parametrize("action", ["suspend", "resume", "rotate-secret"])
def test_actions_require_the_csrf_token(action: str, login: Login, acme: Tenant) -> None:
    assert run_action(login("root", enforce_csrf_checks=True), acme, action).status_code == 403


@ONCE
@pytest.mark.parametrize("role", ["admin", "root"])
def test_new_secret_is_shown_once(role: str, login: Login, acme: Tenant) -> None:
    client = login(role)
    answer = run_action(client, acme, "rotate-secret", "the old one leaked")
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
        content = client.get(page).content.decode()
        assert secret not in content
        assert row.encrypted_secret not in content
    assert "whsec_…" in client.get(url("signingsecret", "changelist")).content.decode()
    assert "the old one leaked" in LogEntry.objects.get().get_change_message()
    assert secret not in LogEntry.objects.get().get_change_message()


@ONCE
@pytest.mark.parametrize("role", [None, "viewer", "operator"])
def test_only_admins_of_a_tenant_create_secrets(role: str | None, login: Login, acme: Tenant) -> None:
    assert run_action(login(role), acme, "rotate-secret").status_code == 403
    assert not SigningSecret.objects.exists()


# -- scoping --------------------------------------------------------------------------------------------------------


@ISOLATED
def test_memberships_decide_permissions(acme: Tenant, other: Tenant) -> None:
    user = UserFactory()
    TenantMembershipFactory(tenant=acme, user=user, role="operator")
    TenantMembershipFactory(tenant=other, user=user)
    assert set(scoping.tenants_of(user)) == {acme, other}
    assert set(scoping.tenants_of(user, scoping.Role.OPERATOR)) == {acme}
    assert set(scoping.tenants_of(user, scoping.Role.ADMIN)) == set()
    assert scoping.has_role(user, acme.tid, scoping.Role.OPERATOR)
    assert not scoping.has_role(user, other.tid, scoping.Role.OPERATOR)
    assert scoping.has_role(user, None, scoping.Role.OPERATOR)
    assert not scoping.has_role(user, None, scoping.Role.ADMIN)
    assert not scoping.has_role(user, "aaaaaaaa")
    assert not scoping.has_role(user, "")


@ISOLATED
def test_inactive_and_anonymous_users_see_nothing(acme: Tenant) -> None:
    inactive = UserFactory(is_active=False, is_superuser=True)
    for user in (inactive, AnonymousUser(), UserFactory()):
        assert not scoping.tenants_of(user).exists()
        assert not scoping.has_role(user, acme.tid)
        assert not scoping.has_role(user, None)
