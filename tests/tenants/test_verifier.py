"""Verification and caching of tokens, suspension, validators, and the Authorization header."""

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

CACHED = pytest.mark.spec("AUT-1", "A verified token is cached by its hash, for a minute at most")
SUSPENDED = pytest.mark.spec("TEN-5", "Suspension refuses new work at once, and claimed tasks can be finished")


def request(token: str) -> Any:
    return SimpleNamespace(META={"HTTP_AUTHORIZATION": f"Bearer {token}"})


class AcceptAll:
    """A validator that accepts every token, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.claims = claims()

    def validate(self, token: str) -> Verified | None:
        self.calls += 1
        return Verified(claims=self.claims, producer_audience="codeq-producer", worker_audience="codeq-worker")


def no_query(*args: object) -> None:
    raise AssertionError("unexpected query or thread")


@pytest.fixture
def acme_idp(acme: models.Tenant, signers: dict[str, Signer]) -> Signer:
    """The issuer of `acme`, with a static key."""
    own = Signer("ES256", "acme-key")
    TenantIssuerFactory(tenant=acme, issuer="acme-idp", jwks={"keys": [own.jwk]})
    return own


# -- cached tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.spec("TEN-4", "A cached token costs no query, no thread and no wait")
@pytest.mark.usefixtures("acme")
def test_cached_token_costs_no_query(django_assert_num_queries: Callable[..., Any]) -> None:
    token = services.issue_token("acme", "worker")
    authentication = BearerAuthentication()
    first, _ = authentication.authenticate(request(token))
    with django_assert_num_queries(0), connection.execute_wrapper(no_query):
        for _ in range(100):
            caller, auth = authentication.authenticate(request(token))
            assert caller is first
            assert auth == token
            assert authentication.authenticate_cached(f"Bearer {token}") is first


@pytest.mark.spec("TEN-4", "A cached token costs no query, no thread and no wait")
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("acme")
async def test_cached_token_stays_on_the_event_loop(
    issuer: JwksServer, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = f"Bearer {signer.token()}"
    authentication = BearerAuthentication()
    first = await authentication.authenticate_async(header)
    monkeypatch.setattr(Verifier, "_verify_in_thread", no_query)
    with connection.execute_wrapper(no_query):
        for _ in range(100):
            coroutine = authentication.authenticate_async(header)
            with pytest.raises(StopIteration) as done:  # it finishes without waiting
                coroutine.send(None)
            assert done.value.value is first
    await asyncio.to_thread(verifier.stop)


@pytest.mark.spec("TEN-4", "A cached token costs no query, no thread and no wait")
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("acme")
async def test_new_token_is_verified_once_and_in_a_thread() -> None:
    loop_ran = threading.Event()

    class Blocking(AcceptAll):
        def validate(self, token: str) -> Verified | None:
            # On the event loop this would wait forever, because the loop sets the event.
            assert loop_ran.wait(10)
            return super().validate(token)

    validator = Blocking()
    verifier = Verifier([validator])
    waiting = [asyncio.ensure_future(verifier.verify_async("the same token")) for _ in range(50)]
    await asyncio.sleep(0)
    loop_ran.set()
    callers = await asyncio.gather(*waiting)
    assert validator.calls == 1
    assert all(caller is callers[0] for caller in callers)
    await asyncio.to_thread(verifier.stop)


@CACHED
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("acme")
async def test_disconnected_client_does_not_affect_others() -> None:
    release = threading.Event()

    class Slow(AcceptAll):
        def validate(self, token: str) -> Verified | None:
            assert release.wait(10)
            return super().validate(token)

    verifier = Verifier([Slow()])
    first = asyncio.ensure_future(verifier.verify_async("token"))
    second = asyncio.ensure_future(verifier.verify_async("token"))
    await asyncio.sleep(0)
    first.cancel()
    release.set()
    assert (await second).subject == "someone"
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.to_thread(verifier.stop)


@CACHED
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("acme")
async def test_refusal_reaches_all_waiting_requests_and_is_not_cached(issuer: JwksServer) -> None:
    verifier = Verifier()
    token = Signer("ES256", "key-ES256").token()
    for _ in range(2):
        refusals = await asyncio.gather(*(verifier.verify_async(token) for _ in range(5)), return_exceptions=True)
        assert {type(refusal) for refusal in refusals} == {Unauthenticated}
    assert not verifier._cache
    assert not verifier._verifying
    await asyncio.to_thread(verifier.stop)


# -- limits of the cache ---------------------------------------------------------------------------------------------


@CACHED
@pytest.mark.usefixtures("acme")
def test_cached_token_expires_after_the_configured_time(configure: Configure) -> None:
    configure(auth={"cache_seconds": 30})
    clock, validator = Clock(time.time()), AcceptAll()
    verifier = Verifier([validator], clock=clock)
    verifier.verify("token")
    clock.now += 29.9
    verifier.verify("token")
    assert validator.calls == 1
    clock.now += 0.1
    verifier.verify("token")
    assert validator.calls == 2


@CACHED
@pytest.mark.usefixtures("acme")
def test_number_of_cached_tokens_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenants.auth.verifier.CACHE_LIMIT", 10)
    verifier = Verifier([AcceptAll()])
    for number in range(50):
        verifier.verify(f"token-{number}")
    assert len(verifier._cache) == 10
    assert verifier.get_cached("token-49") is not None
    assert verifier.get_cached("token-0") is None


@CACHED
@pytest.mark.usefixtures("acme")
def test_cache_does_not_contain_the_tokens(signer: Signer, fresh_verifier: Verifier) -> None:
    token = signer.token()
    caller = fresh_verifier.verify(token)
    cached = repr([fresh_verifier._cache, caller])
    assert token not in cached
    assert token.rsplit(".", 1)[1] not in cached
    assert caller.fingerprint
    assert fresh_verifier.verify(signer.token(jti="another")).fingerprint != caller.fingerprint


# -- suspension -----------------------------------------------------------------------------------------------------


@SUSPENDED
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("acme")
def test_suspension_applies_to_cached_tokens() -> None:
    token = services.issue_token("acme", "worker")
    fresh = services.issue_token("acme", "worker")
    starts, finishes = BearerAuthentication(), BearerAuthentication(allows_suspended=True)
    starts.authenticate(request(token))
    models.Tenant.objects.filter(slug="acme").update(status="suspended")
    tenant_cache.poll()
    for bearer_token in (token, fresh):
        with pytest.raises(TenantSuspended):
            starts.authenticate(request(bearer_token))
        with pytest.raises(TenantSuspended):
            starts.authenticate_cached(f"Bearer {bearer_token}") or starts.authenticate(request(bearer_token))
        caller, _ = finishes.authenticate(request(bearer_token))
        assert caller.tenant.is_suspended
        with pytest.raises(TenantSuspended):
            refuse_new_work(caller)
    models.Tenant.objects.filter(slug="acme").update(status="active")
    tenant_cache.poll()
    caller, _ = starts.authenticate(request(token))
    refuse_new_work(caller)


@SUSPENDED
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("acme")
async def test_suspension_applies_on_the_event_loop(issuer: JwksServer, signer: Signer) -> None:
    header = f"Bearer {signer.token()}"
    starts, finishes = BearerAuthentication(), BearerAuthentication(allows_suspended=True)
    await starts.authenticate_async(header)
    await asyncio.to_thread(closing_connection(services.suspend), "acme")
    for value in (header, f"Bearer {signer.token(jti='new')}"):
        with pytest.raises(TenantSuspended):
            await starts.authenticate_async(value)
        assert (await finishes.authenticate_async(value)).tenant.is_suspended
    await asyncio.to_thread(verifier.stop)


def closing_connection(job: Callable[..., object]) -> Callable[..., None]:
    def run(*args: object) -> None:
        try:
            job(*args)
        finally:
            connection.close()

    return run


@SUSPENDED
@pytest.mark.django_db(transaction=True)
def test_changed_limits_apply_to_cached_tokens(acme: models.Tenant) -> None:
    token = services.issue_token("acme", "producer")
    assert verifier.verify(token).tenant.payload_bytes != 77
    models.Tenant.objects.filter(slug="acme").update(payload_bytes=77)
    tenant_cache.poll()
    assert verifier.verify(token).tenant.payload_bytes == 77


@SUSPENDED
def test_token_of_a_deleted_tenant_is_refused(acme: models.Tenant) -> None:
    token = services.issue_token("acme", "producer")
    verifier.verify(token)
    tid = acme.tid
    acme.delete()
    tenant_cache.refresh([tid])
    with pytest.raises(Forbidden):
        verifier.verify(token)


@SUSPENDED
@pytest.mark.usefixtures("issuer")
def test_new_tenant_does_not_accept_tokens_of_a_deleted_tenant_of_its_name(
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


class AcceptNone:
    def validate(self, token: str) -> Verified | None:
        return None


class OpaqueTokens:
    """A custom validator for tokens that are not JWTs."""

    def validate(self, token: str) -> Verified | None:
        if token != "opaque-secret":
            return None
        return Verified(claims=claims(sub="by-plugin"), producer_audience="codeq-producer", worker_audience="x")


PLUGINS = pytest.mark.spec("AUT-1", "Validators are named by dotted path and tried in order")


@PLUGINS
@pytest.mark.usefixtures("acme")
def test_validators_are_tried_in_order(configure: Configure, signer: Signer, issuer: JwksServer) -> None:
    here = "tests.tenants.test_verifier"
    configure(
        auth={"validators": [f"{here}.AcceptNone", f"{here}.OpaqueTokens", "tenants.auth.validators.JwksValidator"]}
    )
    verifier = Verifier()
    assert verifier.verify("opaque-secret").subject == "by-plugin"
    assert verifier.verify(signer.token()).subject == "someone"
    with pytest.raises(Unauthenticated):
        verifier.verify("opaque-guess")


@PLUGINS
@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize("bad", [{"exp": None}, {"exp": 1}, {"aud": "else"}, {"sub": 7}], ids=str)
def test_common_checks_apply_to_every_validator(bad: dict[str, Any]) -> None:
    validator = AcceptAll()
    validator.claims = claims(**bad)
    with pytest.raises(Unauthenticated):
        Verifier([validator]).verify("token")


OWN_ISSUER = pytest.mark.spec(
    "AUT-1", "A tenant's own issuer, with static keys or a URL, issues tokens for that tenant only"
)


@OWN_ISSUER
@pytest.mark.usefixtures("issuer")
def test_token_of_a_tenants_issuer_is_accepted(acme_idp: Signer) -> None:
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
def test_tenants_issuer_cannot_name_another_tenant(
    changes: dict[str, Any], error: type[Exception], acme_idp: Signer
) -> None:
    with pytest.raises(error):
        Verifier().verify(acme_idp.token(**{"iss": "acme-idp", **changes}))


@OWN_ISSUER
@pytest.mark.usefixtures("issuer", "other")
def test_token_bound_to_a_tenant_cannot_name_another() -> None:
    class BoundToAcme(AcceptAll):
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
def test_tenants_issuer_cannot_grant_the_operator_role(acme_idp: Signer) -> None:
    caller = Verifier().verify(acme_idp.token(iss="acme-idp", scope="codeq:operator codeq:admin"))
    assert sorted(caller.roles) == ["admin", "producer"]


@OWN_ISSUER
@pytest.mark.usefixtures("issuer")
def test_tenants_issuer_may_have_its_own_audiences(acme_idp: Signer) -> None:
    models.TenantIssuer.objects.update(producer_audience="acme-api", worker_audience="acme-workers")
    verifier = Verifier()
    assert verifier.verify(acme_idp.token(iss="acme-idp", aud="acme-api")).roles == {"producer"}
    assert verifier.verify(acme_idp.token(iss="acme-idp", aud="acme-workers")).roles == {"worker"}
    with pytest.raises(Unauthenticated):
        verifier.verify(acme_idp.token(iss="acme-idp", aud="codeq-producer"))


@OWN_ISSUER
def test_tenants_issuer_with_a_url(acme: models.Tenant, jwks_server: JwksServer, signer: Signer) -> None:
    jwks_server.keys = [signer.jwk]
    TenantIssuerFactory(tenant=acme, issuer="acme-idp", jwks_url=jwks_server.url)
    verifier = Verifier()
    for number in range(5):
        assert verifier.verify(signer.token(iss="acme-idp", jti=str(number))).tenant.slug == "acme"
    assert jwks_server.requests == 1


@OWN_ISSUER
@pytest.mark.usefixtures("issuer")
def test_two_tenants_may_have_issuers_of_the_same_name(acme_idp: Signer, other: models.Tenant) -> None:
    other_idp = Signer("ES256", "acme-key")
    TenantIssuerFactory(tenant=other, issuer="acme-idp", jwks={"keys": [other_idp.jwk]})
    verifier = Verifier()
    assert verifier.verify(acme_idp.token(iss="acme-idp")).tenant.slug == "acme"
    assert verifier.verify(other_idp.token(iss="acme-idp", tenantId="other")).tenant.slug == "other"
    with pytest.raises(Unauthenticated):
        verifier.verify(other_idp.token(iss="acme-idp", tenantId="acme"))


@PLUGINS
@pytest.mark.django_db(transaction=True)
def test_token_of_an_uncached_tenant_is_a_503_without_postgresql(
    issuer: JwksServer, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connection.settings_dict, "HOST", "/nowhere/at/all")
    connection.close()
    with pytest.raises(Unavailable):
        Verifier().verify(signer.token())


@PLUGINS
@pytest.mark.usefixtures("acme")
def test_installation_keys_are_the_default() -> None:
    token = services.issue_token("acme", "producer")
    assert Verifier().verify(token).tenant.slug == "acme"
    assert Verifier([JwksValidator()]).verify(token).tenant.slug == "acme"


# -- the header and DRF ---------------------------------------------------------------------------------------------

HEADER = pytest.mark.spec("AUT-1", "The Authorization header carries the token as Bearer")


@HEADER
@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER ", "Bearer    "])
@pytest.mark.usefixtures("acme")
def test_scheme_is_case_insensitive(scheme: str) -> None:
    token = services.issue_token("acme", "producer")
    caller, auth = BearerAuthentication().authenticate(SimpleNamespace(META={"HTTP_AUTHORIZATION": scheme + token}))
    assert (caller.subject, auth) == ("producer", token)


@HEADER
@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer  ", "Basic YTpi", "Token x", "Bearer\tx", "xBearer y", "é"]
)
def test_invalid_authorization_header_is_a_401(header: str | None) -> None:
    meta = {} if header is None else {"HTTP_AUTHORIZATION": header}
    with pytest.raises(Unauthenticated):
        BearerAuthentication().authenticate(SimpleNamespace(META=meta))
    with pytest.raises(Unauthenticated):
        BearerAuthentication().authenticate_cached(header)


@HEADER
@pytest.mark.usefixtures("acme")
def test_authentication_and_permissions_work_with_drf() -> None:
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
