"""The ASGI handler of the API: Django's URL resolver and views, without its middleware.

Django's own handler switches threads for every request and sends signals from another thread, which is most of the
cost of a small request (docs/adr/0005). This handler sends no signals. In Django these signals close old database
connections, so its views use the database only through `core.threadpool`, which closes them itself.
"""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from django.core.exceptions import RequestAborted
from django.core.handlers.asgi import ASGIHandler, ASGIRequest
from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.urls import ResolverMatch, get_resolver

from core import errors, problem_details, request_id
from core.conf import conf
from core.http.exchange import WHOLE_RESPONSE, Exchange

Scope = Mapping[str, Any]
Message = Mapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
View = Callable[..., Awaitable[HttpResponseBase]]
_find_uuid = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}").search

# Timeout for the body, so that slow clients do not occupy connections.
BODY_SECONDS = 30.0
# Bytes beyond the largest body that are read and discarded, so that a client can finish sending and read the error.
DRAIN_BYTES = 64 * 2**10
DRAIN_SECONDS = 2.0
NOSNIFF = (b"x-content-type-options", b"nosniff")
NO_STORE = (b"cache-control", b"no-store")
# The headers of most responses as lines, for a request id.
JSON_HEADERS = (
    b"content-type: application/json\r\nx-content-type-options: nosniff\r\ncache-control: no-store\r\n"
    b"x-request-id: %b\r\n"
)


class ApiRequest(ASGIRequest):
    """A request to the API. Django's `META` is built only when it is read."""

    method: str
    raw_headers: dict[bytes, bytes]
    id: str
    route: str = ""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope = scope
        self.method = scope["method"]
        self.path = self.path_info = scope["path"]
        self.resolver_match = None
        self.user: Any = None
        self.auth: Any = None
        headers = scope["headers"]
        raw_headers = dict(headers)
        if len(raw_headers) != len(headers):
            # Join repeated headers, as Django does: a proxy may have checked only one of them.
            raw_headers = {}
            for name, value in headers:
                raw_headers[name] = raw_headers[name] + b"," + value if name in raw_headers else value
        self.raw_headers = raw_headers
        self._receive = receive
        # The object that has the request and its connection: an `Exchange`, or that of another server.
        self._exchange: Any = getattr(receive, "__self__", None)
        length = raw_headers.get(b"content-length", b"0")
        self.content_length = int(length) if length.isdigit() and len(length) < 16 else 1 << 60
        self.is_body_read = self.content_length == 0 and b"transfer-encoding" not in raw_headers
        self.received_bytes = 0

    def __getattr__(self, name: str) -> Any:
        if name != "META":
            raise AttributeError(name)
        match = self.resolver_match
        ASGIRequest.__init__(self, self.scope, io.BytesIO())
        self.resolver_match = match
        return self.META

    def header(self, name: bytes) -> str | None:
        value = self.raw_headers.get(name)
        return None if value is None else value.decode("latin-1")

    async def read_body(self, limit: int) -> bytes:
        """Return the whole body.

        Raises PayloadTooLarge, UnsupportedMediaType, RequestTimeout or, if the client disconnects, RequestAborted.
        """
        if self.is_body_read:
            return b""
        # A compressed body could expand to a thousand times its size.
        if self.raw_headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise errors.UnsupportedMediaType
        if self.content_length > limit:
            raise errors.PayloadTooLarge(f"The body is larger than {limit} bytes.")
        exchange = self._exchange
        body = exchange.take_body() if isinstance(exchange, Exchange) else None
        if body is not None:
            self.is_body_read, self.received_bytes = True, len(body)
        else:
            chunks: list[bytes] = []
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    while not self.is_body_read and self.received_bytes <= limit:
                        chunks.append(await self._receive_chunk())
            except TimeoutError as error:
                raise errors.RequestTimeout from error
            body = b"".join(chunks)
        if self.received_bytes > limit:
            raise errors.PayloadTooLarge(f"The body is larger than {limit} bytes.")
        return body

    async def _receive_chunk(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise RequestAborted
        self.is_body_read = not message.get("more_body", False)
        chunk: bytes = message.get("body", b"")
        self.received_bytes += len(chunk)
        return chunk

    @property
    def is_awaiting_continue(self) -> bool:
        """Whether the client waits for `100 Continue`, which is sent when the body is read."""
        return not self.received_bytes and self.raw_headers.get(b"expect", b"").lower() == b"100-continue"

    async def drain(self, limit: int) -> None:
        """Discard the rest of the body, within limits. Sets `is_body_read` if all of it arrived."""
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while not self.is_body_read and self.received_bytes < limit:
                    await self._receive_chunk()
        except TimeoutError:
            return

    @property
    def is_disconnected(self) -> bool:
        """Whether the connection is closed.

        True one loop iteration before `wait_for_disconnect` returns. Always False on servers that do not expose their
        transport as uvicorn does.
        """
        transport = getattr(self._exchange, "transport", None)
        return transport is not None and bool(transport.is_closing())

    async def wait_for_disconnect(self) -> None:
        """Wait until the client disconnects. The body must have been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


class ApiResponse(HttpResponse):
    """A JSON response. It skips Django's constructor, which takes a tenth of a request's time."""

    def __init__(self, body: bytes, status: int = 200) -> None:
        self.status_code = status
        self.headers = {"Content-Type": "application/json"}  # type: ignore[assignment]
        self.content = body

    content = b""  # a plain attribute; in HttpResponse it is a property that joins chunks


class ApiHandler(ASGIHandler):
    """Serve each API request in the asyncio task that the server created for it."""

    def __init__(self) -> None:
        # Without super().__init__(), which would load the console's middleware.
        self.match_by_path: dict[str, ResolverMatch] = {}
        # By the parts of a path before and after its UUID: the match, and the name of the UUID's argument.
        self.match_by_parts: dict[tuple[str, str], tuple[ResolverMatch, str]] = {}
        self.drain_bytes = conf().web.body_bytes + DRAIN_BYTES

    async def __call__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        error: errors.CodeqError | type[errors.CodeqError] | None = None,
    ) -> None:
        """Respond to one request with its view, or with `error` if it is given."""
        request = ApiRequest(scope, receive)
        request.id = request_id.assign(request.raw_headers.get(request_id.HEADER))
        try:
            try:
                if error is not None:
                    raise error
                view, arguments = self.resolve(request)
                response = await view(request, **arguments)
            except Exception as raised:  # noqa: BLE001 - the edge of the process; it is logged there
                response = problem_details.problem_response(raised)
            if not request.is_body_read and not request.is_awaiting_continue:
                await request.drain(self.drain_bytes)
        except RequestAborted:
            return
        await self.send(request, response, send)

    def resolve(self, request: ApiRequest) -> tuple[View, dict[str, Any]]:
        """Return the view of the path and its arguments.

        The resolver's matches are cached, so that it runs once for most routes: by path if the path has no argument,
        and by the path without the UUID if its only argument is a UUID. Other paths are resolved each time.
        """
        path = request.path
        match = self.match_by_path.get(path)
        if match is not None:
            request.route = match.route
            return match.func, {}
        uuid = _find_uuid(path)
        parts = None if uuid is None else (path[: uuid.start()], path[uuid.end() :])
        if parts is not None and uuid is not None and parts in self.match_by_parts:
            match, name = self.match_by_parts[parts]
            request.route = match.route
            return match.func, {name: uuid.group()}
        match = get_resolver().resolve(path)
        request.route = match.route
        if not match.kwargs:
            self.match_by_path[path] = match
        elif parts is not None and uuid is not None and list(match.kwargs.values()) == [uuid.group()]:
            self.match_by_parts[parts] = (match, next(iter(match.kwargs)))
        return match.func, match.kwargs

    async def send(self, request: ApiRequest, response: HttpResponseBase, send: Send) -> None:
        if isinstance(response, StreamingHttpResponse):
            response.headers["X-Request-Id"] = request.id
            for name, value in (NOSNIFF, NO_STORE):
                response.headers[name.decode().title()] = value.decode()
            await self.send_response(response, send)
            return
        assert isinstance(response, HttpResponse)
        body = response.content
        is_plain = type(response) is ApiResponse and len(response.headers) == 1 and request.is_body_read
        if is_plain and WHOLE_RESPONSE in request.scope.get("extensions", ()):
            lines = JSON_HEADERS % request.id.encode()
            await send({"type": WHOLE_RESPONSE, "status": response.status_code, "headers": lines, "body": body})
            return
        headers = [(name.encode("ascii"), value.encode("latin-1")) for name, value in response.headers.items()]
        headers.append(NOSNIFF)
        if "Cache-Control" not in response.headers:
            headers.append(NO_STORE)
        headers.append((request_id.HEADER, request.id.encode()))
        if response.status_code != 204:
            headers.append((b"content-length", b"%d" % len(body)))
        if not request.is_body_read:
            # The rest of the body could be mistaken for the next request.
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if request.method == "HEAD" else body})


__all__ = ["ApiHandler", "ApiRequest", "Message", "Receive", "Scope", "Send"]
