"""Every route of the URLconf for every caller that must not use it."""

from __future__ import annotations

import hmac
import json
import statistics
import time
import uuid
from collections.abc import Callable
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tenants.domain import WORKER_SCOPES
from tests.queues.api.asgi_client import Client
from tests.queues.api.conftest import NORTH, SOUTH, TASKS
from tests.queues.api.redis_dump import dump_redis
from tests.queues.api.routes import ABSENT, NEW_TASK, PROTECTED, ROUTE_CASES, RouteCase, call_route, list_routes
from tests.queues.api.tasks import claim_task, enqueue_task
from tests.tenants.minting import assemble

MakeClient = Callable[..., Client]


def test_every_route_has_a_case() -> None:
    assert sorted(list_routes()) == sorted(ROUTE_CASES)


for_each_protected_route = pytest.mark.parametrize(
    ("route", "case"), PROTECTED.items(), ids=[" ".join(route) for route in PROTECTED]
)


@pytest.mark.spec("AUT-1", "No route of the API answers without a valid token")
@for_each_protected_route
@pytest.mark.parametrize("who", ["anonymous", "nonsense", "expired", "basic", "no tenant", "no audience"])
async def test_request_without_a_valid_token_is_refused(
    client: MakeClient, producer: Client, route: tuple[str, str], case: RouteCase, who: str
) -> None:
    task = await enqueue_task(producer)
    role = "worker" if case.role == "worker" else "admin"
    before = dump_redis()
    claims: dict[str, Any] = {
        "expired": {"exp": int(time.time()) - 3600},
        "no tenant": {"tenantId": None},
        "no audience": {"aud": None},
    }.get(who, {})
    caller = client() if who in ("anonymous", "nonsense", "basic") else client(role, **claims)
    if who == "nonsense":
        caller.token = "nonsense"
    if who == "basic":
        caller.token = None
    response = await call_route(caller, route, case, task["id"])
    assert (response.status, response.code) in {
        (401, "unauthenticated"), (403, "forbidden"),
    }  # fmt: skip
    if who in ("anonymous", "nonsense", "basic", "expired"):
        assert response.status == 401
        assert response.headers["www-authenticate"] == "Bearer"
    assert dump_redis() == before


@pytest.mark.spec("AUT-2", "Each route serves its role only")
@for_each_protected_route
@pytest.mark.parametrize("role", ["producer", "worker", "admin", "operator"])
async def test_route_serves_only_its_roles(
    client: MakeClient, producer: Client, route: tuple[str, str], case: RouteCase, role: str
) -> None:
    allowed = {
        "producer": {"producer", "admin", "operator"},
        "worker": {"worker"},
        "either": {"producer", "worker", "admin", "operator"},
        "admin": {"admin", "operator"},
    }[case.role]
    task = await enqueue_task(producer)
    before = dump_redis()
    response = await call_route(client(role), route, case, task["id"])
    if role in allowed:
        assert response.status not in (401, 403), response.body
    else:
        assert (response.status, response.code) == (403, "forbidden")
        assert dump_redis() == before


@pytest.mark.spec(
    "AUT-2", "A worker needs the scope of the operation, and a scope in a producer's token grants nothing"
)
@pytest.mark.parametrize(
    ("route", "case", "missing"),
    [(route, case, scope) for route, case in ROUTE_CASES.items() for scope in case.scopes],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
async def test_worker_without_the_scope_is_refused(
    client: MakeClient, producer: Client, route: tuple[str, str], case: RouteCase, missing: str
) -> None:
    task = await enqueue_task(producer)
    await claim_task(client("worker", sub="holder"))
    before = dump_redis()
    others = " ".join(scope for scope in WORKER_SCOPES if scope != missing)
    for caller in (
        client("worker", sub="holder", scope=others),
        client("worker", sub="holder", scope=None),
        client("producer", scope=" ".join(WORKER_SCOPES)),
    ):
        response = await call_route(caller, route, case, task["id"])
        assert (response.status, response.code) == (403, "forbidden")
    assert dump_redis() == before


WITH_ID = {route: case for route, case in PROTECTED.items() if case.foreign is not None}


@pytest.mark.spec("TEN-3", "Another tenant's task gets the same bytes as one that never existed, and is not changed")
@pytest.mark.parametrize(("route", "case"), WITH_ID.items(), ids=[" ".join(route) for route in WITH_ID])
async def test_another_tenants_id_is_an_unknown_id(
    client: MakeClient, producer: Client, route: tuple[str, str], case: RouteCase
) -> None:
    task = await enqueue_task(producer)
    worker = client("worker", sub="same-sub")
    await claim_task(worker)
    real_id = task["id"]
    if "subscription_id" in route[1]:
        subscribed = await worker.post("/v1/codeq/workers/subscriptions", {"callbackUrl": "https://example.org/wake"})
        real_id = subscribed.json["subscriptionId"]
    if "job_id" in route[1]:
        real_id = (await client("admin").post("/v1/codeq/admin/dlq/RENDER/replay")).json["id"]
    before = dump_redis()
    caller = client("producer" if case.role == "either" else case.role, SOUTH, sub="same-sub")
    foreign = await call_route(caller, route, case, real_id)
    absent = await call_route(caller, route, case, ABSENT)
    assert foreign.status == absent.status == case.foreign
    assert foreign.headers == absent.headers
    assert foreign.body == absent.body.replace(ABSENT.encode(), real_id.encode())
    if foreign.status == 200:
        assert foreign.json["results"][0]["error"] == "task_not_found"
    assert dump_redis() == before


HELD = {route: case for route, case in PROTECTED.items() if case.other_worker is not None}


@pytest.mark.spec("AUT-2", "The token's `sub` identifies a worker: another worker of the tenant cannot change its task")
@pytest.mark.parametrize(("route", "case"), HELD.items(), ids=[" ".join(route) for route in HELD])
async def test_another_worker_cannot_change_the_task(
    client: MakeClient, producer: Client, route: tuple[str, str], case: RouteCase
) -> None:
    task = await enqueue_task(producer)
    await claim_task(client("worker", sub="holder"))
    response = await call_route(client("worker", sub="other"), route, case, task["id"])
    assert response.status == case.other_worker
    if response.status == 200:
        assert response.json["results"][0]["error"] == "not_owner"
    else:
        assert response.code == "not_owner"
    read = (await producer.get(f"{TASKS}/{task['id']}")).json
    assert (read["status"], read["workerId"]) == ("IN_PROGRESS", "holder")


@pytest.mark.spec("TEN-3", "Counting, pausing and cleanup are limited to the tenant")
async def test_an_administrator_sees_and_changes_its_own_tenant_only(
    client: MakeClient, producer: Client, admin: Client, worker: Client
) -> None:
    await enqueue_task(producer)
    foreign = client("admin", SOUTH)
    assert (await foreign.get("/v1/codeq/admin/queues")).json == {"queues": []}
    assert (await foreign.get("/v1/codeq/admin/queues/RENDER")).json["ready"] == 0
    await foreign.post("/v1/codeq/admin/queues/RENDER/pause")
    assert (await admin.get("/v1/codeq/admin/queues/RENDER")).json["paused"] is False
    assert (await worker.post(f"{TASKS}/claim")).status == 200
    operator = client("operator", SOUTH)
    assert (await operator.get("/v1/codeq/admin/queues")).json["queues"][0]["ready"] == 0


@pytest.mark.spec("TEN-2", "Two tenant claims that differ are refused")
async def test_token_with_two_tenants_is_refused(client: MakeClient) -> None:
    response = await client("producer", NORTH, tid=SOUTH).post(TASKS, NEW_TASK)
    assert (response.status, response.code) == (403, "forbidden")
    unknown = await client("producer", "nobody-knows-this-tenant").post(TASKS, NEW_TASK)
    assert (unknown.status, unknown.code) == (403, "forbidden")


FORGED: dict[str, Callable[[dict[str, Any]], str]] = {
    "its text": lambda jwk: json.dumps(jwk),
    "its text, compact": lambda jwk: json.dumps(jwk, separators=(",", ":")),
    "its PEM": lambda jwk: jwt.PyJWK(jwk).key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode(),
    "its coordinates": lambda jwk: jwk["x"] + jwk["y"],
    "nothing": lambda jwk: "",
}


@pytest.mark.spec("AUT-1", "A token signed with a public key, or with no algorithm, is refused")
@pytest.mark.parametrize("secret", FORGED.values(), ids=FORGED.keys())
@pytest.mark.parametrize("algorithm", ["HS256", "HS512", "none"])
async def test_token_signed_with_a_public_key_is_refused(
    anonymous: Client, client: MakeClient, algorithm: str, secret: Callable[[dict[str, Any]], str]
) -> None:
    (key,) = (await anonymous.get("/.well-known/jwks.json")).json["keys"]
    caller = client("admin")
    assert (await caller.get("/v1/codeq/admin/queues")).status == 200
    claims = jwt.decode(caller.token or "", options={"verify_signature": False})
    header = {"alg": algorithm, "typ": "JWT", "kid": key["kid"]}
    signed = assemble(header, claims, b"").rstrip(".")
    kinds = {"HS256": "sha256", "HS512": "sha512"}
    is_signed = algorithm in kinds
    signature = hmac.digest(secret(key).encode(), signed.encode(), kinds[algorithm]) if is_signed else b""
    caller.token = assemble(header, claims, signature)
    response = await caller.get("/v1/codeq/admin/queues")
    assert (response.status, response.code) == (401, "unauthenticated")


@pytest.mark.spec("TEN-3", "The response time does not distinguish another tenant's task from one that never existed")
async def test_response_time_does_not_distinguish_tasks(producer: Client, stranger: Client) -> None:
    foreign = (await enqueue_task(producer))["id"]
    absent = f"{foreign[:-12]}{uuid.uuid4().hex[:12]}"
    took: dict[str, list[float]] = {foreign: [], absent: []}
    for number in range(400):
        # Alternating, so that other load on the machine affects both alike.
        task_id = (foreign, absent)[number % 2]
        began = time.perf_counter()
        assert (await stranger.get(f"{TASKS}/{task_id}")).status == 404
        took[task_id].append(time.perf_counter() - began)
    assert abs(statistics.median(took[foreign]) - statistics.median(took[absent])) <= 0.002
