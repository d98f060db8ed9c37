"""Tenants, signing secrets, the installation's keys, and the management commands."""

from __future__ import annotations

import base64
import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import jwt
import pytest
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.db import connection, connections, transaction
from django.test import Client, override_settings
from django.utils import timezone

from core.errors import ConfigError, Forbidden, InvalidRequest, NotFound, Unauthenticated
from tenants import models, secret_encryption, services
from tenants.auth import installation_keys
from tenants.auth.verifier import Verifier
from tenants.models import InstallationKey, SigningSecret, Tenant, TenantIssuer
from tests.tenants.conftest import Configure
from tests.tenants.minting import Signer
from tests.waiting import until

MODEL = pytest.mark.spec("TEN-5", "Tenants are rows with limits, suspension, secrets and issuers")
SECRETS = pytest.mark.spec(
    "WHK-4", "Signing secrets are per tenant and encrypted, and two are active during a rotation"
)
OWN_KEYS = pytest.mark.spec("AUT-1", "The installation's key pair is shared by its machines and served as JWKS")


# -- tenants --------------------------------------------------------------------------------------------------------


@MODEL
def test_name_of_a_tenant_is_valid_and_unique(db: None) -> None:
    services.create_tenant("acme")
    for slug in ("acme", "", "a b", "a{b}", "ü", "x" * 129, "a\n"):
        with pytest.raises(InvalidRequest):
            services.create_tenant(slug)
    assert Tenant.objects.count() == 1


@MODEL
def test_taken_tid_is_replaced(db: None, monkeypatch: pytest.MonkeyPatch) -> None:
    minted = iter(["aaaaaaaa", "aaaaaaaa", "bbbbbbbb"])
    monkeypatch.setattr(services, "mint_tid", lambda: next(minted))
    assert services.create_tenant("one").tid == "aaaaaaaa"
    assert services.create_tenant("two").tid == "bbbbbbbb"


@MODEL
@pytest.mark.django_db(transaction=True)
def test_twenty_concurrent_requests_create_one_tenant() -> None:
    barrier = threading.Barrier(20, timeout=10)

    def provision(_: int) -> str:
        barrier.wait()
        try:
            return services.provision("acme").tid
        finally:
            connections.close_all()

    with ThreadPoolExecutor(20) as pool:
        ids = set(pool.map(provision, range(20)))
    assert ids == {Tenant.objects.get().tid}


@MODEL
@pytest.mark.usefixtures("acme")
def test_suspending_and_resuming(acme: Tenant) -> None:
    assert services.suspend("acme").is_suspended
    assert not services.resume("acme").is_suspended
    with pytest.raises(NotFound):
        services.suspend("nobody")
    with pytest.raises(Forbidden):
        services.provision("no name")


@MODEL
@pytest.mark.parametrize(
    "fields",
    [
        {"issuer": "codeq", "jwks_url": "https://idp.example/jwks"},
        {"issuer": "idp"},
        {"issuer": "idp", "jwks": {"keys": []}},
        {"issuer": "idp", "jwks": {"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "a"}]}},
        {"issuer": "idp", "jwks": [1]},
        {"issuer": "idp", "jwks_url": "file:///etc/passwd"},
        {"issuer": "", "jwks_url": "https://idp.example/jwks"},
    ],
    ids=str,
)
def test_unusable_issuer_is_invalid(fields: dict[str, Any], acme: Tenant) -> None:
    with pytest.raises(ValidationError):
        TenantIssuer(tenant=acme, **fields).full_clean()


@MODEL
def test_issuer_with_url_or_keys_is_valid(acme: Tenant, signer: Signer, configure: Configure) -> None:
    TenantIssuer(tenant=acme, issuer="a", jwks={"keys": [signer.jwk]}).full_clean()
    TenantIssuer(tenant=acme, issuer="b", jwks_url="https://idp.example/jwks").full_clean()
    plain = TenantIssuer(tenant=acme, issuer="c", jwks_url="http://idp.example/jwks")
    plain.full_clean()
    configure(production=True)
    with pytest.raises(ValidationError):
        plain.full_clean()


# -- secrets --------------------------------------------------------------------------------------------------------


@SECRETS
@pytest.mark.usefixtures("acme")
def test_signing_secret_is_long_and_stays_the_same() -> None:
    secret = services.get_or_create_signing_secret("acme")
    assert secret.startswith("whsec_")
    assert len(base64.b64decode(secret.removeprefix("whsec_"), validate=True)) >= 24
    assert services.get_or_create_signing_secret("acme") == secret
    with pytest.raises(NotFound):
        services.get_or_create_signing_secret("nobody")


@SECRETS
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("acme")
def test_twenty_concurrent_requests_get_one_secret() -> None:
    def get_secret(_: int) -> str:
        try:
            return services.get_or_create_signing_secret("acme")
        finally:
            connections.close_all()

    with ThreadPoolExecutor(20) as pool:
        assert len(set(pool.map(get_secret, range(20)))) == 1


@SECRETS
def test_secret_is_encrypted_and_masked(acme: Tenant) -> None:
    secret = services.get_or_create_signing_secret("acme")
    row = SigningSecret.objects.get()
    with connection.cursor() as cursor:
        cursor.execute("SELECT row_to_json(tenants_signingsecret)::text FROM tenants_signingsecret")
        stored = cursor.fetchone()[0]
    assert secret not in stored
    assert secret.removeprefix("whsec_")[:8] not in stored
    for text in (str(row), repr(row), f"{row}"):
        assert secret not in text
        assert "…" in text
    assert len(row.hint) == 4


@SECRETS
def test_at_most_two_secrets_are_active(acme: Tenant) -> None:
    first = services.get_or_create_signing_secret("acme")
    second = services.rotate_signing_secret("acme").reveal()
    assert services.signing_secrets(acme.tid) == [second, first]
    assert services.get_or_create_signing_secret("acme") == second
    third = services.rotate_signing_secret("acme").reveal()
    assert services.signing_secrets(acme.tid) == [third, second]
    SigningSecret.objects.filter(retires_at__isnull=False).update(retires_at=timezone.now() - timedelta(seconds=1))
    assert services.signing_secrets(acme.tid) == [third]
    assert [row.is_active for row in SigningSecret.objects.all()] == [True, False, False]


@SECRETS
def test_rotation_does_not_extend_an_older_secret(acme: Tenant) -> None:
    services.get_or_create_signing_secret("acme")
    services.rotate_signing_secret("acme", overlap_seconds=60)
    retires_at = SigningSecret.objects.exclude(retires_at=None).get().retires_at
    services.rotate_signing_secret("acme", overlap_seconds=3600)
    assert SigningSecret.objects.filter(retires_at__lte=retires_at).count() == 1


@SECRETS
def test_tenants_share_no_secret(acme: Tenant, other: Tenant) -> None:
    assert services.get_or_create_signing_secret("acme") != services.get_or_create_signing_secret("other")
    assert set(services.signing_secrets(acme.tid)).isdisjoint(services.signing_secrets(other.tid))
    assert services.signing_secrets("aaaaaaaa") == []


@SECRETS
def test_secrets_cannot_be_decrypted_without_the_key(acme: Tenant) -> None:
    secret = services.get_or_create_signing_secret("acme")
    old_key = secret_encryption.settings.SECRET_KEY
    with override_settings(SECRET_KEY="another"):
        with pytest.raises(ConfigError, match="SECRET_KEY_FALLBACKS"):
            services.get_or_create_signing_secret("acme")
        with override_settings(SECRET_KEY_FALLBACKS=[old_key]):
            assert services.get_or_create_signing_secret("acme") == secret


@SECRETS
def test_old_key_can_be_removed_after_reseal(acme: Tenant) -> None:
    secret = services.get_or_create_signing_secret("acme")
    kid = installation_keys.document()["keys"][0]["kid"]
    old_key = secret_encryption.settings.SECRET_KEY
    with override_settings(SECRET_KEY="another"):
        with pytest.raises(CommandError, match="1 in tenants"):
            call_command("reseal", stdout=io.StringIO())
        output = io.StringIO()
        with override_settings(SECRET_KEY_FALLBACKS=[old_key]):
            call_command("reseal", stdout=output)
        assert "tenants.SigningSecret.sealed: 1 encrypted again" in output.getvalue()
        assert services.get_or_create_signing_secret("acme") == secret
        assert secret_encryption.decrypt(models.InstallationKey.objects.get(kid=kid).encrypted_private_key).startswith(
            b"-----BEGIN"
        )
    with pytest.raises(ConfigError):
        services.get_or_create_signing_secret("acme")


def test_encrypted_fields_are_complete() -> None:
    assert {f"{model._meta.label}.{field.column}" for model, field in secret_encryption.encrypted_fields()} == {
        "tenants.InstallationKey.sealed", "tenants.SigningSecret.sealed",
        "webhooks.Endpoint.sealed", "webhooks.Endpoint.former_sealed",
    }  # fmt: skip


# -- the installation's keys ----------------------------------------------------------------------------------------


@OWN_KEYS
@pytest.mark.django_db(transaction=True)
def test_two_machines_that_start_together_create_one_key() -> None:
    is_created, may_commit = threading.Event(), threading.Event()

    def first() -> None:
        try:
            with transaction.atomic():
                installation_keys.document()
                is_created.set()
                assert may_commit.wait(10)
        finally:
            connections.close_all()

    def second() -> str:
        try:
            return str(installation_keys.document()["keys"][0]["kid"])
        finally:
            connections.close_all()

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(first)
        assert is_created.wait(10)
        two = pool.submit(second)
        until(lambda: two.done() or is_waiting_for_the_lock())
        # Without the lock, the second machine would see no key and create another one.
        assert not two.done()
        may_commit.set()
        one.result(10)
        assert two.result(10) == InstallationKey.objects.get().kid


def is_waiting_for_the_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        return bool(cursor.fetchone()[0])


@OWN_KEYS
@pytest.mark.django_db
@pytest.mark.urls("tests.tenants.urls")
def test_jwks_document_is_public_cacheable_and_verifies_tokens(client: Client, acme: Tenant) -> None:
    token = services.issue_token("acme", "producer")
    answer = client.get("/.well-known/jwks.json")
    assert answer.status_code == 200
    assert answer["Content-Type"].startswith("application/jwk-set+json")
    assert "public" in answer["Cache-Control"]
    assert "max-age=60" in answer["Cache-Control"]
    assert not answer.cookies
    (published,) = answer.json()["keys"]
    assert set(published) == {"kty", "crv", "x", "y", "kid", "use", "alg"}
    claims = jwt.decode(token, jwt.PyJWK(published), algorithms=["ES256"], audience="codeq-producer", issuer="codeq")
    assert claims["tenantId"] == "acme"
    assert jwt.get_unverified_header(token)["kid"] == published["kid"]
    assert client.post("/.well-known/jwks.json").status_code == 405


@OWN_KEYS
def test_private_key_is_encrypted(db: None) -> None:
    installation_keys.document()
    with connection.cursor() as cursor:
        cursor.execute("SELECT row_to_json(tenants_installationkey)::text FROM tenants_installationkey")
        stored = cursor.fetchone()[0]
    assert "PRIVATE KEY" not in stored
    assert '"d"' not in stored


@OWN_KEYS
@pytest.mark.usefixtures("acme")
def test_installation_key_can_be_replaced() -> None:
    before = services.issue_token("acme", "producer")
    kid = InstallationKey.objects.get().kid
    assert installation_keys.rotate() != kid
    after = services.issue_token("acme", "producer")
    assert jwt.get_unverified_header(after)["kid"] != kid
    for token in (before, after):
        Verifier().verify(token)
    installation_keys.retire(kid)
    Verifier().verify(after)
    with pytest.raises(Unauthenticated):
        Verifier().verify(before)


@OWN_KEYS
@pytest.mark.usefixtures("acme")
def test_key_created_on_another_machine_is_accepted_within_a_second() -> None:
    one = Verifier()
    one.verify(services.issue_token("acme", "producer"))
    installation_keys._create()  # as on another machine, without `rotate` in this process
    token = services.issue_token("acme", "producer")
    own_keys = installation_keys.own_keys
    own_keys._tried_at = own_keys._unknown_at = own_keys._clock() - 1
    assert one.verify(token).tenant.slug == "acme"


@OWN_KEYS
@pytest.mark.spec("AUT-1", "A token of a cached key does not wait for a database that hangs")
@pytest.mark.usefixtures("acme")
def test_no_token_waits_for_a_database_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    token = services.issue_token("acme", "producer")
    Verifier().verify(token)
    own_keys, thawed, is_fetching = installation_keys.own_keys, threading.Event(), threading.Event()

    def hang() -> dict[str, Any]:
        is_fetching.set()
        thawed.wait(10)
        return {}

    monkeypatch.setattr(own_keys, "_start", installation_keys._run_in_thread)
    monkeypatch.setattr(own_keys, "_fetch_keys", hang)
    own_keys._fetched_at = own_keys._tried_at = own_keys._clock() - 61
    started = time.monotonic()
    try:
        assert Verifier().verify(token).tenant.slug == "acme"
        assert time.monotonic() - started < 8
        assert is_fetching.wait(5)
    finally:
        thawed.set()
        until(lambda: not own_keys.is_fetching)


# -- commands -------------------------------------------------------------------------------------------------------


def run(*args: str) -> str:
    out = io.StringIO()
    call_command(*args, stdout=out)
    return out.getvalue()


COMMANDS = pytest.mark.spec("AUT-1", "`manage.py token` prints only a valid token")


@COMMANDS
@pytest.mark.usefixtures("acme")
def test_token_command_prints_only_the_token() -> None:
    out = run(
        "token", "--tenant", "acme", "--role", "worker", "--sub", "w-1", "--commands", "a, b,", "--group", "g",
        "--ttl", "60",
    )  # fmt: skip
    assert out.count("\n") == 1
    caller = Verifier().verify(out.strip())
    assert (caller.subject, caller.commands, caller.group) == ("w-1", {"a", "b"}, "g")
    issued = jwt.decode(out.strip(), options={"verify_signature": False})
    assert issued["exp"] - issued["iat"] == 60


@COMMANDS
@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize("role", ["producer", "worker", "admin", "operator"])
def test_token_command_accepts_every_role(role: str) -> None:
    assert role in Verifier().verify(run("token", "--tenant", "acme", "--role", role).strip()).roles


@COMMANDS
def test_unknown_tenant_is_created_or_an_error(db: None, configure: Configure) -> None:
    with pytest.raises(CommandError, match="acme does not exist"):
        run("token", "--tenant", "acme", "--role", "worker")
    configure(auth={"provision_tenants": True})
    Verifier().verify(run("token", "--tenant", "acme", "--role", "worker").strip())
    assert Tenant.objects.get().slug == "acme"
    with pytest.raises(CommandError):
        run("token", "--tenant", "no name", "--role", "worker")


@COMMANDS
@pytest.mark.usefixtures("acme")
def test_no_token_is_issued_with_an_external_issuer(configure: Configure) -> None:
    configure(auth={"jwks_url": "https://idp.example/jwks"})
    with pytest.raises(CommandError, match="CODEQ_AUTH_JWKS_URL"):
        run("token", "--tenant", "acme", "--role", "worker")


@SECRETS
@pytest.mark.usefixtures("acme")
def test_secret_command_prints_only_the_secret() -> None:
    assert run("secret", "--tenant", "acme") == services.get_or_create_signing_secret("acme") + "\n"
    with pytest.raises(CommandError, match="nobody does not exist"):
        run("secret", "--tenant", "nobody")


@MODEL
def test_name_with_a_similar_letter_is_invalid(db: None) -> None:
    tenant = models.Tenant(slug="аcme")  # a Cyrillic а
    with pytest.raises(ValidationError):
        tenant.full_clean()


@OWN_KEYS
@pytest.mark.spec("AUT-1", "`manage.py keys` replaces the signing key; both keys verify until the old one is retired")
@pytest.mark.usefixtures("acme")
def test_key_is_replaced_by_three_commands() -> None:
    before = services.issue_token("acme", "producer")
    [former] = run("keys", "list").split("\n")[:-1]
    kid = former.split()[0]
    assert former.endswith("signs")
    new = run("keys", "rotate").strip()
    assert [(line.split()[0], line.split()[-1]) for line in run("keys", "list").splitlines()] == [
        (new, "signs"),
        (kid, "verifies"),
    ]
    after = services.issue_token("acme", "producer")
    for token in (before, after):
        Verifier().verify(token)
    assert run("keys", "retire", kid) == ""
    Verifier().verify(after)
    with pytest.raises(Unauthenticated):
        Verifier().verify(before)


@OWN_KEYS
@pytest.mark.usefixtures("acme")
def test_signing_key_and_unknown_key_cannot_be_retired() -> None:
    services.issue_token("acme", "producer")
    for kid, message in (
        (InstallationKey.objects.get().kid, "signs new tokens"),
        ("nonsense", "nonsense does not exist"),
    ):
        with pytest.raises(CommandError, match=message):
            run("keys", "retire", kid)
    assert InstallationKey.objects.count() == 1
