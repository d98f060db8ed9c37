"""Every route for everybody who must not have it; from the URLconf, so that a new route cannot be forgotten."""

from __future__ import annotations

import hmac
import json
import statistics
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from django.urls import URLPattern, URLResolver, get_resolver

from core.http.api_view import ApiView
from core.redis.connections import client as redis_client
from tenants.domain import WORKER_SCOPES
from tests.queues.api.asgi_client import Client
from tests.queues.api.conftest import NORTH, SOUTH, TASKS
from tests.queues.api.test_tasks import made
from tests.queues.api.test_workers import DONE, claimed
from tests.tenants.minting import assemble

MakeClient = Callable[..., Client]
ABSENT = "01920f3e-8d5a-7c31-9a54-0b6f3c2d1e10"
NEW_TASK = {"command": "RENDER", "payload": {}}


@dataclass(frozen=True)
class Row:
    """Who may call an operation, and what it is called with."""

    role: str  # producer, worker, either, admin, anybody
    body: Any = None
    scopes: tuple[str, ...] = ()
    # What the answer is for an id of another tenant, in the path or the body; None: the route takes no id.
    foreign: int | None = None
    # What another worker of the tenant gets for a task it does not hold.
    other_worker: int | None = None
    query: str = field(default="")


ROWS: dict[tuple[str, str], Row] = {
    ("GET", "/healthz"): Row("anybody"),
    ("GET", "/readyz"): Row("anybody"),
    ("GET", "/metrics"): Row("anybody"),
    ("GET", "/.well-known/jwks.json"): Row("anybody"),
    ("POST", "/v1/codeq/tasks"): Row("producer", NEW_TASK),
    ("POST", "/v1/codeq/tasks/batch"): Row("producer", {"tasks": [NEW_TASK]}),
    ("GET", "/v1/codeq/tasks/<str:task_id>"): Row("either", foreign=404),
    ("DELETE", "/v1/codeq/tasks/<str:task_id>"): Row("producer", foreign=404),
    ("GET", "/v1/codeq/tasks/<str:task_id>/result"): Row("either", foreign=404),
    ("GET", "/v1/codeq/tasks/<str:task_id>/artifacts/<str:artifact_id>"): Row("either", foreign=404),
    ("POST", "/v1/codeq/tasks/<str:task_id>/result"): Row(
        "worker", DONE, scopes=("codeq:result",), foreign=404, other_worker=403
    ),
    ("POST", "/v1/codeq/tasks/<str:task_id>/heartbeat"): Row(
        "worker", {}, scopes=("codeq:heartbeat",), foreign=404, other_worker=403
    ),
    ("POST", "/v1/codeq/tasks/<str:task_id>/nack"): Row(
        "worker", {}, scopes=("codeq:nack",), foreign=404, other_worker=403
    ),
    ("POST", "/v1/codeq/tasks/<str:task_id>/abandon"): Row(
        "worker", {}, scopes=("codeq:abandon",), foreign=404, other_worker=403
    ),
    ("POST", "/v1/codeq/tasks/claim"): Row("worker", {}, scopes=("codeq:claim",)),
    ("POST", "/v1/codeq/tasks/claim/batch"): Row("worker", {}, scopes=("codeq:claim",)),
    ("POST", "/v1/codeq/tasks/batch/results"): Row(
        "worker", {"results": [{"taskId": "TASK"} | DONE]}, scopes=("codeq:result",), foreign=200, other_worker=200
    ),
    ("POST", "/v1/codeq/tasks/exchange"): Row(
        "worker",
        {"results": [{"taskId": "TASK"} | DONE]},
        scopes=("codeq:result", "codeq:claim"),
        foreign=200,
        other_worker=200,
    ),
    ("POST", "/v1/codeq/workers/subscriptions"): Row(
        "worker", {"callbackUrl": "https://worker.example.com/wake"}, scopes=("codeq:subscribe",)
    ),
    ("GET", "/v1/codeq/workers/subscriptions"): Row("worker", scopes=("codeq:subscribe",)),
    ("DELETE", "/v1/codeq/workers/subscriptions/<str:subscription_id>"): Row(
        "worker", scopes=("codeq:subscribe",), foreign=404
    ),
    ("POST", "/v1/codeq/workers/subscriptions/<str:subscription_id>/heartbeat"): Row(
        "worker", {}, scopes=("codeq:subscribe",), foreign=404
    ),
    ("GET", "/v1/codeq/tasks"): Row("producer"),
    ("GET", "/v1/codeq/admin/dlq/<str:command>"): Row("admin"),
    ("POST", "/v1/codeq/admin/dlq/<str:command>/replay"): Row("admin", {"dryRun": True}),
    ("GET", "/v1/codeq/admin/bulk/<str:job_id>"): Row("admin", foreign=404),
    ("DELETE", "/v1/codeq/admin/bulk/<str:job_id>"): Row("admin", foreign=404),
    ("GET", "/v1/codeq/admin/topics"): Row("admin"),
    ("GET", "/v1/codeq/admin/topics/<str:name>"): Row("admin"),
    ("PUT", "/v1/codeq/admin/topics/<str:name>"): Row("admin", {"maxAttempts": 3}),
    ("DELETE", "/v1/codeq/admin/topics/<str:name>"): Row("admin", query="?deletionPolicy=Delete"),
    ("GET", "/v1/codeq/admin/queues"): Row("admin"),
    ("GET", "/v1/codeq/admin/queues/<str:command>"): Row("admin"),
    ("POST", "/v1/codeq/admin/queues/<str:command>/pause"): Row("admin", {}),
    ("POST", "/v1/codeq/admin/queues/<str:command>/resume"): Row("admin", {}),
    ("POST", "/v1/codeq/admin/tasks/cleanup"): Row("admin", {}),
    ("GET", "/v1/codeq/insights/<str:mart>"): Row("producer"),
}


def routes(patterns: list[Any] | None = None, before: str = "/") -> list[tuple[str, str]]:
    """Every method of every path that an ApiView serves."""
    found = []
    for pattern in get_resolver().url_patterns if patterns is None else patterns:
        path = before + str(pattern.pattern)
        if isinstance(pattern, URLResolver):
            found += routes(pattern.url_patterns, path)
        elif isinstance(pattern, URLPattern):
            view = getattr(pattern.callback, "cls", None)
            if isinstance(view, type) and issubclass(view, ApiView):
                found += [(method, path) for method in view.operations if method != "HEAD"]
    return found


def test_every_route_has_a_row_and_every_row_a_route() -> None:
    assert sorted(routes()) == sorted(ROWS)


GUARDED = {route: row for route, row in ROWS.items() if row.role != "anybody"}
each_guarded = pytest.mark.parametrize(("route", "row"), GUARDED.items(), ids=[" ".join(route) for route in GUARDED])


def with_id(value: Any, task_id: str) -> Any:
    if isinstance(value, dict):
        return {name: with_id(each, task_id) for name, each in value.items()}
    if isinstance(value, list):
        return [with_id(each, task_id) for each in value]
    return task_id if value == "TASK" else value


async def call(client: Client, route: tuple[str, str], row: Row, task_id: str = ABSENT) -> Any:
    method, path = route
    target = (
        path.replace("<str:task_id>", task_id)
        .replace("<str:subscription_id>", task_id)
        .replace("<str:job_id>", task_id)
        .replace("<str:name>", "OF_THE_ISOLATION_TESTS")
        .replace("<str:command>", "RENDER")
        .replace("<str:mart>", "latency")
    )
    target = target.replace("<str:artifact_id>", "0" * 64)
    said = {} if row.body is None else {"body": with_id(row.body, task_id)}
    return await client.request(method, target + row.query, headers={"X-Request-Id": "same"}, **said)


def everything() -> dict[bytes, Any]:
    return {key: redis_client().dump(key) for key in sorted(redis_client().keys("*"))}


@pytest.mark.spec("AUT-1", "No route of the API answers without a valid token")
@each_guarded
@pytest.mark.parametrize("who", ["anonymous", "nonsense", "expired", "basic", "no tenant", "no audience"])
async def test_without_a_valid_token(
    client: MakeClient, producer: Client, route: tuple[str, str], row: Row, who: str
) -> None:
    task = await made(producer)
    role = "worker" if row.role == "worker" else "admin"
    before = everything()
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
    answer = await call(caller, route, row, task["id"])
    assert (answer.status, answer.code) in {
        (401, "unauthenticated"), (403, "forbidden"),
    }  # fmt: skip
    if who in ("anonymous", "nonsense", "basic", "expired"):
        assert answer.status == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    assert everything() == before


@pytest.mark.spec("AUT-2", "Each route is for its role alone")
@each_guarded
@pytest.mark.parametrize("role", ["producer", "worker", "admin", "operator"])
async def test_the_wrong_role(
    client: MakeClient, producer: Client, route: tuple[str, str], row: Row, role: str
) -> None:
    allowed = {
        "producer": {"producer", "admin", "operator"},
        "worker": {"worker"},
        "either": {"producer", "worker", "admin", "operator"},
        "admin": {"admin", "operator"},
    }[row.role]
    task = await made(producer)
    before = everything()
    answer = await call(client(role), route, row, task["id"])
    if role in allowed:
        assert answer.status not in (401, 403), answer.body
    else:
        assert (answer.status, answer.code) == (403, "forbidden")
        assert everything() == before


@pytest.mark.spec("AUT-2", "A worker needs the scope of what it does, and a scope in a producer's token opens nothing")
@pytest.mark.parametrize(
    ("route", "row", "missing"),
    [(route, row, scope) for route, row in ROWS.items() for scope in row.scopes],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
async def test_a_missing_scope(
    client: MakeClient, producer: Client, route: tuple[str, str], row: Row, missing: str
) -> None:
    task = await made(producer)
    await claimed(client("worker", sub="holder"))
    before = everything()
    others = " ".join(scope for scope in WORKER_SCOPES if scope != missing)
    for caller in (
        client("worker", sub="holder", scope=others),
        client("worker", sub="holder", scope=None),
        client("producer", scope=" ".join(WORKER_SCOPES)),
    ):
        answer = await call(caller, route, row, task["id"])
        assert (answer.status, answer.code) == (403, "forbidden")
    assert everything() == before


WITH_ID = {route: row for route, row in GUARDED.items() if row.foreign is not None}


@pytest.mark.spec("TEN-3", "Another tenant's task answers byte for byte as one that never existed, and is not touched")
@pytest.mark.parametrize(("route", "row"), WITH_ID.items(), ids=[" ".join(route) for route in WITH_ID])
async def test_another_tenants_id_is_an_unknown_id(
    client: MakeClient, producer: Client, route: tuple[str, str], row: Row
) -> None:
    task = await made(producer)
    worker = client("worker", sub="same-sub")
    await claimed(worker)
    real_id = task["id"]
    if "subscription_id" in route[1]:
        subscribed = await worker.post("/v1/codeq/workers/subscriptions", {"callbackUrl": "https://example.org/wake"})
        real_id = subscribed.json["subscriptionId"]
    if "job_id" in route[1]:
        real_id = (await client("admin").post("/v1/codeq/admin/dlq/RENDER/replay")).json["id"]
    before = everything()
    caller = client("producer" if row.role == "either" else row.role, SOUTH, sub="same-sub")
    foreign = await call(caller, route, row, real_id)
    absent = await call(caller, route, row, ABSENT)
    assert foreign.status == absent.status == row.foreign
    assert foreign.headers == absent.headers
    assert foreign.body == absent.body.replace(ABSENT.encode(), real_id.encode())
    if foreign.status == 200:
        assert foreign.json["results"][0]["error"] == "task_not_found"
    assert everything() == before


HELD = {route: row for route, row in GUARDED.items() if row.other_worker is not None}


@pytest.mark.spec("AUT-2", "A worker is its token's `sub`: another one of the tenant cannot touch the task it holds")
@pytest.mark.parametrize(("route", "row"), HELD.items(), ids=[" ".join(route) for route in HELD])
async def test_another_worker_of_the_tenant(
    client: MakeClient, producer: Client, route: tuple[str, str], row: Row
) -> None:
    task = await made(producer)
    await claimed(client("worker", sub="holder"))
    answer = await call(client("worker", sub="other"), route, row, task["id"])
    assert answer.status == row.other_worker
    if answer.status == 200:
        assert answer.json["results"][0]["error"] == "not_owner"
    else:
        assert answer.code == "not_owner"
    read = (await producer.get(f"{TASKS}/{task['id']}")).json
    assert (read["status"], read["workerId"]) == ("IN_PROGRESS", "holder")


@pytest.mark.spec("TEN-3", "Counting, pausing and cleaning up stay inside the tenant")
async def test_an_administrator_sees_and_changes_its_own_tenant_only(
    client: MakeClient, producer: Client, admin: Client, worker: Client
) -> None:
    await made(producer)
    foreign = client("admin", SOUTH)
    assert (await foreign.get("/v1/codeq/admin/queues")).json == {"queues": []}
    assert (await foreign.get("/v1/codeq/admin/queues/RENDER")).json["ready"] == 0
    await foreign.post("/v1/codeq/admin/queues/RENDER/pause")
    assert (await admin.get("/v1/codeq/admin/queues/RENDER")).json["paused"] is False
    assert (await worker.post(f"{TASKS}/claim")).status == 200
    operator = client("operator", SOUTH)
    assert (await operator.get("/v1/codeq/admin/queues")).json["queues"][0]["ready"] == 0


@pytest.mark.spec("TEN-2", "Two tenant claims that differ are refused")
async def test_two_tenants_in_one_token(client: MakeClient) -> None:
    answer = await client("producer", NORTH, tid=SOUTH).post(TASKS, NEW_TASK)
    assert (answer.status, answer.code) == (403, "forbidden")
    unknown = await client("producer", "nobody-knows-this-tenant").post(TASKS, NEW_TASK)
    assert (unknown.status, unknown.code) == (403, "forbidden")


FORGED: dict[str, Callable[[dict[str, Any]], str]] = {
    "its text": lambda jwk: json.dumps(jwk),
    "its text, compact": lambda jwk: json.dumps(jwk, separators=(",", ":")),
    "its PEM": lambda jwk: jwt.PyJWK(jwk).key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode(),
    "its coordinates": lambda jwk: jwk["x"] + jwk["y"],
    "nothing": lambda jwk: "",
}


@pytest.mark.spec(
    "AUT-1", "The public keys that are served are no secret to sign with, and no algorithm is no signature"
)
@pytest.mark.parametrize("secret", FORGED.values(), ids=FORGED.keys())
@pytest.mark.parametrize("algorithm", ["HS256", "HS512", "none"])
async def test_a_public_key_is_no_secret(
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
    answer = await caller.get("/v1/codeq/admin/queues")
    assert (answer.status, answer.code) == (401, "unauthenticated")


@pytest.mark.spec("TEN-3", "Nor does time tell another tenant's task from one that never was")
async def test_time_does_not_tell_either(producer: Client, stranger: Client) -> None:
    foreign = (await made(producer))["id"]
    absent = f"{foreign[:-12]}{uuid.uuid4().hex[:12]}"
    took: dict[str, list[float]] = {foreign: [], absent: []}
    for number in range(400):
        # In turn, so that whatever else the machine does falls on both.
        task_id = (foreign, absent)[number % 2]
        began = time.perf_counter()
        assert (await stranger.get(f"{TASKS}/{task_id}")).status == 404
        took[task_id].append(time.perf_counter() - began)
    assert abs(statistics.median(took[foreign]) - statistics.median(took[absent])) <= 0.002
