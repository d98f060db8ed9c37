"""Claims of tokens with a valid signature: times, audience, tenant, roles and scopes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from rest_framework.permissions import BasePermission

from core.errors import CodeqError, Forbidden, Unauthenticated
from tenants import models, services
from tenants.auth.claims import TENANT_CLAIMS
from tenants.auth.verifier import Verifier
from tenants.domain import WORKER_SCOPES, Caller, CallerRole
from tenants.permissions import (
    HasScope,
    IsAdmin,
    IsProducer,
    IsProducerOrWorker,
    IsWorker,
    commands_for,
)
from tests.tenants.conftest import Clock, Configure, JwksServer
from tests.tenants.minting import ISSUER, Signer, claims

pytestmark = pytest.mark.usefixtures("acme", "other")

NOW = 1_800_000_000


def is_permitted(permission: type[BasePermission], caller: Caller) -> bool:
    return permission().has_permission(SimpleNamespace(user=caller), None)  # type: ignore[arg-type]


@pytest.fixture
def clock() -> Clock:
    return Clock(NOW)


@pytest.fixture
def verifier(issuer: JwksServer, clock: Clock) -> Verifier:
    return Verifier(clock=clock)


def find_error(verifier: Verifier, token: str) -> type[CodeqError] | None:
    """Return the error that the token causes, or None."""
    try:
        verifier.verify(token)
    except CodeqError as error:
        return type(error)
    return None


def fresh_claims(**changes: Any) -> dict[str, Any]:
    return claims(**{"iat": NOW, "exp": NOW + 600, **changes})


TIMES: list[tuple[str, dict[str, Any], bool]] = [
    ("fresh", {}, True),
    ("expired-59s-ago", {"exp": NOW - 59}, True),
    ("expired-60s-ago", {"exp": NOW - 60}, False),
    ("expired-61s-ago", {"exp": NOW - 61}, False),
    ("no-exp", {"exp": None}, False),
    ("exp-text", {"exp": str(NOW + 600)}, False),
    ("exp-true", {"exp": True}, False),
    ("exp-list", {"exp": [NOW + 600]}, False),
    ("exp-object", {"exp": {"$gt": 0}}, False),
    ("exp-zero", {"exp": 0}, False),
    ("exp-negative", {"exp": -1}, False),
    ("exp-fraction", {"exp": NOW + 0.5}, True),
    ("exp-far", {"exp": 253_402_300_799}, True),
    ("exp-too-far", {"exp": 10**30}, False),
    ("exp-1e300", {"exp": 1e300}, False),
    ("nbf-in-59s", {"nbf": NOW + 59}, True),
    ("nbf-in-61s", {"nbf": NOW + 61}, False),
    ("nbf-text", {"nbf": "0"}, False),
    ("nbf-true", {"nbf": True}, False),
    ("iat-in-59s", {"iat": NOW + 59}, True),
    ("iat-in-61s", {"iat": NOW + 61}, False),
    ("iat-text", {"iat": "yesterday"}, False),
    ("no-iat", {"iat": None}, True),
]


@pytest.mark.spec("AUT-1", "A token is valid from nbf to exp, with the leeway, and must expire")
@pytest.mark.parametrize(("changes", "is_good"), [case[1:] for case in TIMES], ids=[case[0] for case in TIMES])
def test_times(changes: dict[str, Any], is_good: bool, signer: Signer, verifier: Verifier) -> None:
    assert find_error(verifier, signer.sign(fresh_claims(**changes))) is (None if is_good else Unauthenticated)


@pytest.mark.spec("AUT-1", "A token is valid from nbf to exp, with the leeway, and must expire")
@pytest.mark.parametrize("number", ["1e400", "-1e400", "1e308", "NaN", "Infinity", "9" * 400, '"1e9"', "null"])
def test_numbers_that_overflow_are_refused(number: str, signer: Signer, verifier: Verifier) -> None:
    for name in ("exp", "nbf", "iat"):
        text = json.dumps(fresh_claims(**{name: "@"})).replace('"@"', number)
        token = signer.sign_raw({"alg": "ES256", "kid": signer.kid}, text.encode())
        assert find_error(verifier, token) is Unauthenticated


@pytest.mark.spec("AUT-1", "A cached token expires at its exp, without the leeway")
def test_token_is_not_cached_after_it_expires(signer: Signer, verifier: Verifier, clock: Clock) -> None:
    token = signer.sign(fresh_claims(exp=NOW + 10))
    verifier.verify(token)
    clock.now = NOW + 9.9
    assert verifier.get_cached(token) is not None
    clock.now = NOW + 10
    assert verifier.get_cached(token) is None
    clock.now = NOW + 69
    assert find_error(verifier, token) is None
    clock.now = NOW + 70
    assert find_error(verifier, token) is Unauthenticated


PRODUCER, WORKER = "codeq-producer", "codeq-worker"
AUDIENCES: list[tuple[str, Any, frozenset[CallerRole] | None]] = [
    ("producer", PRODUCER, frozenset({CallerRole.PRODUCER})),
    ("worker", WORKER, frozenset({CallerRole.WORKER})),
    ("list-of-one", [PRODUCER], frozenset({CallerRole.PRODUCER})),
    ("among-others", ["https://else.example", WORKER], frozenset({CallerRole.WORKER})),
    ("both", [PRODUCER, WORKER], frozenset({CallerRole.PRODUCER, CallerRole.WORKER})),
    ("other", "else", None),
    ("missing", None, None),
    ("empty", "", None),
    ("empty-list", [], None),
    ("prefix", "codeq-producer-not", None),
    ("shorter", "codeq-produce", None),
    ("space-separated", "codeq-producer codeq-worker", None),
    ("case", "Codeq-Producer", None),
    ("trailing-slash", "codeq-producer/", None),
    ("number", 7, None),
    ("true", True, None),
    ("object", {PRODUCER: True}, None),
    ("nested", [[PRODUCER]], None),
    ("list-with-a-number", [PRODUCER, 7], None),
]


@pytest.mark.spec("AUT-1", "The audience determines whether the token is a producer's or a worker's")
@pytest.mark.parametrize(("audience", "roles"), [case[1:] for case in AUDIENCES], ids=[case[0] for case in AUDIENCES])
def test_audiences(audience: Any, roles: frozenset[CallerRole] | None, signer: Signer, verifier: Verifier) -> None:
    token = signer.sign(fresh_claims(aud=audience))
    if roles is None:
        assert find_error(verifier, token) is Unauthenticated
    else:
        assert verifier.verify(token).roles == roles


@pytest.mark.spec("AUT-1", "Only the configured issuer's tokens are accepted")
@pytest.mark.parametrize(
    "issuer_claim",
    [None, "", "codeq", ISSUER + "/", ISSUER.upper(), ISSUER[:-1], "https://issuer.example.evil", [ISSUER], 7, True],
    ids=str,
)
def test_other_issuer_is_refused(issuer_claim: Any, signer: Signer, verifier: Verifier) -> None:
    token = signer.sign_raw({"alg": "ES256", "kid": signer.kid}, fresh_claims(iss=issuer_claim))
    assert find_error(verifier, token) is Unauthenticated


SUBJECTS: list[tuple[str, Any, bool]] = [
    ("name", "worker-1", True),
    ("spaces", "a worker", True),
    ("255", "x" * 255, True),
    ("256", "x" * 256, False),
    ("empty", "", False),
    ("missing", None, False),
    ("number", 7, False),
    ("list", ["a"], False),
    ("newline", "a\nb", False),
    ("nul", "a\x00b", False),
    ("right-to-left", "a\u202eb", False),
]


@pytest.mark.spec("AUT-2", "The worker's id is the token's sub")
@pytest.mark.parametrize(("subject", "is_good"), [case[1:] for case in SUBJECTS], ids=[case[0] for case in SUBJECTS])
def test_subjects(subject: Any, is_good: bool, signer: Signer, verifier: Verifier) -> None:
    token = signer.sign_raw({"alg": "ES256", "kid": signer.kid}, fresh_claims(sub=subject))
    assert find_error(verifier, token) is (None if is_good else Unauthenticated)
    if is_good:
        assert verifier.verify(token).subject == subject


# -- tenant ---------------------------------------------------------------------------------------------------------

TENANT_SPEC = pytest.mark.spec("TEN-2", "All tenant claims of a token name the same tenant, or it is refused")


@TENANT_SPEC
@pytest.mark.parametrize("name", TENANT_CLAIMS)
def test_each_tenant_claim_names_the_tenant(name: str, signer: Signer, verifier: Verifier) -> None:
    caller = verifier.verify(signer.sign(fresh_claims(**{"tenantId": None, name: "other"})))
    assert caller.tenant.slug == "other"


@TENANT_SPEC
@pytest.mark.parametrize("first", TENANT_CLAIMS)
@pytest.mark.parametrize("second", TENANT_CLAIMS)
def test_two_tenant_claims_must_agree(first: str, second: str, signer: Signer, verifier: Verifier) -> None:
    agreeing = fresh_claims(tenantId=None) | {first: "acme", second: "acme"}
    assert verifier.verify(signer.sign(agreeing)).tenant.slug == "acme"
    if first != second:
        differing = fresh_claims(tenantId=None) | {first: "acme", second: "other"}
        assert find_error(verifier, signer.sign(differing)) is Forbidden


@TENANT_SPEC
@pytest.mark.parametrize("name", TENANT_CLAIMS)
@pytest.mark.parametrize(
    "value",
    [
        *("", " ", "acme ", " acme", "ACME", "аcme", "acme\x00", "acme\n", "a:b", "a}:{b", "_", "*", "x" * 10_000),
        *(None, 7, True, ["acme"], [], {"id": "acme"}, {}),
    ],
    ids=lambda value: ascii(value)[:16],
)
def test_invalid_tenant_name_is_refused(name: str, value: Any, signer: Signer, verifier: Verifier) -> None:
    payload = fresh_claims(tenantId=None) | {name: value}
    assert find_error(verifier, signer.sign_raw({"alg": "ES256", "kid": signer.kid}, payload)) is Forbidden


@TENANT_SPEC
@pytest.mark.parametrize("value", ["", None, 7, ["acme"]], ids=repr)
def test_invalid_tenant_claim_beside_a_valid_one_is_refused(value: Any, signer: Signer, verifier: Verifier) -> None:
    payload = fresh_claims() | {"organization_id": value}
    assert find_error(verifier, signer.sign_raw({"alg": "ES256", "kid": signer.kid}, payload)) is Forbidden


@TENANT_SPEC
@pytest.mark.parametrize("subject", ["acme", "other", "someone"])
def test_subject_is_not_used_as_tenant_name(subject: str, signer: Signer, verifier: Verifier) -> None:
    assert find_error(verifier, signer.sign(fresh_claims(tenantId=None, sub=subject))) is Forbidden


@TENANT_SPEC
def test_in_single_tenant_mode_sub_is_the_tenant(configure: Configure, signer: Signer, verifier: Verifier) -> None:
    configure(auth={"single_tenant": True})
    assert verifier.verify(signer.sign(fresh_claims(tenantId=None, sub="acme"))).tenant.slug == "acme"
    assert verifier.verify(signer.sign(fresh_claims(tenantId="other", sub="acme"))).tenant.slug == "other"
    assert find_error(verifier, signer.sign(fresh_claims(tenantId=None, sub="nobody"))) is Forbidden
    # An empty claim is not a missing claim.
    assert find_error(verifier, signer.sign(fresh_claims(tenantId="", sub="acme"))) is Forbidden


@pytest.mark.spec("TEN-2", "A token of an unknown tenant is a 403, or creates the tenant if the setting allows it")
def test_unknown_tenant_is_refused_or_created(configure: Configure, signer: Signer, verifier: Verifier) -> None:
    token = signer.sign(fresh_claims(tenantId="newcomer"))
    assert find_error(verifier, token) is Forbidden
    configure(auth={"provision_tenants": True})
    tenant = verifier.verify(token).tenant
    assert models.Tenant.objects.get(slug="newcomer").tid == tenant.tid
    for invalid_name in ("a b", "a}:{b", "x" * 129, "ü", "a\nb"):
        assert find_error(verifier, signer.sign(fresh_claims(tenantId=invalid_name))) is Forbidden
    assert models.Tenant.objects.count() == 3


@pytest.mark.spec("TEN-1", "Keys contain a tenant's random id, never its name")
def test_tid_is_independent_of_the_name(configure: Configure, signer: Signer, verifier: Verifier) -> None:
    configure(auth={"provision_tenants": True})
    names = ["a:b", "a.b", "A:B", "_", "-", "a|b", "a/b", "a=b", "a@b"]
    ids = {name: verifier.verify(signer.sign(fresh_claims(tenantId=name))).tenant.tid for name in names}
    assert len(set(ids.values())) == len(names)
    assert all(len(tid) == 8 and set(tid) <= set("abcdefghijklmnopqrstuvwxyz234567") for tid in ids.values())


# -- roles, scopes, commands ----------------------------------------------------------------------------------------


def caller_of(verifier: Verifier, signer: Signer, **changes: Any) -> Caller:
    return verifier.verify(signer.sign(fresh_claims(**changes)))


ADMINS: list[tuple[str, dict[str, Any], set[CallerRole] | None]] = [
    ("plain", {}, set()),
    ("role", {"role": "ADMIN"}, {CallerRole.ADMIN}),
    ("scope", {"scope": "codeq:admin"}, {CallerRole.ADMIN}),
    ("scope-among-others", {"scope": "a codeq:admin b"}, {CallerRole.ADMIN}),
    ("operator", {"scope": "codeq:operator"}, {CallerRole.OPERATOR}),
    ("role-lower", {"role": "admin"}, set()),
    ("role-title", {"role": "Admin"}, set()),
    ("role-padded", {"role": " ADMIN"}, set()),
    ("role-other", {"role": "SUPERADMIN"}, set()),
    ("roles", {"roles": ["ADMIN"]}, set()),
    ("scope-prefix", {"scope": "codeq:administrator"}, set()),
    ("scope-case", {"scope": "CODEQ:ADMIN"}, set()),
    ("scope-comma", {"scope": "codeq:admin,codeq:operator"}, set()),
    ("role-list", {"role": ["ADMIN"]}, None),
    ("role-object", {"role": {"ADMIN": True}}, None),
    ("role-true", {"role": True}, None),
    ("scope-list", {"scope": ["codeq:admin"]}, None),
    ("scope-object", {"scope": {"codeq:admin": 1}}, None),
]


@pytest.mark.spec("AUT-1", "An administrator is a producer with the exact role or scope")
@pytest.mark.parametrize(("changes", "roles"), [case[1:] for case in ADMINS], ids=[case[0] for case in ADMINS])
def test_administrators(
    changes: dict[str, Any], roles: set[CallerRole] | None, signer: Signer, verifier: Verifier
) -> None:
    if roles is None:
        assert find_error(verifier, signer.sign(fresh_claims(**changes))) is Forbidden
    else:
        assert caller_of(verifier, signer, **changes).roles == {CallerRole.PRODUCER} | roles


@pytest.mark.spec("AUT-1", "A worker's token never grants administration")
@pytest.mark.parametrize("changes", [{"role": "ADMIN"}, {"scope": "codeq:admin codeq:operator"}], ids=str)
def test_worker_is_never_an_administrator(changes: dict[str, Any], signer: Signer, verifier: Verifier) -> None:
    assert caller_of(verifier, signer, aud=WORKER, **changes).roles == {CallerRole.WORKER}


ALLOWED: dict[str, tuple[dict[str, Any], set[type[BasePermission]]]] = {
    "producer": ({}, {IsProducer, IsProducerOrWorker}),
    "worker": ({"aud": WORKER}, {IsWorker, IsProducerOrWorker}),
    "admin": ({"role": "ADMIN"}, {IsProducer, IsProducerOrWorker, IsAdmin}),
    "operator": ({"scope": "codeq:operator"}, {IsProducer, IsProducerOrWorker, IsAdmin}),
    "both": ({"aud": [PRODUCER, WORKER]}, {IsProducer, IsWorker, IsProducerOrWorker}),
}


@pytest.mark.spec(
    "AUT-1", "Permission classes accept producers, workers, either, or administrators including operators"
)
@pytest.mark.parametrize("name", ALLOWED)
def test_permission_classes(name: str, signer: Signer, verifier: Verifier) -> None:
    changes, allowed = ALLOWED[name]
    caller = caller_of(verifier, signer, **changes)
    classes = {IsProducer, IsWorker, IsProducerOrWorker, IsAdmin}
    assert {permission_class for permission_class in classes if is_permitted(permission_class, caller)} == allowed


@pytest.mark.spec("AUT-2", "A scope allows one operation of a worker, and only in a worker's token")
@pytest.mark.parametrize("scope", WORKER_SCOPES)
def test_missing_scope_refuses_its_operation_only(scope: str, signer: Signer, verifier: Verifier) -> None:
    rest = [other for other in WORKER_SCOPES if other != scope]
    worker = caller_of(verifier, signer, aud=WORKER, scope=" ".join(rest))
    assert {granted for granted in WORKER_SCOPES if is_permitted(HasScope(granted), worker)} == set(rest)
    producer = caller_of(verifier, signer, scope=scope)
    assert not is_permitted(HasScope(scope), producer)


@pytest.mark.spec("AUT-2", "A scope allows one operation of a worker, and only in a worker's token")
@pytest.mark.parametrize("text", ["", "codeq:claims", "CODEQ:CLAIM", "codeq:*", "*", "codeq:claim,codeq:nack", "claim"])
def test_similar_scope_is_not_accepted(text: str, signer: Signer, verifier: Verifier) -> None:
    worker = caller_of(verifier, signer, aud=WORKER, scope=text)
    assert not any(is_permitted(HasScope(scope), worker) for scope in WORKER_SCOPES)


COMMANDS: list[tuple[str, Any, list[str] | None, list[str] | None]] = [
    # name, eventTypes, requested, granted (None = Forbidden)
    ("all-of-mine", ["b", "a"], None, ["a", "b"]),
    ("requested-empty", ["a"], [], ["a"]),
    ("subset", ["a", "b"], ["b"], ["b"]),
    ("order-kept", ["a", "b", "c"], ["c", "a"], ["c", "a"]),
    ("twice", ["a"], ["a", "a"], ["a"]),
    ("outside", ["a"], ["b"], None),
    ("partly-outside", ["a"], ["a", "b"], None),
    ("case", ["render"], ["Render"], None),
    ("prefix", ["render"], ["render.large"], None),
    ("star", ["*"], ["anything"], ["anything"]),
    ("star-all", ["*"], None, ["*"]),
    ("star-among-others", ["a", "*"], None, ["*"]),
    ("asks-for-the-star", ["a"], ["*"], None),
    ("pattern-is-no-star", ["a*"], ["ab"], None),
    ("none", None, None, None),
    ("empty", [], None, None),
    ("empty-requested", [], ["a"], None),
]


@pytest.mark.spec("AUT-2", "A worker may claim only the commands of its eventTypes")
@pytest.mark.parametrize(
    ("event_types", "requested", "granted"), [case[1:] for case in COMMANDS], ids=[case[0] for case in COMMANDS]
)
def test_commands(
    event_types: Any, requested: list[str] | None, granted: list[str] | None, signer: Signer, verifier: Verifier
) -> None:
    worker = caller_of(verifier, signer, aud=WORKER, eventTypes=event_types)
    if granted is None:
        with pytest.raises(Forbidden):
            commands_for(worker, requested)
    else:
        assert commands_for(worker, requested) == granted


@pytest.mark.spec("AUT-2", "Claims of a wrong type are refused")
@pytest.mark.parametrize(
    "changes",
    [
        {"eventTypes": "a"},
        {"eventTypes": [1]},
        {"eventTypes": ["a", None]},
        {"eventTypes": [""]},
        {"eventTypes": {"a": 1}},
        {"eventTypes": True},
        {"workerGroup": ["g"]},
        {"workerGroup": 7},
        {"workerGroup": "x" * 129},
        {"workerGroup": "a\nb"},
    ],
    ids=str,
)
def test_claims_of_a_wrong_type_are_refused(changes: dict[str, Any], signer: Signer, verifier: Verifier) -> None:
    assert find_error(verifier, signer.sign(fresh_claims(aud=WORKER, **changes))) is Forbidden


@pytest.mark.spec("AUT-2", "The worker's group is a claim of its token")
def test_group_comes_from_the_token(signer: Signer, verifier: Verifier) -> None:
    assert caller_of(verifier, signer, aud=WORKER, workerGroup="blue").group == "blue"
    assert caller_of(verifier, signer, aud=WORKER).group == ""


@pytest.mark.spec("AUT-2", "Producers may claim only with the development setting")
def test_producers_as_workers(configure: Configure, signer: Signer, verifier: Verifier) -> None:
    assert CallerRole.WORKER not in caller_of(verifier, signer, jti="1").roles
    configure(auth={"producer_as_worker": True})
    caller = caller_of(verifier, signer, jti="2")
    assert caller.roles == {CallerRole.PRODUCER, CallerRole.WORKER}
    assert commands_for(caller, None) == ["*"]
    assert all(is_permitted(HasScope(scope), caller) for scope in WORKER_SCOPES)


@pytest.mark.spec("AUT-1", "Issued tokens have the requested claims")
@pytest.mark.parametrize("role", list(CallerRole))
def test_issued_tokens(role: CallerRole) -> None:
    token = services.issue_token("acme", role, subject="me", commands=["a", "b"], group="blue")
    caller = Verifier().verify(token)
    assert caller.tenant.slug == "acme"
    assert caller.subject == "me"
    expected = {
        CallerRole.PRODUCER: {CallerRole.PRODUCER},
        CallerRole.WORKER: {CallerRole.WORKER},
        CallerRole.ADMIN: {CallerRole.PRODUCER, CallerRole.ADMIN},
        CallerRole.OPERATOR: {CallerRole.PRODUCER, CallerRole.ADMIN, CallerRole.OPERATOR},
    }
    assert caller.roles == expected[role]
    if role is CallerRole.WORKER:
        assert (caller.commands, caller.group, caller.scopes) == ({"a", "b"}, "blue", set(WORKER_SCOPES))
