"""A client that calls the ASGI application directly, without a network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from codeq_site.asgi import application
from tests.queues.api import conformity

Application = Callable[..., Awaitable[None]]
NO_BODY: Any = object()


class Response(msgspec.Struct):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The `code` of a problem document. Fails for any other body."""
        assert self.headers["content-type"] == "application/problem+json", (self.status, self.body)
        return str(self.json["code"])


class PendingRequest:
    """A request in progress.

    `await response()` waits for the response, `disconnect()` closes the connection.
    """

    def __init__(
        self, application: Application, scope: dict[str, Any], chunks: Sequence[bytes], *, never_ends: bool = False
    ) -> None:
        self._chunks = list(chunks) or [b""]
        self._never_ends = never_ends
        self._is_disconnected = asyncio.Event()
        self._started: dict[str, Any] = {}
        self._body = b""
        self.bytes_read = 0
        self.transport: Any = None  # where uvicorn exposes its transport
        self.task = asyncio.create_task(application(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._chunks:
            chunk = self._chunks.pop(0)
            self.bytes_read += len(chunk)
            return {"type": "http.request", "body": chunk, "more_body": bool(self._chunks) or self._never_ends}
        await self._is_disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert not self._started, "a second response"
            self._started = dict(message)
        else:
            self._body += message.get("body", b"")

    def disconnect(self) -> None:
        self._is_disconnected.set()

    async def response(self) -> Response | None:
        """Return the response, or None if the application sent none."""
        await self.task
        if not self._started:
            return None
        names = [name.decode().lower() for name, _ in self._started["headers"]]
        assert len(names) == len(set(names)), f"a repeated header: {names}"
        headers = {name.decode().lower(): value.decode() for name, value in self._started["headers"]}
        return Response(status=self._started["status"], headers=headers, body=self._body)


class Client:
    def __init__(self, application: Application, token: str | None = None) -> None:
        self.application = application
        self.token = token

    def start(
        self,
        method: str,
        path: str,
        body: Any = NO_BODY,
        *,
        headers: dict[str, str] | None = None,
        chunks: Sequence[bytes] | None = None,
        never_ends: bool = False,
    ) -> PendingRequest:
        """Start a request.

        `body` is sent as JSON, or unchanged if it is bytes. With `never_ends`, the body never ends.
        """
        target, _, query = path.partition("?")
        sent = {"host": "testserver"}
        if self.token is not None:
            sent["authorization"] = f"Bearer {self.token}"
        if body is not NO_BODY and chunks is None:
            chunks = [body if isinstance(body, bytes) else json.dumps(body).encode()]
        if chunks is not None:
            sent |= {"content-type": "application/json", "content-length": str(sum(map(len, chunks)))}
        sent |= {name.lower(): value for name, value in (headers or {}).items()}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(target),
            "raw_path": quote(target, safe="/%").encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in sent.items() if value != ""],
            "client": ("127.0.0.1", 1),
            "server": ("testserver", 80),
        }
        return PendingRequest(self.application, scope, chunks or [], never_ends=never_ends)

    async def request(self, method: str, path: str, body: Any = NO_BODY, **options: Any) -> Response:
        response = await self.start(method, path, body, **options).response()
        assert response is not None
        if self.application is application:
            conformity.check(method, path, response)
        return response

    async def get(self, path: str, **options: Any) -> Response:
        return await self.request("GET", path, **options)

    async def post(self, path: str, body: Any = NO_BODY, **options: Any) -> Response:
        return await self.request("POST", path, body, **options)

    async def delete(self, path: str, **options: Any) -> Response:
        return await self.request("DELETE", path, **options)
