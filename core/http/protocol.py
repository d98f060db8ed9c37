"""The HTTP/1.1 protocol of the web processes: httptools' parser, limits on size and time, one write per response.

uvicorn starts, stops and accepts connections; this class serves them. uvicorn's own protocol writes the head and the body
of a response separately, starts two timers per request and accepts any number of header lines and pipelined requests
(docs/adr/0017).
"""

from __future__ import annotations

import asyncio
import http
import logging
import urllib.parse
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, cast

import httptools

log = logging.getLogger("codeq.web")

# The largest request head, and the largest trailers. A token and a trace context take 1 KB.
HEAD_BYTES = 64 * 2**10
# The time for a request head to arrive, from its first byte.
HEAD_SECONDS = 20.0
# The limit of pipelined requests on one connection. One read may contain about 500 requests with a token.
MAX_PIPELINED = 1000
# Reading resumes when fewer requests than this wait in the pipeline.
RESUME_READING_REQUESTS = 100
# Reading pauses while more than this of a body has not been read by the application.
UNREAD_BODY_BYTES = 64 * 2**10
# Headers that offer another protocol. Every offer is declined: the request is parsed again without them.
UPGRADE_HEADERS = frozenset({b"upgrade", b"http2-settings"})
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
BAD_REQUEST = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: 31\r\n"
    b"connection: close\r\n\r\nInvalid HTTP request received.\n"
)
SERVER_ERROR = (
    b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: 21\r\n"
    b"connection: close\r\n\r\nInternal Server Error"
)
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus}
DISCONNECT = {"type": "http.disconnect"}
ASGI_VERSION = {"version": "3.0", "spec_version": "2.3"}

Message = Mapping[str, Any]
Application = Callable[[dict[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Any]


class ServerConfig(Protocol):
    """The part of `uvicorn.Config` that a protocol needs."""

    loaded_app: Any
    timeout_keep_alive: int
    root_path: str


class ServerState(Protocol):
    """The part of uvicorn's server that a protocol shares: it waits for these when it stops."""

    total_requests: int
    connections: set[Any]
    tasks: set[asyncio.Task[None]]
    default_headers: list[tuple[bytes, bytes]]


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
        self, connection: BoundedHttpProtocol, scope: dict[str, Any], *, is_keep_alive: bool, awaits_continue: bool
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
        except Exception as error:  # noqa: BLE001 - the edge of the process; it is logged here
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

    async def receive(self) -> Message:
        """Return the next part of the body; later, or if the client disconnects, `http.disconnect`."""
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
        """Send a part of the response. The head is written together with the first part of the body."""
        connection = self._connection
        if connection.drained is not None and not self.is_disconnected:
            await connection.drained
        if self.is_disconnected:
            return
        if self.is_complete:
            raise RuntimeError("The response is complete already.")
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
            self.is_complete = True
            self._wake()
            if not self.is_keep_alive:
                connection.transport.close()
            connection.end_exchange()

    def _build_head(self, start: Message, body_bytes: int | None) -> bytes:
        """Return the status line and the headers. `body_bytes` is the length of a body that is complete."""
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
        # Without a length and chunks, the end of the connection is the end of the body.
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


class BoundedHttpProtocol(asyncio.Protocol):
    """One connection of a client, with limits on size and time."""

    transport: asyncio.Transport

    def __init__(
        self,
        config: ServerConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.loop = _loop or asyncio.get_event_loop()
        self.pipeline: deque[Exchange] = deque()
        self.drained: asyncio.Future[None] | None = None
        self._app: Application = config.loaded_app
        self._keep_alive_seconds = config.timeout_keep_alive
        self._root_path = config.root_path
        self._state = server_state
        self._parser = self._new_parser()
        self._timer: asyncio.TimerHandle | None = None
        # The connection is closed at these times; 0 = no limit now.
        self._head_deadline = 0.0
        self._idle_deadline = 0.0
        self._is_reading_paused = False
        # The request that is being served, and the one that was read last.
        self._running: Exchange | None = None
        self._latest: Exchange | None = None
        # Counts heads and parts of bodies that were parsed; and bytes that completed neither.
        self._progress = 0
        self._unparsed_bytes = 0
        self._is_in_head = False
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._awaits_continue = False

    # --- the connection ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._state.connections.add(self)
        self._server = _address(transport.get_extra_info("sockname"))
        self._client = _address(transport.get_extra_info("peername"))
        self._scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        self._head_deadline = self.loop.time() + HEAD_SECONDS
        self._check_deadlines()

    def connection_lost(self, error: Exception | None) -> None:
        self._state.connections.discard(self)
        # The request that is being served must not claim a task for a client that has disconnected.
        for exchange in (self._running, *self.pipeline):
            if exchange is not None and not exchange.is_complete:
                exchange.disconnect()
        self.resume_writing()
        # Otherwise the waiting requests would stay in memory until the garbage collector runs.
        self.pipeline.clear()
        self._running = self._latest = self._parser = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def shutdown(self) -> None:
        """Close the connection, after the response that is being made."""
        if self._latest is None or self._latest.is_complete:
            self.transport.close()
        else:
            self._latest.is_keep_alive = False

    def pause_writing(self) -> None:
        if self.drained is None:
            self.drained = self.loop.create_future()

    def resume_writing(self) -> None:
        if self.drained is not None:
            drained, self.drained = self.drained, None
            if not drained.done():
                drained.set_result(None)

    def pause_reading(self) -> None:
        if not self._is_reading_paused:
            self._is_reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again, unless many requests wait.

        A few may wait: a server that does not read does not notice that the client disconnects.
        """
        if self._is_reading_paused and len(self.pipeline) < RESUME_READING_REQUESTS and not self.transport.is_closing():
            self._is_reading_paused = False
            self.transport.resume_reading()

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        return self._state.default_headers

    def default_head(self) -> bytes:
        """Return the lines of the headers that uvicorn renews every second: the date."""
        return _join_headers(self._state.default_headers)

    def _check_deadlines(self) -> None:
        """Close the connection if a limit has passed. Runs a few times per limit, instead of one timer per request."""
        now = self.loop.time()
        if self._head_deadline and now >= self._head_deadline:
            if self._is_reading_paused:
                self._head_deadline = now + HEAD_SECONDS  # the server itself has paused reading
            else:
                self.transport.close()
        elif self._idle_deadline and now >= self._idle_deadline:
            self.transport.close()
        seconds = min(HEAD_SECONDS, self._keep_alive_seconds) / 4
        self._timer = self.loop.call_later(seconds, self._check_deadlines)

    # --- requests ---

    def data_received(self, data: bytes) -> None:
        self._idle_deadline = 0.0
        progress = self._progress
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            log.info("received bytes that are not HTTP: %s", type(error).__name__)
            self.transport.write(BAD_REQUEST)
            self.transport.close()
            return
        self._unparsed_bytes = self._unparsed_bytes + len(data) if self._progress == progress else 0
        is_answered = self._latest is None or self._latest.is_complete
        if self._unparsed_bytes > HEAD_BYTES:
            if is_answered:
                self.transport.write(TOO_LARGE)
            self.transport.close()
        elif not is_answered and not self._is_in_head:
            self._head_deadline = 0.0
        elif not self._head_deadline:
            self._head_deadline = self.loop.time() + HEAD_SECONDS

    def _new_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        # A request is served although bytes follow its `Connection: close`.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._without_upgrade() + data[upgrade.args[0] :]
            else:
                return

    def _without_upgrade(self) -> bytes:
        """Return a request head without its offer of another protocol, and renew the parser.

        Java's HTTP client makes such an offer to every server. The parser assumes that the request has no body and
        that the bytes behind it belong to the other protocol. They would be parsed as the next request, which lets the
        author of a body smuggle requests.
        """
        method = self._parser.get_method()
        if method == b"CONNECT":
            raise httptools.HttpParserInvalidMethodError("CONNECT is not supported")
        lines = [b"%b %b HTTP/%b" % (method, self._url, self._parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self._headers if header[0] not in UPGRADE_HEADERS]
        self._parser = self._new_parser()
        return b"\r\n".join([*lines, b"", b""])

    # The parser calls these.

    def on_message_begin(self) -> None:
        self._is_in_head = True
        self._url = b""
        self._headers = []
        self._awaits_continue = False

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return  # a trailer: no proxy has checked it, so it must not become a header
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._awaits_continue = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        parser = self._parser
        if parser.should_upgrade():
            return  # `_feed` parses the head again, without the offer
        if len(self.pipeline) >= MAX_PIPELINED:
            raise BufferError("too many pipelined requests")
        self._progress += 1
        url = httptools.parse_url(self._url)
        raw_path: bytes = url.path
        path = raw_path.decode("ascii")
        version: str = parser.get_http_version()
        scope = {
            "type": "http",
            "asgi": ASGI_VERSION,
            "http_version": version,
            "method": parser.get_method().decode("ascii"),
            "scheme": self._scheme,
            "path": self._root_path + (urllib.parse.unquote(path) if "%" in path else path),
            "raw_path": self._root_path.encode("ascii") + raw_path,
            "query_string": url.query or b"",
            "root_path": self._root_path,
            "headers": self._headers,
            "client": self._client,
            "server": self._server,
        }
        exchange = Exchange(
            self,
            scope,
            is_keep_alive=version != "1.0" and parser.should_keep_alive(),
            awaits_continue=self._awaits_continue,
        )
        self._latest = exchange
        if self._running is None:
            self._running = exchange
            exchange.start(self._app, self._state.tasks)
        else:
            self.pause_reading()
            self.pipeline.append(exchange)

    def on_body(self, body: bytes) -> None:
        self._progress += 1
        if self._latest is not None and not self._latest.is_complete:
            if self._latest.add_body(body) > UNREAD_BODY_BYTES:
                self.pause_reading()

    def on_message_complete(self) -> None:
        if self._latest is not None and not self._parser.should_upgrade():
            self._latest.end_body()

    def end_exchange(self) -> None:
        """Serve the next pipelined request, or wait for one."""
        self._state.total_requests += 1
        self._running = None
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._running = self.pipeline.popleft()
            self._running.start(self._app, self._state.tasks)
        else:
            self._idle_deadline = self.loop.time() + self._keep_alive_seconds
        self.resume_reading()


def _address(name: Any) -> tuple[str, int | None] | None:
    """Return an address as ASGI has it; the name of a unix socket is a text."""
    if isinstance(name, tuple):
        return str(name[0]), int(name[1])
    return (name, None) if isinstance(name, str) and name else None


_joined: tuple[list[tuple[bytes, bytes]], bytes] = ([], b"")


def _join_headers(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the lines of headers; those of the last list are remembered."""
    global _joined
    if _joined[0] is not headers:
        _joined = (headers, b"".join(b"%b: %b\r\n" % header for header in headers))
    return _joined[1]
