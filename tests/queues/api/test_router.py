"""The router and the handler of the API: paths, methods, request ids, bodies."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from codeq_site.asgi import application
from core import request_id
from core.conf import conf
from core.http import handler as http_handler
from core.http import router
from core.http.handler import ApiHandler
from core.http.router import Router
from core.logging import JsonFormatter
from queues import long_poll, selectors
from tests.queues.api.asgi_client import Client
from tests.queues.api.conftest import TASKS
from tests.queues.api.tasks import enqueue_task

LIMIT = conf().web.body_bytes


@pytest.mark.parametrize("path", ["/v1/codeq/", "/v1/codeq/nothing", "/v1/codeq/tasks/", "/v1/codeq//tasks",
                                  "/v1/codeq/tasks;a=1", "/v1/codeq/tasks/a/b/c", "/v1/codeq/../admin/"])  # fmt: skip
async def test_an_unknown_path_is_a_problem(anonymous: Client, path: str) -> None:
    response = await anonymous.get(path)
    assert (response.status, response.code) == (404, "not_found")
    assert response.json["requestId"] == response.headers["x-request-id"]
    assert set(response.json) == {"type", "title", "status", "code", "error", "detail", "requestId"}
    assert (response.json["error"], response.json["status"]) == ("not_found", 404)


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (TASKS, "GET, POST, HEAD, OPTIONS"),
        (f"{TASKS}/claim", "POST, OPTIONS"),
        (f"{TASKS}/x", "GET, DELETE, HEAD, OPTIONS"),
        ("/healthz", "GET, HEAD, OPTIONS"),
    ],
)
async def test_other_method_gets_the_allowed_ones(anonymous: Client, path: str, allowed: str) -> None:
    for method in ("PUT", "PATCH", "TRACE", "CONNECT", "get", "BREW"):
        response = await anonymous.request(method, path)
        assert (response.status, response.code) == (405, "method_not_allowed")
        assert response.headers["allow"] == allowed
    options = await anonymous.request("OPTIONS", path)
    assert (options.status, options.body, options.headers["allow"]) == (204, b"", allowed)


@pytest.mark.parametrize(("trusted", "client"), [("127.0.0.1", "203.0.113.9"), ("192.0.2.1", "127.0.0.1")])
async def test_console_gets_the_address_that_a_trusted_proxy_forwards(
    monkeypatch: pytest.MonkeyPatch, trusted: str, client: str
) -> None:
    seen: list[Any] = []

    async def serve(handler: router.ConsoleHandler, scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["client"][0])

    monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    monkeypatch.setattr(router.ConsoleHandler, "__call__", serve)
    headers = [(b"x-forwarded-for", b"203.0.113.9")]
    scope = {"type": "http", "path": "/admin/", "headers": headers, "client": ("127.0.0.1", 1), "scheme": "http"}
    await Router()(scope, None, None)  # type: ignore[arg-type]
    assert seen == [client]


async def test_head_is_get_without_the_body(producer: Client) -> None:
    task = await enqueue_task(producer)
    get = await producer.get(f"{TASKS}/{task['id']}")
    head = await producer.request("HEAD", f"{TASKS}/{task['id']}")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["content-length"] == get.headers["content-length"] == str(len(get.body))
    missing = await producer.request("HEAD", f"{TASKS}/nothing")
    assert (missing.status, missing.body) == (404, b"")


@pytest.mark.spec("AUT-4", "The request id is returned, with success and with errors")
@pytest.mark.parametrize("sent", ["abc", "A-1_b.2", "x" * 128])
async def test_request_id_is_returned(anonymous: Client, producer: Client, sent: str) -> None:
    headers = {"X-Request-Id": sent}
    for response in (
        await producer.post(TASKS, {"command": "A", "payload": 1}, headers=headers),
        await producer.post(TASKS, {}, headers=headers),
        await anonymous.get(f"{TASKS}/x", headers=headers),
        await anonymous.get("/v1/codeq/nothing", headers=headers),
        await anonymous.get("/admin/login/", headers=headers),
        await anonymous.get("/nothing-in-the-console", headers=headers),
        await anonymous.get("/healthz", headers=headers),
    ):
        assert response.headers["x-request-id"] == sent


@pytest.mark.spec("AUT-4", "A missing id, or one that could forge a log line, is replaced")
@pytest.mark.parametrize(
    "sent", ["", "a b", "x" * 129, "a\r\nSet-Cookie: b=c", "\x1b[31m", "é", "a,b", "a/b", "x" * 65_536]
)
async def test_invalid_request_id_is_replaced(anonymous: Client, sent: str) -> None:
    for path in ("/healthz", "/v1/codeq/nothing", "/admin/login/"):
        ids = [(await anonymous.get(path, headers={"X-Request-Id": sent})).headers["x-request-id"] for _ in range(2)]
        assert all(re.fullmatch("[0-9a-f]{32}", request_id) for request_id in ids)
        assert ids[0] != ids[1]


@pytest.mark.spec("AUT-4", "Every log line of a request has its id")
async def test_log_line_has_the_request_id(
    producer: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise KeyError("secret-canary")

    monkeypatch.setattr(selectors, "task", fail)
    caplog.handler.addFilter(request_id.RequestIdFilter())
    with caplog.at_level(logging.INFO):
        response = await producer.get(f"{TASKS}/x", headers={"X-Request-Id": "the-id"})
    assert (response.status, response.code) == (500, "error")
    assert b"canary" not in response.body
    assert response.json["detail"].startswith("An unexpected error occurred.")
    records = [record for record in caplog.records if record.name == "codeq.web"]
    assert [record.request_id for record in records] == ["the-id"]  # type: ignore[attr-defined]


@pytest.mark.spec("OBS-3", "A log entry is one line, as text or JSON, with any content")
def test_a_log_line_is_one_json_object() -> None:
    request_id.assign(b"the-id")
    record = logging.LogRecord("codeq", logging.ERROR, __file__, 1, "two\nlines \ud800 %s", ("\x1b[31m",), None)
    assert request_id.RequestIdFilter().filter(record)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    entry = json.loads(line)
    assert (entry["level"], entry["message"], entry["requestId"]) == ("ERROR", "two\nlines \\ud800 \x1b[31m", "the-id")
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    assert "ValueError" in json.loads(JsonFormatter().format(record))["error"]


async def test_large_header_causes_a_short_log_line(anonymous: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header of 60 KB once caused 240 KB of log."""
    log_stream = io.StringIO()
    handler = next(log_handler for log_handler in logging.getLogger().handlers if log_handler.get_name() == "stderr")
    monkeypatch.setattr(handler, "stream", log_stream)
    response = await anonymous.get("/admin/login/", headers={"Host": "evil" * 10_000})
    assert response.status == 400
    assert "evil" in log_stream.getvalue()
    assert len(log_stream.getvalue()) < 1000
    assert "ERROR" not in log_stream.getvalue()


OTHER_TYPES = [
    "text/plain",
    "multipart/form-data; boundary=x",
    "application/x-www-form-urlencoded",
    "application/json; charset=utf-7",
    "application/json; charset=latin-1",
    "application/jsonp",
    "application/problem+json",
    "json",
    "a" * 10_000,
    "",
]


@pytest.mark.parametrize("kind", OTHER_TYPES)
async def test_another_content_type_is_refused(producer: Client, kind: str) -> None:
    response = await producer.post(TASKS, {"command": "A", "payload": 1}, headers={"Content-Type": kind})
    assert (response.status, response.code) == (415, "unsupported_media_type")


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON", "application/json; charset=utf-8",
                                  'application/json;charset="UTF-8"', "application/json ; charset=utf-8"])  # fmt: skip
async def test_content_type_of_json_may_be_written_in_several_ways(producer: Client, kind: str) -> None:
    response = await producer.post(TASKS, {"command": "A", "payload": 1}, headers={"Content-Type": kind})
    assert response.status == 202


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, identity", "chunked"])
async def test_compressed_body_is_refused_unread(producer: Client, encoding: str) -> None:
    exchange = producer.start("POST", TASKS, b"\x1f\x8b" + b"x" * 100, headers={"Content-Encoding": encoding})
    response = await exchange.response()
    assert response is not None
    assert (response.status, response.code) == (415, "unsupported_media_type")


CHUNK = b" " * 65_536


@pytest.mark.parametrize("announced", ["truth", "a lie", "nothing"])
async def test_too_large_body_is_read_no_further(producer: Client, announced: str) -> None:
    chunks = [CHUNK] * (LIMIT // len(CHUNK) + 100)
    lengths = {"truth": str(len(chunks) * len(CHUNK)), "a lie": "10", "nothing": ""}
    headers = {"Content-Length": lengths[announced]}
    if announced == "nothing":
        headers["Transfer-Encoding"] = "chunked"
    exchange = producer.start("POST", TASKS, chunks=chunks, headers=headers)
    response = await exchange.response()
    assert response is not None
    assert (response.status, response.code) == (413, "payload_too_large")
    assert exchange.bytes_read <= LIMIT + 2 * len(CHUNK)
    assert response.headers["connection"] == "close"


async def test_a_body_of_exactly_the_limit_is_read(producer: Client) -> None:
    task = b'{"command":"A","payload":1}'
    body = b" " * (LIMIT - len(task)) + task
    parts = [body[at : at + 1_000_000] for at in range(0, len(body), 1_000_000)]
    assert (await producer.post(TASKS, chunks=parts)).status == 202
    assert (await producer.post(TASKS, chunks=[b" ", *parts])).status == 413


@pytest.mark.parametrize("length", ["-1", "1e3", "9" * 30, "0x10", "²"])
async def test_invalid_content_length_is_handled(producer: Client, length: str) -> None:
    response = await producer.post(TASKS, {"command": "A", "payload": 1}, headers={"Content-Length": length})
    assert response.status == 413


async def test_late_body_is_a_timeout(producer: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_handler, "BODY_SECONDS", 0.05)
    monkeypatch.setattr(http_handler, "DRAIN_SECONDS", 0.05)
    exchange = producer.start("POST", TASKS, b'{"command":', never_ends=True)
    response = await asyncio.wait_for(exchange.response(), 15)
    assert response is not None
    assert (response.status, response.code) == (408, "request_timeout")
    assert response.headers["connection"] == "close"


async def test_client_that_disconnects_while_sending_gets_no_response(producer: Client) -> None:
    exchange = producer.start("POST", TASKS, b'{"command":', never_ends=True)
    exchange.disconnect()
    assert await exchange.response() is None


async def test_body_of_an_unauthenticated_request_is_not_read(anonymous: Client) -> None:
    response = await anonymous.post(TASKS, b"{" * 1000)
    assert (response.status, response.code) == (401, "unauthenticated")
    assert response.headers["www-authenticate"] == "Bearer"


async def test_repeated_header_is_joined(producer: Client) -> None:
    exchange = producer.start("GET", f"{TASKS}/x")
    exchange.task.cancel()
    scope = {
        "type": "http", "method": "GET", "path": f"{TASKS}/x", "query_string": b"", "root_path": "",
        "headers": [(b"authorization", f"Bearer {producer.token}".encode()), (b"authorization", b"Bearer other")],
    }  # fmt: skip
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    await application(scope, receive, send)
    assert sent[0]["status"] == 401


async def test_responses_are_not_cached_or_sniffed(producer: Client) -> None:
    response = await producer.post(TASKS, {"command": "A", "payload": 1})
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize(("serve", "api", "console"), [("all", 401, 200), ("api", 401, 404), ("console", 404, 200)])
async def test_process_serves_the_configured_parts(
    monkeypatch: pytest.MonkeyPatch, client: Callable[..., Client], serve: str, api: int, console: int
) -> None:
    process_router = Router()
    monkeypatch.setattr(process_router, "serves_api", serve != "console")
    monkeypatch.setattr(process_router, "serves_console", serve != "api")
    caller = client()
    caller.application = process_router
    assert (await caller.get(f"{TASKS}/x")).status == api
    assert (await caller.get("/admin/login/")).status == console
    assert (await caller.get("/healthz")).status == 200


@pytest.mark.usefixtures("_registry")
async def test_start_and_stop_open_and_close_the_long_poll_registry() -> None:
    to_application: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    from_application: asyncio.Queue[Any] = asyncio.Queue()
    life = asyncio.create_task(application({"type": "lifespan"}, to_application.get, from_application.put))
    await to_application.put({"type": "lifespan.startup"})
    assert (await from_application.get())["type"] == "lifespan.startup.complete"
    assert long_poll.registry().is_listening
    await to_application.put({"type": "lifespan.shutdown"})
    assert (await from_application.get())["type"] == "lifespan.shutdown.complete"
    assert not long_poll.registry().is_listening
    await life


async def test_a_websocket_is_refused() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await application({"type": "websocket", "path": "/v1/codeq/tasks"}, send, send)  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close"}]


def test_path_is_resolved_once_and_no_id_is_cached() -> None:
    handler = ApiHandler()

    def resolved(path: str) -> dict[str, Any]:
        scope = {"method": "GET", "path": path, "headers": []}
        return handler.resolve(http_handler.ApiRequest(scope, None))[1]  # type: ignore[arg-type]

    first, second = "01920f3e-8d5a-7c31-9a54-0b6f3c2d1e10", "01920f3e-8d5a-7c31-9a54-0b6f3c2d1e11"
    for task_id in (first, second, first):
        assert resolved(f"{TASKS}/{task_id}/result") == {"task_id": task_id}
        assert resolved(f"{TASKS}/{task_id}") == {"task_id": task_id}
    assert resolved(f"{TASKS}/x{first}x") == {"task_id": f"x{first}x"}
    assert resolved(f"{TASKS}/{first}{second}") == {"task_id": first + second}
    assert resolved("/v1/codeq/admin/queues/A") == {"command": "A"}
    assert resolved("/v1/codeq/admin/queues/B") == {"command": "B"}
    assert len(handler.match_by_parts) == 2
    assert not handler.match_by_path
    assert resolved(TASKS) == resolved(TASKS) == {}
    assert len(handler.match_by_path) == 1


async def test_large_form_is_not_written_to_a_file(anonymous: Client) -> None:
    """Django reads a whole body, of any client, before it resolves the path."""
    parts = [b"a" * 2**20] * (LIMIT // 2**20 + 4)
    response = await anonymous.request("POST", "/admin/login/", chunks=parts)
    assert (response.status, response.code) == (413, "payload_too_large")


async def test_unfinished_form_times_out(anonymous: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "BODY_SECONDS", 0.05)
    monkeypatch.setattr(http_handler, "DRAIN_SECONDS", 0.05)
    response = await anonymous.request("POST", "/admin/login/", chunks=[b"a", b"b"], never_ends=True)
    assert (response.status, response.code) == (408, "request_timeout")
