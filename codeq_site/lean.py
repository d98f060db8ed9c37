"""The handler of the API's paths: Django's resolver and views, and nothing else of a request's usual way.

The stock ASGI handler hops to a thread for every request and sends signals through another; that is most of what a
request costs there (docs/adr/0005). Without them no connection to the database is looked after, so a view here asks
the database only through `codeq_site.offloop`.
"""

from __future__ import annotations

import asyncio
import functools
import io
import re
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from typing import Any

from django.core.exceptions import RequestAborted
from django.core.handlers.asgi import ASGIHandler, ASGIRequest
from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.urls import ResolverMatch, get_resolver

from codeq_site import errors, problem, request_id
from codeq_site.conf import conf

Scope = Mapping[str, Any]
Message = Mapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
View = Callable[..., Awaitable[HttpResponseBase]]
_uuid = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}").search

# How long a client may take over its body: slow ones must not hold a connection for ever.
BODY_SECONDS = 30.0
# What is read beyond the largest body and thrown away, so that a client can finish sending and see its answer.
DRAIN_BYTES = 64 * 2**10
DRAIN_SECONDS = 2.0
NOT_GUESSED = (b"x-content-type-options", b"nosniff")
NOT_KEPT = (b"cache-control", b"no-store")


class LeanRequest(ASGIRequest):
    """A request of the API. What Django keeps in META is made only when somebody asks for it."""

    method: str
    received: dict[bytes, bytes]
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
        received = dict(headers)
        if len(received) != len(headers):
            # The same header twice: joined, as Django does it, so that nobody picks the one a proxy did not check.
            received = {}
            for name, value in headers:
                received[name] = received[name] + b"," + value if name in received else value
        self.received = received
        self._receive = receive
        length = received.get(b"content-length", b"0")
        self.announced = int(length) if length.isdigit() and len(length) < 16 else 1 << 60
        self.is_body_read = self.announced == 0 and b"transfer-encoding" not in received
        self.taken = 0

    def __getattr__(self, name: str) -> Any:
        if name != "META":
            raise AttributeError(name)
        match = self.resolver_match
        ASGIRequest.__init__(self, self.scope, io.BytesIO())
        self.resolver_match = match
        return self.META

    def header(self, name: bytes) -> str | None:
        value = self.received.get(name)
        return None if value is None else value.decode("latin-1")

    async def read_body(self, limit: int) -> bytes:
        """The whole body, or PayloadTooLarge, UnsupportedMediaType, RequestTimeout, RequestAborted."""
        if self.is_body_read:
            return b""
        # A compressed body could be a thousand times larger than what was sent.
        if self.received.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise errors.UnsupportedMediaType
        if self.announced > limit:
            raise errors.PayloadTooLarge(f"The body is larger than {limit} bytes.")
        # Nearly every body is here already, and a deadline costs half of what a whole request does.
        taking = self._take()
        try:
            waits_for = taking.send(None)
        except StopIteration as taken:
            body: bytes = taken.value
        else:
            body = await self._in_time(_resumed(taking, waits_for))
        if not self.is_body_read and self.taken <= limit:
            body = await self._in_time(self._take_on(body, limit))
        if self.taken > limit:
            raise errors.PayloadTooLarge(f"The body is larger than {limit} bytes.")
        return body

    async def _in_time(self, taking: Awaitable[bytes]) -> bytes:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await taking
        except TimeoutError as error:
            raise errors.RequestTimeout from error

    async def _take_on(self, first: bytes, limit: int) -> bytes:
        chunks = [first]
        while not self.is_body_read and self.taken <= limit:
            chunks.append(await self._take())
        return b"".join(chunks)

    async def _take(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise RequestAborted
        self.is_body_read = not message.get("more_body", False)
        chunk: bytes = message.get("body", b"")
        self.taken += len(chunk)
        return chunk

    @property
    def is_body_withheld(self) -> bool:
        """Whether the client waits to hear if its body is wanted. To read is to say yes."""
        return not self.taken and self.received.get(b"expect", b"").lower() == b"100-continue"

    async def drain(self, limit: int) -> None:
        """Let the client finish sending, within bounds. `is_body_read` says whether it did."""
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while not self.is_body_read and self.taken < limit:
                    await self._take()
        except TimeoutError:
            return

    @property
    def is_hung_up(self) -> bool:
        """Whether the server has closed the connection already, of which `disconnected` tells a turn of the loop later.

        False where a server does not show its transport, as uvicorn does.
        """
        transport = getattr(getattr(self._receive, "__self__", None), "transport", None)
        return transport is not None and bool(transport.is_closing())

    async def disconnected(self) -> None:
        """Returns when the client has gone. Only after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


class LeanResponse(HttpResponse):
    """An answer in JSON, without what Django's constructor does for a page: that is a tenth of a request's time."""

    def __init__(self, body: bytes, status: int = 200) -> None:
        self.status_code = status
        self.headers = {"Content-Type": "application/json"}  # type: ignore[assignment]
        self.content = body

    content = b""  # an attribute here, a join of chunks in a page


@types.coroutine
def _resumed(coroutine: Coroutine[Any, Any, bytes], waits_for: Any) -> Generator[Any, Any, bytes]:
    """Go on awaiting a coroutine that was started by hand and waits for something."""
    while True:
        try:
            sent = yield waits_for
        except BaseException as error:  # noqa: BLE001 - handed on, a cancellation among them
            step = functools.partial(coroutine.throw, error)
        else:
            step = functools.partial(coroutine.send, sent)
        try:
            waits_for = step()
        except StopIteration as done:
            body: bytes = done.value
            return body


class LeanHandler(ASGIHandler):
    """Resolver -> view -> answer, in the task that the server made for the request."""

    def __init__(self) -> None:
        # No call to super(): it would load the console's middleware.
        self._literal: dict[str, ResolverMatch] = {}
        self._shapes: dict[tuple[str, str], tuple[ResolverMatch, str]] = {}
        self.drain_bytes = conf().web.body_bytes + DRAIN_BYTES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.serve(scope, receive, send, self.view)

    async def refuse(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        why: errors.CodeqError | type[errors.CodeqError] = errors.NotFound,
    ) -> None:
        """The answer to a request that no view gets; by default, to a path that this process does not serve."""

        async def refused(request: LeanRequest) -> HttpResponseBase:
            raise why

        await self.serve(scope, receive, send, refused)

    async def serve(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        view: Callable[[LeanRequest], Awaitable[HttpResponseBase]],
    ) -> None:
        request = LeanRequest(scope, receive)
        request.id = request_id.choose(request.received.get(request_id.HEADER))
        request_id.begin(request.id)
        try:
            try:
                response = await view(request)
            except Exception as error:  # noqa: BLE001 - the edge of the process; it is logged there
                response = problem.answer(error)
            if not request.is_body_read and not request.is_body_withheld:
                await request.drain(self.drain_bytes)
        except RequestAborted:
            return
        await self.send(request, response, send)

    async def view(self, request: LeanRequest) -> HttpResponseBase:
        view, arguments = self.resolve(request)
        response: HttpResponseBase = await view(request, **arguments)
        return response

    def resolve(self, request: LeanRequest) -> tuple[View, dict[str, Any]]:
        """The view of the path and its arguments.

        A path is looked up once: without arguments there are only as many as routes, and with an id as the only
        argument it is remembered without the id.
        """
        path = request.path
        known = self._literal.get(path)
        if known is not None:
            request.route = known.route
            return known.func, {}
        found = _uuid(path)
        shape = None if found is None else (path[: found.start()], path[found.end() :])
        if shape is not None and found is not None and shape in self._shapes:
            known, name = self._shapes[shape]
            request.route = known.route
            return known.func, {name: found.group()}
        match = get_resolver().resolve(path)
        request.route = match.route
        if not match.kwargs:
            self._literal[path] = match
        elif shape is not None and found is not None and list(match.kwargs.values()) == [found.group()]:
            self._shapes[shape] = (match, next(iter(match.kwargs)))
        return match.func, match.kwargs

    async def send(self, request: LeanRequest, response: HttpResponseBase, send: Send) -> None:
        if isinstance(response, StreamingHttpResponse):
            response.headers["X-Request-Id"] = request.id
            for name, value in (NOT_GUESSED, NOT_KEPT):
                response.headers[name.decode().title()] = value.decode()
            await self.send_response(response, send)
            return
        assert isinstance(response, HttpResponse)
        body = response.content
        headers = [(name.encode("ascii").lower(), value.encode("latin-1")) for name, value in response.headers.items()]
        headers += ((request_id.HEADER, request.id.encode()), NOT_GUESSED)
        if "Cache-Control" not in response.headers:
            headers.append(NOT_KEPT)
        if response.status_code != 204:
            headers.append((b"content-length", b"%d" % len(body)))
        if not request.is_body_read:
            # What is still coming cannot be told from the next request.
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if request.method == "HEAD" else body})


__all__ = ["LeanHandler", "LeanRequest", "Message", "Receive", "Scope", "Send"]
