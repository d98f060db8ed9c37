"""Verified once, remembered for a minute, and never asked of the database again."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection
from rest_framework.response import Response
from rest_framework.test import APIRequestFactory
from rest_framework.views import APIView

from core.errors import Forbidden, TenantSuspended, Unauthenticated, Unavailable
from tenants import models, services
from tenants.auth.authentication import BearerAuthentication
from tenants.auth.claims import Verified
from tenants.auth.validators import JwksValidator
from tenants.auth.verifier import Verifier, verifier
from tenants.cache import tenant_cache
from tenants.permissions import IsProducer, IsWorker, refuse_new_work
from tests.factories import TenantIssuerFactory
from tests.tenants.conftest import Clock, Configure, JwksServer
from tests.tenants.minting import Signer, claims

REMEMBERED = pytest.mark.spec("AUT-1", "A verified token is remembered for a minute at most, by its hash")
SUSPENDED = pytest.mark.spec("TEN-5", "Suspension stops new work at once and lets claimed work finish")


def request(token: str) -> Any:
    return SimpleNamespace(META={"HTTP_AUTHORIZATION": f"Bearer {token}"})


class Counting:
    """A validator that says yes to every token, and counts."""

    def __init__(self) -> None:
        self.asked = 0
        self.claims = claims()

    def validate(self, token: str) -> Verified | None:
        self.asked += 1
        return Verified(claims=self.claims, producer_audience="codeq-producer", worker_audience="codeq-worker")


def no_query(*args: object) -> None:
    raise AssertionError("a query on the hot path")


@pytest.fixture
def acme_idp(acme: models.Tenant, signers: dict[str, Signer]) -> Signer:
    """`acme` has an issuer of its own, with a static key."""
    own = Signer("ES256", "acme-key")
    TenantIssuerFactory(tenant=acme, issuer="acme-idp", jwks={"keys": [own.jwk]})
    return own


# -- the hot path ---------------------------------------------------------------------------------------------------


@pytest.mark.spec("TEN-4", "A token seen before costs no query, no thread and no wait")
@pytest.mark.usefixtures("acme")
def test_a_cache_hit_costs_no_query(django_assert_num_queries: Callable[..., Any]) -> None:
    token = services.issue_token("acme", "worker")
    authentication = BearerAuthentication()
    first, _ = authentication.authenticate(request(token))
    with django_assert_num_queries(0), connection.execute_wrapper(no_query):
        for _ in range(100):
            caller, auth = authentication.authenticate(request(token))
            assert caller is first
            assert auth == token
            assert authentication.authenticate_cached(f"Bearer {token}") is first


@pytest.mark.spec("TEN-4", "A token seen before costs no query, no thread and no wait")
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("acme")
async def test_a_cache_hit_on_the_event_loop_never_leaves_it(
    issuer: JwksServer, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = f"Bearer {signer.token()}"
    authentication = BearerAuthentication()
    first = await authentication.authenticate_async(header)
    monkeypatch.setattr(Verifier, "_verify_in_thread", no_query)
    with connection.execute_wrapper(no_query):
        for _ in range(100):
            coroutine = authentication.authenticate_async(header)
            with pytest.raises(StopIteration) as done:  # it ends without ever having waited
                coroutine.send(None)
            assert done.value.value is first
    await asyncio.to_thread(verifier.stop)


@pytest.mark.spec("TEN-4", "A token seen before costs no query, no thread and no wait")
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("acme")
async def test_a_new_token_is_verified_off_the_loop_and_once() -> None:
    loop_ran = threading.Event()

    class Blocking(Counting):
        def validate(self, token: str) -> Verified | None:
            # Would wait for ever on the event loop, which has to go on to set this.
            assert loop_ran.wait(10)
            return super().validate(token)

    validator = Blocking()
    one = Verifier([validator])
    waiting = [asyncio.ensure_future(one.verify_async("the same token")) for _ in range(50)]
    await asyncio.sleep(0)
    loop_ran.set()
    callers = await asyncio.gather(*waiting)
    assert validator.asked == 1
    assert all(caller is callers[0] for caller in callers)
    await asyncio.to_thread(one.stop)


@REMEMBERED
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("acme")
async def test_a_client_that_goes_away_spoils_nothing_for_the_others() -> None:
    release = threading.Event()

    class Slow(Counting):
        def validate(self, token: str) -> Verified | None:
            assert release.wait(10)
            return super().validate(token)

    one = Verifier([Slow()])
    first = asyncio.ensure_future(one.verify_async("token"))
    second = asyncio.ensure_future(one.verify_async("token"))
    await asyncio.sleep(0)
    first.cancel()
    release.set()
    assert (await second).subject == "someone"
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.to_thread(one.stop)


@REMEMBERED
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("acme")
async def test_a_refusal_reaches_everybody_who_waits_and_is_not_remembered(issuer: JwksServer) -> None:
    one = Verifier()
    token = Signer("ES256", "key-ES256").token()
    for _ in range(2):
        refusals = await asyncio.gather(*(one.verify_async(token) for _ in range(5)), return_exceptions=True)
        assert {type(each) for each in refusals} == {Unauthenticated}
    assert not one._cache
    assert not one._verifying
    await asyncio.to_thread(one.stop)


# -- the memory -----------------------------------------------------------------------------------------------------


@REMEMBERED
@pytest.mark.usefixtures("acme")
def test_the_memory_lasts_as_long_as_the_setting_says(configure: Configure) -> None:
    configure(auth={"cache_seconds": 30})
    clock, validator = Clock(time.time()), Counting()
    one = Verifier([validator], clock=clock)
    one.verify("token")
    clock.now += 29.9
    one.verify("token")
    assert validator.asked == 1
    clock.now += 0.1
    one.verify("token")
    assert validator.asked == 2


@REMEMBERED
@pytest.mark.usefixtures("acme")
def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenants.auth.verifier.CACHE_LIMIT", 10)
    one = Verifier([Counting()])
    for number in range(50):
        one.verify(f"token-{number}")
    assert len(one._cache) == 10
    assert one.cached("token-49") is not None
    assert one.cached("token-0") is None


@REMEMBERED
@pytest.mark.usefixtures("acme")
def test_the_memory_does_not_hold_the_tokens(signer: Signer, fresh_verifier: Verifier) -> None:
    token = signer.token()
    caller = fresh_verifier.verify(token)
    kept = repr([fresh_verifier._cache, caller])
    assert token not in kept
    assert token.rsplit(".", 1)[1] not in kept
    assert caller.fingerprint
    assert fresh_verifier.verify(signer.token(jti="another")).fingerprint != caller.fingerprint


# -- suspension -----------------------------------------------------------------------------------------------------


@SUSPENDED
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("acme")
def test_a_suspension_is_in_force_in_spite_of_the_memory() -> None:
    token = services.issue_token("acme", "worker")
    fresh = services.issue_token("acme", "worker")
    starts, finishes = BearerAuthentication(), BearerAuthentication(is_finishing=True)
    starts.authenticate(request(token))
    models.Tenant.objects.filter(slug="acme").update(status="suspended")
    tenant_cache.poll()
    for each in (token, fresh):
        with pytest.raises(TenantSuspended):
            starts.authenticate(request(each))
        with pytest.raises(TenantSuspended):
            starts.authenticate_cached(f"Bearer {each}") or starts.authenticate(request(each))
        caller, _ = finishes.authenticate(request(each))
        assert caller.tenant.suspended
        with pytest.raises(TenantSuspended):
            refuse_new_work(caller)
    models.Tenant.objects.filter(slug="acme").update(status="active")
    tenant_cache.poll()
    caller, _ = starts.authenticate(request(token))
    refuse_new_work(caller)


@SUSPENDED
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("acme")
async def test_a_suspension_is_in_force_on_the_event_loop_too(issuer: JwksServer, signer: Signer) -> None:
    header = f"Bearer {signer.token()}"
    starts, finishes = BearerAuthentication(), BearerAuthentication(is_finishing=True)
    await starts.authenticate_async(header)
    await asyncio.to_thread(closing(services.suspend), "acme")
    for each in (header, f"Bearer {signer.token(jti='new')}"):
        with pytest.raises(TenantSuspended):
            await starts.authenticate_async(each)
        assert (await finishes.authenticate_async(each)).tenant.suspended
    await asyncio.to_thread(verifier.stop)


def closing(job: Callable[..., object]) -> Callable[..., None]:
    def run(*args: object) -> None:
        try:
            job(*args)
        finally:
            connection.close()

    return run


@SUSPENDED
@pytest.mark.django_db(transaction=True)
def test_changed_limits_reach_remembered_tokens(acme: models.Tenant) -> None:
    token = services.issue_token("acme", "producer")
    assert verifier.verify(token).tenant.payload_bytes != 77
    models.Tenant.objects.filter(slug="acme").update(payload_bytes=77)
    tenant_cache.poll()
    assert verifier.verify(token).tenant.payload_bytes == 77


@SUSPENDED
def test_a_deleted_tenants_token_is_worth_nothing(acme: models.Tenant) -> None:
    token = services.issue_token("acme", "producer")
    verifier.verify(token)
    tid = acme.tid
    acme.delete()
    tenant_cache.refresh([tid])
    with pytest.raises(Forbidden):
        verifier.verify(token)


@SUSPENDED
@pytest.mark.usefixtures("issuer")
def test_whoever_takes_a_deleted_tenants_name_does_not_take_its_issuers_tokens(
    acme_idp: Signer, acme: models.Tenant
) -> None:
    token, tid = acme_idp.token(iss="acme-idp"), acme.tid
    assert verifier.verify(token).tenant.tid == tid
    acme.delete()
    successor = services.create_tenant("acme")
    tenant_cache.refresh([tid, successor.tid])
    assert tenant_cache.find("acme") is not None
    with pytest.raises(Unauthenticated):
        verifier.verify(token)


# -- validators -----------------------------------------------------------------------------------------------------


class NotMine:
    def validate(self, token: str) -> Verified | None:
        return None


class OpaqueTokens:
    """A plugin for tokens that are no JWT at all."""

    def validate(self, token: str) -> Verified | None:
        if token != "opaque-secret":
            return None
        return Verified(claims=claims(sub="by-plugin"), producer_audience="codeq-producer", worker_audience="x")


PLUGINS = pytest.mark.spec("AUT-1", "Validators are named by dotted path and asked in their order")


@PLUGINS
@pytest.mark.usefixtures("acme")
def test_validators_are_asked_in_their_order(configure: Configure, signer: Signer, issuer: JwksServer) -> None:
    here = "tests.tenants.test_verifier"
    configure(auth={"validators": [f"{here}.NotMine", f"{here}.OpaqueTokens", "tenants.auth.validators.JwksValidator"]})
    one = Verifier()
    assert one.verify("opaque-secret").subject == "by-plugin"
    assert one.verify(signer.token()).subject == "someone"
    with pytest.raises(Unauthenticated):
        one.verify("opaque-guess")


@PLUGINS
@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize("bad", [{"exp": None}, {"exp": 1}, {"aud": "else"}, {"sub": 7}], ids=str)
def test_a_validator_cannot_forget_the_common_checks(bad: dict[str, Any]) -> None:
    validator = Counting()
    validator.claims = claims(**bad)
    with pytest.raises(Unauthenticated):
        Verifier([validator]).verify("token")


OWN_ISSUER = pytest.mark.spec("AUT-1", "A tenant's own issuer, by static keys or by URL, speaks for that tenant only")


@OWN_ISSUER
@pytest.mark.usefixtures("issuer")
def test_a_tenants_own_issuer_is_accepted(acme_idp: Signer) -> None:
    caller = Verifier().verify(acme_idp.token(iss="acme-idp", role="ADMIN"))
    assert caller.tenant.slug == "acme"
    assert caller.is_authenticated


@OWN_ISSUER
@pytest.mark.usefixtures("issuer", "other")
@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"tenantId": "other"}, Unauthenticated),
        ({"tenantId": "other", "tid": "acme"}, Unauthenticated),
        ({"tenantId": None}, Unauthenticated),
        ({"tenantId": "nobody"}, Unauthenticated),
        ({"iss": "other-idp"}, Unauthenticated),
        ({"iss": "https://issuer.example"}, Unauthenticated),
        ({"exp": 1}, Unauthenticated),
        ({"organization_id": 7}, Forbidden),
        ({"organization_id": ""}, Unauthenticated),
    ],
    ids=str,
)
def test_a_tenants_own_issuer_speaks_for_no_other(
    changes: dict[str, Any], error: type[Exception], acme_idp: Signer
) -> None:
    with pytest.raises(error):
        Verifier().verify(acme_idp.token(**{"iss": "acme-idp", **changes}))


@OWN_ISSUER
@pytest.mark.usefixtures("issuer", "other")
def test_a_validators_word_for_one_tenant_is_not_taken_for_another() -> None:
    class BoundToAcme(Counting):
        def validate(self, token: str) -> Verified | None:
            return Verified(
                claims=claims(tenantId="other"),
                tenant="acme",
                producer_audience="codeq-producer",
                worker_audience="codeq-worker",
            )

    with pytest.raises(Forbidden):
        Verifier([BoundToAcme()]).verify("token")


@OWN_ISSUER
@pytest.mark.usefixtures("issuer")
def test_a_tenants_own_issuer_makes_no_platform_operator(acme_idp: Signer) -> None:
    caller = Verifier().verify(acme_idp.token(iss="acme-idp", scope="codeq:operator codeq:admin"))
    assert sorted(caller.roles) == ["admin", "producer"]


@OWN_ISSUER
@pytest.mark.usefixtures("issuer")
def test_a_tenants_own_issuer_may_have_its_own_audiences(acme_idp: Signer) -> None:
    models.TenantIssuer.objects.update(producer_audience="acme-api", worker_audience="acme-workers")
    one = Verifier()
    assert one.verify(acme_idp.token(iss="acme-idp", aud="acme-api")).roles == {"producer"}
    assert one.verify(acme_idp.token(iss="acme-idp", aud="acme-workers")).roles == {"worker"}
    with pytest.raises(Unauthenticated):
        one.verify(acme_idp.token(iss="acme-idp", aud="codeq-producer"))


@OWN_ISSUER
def test_a_tenants_own_issuer_by_url(acme: models.Tenant, jwks_server: JwksServer, signer: Signer) -> None:
    jwks_server.keys = [signer.jwk]
    TenantIssuerFactory(tenant=acme, issuer="acme-idp", jwks_url=jwks_server.url)
    one = Verifier()
    for number in range(5):
        assert one.verify(signer.token(iss="acme-idp", jti=str(number))).tenant.slug == "acme"
    assert jwks_server.asked == 1


@OWN_ISSUER
@pytest.mark.usefixtures("issuer")
def test_two_tenants_may_call_their_issuers_the_same(acme_idp: Signer, other: models.Tenant) -> None:
    theirs = Signer("ES256", "acme-key")
    TenantIssuerFactory(tenant=other, issuer="acme-idp", jwks={"keys": [theirs.jwk]})
    one = Verifier()
    assert one.verify(acme_idp.token(iss="acme-idp")).tenant.slug == "acme"
    assert one.verify(theirs.token(iss="acme-idp", tenantId="other")).tenant.slug == "other"
    with pytest.raises(Unauthenticated):
        one.verify(theirs.token(iss="acme-idp", tenantId="acme"))


@PLUGINS
@pytest.mark.django_db(transaction=True)
def test_without_postgresql_a_new_tenants_token_is_a_503(
    issuer: JwksServer, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connection.settings_dict, "HOST", "/nowhere/at/all")
    connection.close()
    with pytest.raises(Unavailable):
        Verifier().verify(signer.token())


@PLUGINS
@pytest.mark.usefixtures("acme")
def test_the_installations_own_keys_are_the_default() -> None:
    token = services.issue_token("acme", "producer")
    assert Verifier().verify(token).tenant.slug == "acme"
    assert Verifier([JwksValidator()]).verify(token).tenant.slug == "acme"


# -- the header and DRF ---------------------------------------------------------------------------------------------

HEADER = pytest.mark.spec("AUT-1", "The token comes in the Authorization header, as Bearer")


@HEADER
@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER ", "Bearer    "])
@pytest.mark.usefixtures("acme")
def test_the_scheme_in_any_case(scheme: str) -> None:
    token = services.issue_token("acme", "producer")
    caller, auth = BearerAuthentication().authenticate(SimpleNamespace(META={"HTTP_AUTHORIZATION": scheme + token}))
    assert (caller.subject, auth) == ("producer", token)


@HEADER
@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer  ", "Basic YTpi", "Token x", "Bearer\tx", "xBearer y", "é"]
)
def test_anything_else_is_a_401(header: str | None) -> None:
    meta = {} if header is None else {"HTTP_AUTHORIZATION": header}
    with pytest.raises(Unauthenticated):
        BearerAuthentication().authenticate(SimpleNamespace(META=meta))
    with pytest.raises(Unauthenticated):
        BearerAuthentication().authenticate_cached(header)


@HEADER
@pytest.mark.usefixtures("acme")
def test_it_is_a_drf_authentication_and_the_guards_are_drf_permissions() -> None:
    class View(APIView):
        authentication_classes = [BearerAuthentication]
        permission_classes = [IsProducer & ~IsWorker]

        def get(self, request: Any) -> Any:
            return Response(request.user.subject)

    factory = APIRequestFactory()
    for role, status in (("producer", 200), ("worker", 403)):
        token = services.issue_token("acme", role)
        answer = View.as_view()(factory.get("/", HTTP_AUTHORIZATION=f"Bearer {token}"))
        assert answer.status_code == status
    assert BearerAuthentication().authenticate_header(request("")) == "Bearer"
