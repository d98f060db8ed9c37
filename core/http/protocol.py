"""uvicorn's HTTP protocol with limits on size and time.

uvicorn itself accepts any number of header lines, for any time, and any number of pipelined requests: 30 MB of
pipelined requests took 2.3 GB of memory, and a few hundred half-sent request heads used up all file descriptors.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

# The largest request head, and the largest trailers. A token and a trace context take 1 KB.
HEAD_BYTES = 64 * 2**10
# The time for a request head to arrive, from its first byte.
HEAD_SECONDS = 20.0
# The limit of pipelined requests on one connection. One read may contain about 500 requests with a token.
MAX_PIPELINED = 1000
# Reading resumes when fewer requests than this wait in the pipeline.
RESUME_READING_REQUESTS = 100
# Headers that offer another protocol. Every offer is declined: the request is parsed again without them.
UPGRADE_HEADERS = frozenset({b"upgrade", b"http2-settings"})
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedFlowControl(FlowControl):
    """Stop reading while many requests wait.

    A few may wait: a server that does not read does not notice that the client disconnects.
    """

    def __init__(self, transport: asyncio.Transport, connection: BoundedHttpProtocol) -> None:
        super().__init__(transport)
        self.connection = connection

    def resume_reading(self) -> None:
        if len(self.connection.pipeline) < RESUME_READING_REQUESTS:
            super().resume_reading()


class BoundedTrailers(list[tuple[bytes, bytes]]):
    """Ignore trailers: no proxy has checked them, so they must not be added to the headers."""

    def append(self, _: object) -> None:
        pass


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection of a client."""

    running: RequestResponseCycle | None = None
    head_timer: asyncio.TimerHandle | None = None
    # Bytes received that completed neither a request head nor a part of a body.
    unparsed_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = BoundedFlowControl(transport, self)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # uvicorn marks the last request that it has read. The request that is being served may be another one, such as
        # a long poll, and must not claim a task for a client that has disconnected.
        if self.running is not None and not self.running.response_complete:
            self.running.disconnected = True
            self.running.message_event.set()
        # Otherwise the waiting requests would stay in memory until the garbage collector runs.
        self.pipeline.clear()
        self._stop_head_timer()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        before = self.cycle
        held = 0 if before is None else len(before.body)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self.logger.info("received bytes that are not HTTP: %s", type(error).__name__)
            self.send_400_response("Invalid HTTP request received.")
            return
        latest = self.cycle
        if latest is not before or (latest is not None and len(latest.body) > held):
            self.unparsed_bytes = 0
        else:
            self.unparsed_bytes += len(data)
        is_answered = latest is None or latest.response_complete
        if self.unparsed_bytes > HEAD_BYTES:
            if is_answered:
                self.transport.write(TOO_LARGE)
            self.transport.close()
        elif is_answered or latest.scope is not self.scope:
            self._start_head_timer()
        else:
            self._stop_head_timer()

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
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
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise httptools.HttpParserInvalidMethodError("CONNECT is not supported")
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % line for line in self.headers if line[0] not in UPGRADE_HEADERS]
        self.parser = httptools.HttpRequestParser(self)
        # The same leniency as uvicorn: a request is served although bytes follow its `Connection: close`.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"\r\n".join([*lines, b"", b""])

    def _should_upgrade(self) -> bool:
        # Makes uvicorn leave the offer to `_feed`.
        return True

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise BufferError
        super().on_headers_complete()
        if not self.parser.should_upgrade():
            self.headers = BoundedTrailers()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self.running = cycle
        super()._start_asgi_task(cycle, app)

    def _start_head_timer(self) -> None:
        if self.head_timer is None:
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self._close_late_head)

    def _close_late_head(self) -> None:
        self.head_timer = None
        if self.flow.read_paused:
            self._start_head_timer()  # the server itself has paused reading
        else:
            self.transport.close()

    def _stop_head_timer(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None
