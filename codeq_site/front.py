"""The front: the API's paths go to the lean handler, everything else to Django as it comes, on one port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import cast

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIHandler
from django.http import StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.urls import get_resolver

from codeq_site import errors, metrics, request_id
from codeq_site.conf import conf
from codeq_site.lean import BODY_SECONDS, LeanHandler, Message, Receive, Scope, Send
from queues import waiting

API = "/v1/codeq/"
DISCONNECTED = {"type": "http.disconnect"}
OPERATIONS = frozenset({"/healthz", "/readyz", "/metrics", "/.well-known/jwks.json"})


class ConsoleHandler(ASGIHandler):
    """Django as it comes, but for files: those that WhiteNoise sends are read in threads, and a piece at a time."""

    async def send_response(self, response: HttpResponseBase, send: Send) -> None:
        if isinstance(response, StreamingHttpResponse) and not response.is_async:
            pieces = cast(Iterator[bytes], response.streaming_content)
            response.streaming_content = _read_in_threads(pieces)
        await super().send_response(response, send)


async def _read_in_threads(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    def following() -> bytes | None:
        return next(pieces, None)

    while (piece := await sync_to_async(following)()) is not None:
        yield piece


class BoundedBody:
    """A body within the bounds that the API keeps. Django writes one of any size to a file first, from anybody."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._most = conf().web.body_bytes
        self._until = asyncio.get_running_loop().time() + BODY_SECONDS
        self._taken = 0
        self._is_whole = False
        self.refused: errors.CodeqError | None = None

    async def receive(self) -> Message:
        """The next message; that the client has left, when it is the server who has had enough."""
        if self._is_whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            self.refused = errors.RequestTimeout()
            return DISCONNECTED
        self._taken += len(message.get("body", b""))
        if self._taken > self._most:
            self.refused = errors.PayloadTooLarge(f"The body is larger than {self._most} bytes.")
            return DISCONNECTED
        self._is_whole = not message.get("more_body", False)
        return message


class Front:
    """Splits by path; what this process does not serve is a 404. Handles the server's start and stop."""

    def __init__(self) -> None:
        # The views are imported now, and not while the first client waits.
        _ = get_resolver().url_patterns
        self.lean = LeanHandler()
        self.console = ConsoleHandler()
        self.serves_api = conf().web.serve != "console"
        self.serves_console = conf().web.serve != "api"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "http":
            path = scope["path"]
            if path.startswith(API):
                await (self.lean if self.serves_api else self.lean.refuse)(scope, receive, send)
            elif path in OPERATIONS:
                await self.lean(scope, receive, send)
            elif self.serves_console:
                await self._console(scope, receive, send)
            else:
                await self.lean.refuse(scope, receive, send)
        elif kind == "lifespan":
            await self._lifespan(receive, send)
        else:
            await send({"type": "websocket.close"})

    async def _console(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = next((value for name, value in scope["headers"] if name == request_id.HEADER), None)
        own = request_id.choose(sent)
        request_id.begin(own)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (request_id.HEADER, own.encode())]}
            await send(message)

        body = BoundedBody(receive)
        await self.console(dict(scope), body.receive, send_with_id)
        if body.refused is not None:
            await self.lean.refuse(scope, receive, send, body.refused)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                waiting.room().open()
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                await waiting.room().close()
                metrics.flush()
                await send({"type": "lifespan.shutdown.complete"})
                return
