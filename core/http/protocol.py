"""The HTTP/1.1 protocol of the web processes, with limits on size and time.

uvicorn accepts connections and stops the process; this class serves them. uvicorn's own protocol writes the head and
the body of a response separately, starts two timers per request and accepts any number of header lines and pipelined
requests (docs/adr/0017).
"""

from __future__ import annotations

import asyncio
import logging
import urllib.parse
from collections import deque
from typing import Any, Protocol, cast

import httptools

from core.http.exchange import WHOLE_RESPONSE, Application, Exchange

log = logging.getLogger("codeq.web")

# The largest request head, and the largest trailers. A token and a trace context take 1 KB.
HEAD_BYTES = 64 * 2**10
# The time for a request head to arrive, from its first byte; for the first head, from the start of the connection.
HEAD_SECONDS = 20.0
# When the process stops, an idle connection is closed after this time. Until then it serves one more request: a proxy
# may be sending one, and does not repeat a POST whose connection is closed.
LINGER_SECONDS = 1.0
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
ASGI_VERSION = {"version": "3.0", "spec_version": "2.3"}
EXTENSIONS: dict[str, dict[str, Any]] = {WHOLE_RESPONSE: {}}


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
        self._is_shutting_down = False
        # The request that is being served, and the one that was read last.
        self._running: Exchange | None = None
        self._latest: Exchange | None = None
        # The number of parsed heads and parts of bodies, and the number of bytes received since the last of them.
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
        # Break the reference cycles, so that the waiting requests are freed now and not by the garbage collector.
        self.pipeline.clear()
        self._running = self._latest = self._parser = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def shutdown(self) -> None:
        """Close the connection after its next response, or after LINGER_SECONDS if it stays idle."""
        self._is_shutting_down = True
        if self._latest is None or self._latest.is_complete:
            self.loop.call_later(LINGER_SECONDS, self._close_if_idle)
        else:
            self._latest.is_keep_alive = False

    def _close_if_idle(self) -> None:
        if not self._is_in_head and (self._latest is None or self._latest.is_complete):
            self.transport.close()

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
        """Resume reading, unless many requests wait.

        While reading is paused, the server does not notice that the client disconnects. So a few requests may wait.
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
        """Close the connection if a time limit has passed.

        It runs a few times per limit, which costs less than a timer for every request.
        """
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
        # Serve a request with `Connection: close` even if bytes follow it.
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
        that the bytes after it belong to the other protocol. They would be parsed as the next request, which lets the
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
            "extensions": EXTENSIONS,
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
            is_keep_alive=version != "1.0" and parser.should_keep_alive() and not self._is_shutting_down,
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
        exchange = self._latest
        if exchange is not None and not exchange.is_complete and exchange.add_body(body) > UNREAD_BODY_BYTES:
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
    """Return an address in the form of ASGI: (host, port), or (path, None) for a unix socket."""
    if isinstance(name, tuple):
        return str(name[0]), int(name[1])
    return (name, None) if isinstance(name, str) and name else None


_joined: tuple[list[tuple[bytes, bytes]], bytes] = ([], b"")


def _join_headers(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the headers as lines. The result for the last list is cached."""
    global _joined
    if _joined[0] is not headers:
        _joined = (headers, b"".join(b"%b: %b\r\n" % header for header in headers))
    return _joined[1]
