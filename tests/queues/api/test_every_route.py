"""Rules of all routes: no 5xx, and a 4xx changes nothing.

Bodies, fields, queries and paths come from the declarations, so that a new route or field is tested too.
"""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
from django.db import connection
from django.urls import get_resolver

from core import threadpool
from core.http.api_view import METHODS, Operation
from core.redis.connections import client as redis_client
from queues.api.examples import EXAMPLES, ID, TOKEN
from queues.engine.keys import COMMAND
from tests.queues.api.asgi_client import Client
from tests.queues.api.conftest import TASKS, delete_rows
from tests.queues.api.routes import ROUTE_CASES, RouteCase, call_route, list_routes
from tests.queues.api.tasks import COMPLETED, claim_task, enqueue_task

MakeClient = Callable[..., Client]
Route = tuple[str, str]
TABLES = ("queues_bulkjob", "queues_bulkitem", "queues_queuepolicy", "webhooks_subscription", "webhooks_delivery")


def operation_of(route: Route) -> Operation:
    method, path = route
    concrete = path.replace("<str:", "").replace(">", "")
    operation: Operation = get_resolver().resolve(concrete).func.cls.operations[method][0]
    return operation


OPERATIONS = {route: operation_of(route) for route in list_routes()}
GUARDED = {route: operation for route, operation in OPERATIONS.items() if not operation.is_open}
WITH_BODY = {route: operation for route, operation in GUARDED.items() if operation.body is not None}
WITH_QUERY = {route: operation for route, operation in GUARDED.items() if operation.query is not None}
WITH_PATH = [route for route in GUARDED if "<" in route[1]]


def for_each_route(routes: Any) -> Any:
    return pytest.mark.parametrize("route", list(routes), ids=[" ".join(route) for route in routes])


class RouteTargets(NamedTuple):
    """A leased task, a subscription and a bulk job, so that every id in a path exists."""

    task_id: str
    lease_token: str
    ids: dict[str, str]
    callers: dict[str, Client]

    def caller(self, route: Route) -> Client:
        role = ROUTE_CASES[route].role
        return self.callers["producer" if role == "either" else role]

    def row(self, route: Route) -> RouteCase:
        return ROUTE_CASES[route]

    def target(self, route: Route, **instead: str) -> str:
        path = route[1]
        for name, value in (self.ids | instead).items():
            path = path.replace(f"<str:{name}>", value)
        return path + self.row(route).query


@pytest.fixture
async def targets(client: MakeClient) -> AsyncIterator[RouteTargets]:
    callers = {"producer": client("producer"), "worker": client("worker", sub="holder"), "admin": client("admin")}
    await enqueue_task(callers["producer"])
    task = await claim_task(callers["worker"])
    body = {"callbackUrl": "https://worker.example.com/wake"}
    subscription = (await callers["worker"].post("/v1/codeq/workers/subscriptions", body)).json["subscriptionId"]
    job = (await callers["admin"].post("/v1/codeq/admin/dlq/RENDER/replay")).json["id"]
    ids = {
        "task_id": task["id"], "subscription_id": subscription, "job_id": job, "command": "RENDER", "name": "RENDER",
        "artifact_id": "0" * 64,
    }  # fmt: skip
    yield RouteTargets(task_id=task["id"], lease_token=task["leaseToken"], ids=ids, callers=callers)
    await threadpool.run_db(delete_rows)


async def read_state() -> Any:
    """Return all of Redis and every row that a route can create."""

    def rows() -> list[Any]:
        with connection.cursor() as cursor:
            rows_by_table = []
            for table in TABLES:
                cursor.execute(f"SELECT to_jsonb(t)::text FROM {table} t ORDER BY 1")
                rows_by_table.append(cursor.fetchall())
            return rows_by_table

    keys = {key: redis_client().dump(key) for key in sorted(redis_client().keys("*"))}
    return keys, await threadpool.run_db(rows)


def body_of(route: Route, targets: RouteTargets) -> Any:
    """Return a valid body for the route."""
    body = EXAMPLES.get(OPERATIONS[route].name, {}).get("request", {})
    text = json.dumps(body).replace(ID, targets.task_id).replace(TOKEN, targets.lease_token)
    return json.loads(text) | ({"waitSeconds": 0} if "waitSeconds" in body else {})


def list_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield every path in a JSON value. The first item of a list stands for all."""
    if path:
        yield path
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from list_paths(inner, (*path, name))
    elif isinstance(value, list) and value:
        yield from list_paths(value[0], (*path, 0))


PLACEHOLDER = "@@placeholder@@"


def with_placeholder(value: Any, path: tuple[Any, ...]) -> bytes:
    value = copy.deepcopy(value)
    inner = value
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = PLACEHOLDER
    return json.dumps(value).encode()


VALUES = {
    "null": b"null",
    "true": b"true",
    "a list": b"[]",
    "an object": b"{}",
    "NaN": b"NaN",
    "Infinity": b"-Infinity",
    "beyond a double": b"1e400",
    "a large double": b"1e308",
    "negative": b"-1",
    "minus zero": b"-0",
    "a half": b"1.5",
    "past 2^63": b"18446744073709551616",
    "5,000 digits": b"9" * 5_000,
    "an empty text": b'""',
    "a NUL": rb'"a\u0000b"',
    "a raw NUL": b'"a\0b"',
    "a lone surrogate": rb'"\ud800"',
    "a surrogate in UTF-8": b'"\xed\xa0\x80"',
    "not UTF-8": b'"\xff"',
    "a line break": rb'"a\r\nSet-Cookie: b=c"',
    "a last line break": rb'"RENDER\n"',
    "right to left": '"\u202eA"'.encode(),
    "ten kilobytes": b'"' + b"x" * 10_000 + b'"',
    "a key of ours": b'"codeq:{0}:q:a:b:ready:0"',
    "a path": b'"../../etc/passwd"',
    "a thousand levels": b"[" * 1_000 + b"]" * 1_000,
    "a hundred thousand levels": b'{"a":' * 100_000,
    "a moment at the end of time": b'"9999-12-31T23:59:59-23:59"',
    "a moment at its beginning": b'"0001-01-01T00:00:00+23:59"',
    "a leap second": b'"2026-06-30T23:59:60Z"',
    "a number as text": b'"5"',
}


@pytest.mark.spec("ENQ-1", "No value of any field of any route causes a 5xx, and a 4xx changes nothing")
@for_each_route(WITH_BODY)
async def test_no_value_of_a_field_causes_a_5xx(targets: RouteTargets, route: Route) -> None:
    caller, path, good = targets.caller(route), targets.target(route), body_of(route, targets)
    fields = {field.encode_name: None for field in msgspec.structs.fields(OPERATIONS[route].body)}
    before = await read_state()
    refused = 0
    for field_path in list_paths(fields | good):
        template = with_placeholder(good, field_path)
        for name, value in VALUES.items():
            body = template.replace(f'"{PLACEHOLDER}"'.encode(), value)
            response = await caller.request(route[0], path, body)
            assert response.status < 500, (field_path, name, response.body)
            after = await read_state()
            if response.status >= 400:
                refused += 1
                assert after == before, (field_path, name, response.body)
                assert len(response.body) < 2_000
            before = after
    assert refused > 5 * len(fields)


UNKNOWN_FIELDS = (
    "tenantId",
    "tenant",
    "id",
    "attempts",
    "createdAt",
    "__proto__",
    "constructor",
    "",
    "x" * 10_000,
    "\u0000",
    "$ref",
)


@pytest.mark.spec("TEN-2", "An unknown field is refused by name, above all one that names a tenant")
@for_each_route(WITH_BODY)
async def test_an_unknown_field_is_refused_by_name(targets: RouteTargets, route: Route) -> None:
    caller, path, good = targets.caller(route), targets.target(route), body_of(route, targets)
    before = await read_state()
    for name in UNKNOWN_FIELDS:
        response = await caller.request(route[0], path, good | {name: "x"})
        assert (response.status, response.code) == (400, "invalid_request"), name
        assert name[:50] in response.json["detail"]
        assert await read_state() == before


INVALID_BODIES = [
    b" ", b"null", b"[]", b'"x"', b"1", b"{", b"{}{}", b"{}x", b"\xff\xfe{}\x00", b"\xef\xbb\xbf{}", b"\x00", b"NaN",
    b"[" * 100_000, b'{"a":' * 100_000, b'{"\xff":1}', rb'{"\ud800":1}', b"payload=1&command=A", b"<a/>",
]  # fmt: skip


@for_each_route(WITH_BODY)
async def test_invalid_body_is_refused(targets: RouteTargets, route: Route) -> None:
    before = await read_state()
    for body in INVALID_BODIES:
        response = await targets.caller(route).request(route[0], targets.target(route), body)
        assert (response.status, response.code) == (400, "invalid_request"), body[:40]
    assert await read_state() == before


MEDIA_TYPES = ["", "text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded",
         "*/*", "application/json; charset=utf-7", "application/json; charset=utf-16",
         "application/json-patch+json"]  # fmt: skip


@for_each_route(WITH_BODY)
async def test_other_content_types_are_refused(targets: RouteTargets, route: Route) -> None:
    before = await read_state()
    good = body_of(route, targets)
    for kind in MEDIA_TYPES:
        response = await targets.caller(route).request(
            route[0], targets.target(route), good, headers={"Content-Type": kind}
        )
        assert (response.status, response.code) == (415, "unsupported_media_type"), kind
    bomb = gzip.compress(b" " * 50_000_000, 9)
    for encoding in ("gzip", "deflate", "x-gzip", "br", "identity, gzip"):
        headers = {"Content-Encoding": encoding}
        response = await targets.caller(route).request(route[0], targets.target(route), bomb, headers=headers)
        assert (response.status, response.code) == (415, "unsupported_media_type"), encoding
    assert await read_state() == before


QUERY_VALUES = ["", "%00", "%0d%0aSet-Cookie:a", "%ff", "%ed%a0%80", "%F0%9F%92%A9", "NaN", "inf", "1e400", "-1",
           "9" * 5_000, "0x10", "x" * 10_000, "'--", "*", "../..", "%2500", "true", "null", "[]", "1;a=2"]  # fmt: skip


@for_each_route(WITH_QUERY)
async def test_no_value_in_a_query_causes_a_5xx(targets: RouteTargets, route: Route) -> None:
    declared = OPERATIONS[route]
    caller, path = targets.caller(route), targets.target(route).partition("?")[0]
    before = await read_state()
    names = [field.encode_name for field in msgspec.structs.fields(declared.query)]
    for name in names:
        for value in QUERY_VALUES:
            response = await caller.request(route[0], f"{path}?{name}={value}")
            assert response.status < 500, (name, value, response.body)
            assert (await read_state())[0] == before[0]
        for query in (f"{name}=1&{name}=1", f"{name}_=1", "&".join(f"{name}{n}=1" for n in range(99))):
            response = await caller.request(route[0], f"{path}?{query}")
            assert (response.status, response.code) == (400, "invalid_request"), query
    assert await read_state() == before


PATH_SEGMENTS = ["%00", "%0d%0aSet-Cookie:a", "%ff", "%ed%a0%80", "..%2f..%2f", "{}", "*", "[a]", "a:b", "a" * 5_000,
                 "%20",
            "%F0%9F%92%A9", "\\", "'", "null", ID.upper(), f"{ID}%0a", f"%20{ID}", ID.replace("-", ""), f"{{{ID}}}",
            f"urn:uuid:{ID}", "%252e"]  # fmt: skip


@for_each_route(WITH_PATH)
async def test_no_value_in_a_path_causes_a_5xx(targets: RouteTargets, route: Route) -> None:
    before = await read_state()
    body = {} if OPERATIONS[route].body is None else {"body": body_of(route, targets)}
    for name in (name for name in targets.ids if f"<str:{name}>" in route[1]):
        for segment in PATH_SEGMENTS:
            target = targets.target(route, **{name: segment})
            response = await targets.caller(route).request(route[0], target, **body)
            if name not in ("command", "name") or not COMMAND.fullmatch(segment):
                assert 400 <= response.status < 500, (segment, response.status, response.body)
                assert await read_state() == before, segment
            before = await read_state()


HEADERS = {
    "X-Request-Id": ["", "a\r\nSet-Cookie: b=c", "\x1b[31m", "é", "x" * 65_536, "\x00"],
    "X-CodeQ-Lease-Token": ["a\r\nb", "é", "x" * 65_536, "\x00", "null"],
    "traceparent": ["00-" + "0" * 32 + "-" + "0" * 16 + "-01", "ff-" + "a" * 32 + "-" + "b" * 16 + "-01", "x" * 65_536,
                    "é", "\x00"],
    "tracestate": ["x" * 10_240, "é", "\x00", "a=b" * 5_000],
    "Accept": ["text/html", "nonsense", "x" * 65_536],
    "Accept-Encoding": ["gzip", "x" * 65_536],
    "Cookie": ["sessionid=x", "csrftoken=" + "x" * 4_096],
    "X-HTTP-Method-Override": ["DELETE"],
    "X-Forwarded-For": ["127.0.0.1", "x" * 10_000],
    "Host": ["evil.example.com", "a b", "x" * 10_000, "[::1"],
    "Range": ["bytes=0-0"],
    "Expect": ["100-continue", "x"],
    "If-None-Match": ["*"],
}  # fmt: skip


@for_each_route(GUARDED)
async def test_no_value_in_a_header_causes_a_5xx(targets: RouteTargets, route: Route) -> None:
    body = {} if OPERATIONS[route].body is None else {"body": body_of(route, targets)}
    before = await read_state()
    for name, values in HEADERS.items():
        for value in values:
            headers = {name: value}
            response = await targets.caller(route).request(route[0], targets.target(route), headers=headers, **body)
            assert response.status < 500, (name, value[:40], response.body)
            assert all("\r" not in text and "\n" not in text for text in response.headers.values())
            assert "set-cookie" not in response.headers
            after = await read_state()
            assert response.status < 400 or after == before, (name, value[:40])
            before = after


TOKEN_HEADERS = ["", " ", "Bearer", "Bearer ", "Bearer \x00", "Bearer é", "Bearer " + "x" * 65_536, "Bearer a.b.c",
          "Bearer a b", "bearer,Bearer", "Basic eDp5", "Digest x", "Bearer " + "a." * 30_000]  # fmt: skip


@for_each_route(GUARDED)
async def test_invalid_authorization_header_is_refused(targets: RouteTargets, route: Route) -> None:
    before = await read_state()
    anonymous = Client(targets.caller(route).application)
    for value in TOKEN_HEADERS:
        response = await anonymous.request(route[0], targets.target(route), headers={"Authorization": value})
        assert (response.status, response.code) == (401, "unauthenticated"), value[:40]
    assert await read_state() == before


@for_each_route(sorted({(path, "") for _, path in OPERATIONS}))
async def test_other_method_is_refused_first(anonymous: Client, targets: RouteTargets, route: Route) -> None:
    path = route[0]
    allowed_methods = {method for method, operation_path in OPERATIONS if operation_path == path}
    target = path
    for name, value in targets.ids.items():
        target = target.replace(f"<str:{name}>", value)
    before = await read_state()
    for method in {method.upper() for method in METHODS} | {"PATCH", "TRACE", "CONNECT", "PROPFIND", "post", "X" * 100}:
        if method not in allowed_methods:
            response = await anonymous.request(method, target)
            assert (response.status, response.code) == (405, "method_not_allowed")
            assert set(response.headers["allow"].split(", ")) >= allowed_methods | {"OPTIONS"}
    assert await read_state() == before


async def test_refused_results_do_not_affect_the_claim(targets: RouteTargets) -> None:
    """Results of an exchange are independent.

    An invalid body is refused as a whole, and claims nothing.
    """
    await enqueue_task(targets.callers["producer"])
    before = await read_state()
    for results in ([COMPLETED], [{"taskId": targets.task_id}], [{"taskId": "x"} | COMPLETED], COMPLETED, "x"):
        response = await targets.callers["worker"].post(f"{TASKS}/exchange", {"results": results})
        assert (response.status, response.code) == (400, "invalid_request")
    assert await read_state() == before
    exchanged = await call_route(targets.callers["worker"], ("POST", f"{TASKS}/exchange"), RouteCase("worker", {}))
    assert exchanged.json["tasks"]
