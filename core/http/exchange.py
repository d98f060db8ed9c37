"""One HTTP request and its response on a connection, as an ASGI application sees them."""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

log = logging.getLogger("codeq.web")

SERVER_ERROR = (
    b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: 21\r\n"
    b"connection: close\r\n\r\nInternal Server Error"
)
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus}
DISCONNECT = {"type": "http.disconnect"}
# An ASGI extension: one message with the status, the header lines (bytes) without Content-Length, and the whole body.
# The application must not put a line break into a header.
WHOLE_RESPONSE = "codeq.response"

Message = Mapping[str, Any]
Application = Callable[[dict[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Any]


class Connection(Protocol):
    """The part of a connection that its requests use."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    # Set while the client reads too slowly.
    drained: asyncio.Future[None] | None

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]: ...

    def default_head(self) -> bytes: ...

    def resume_reading(self) -> None: ...

    def end_exchange(self) -> None: ...


class Exchange:
    """One request and its response, as an ASGI application sees them."""

    __slots__ = (
        "_awaits_continue",
        "_body",
        "_connection",
        "_head",
        "_is_chunked",
        "_remaining_bytes",
        "_task",
        "_waiter",
        "is_body_received",
        "is_complete",
        "is_disconnected",
        "is_keep_alive",
        "scope",
    )

    def __init__(
        self, connection: Connection, scope: dict[str, Any], *, is_keep_alive: bool, awaits_continue: bool
    ) -> None:
        self._connection = connection
        self.scope = scope
        self.is_keep_alive = is_keep_alive
        self._awaits_continue = awaits_continue
        self._body: bytes | bytearray | None = b""  # None: the application has read all of it
        self.is_body_received = False
        self._waiter: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._head: Message | None = None
        self._is_chunked = False
        self._remaining_bytes = -1  # -1: the head is not written yet
        self.is_complete = False
        self.is_disconnected = False

    @property
    def transport(self) -> asyncio.Transport:
        return self._connection.transport

    def start(self, app: Application, tasks: set[asyncio.Task[None]]) -> None:
        """Run the application for this request."""
        task = self._task = self._connection.loop.create_task(self._run(app, tasks))
        tasks.add(task)

    async def _run(self, app: Application, tasks: set[asyncio.Task[None]]) -> None:
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            self.transport.close()
            raise
        except Exception as error:
            log.error("unexpected %s in the application", type(error).__name__, exc_info=error)
            self._end_incomplete()
        else:
            if not self.is_complete and not self.is_disconnected:
                log.error("the application did not complete its response")
                self._end_incomplete()
        finally:
            if self._task is not None:
                tasks.discard(self._task)
                self._task = None

    def _end_incomplete(self) -> None:
        if self._remaining_bytes < 0 and not self.is_disconnected:
            self.transport.write(SERVER_ERROR)
        self.transport.close()

    # --- the request ---

    def add_body(self, data: bytes) -> int:
        """Add received bytes, and return the number of unread ones."""
        body = self._body
        if not body:
            self._body = data
            self._wake()
            return len(data)
        if isinstance(body, bytes):
            body = self._body = bytearray(body)
        body += data
        return len(body)

    def end_body(self) -> None:
        self.is_body_received = True
        self._wake()

    def disconnect(self) -> None:
        self.is_disconnected = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take_body(self) -> bytes | None:
        """Return the body if all of it has arrived, else None.

        The application need not wait for such a body.
        """
        body = self._body
        if body is None or not self.is_body_received or self.is_disconnected or self._awaits_continue:
            return None
        self._body = None
        return bytes(body)

    async def receive(self) -> Message:
        """Return the next part of the body, or `http.disconnect`.

        After the last part, wait until the response is complete or the client disconnects.
        """
        connection = self._connection
        if self._awaits_continue:
            self._awaits_continue = False
            if not connection.transport.is_closing():
                connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self.is_disconnected or self.is_complete):
            if self._body or (self.is_body_received and self._body is not None):
                message = {"type": "http.request", "body": bytes(self._body), "more_body": not self.is_body_received}
                self._body = None if self.is_body_received else b""
                return message
            connection.resume_reading()
            self._waiter = connection.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return DISCONNECT

    # --- the response ---

    async def send(self, message: Message) -> None:
        """Send a part of the response; the head goes out with the first part of the body."""
        connection = self._connection
        if connection.drained is not None and not self.is_disconnected:
            await connection.drained
        if self.is_disconnected:
            return
        if self.is_complete:
            raise RuntimeError("The response is complete already.")
        if message["type"] == WHOLE_RESPONSE:
            connection.transport.write(self._build_whole(message))
            self._end()
            return
        if self._head is None:
            if message["type"] != "http.response.start":
                raise RuntimeError(f"Expected http.response.start, not {message['type']}.")
            self._head = message
            self._awaits_continue = False
            return
        body: bytes = message.get("body", b"")
        is_last = not message.get("more_body", False)
        parts: list[bytes] = []
        if self._remaining_bytes < 0:
            parts.append(self._build_head(self._head, len(body) if is_last else None))
        if self.scope["method"] == "HEAD":
            self._remaining_bytes = 0
        elif self._is_chunked:
            if body:
                parts += (b"%x\r\n" % len(body), body, b"\r\n")
            if is_last:
                parts.append(b"0\r\n\r\n")
        else:
            self._remaining_bytes -= len(body)
            parts.append(body)
            if self._remaining_bytes < 0 or (is_last and self._remaining_bytes):
                raise RuntimeError("The body does not have the length of its Content-Length.")
        connection.transport.write(b"".join(parts))
        if is_last:
            self._end()

    def _end(self) -> None:
        self.is_complete = True
        self._wake()
        if not self.is_keep_alive:
            self.transport.close()
        self._connection.end_exchange()

    def _build_whole(self, message: Message) -> bytes:
        """Return the bytes of a response that is one message.

        Its headers need no check, and its body ends after Content-Length bytes.
        """
        status: int = message["status"]
        body: bytes = message["body"]
        headers: bytes = message["headers"]
        length = b"" if status == 204 else b"content-length: %d\r\n" % len(body)
        end = b"\r\n" if self.is_keep_alive else b"connection: close\r\n\r\n"
        if self.scope["method"] == "HEAD":
            body = b""
        return b"".join((STATUS_LINES[status], self._connection.default_head(), headers, length, end, body))

    def _build_head(self, start: Message, body_bytes: int | None) -> bytes:
        """Return the status line and the headers.

        `body_bytes` is the length of the body if the whole body is known. Also decide how the body's end is marked.
        """
        status: int = start["status"]
        parts = [STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status, self._connection.default_head()]
        lines = 1 + len(self._connection.default_headers)
        length: int | None = None
        is_closing = False
        for raw_name, value in start.get("headers", ()):
            name = raw_name.lower()
            if name == b"content-length":
                length = int(value)
            elif name == b"transfer-encoding":
                continue  # the framing is decided here
            elif name == b"connection" and b"close" in value.lower():
                is_closing = True
            parts += (name, b": ", value, b"\r\n")
            lines += 1
        if length is None and status not in (204, 304):
            if body_bytes is not None:
                length = body_bytes
                parts.append(b"content-length: %d\r\n" % length)
                lines += 1
            elif self.scope["http_version"] == "1.0":
                is_closing = True
            elif self.scope["method"] != "HEAD":
                self._is_chunked = True
                parts.append(b"transfer-encoding: chunked\r\n")
                lines += 1
        # Without a length or chunks, the end of the connection is the end of the body.
        self._remaining_bytes = length if length is not None else 0 if status in (204, 304) else 1 << 62
        if is_closing:
            self.is_keep_alive = False
        if not self.is_keep_alive and not is_closing:
            parts.append(b"connection: close\r\n")
            lines += 1
        head = b"".join(parts)
        # A line break in a name or a value would forge a header, or a second response.
        if head.count(b"\n") != lines or head.count(b"\r") != lines or b"\0" in head:
            raise RuntimeError("A response header contains a line break or a NUL.")
        return head + b"\r\n"
