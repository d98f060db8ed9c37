"""The front: the API's paths go to the lean handler, everything else to Django as it comes, on one port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import cast

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIHandler
from django.http import StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.urls import get_resolver

from codeq_site import metrics, request_id
from codeq_site.conf import conf
from codeq_site.lean import LeanHandler, Message, Receive, Scope, Send
from queues import waiting

API = "/v1/codeq/"
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

        await self.console(dict(scope), receive, send_with_id)

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
