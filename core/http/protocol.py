"""A client's connection: uvicorn's, within bounds.

By itself that takes from anybody any number of header lines, for any length of time, and any number of requests one
behind the other: 30 MB of those were 2.3 GB of memory, and a few hundred half-sent heads all of a process' files.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

# What is read of a head, or of trailers, before anything comes of it. A token and a trace are 1 KB.
HEAD_BYTES = 64 * 2**10
# A request's head, its first one or the next, takes no longer than this from its first byte.
HEAD_SECONDS = 20.0
# Requests that wait on one connection for the one before them. A read holds some 500 that carry a token.
PIPELINED = 1000
RESUME_READING_REQUESTS = 100
# Offers of another protocol. All are declined, and left out when the request is parsed again.
UPGRADE_HEADERS = frozenset({b"upgrade", b"http2-settings"})
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedFlowControl(FlowControl):
    """Reads on only when few requests wait that were read. Some may: who does not read does not see a client leave."""

    def __init__(self, transport: asyncio.Transport, connection: BoundedHttpProtocol) -> None:
        super().__init__(transport)
        self.connection = connection

    def resume_reading(self) -> None:
        if len(self.connection.pipeline) < RESUME_READING_REQUESTS:
            super().resume_reading()


class BoundedTrailers(list[tuple[bytes, bytes]]):
    """Header lines behind a body: a proxy has checked none of them, so they do not join those before it."""

    def append(self, _: object) -> None:
        pass


class BoundedHttpProtocol(HttpToolsProtocol):
    running: RequestResponseCycle | None = None
    head_timer: asyncio.TimerHandle | None = None
    # Bytes received since anything came of them: a whole head, a piece of a body.
    unparsed_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = BoundedFlowControl(transport, self)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # uvicorn tells the last one that was read. The one that is being answered may be a poll, and take a task.
        if self.running is not None and not self.running.response_complete:
            self.running.disconnected = True
            self.running.message_event.set()
        # Or each would be there, with its request, until the collector comes by.
        self.pipeline.clear()
        self._forget_head()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        before = self.cycle
        held = 0 if before is None else len(before.body)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self.logger.info("a request that is not HTTP: %s", type(error).__name__)
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
            self._expect_head()
        else:
            self._forget_head()

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = self._without_offer() + data[offer.args[0] :]
            else:
                return

    def _without_offer(self) -> bytes:
        """The head again, of a request that offers another protocol; Java's client does that to every server.

        The parser takes such a request to have no body, and what follows for that protocol: then the body is the
        next request, written by whoever wrote the body.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise httptools.HttpParserInvalidMethodError("this is no proxy")
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % line for line in self.headers if line[0] not in UPGRADE_HEADERS]
        self.parser = httptools.HttpRequestParser(self)
        # As uvicorn has it: a request is answered though something follows its `Connection: close`.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"\r\n".join([*lines, b"", b""])

    def _should_upgrade(self) -> bool:
        # uvicorn then leaves the request alone, and `_feed` has it.
        return True

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= PIPELINED:
            raise BufferError
        super().on_headers_complete()
        if not self.parser.should_upgrade():
            self.headers = BoundedTrailers()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self.running = cycle
        super()._start_asgi_task(cycle, app)

    def _expect_head(self) -> None:
        if self.head_timer is None:
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _head_is_late(self) -> None:
        self.head_timer = None
        if self.flow.read_paused:
            self._expect_head()  # it is us who do not read
        else:
            self.transport.close()

    def _forget_head(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None
