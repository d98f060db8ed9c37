"""The ASGI router: API paths go to the API handler, all others to Django's own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, cast

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIHandler
from django.http import StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.urls import get_resolver
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from core import errors, metrics, request_id
from core.conf import conf
from core.http.handler import BODY_SECONDS, ApiHandler, Message, Receive, Scope, Send

API_PREFIX = "/v1/codeq/"
DISCONNECTED = {"type": "http.disconnect"}
OPERATIONS_PATHS = frozenset({"/healthz", "/readyz", "/metrics", "/.well-known/jwks.json"})


class ConsoleHandler(ASGIHandler):
    """Django's own handler. Static files are read in threads, chunk by chunk."""

    async def send_response(self, response: HttpResponseBase, send: Send) -> None:
        if isinstance(response, StreamingHttpResponse) and not response.is_async:
            chunks = cast(Iterator[bytes], response.streaming_content)
            response.streaming_content = _read_in_threads(chunks)
        await super().send_response(response, send)


async def _read_in_threads(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    def next_chunk() -> bytes | None:
        return next(chunks, None)

    while (chunk := await sync_to_async(next_chunk)()) is not None:
        yield chunk


class BoundedBody:
    """Limit the body of a console request in size and time.

    Django itself would write a body of any size to a temporary file.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._limit_bytes = conf().web.body_bytes
        self._deadline = asyncio.get_running_loop().time() + BODY_SECONDS
        self._received_bytes = 0
        self._is_complete = False
        self.error: errors.CodeqError | None = None

    async def receive(self) -> Message:
        """Return the next message, or a disconnect once a limit is reached (see `error`)."""
        if self._is_complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            self.error = errors.RequestTimeout()
            return DISCONNECTED
        self._received_bytes += len(message.get("body", b""))
        if self._received_bytes > self._limit_bytes:
            self.error = errors.PayloadTooLarge(f"The body is larger than {self._limit_bytes} bytes.")
            return DISCONNECTED
        self._is_complete = not message.get("more_body", False)
        return message


class Router:
    """Dispatch requests by path and run the hooks of the server's start and stop.

    A request for a part that this process does not serve (`CODEQ_SERVE`) gets a 404.
    """

    def __init__(
        self,
        on_startup: Callable[[], None] | None = None,
        on_shutdown: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._on_startup = on_startup
        self._on_shutdown = on_shutdown
        # Import the views now instead of during the first request.
        _ = get_resolver().url_patterns
        self.api = ApiHandler()
        # Only the console reads the client's address and scheme, for its audit and its redirects.
        console: Any = ConsoleHandler()
        self.console: Any = ProxyHeadersMiddleware(console, os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1"))
        self.serves_api = conf().web.serve != "console"
        self.serves_console = conf().web.serve != "api"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "http":
            path = scope["path"]
            if path.startswith(API_PREFIX):
                await self.api(scope, receive, send, None if self.serves_api else errors.NotFound)
            elif path in OPERATIONS_PATHS:
                await self.api(scope, receive, send)
            elif self.serves_console:
                await self._serve_console(scope, receive, send)
            else:
                await self.api(scope, receive, send, errors.NotFound)
        elif kind == "lifespan":
            await self._run_lifespan(receive, send)
        else:
            await send({"type": "websocket.close"})

    async def _serve_console(self, scope: Scope, receive: Receive, send: Send) -> None:
        header = next((value for name, value in scope["headers"] if name == request_id.HEADER), None)
        chosen_id = request_id.assign(header)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (request_id.HEADER, chosen_id.encode())]}
            await send(message)

        body = BoundedBody(receive)
        await self.console(dict(scope), body.receive, send_with_id)
        if body.error is not None:
            await self.api(scope, receive, send, body.error)

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                if self._on_startup is not None:
                    self._on_startup()
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                if self._on_shutdown is not None:
                    await self._on_shutdown()
                metrics.flush()
                await send({"type": "lifespan.shutdown.complete"})
                return
