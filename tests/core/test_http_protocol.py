"""Limits on a client's connection before, between and after requests, with real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import uvicorn
from uvicorn.server import ServerState

from codeq_site import sockets
from core.http import protocol
from core.http.exchange import WHOLE_RESPONSE
from core.http.protocol import HEAD_BYTES, MAX_PIPELINED, BoundedHttpProtocol

GET = b"GET /one HTTP/1.1\r\nHost: x\r\n\r\n"
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"


class Served:
    """A server with an application that answers with the request it received."""

    def __init__(self) -> None:
        self.connections: list[BoundedHttpProtocol] = []
        self.is_released = asyncio.Event()
        self.is_released.set()
        self.has_seen_disconnect = asyncio.Event()
        self.port = 0
        self.most_waiting = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        if scope["path"] == "/wait":
            assert (await receive())["type"] == "http.disconnect"
            self.has_seen_disconnect.set()
            return
        await self.is_released.wait()
        self.most_waiting = max(self.most_waiting, *(len(connection.pipeline) for connection in self.connections))
        if scope["path"] == "/whole":
            await send({"type": WHOLE_RESPONSE, "status": 200, "headers": b"x-one: 1\r\n", "body": b"all of it"})
            return
        if scope["path"] == "/parts":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"x-one", b"1")]})
            await send({"type": "http.response.body", "body": b"all of it"})
            return
        names = sorted(name.decode() for name, _ in scope["headers"])
        answer = json.dumps({"method": scope["method"], "body": body.decode(), "names": names}).encode()
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(answer))]}
        await send(start)
        await send({"type": "http.response.body", "body": answer})

    async def talk(self, *pieces: bytes, seconds: float = 5) -> bytes:
        """Send, and read until the server closes the connection or is silent for `seconds`."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        received = b""
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)  # so that pieces do not arrive as one
            async with asyncio.timeout(seconds):
                while piece := await reader.read(2**20):
                    received += piece
        except (TimeoutError, ConnectionError):
            pass
        finally:
            writer.close()
        return received


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    app = Served()
    config = uvicorn.Config(
        app, http=BoundedHttpProtocol, ws="none", lifespan="off", log_config=None, server_header=False
    )
    config.load()

    def connected() -> BoundedHttpProtocol:
        app.connections.append(BoundedHttpProtocol(config, ServerState(), {}))
        return app.connections[-1]

    server = await asyncio.get_running_loop().create_server(connected, "127.0.0.1", 0)
    app.port = server.sockets[0].getsockname()[1]
    yield app
    server.close()
    for client_connection in app.connections:
        client_connection.transport.abort()


async def flood(writer: asyncio.StreamWriter, piece: bytes, size: int) -> None:
    for _ in range(size // len(piece)):
        writer.write(piece)
        await writer.drain()


def parse_body(response: bytes) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(response.partition(b"\r\n\r\n")[2])
    return body


ENDLESS = {
    "one line": (b"GET / HTTP/1.1\r\nX: ", b"a" * 2**16),
    "lines": (b"GET / HTTP/1.1\r\n", b"X: a\r\n" * 10_000),
    "a path": (b"GET /", b"a" * 2**16),
    "trailers": (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X: a\r\n" * 10_000),
    "one trailer": (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"a" * 2**16),
    "an extension of a chunk": (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5;a=", b"a" * 2**16),
    "blank lines": (b"", b"\r\n" * 2**15),
}


@pytest.mark.parametrize(("begin", "more"), ENDLESS.values(), ids=ENDLESS.keys())
async def test_endless_input_before_a_request_ends_the_connection(served: Served, begin: bytes, more: bytes) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(begin)
    with pytest.raises(ConnectionError):
        await flood(writer, more, 64 * 2**20)
    writer.close()


async def test_too_large_head_gets_a_431(served: Served) -> None:
    pieces = [b"GET / HTTP/1.1\r\n"] + [b"X: %b\r\n" % (b"a" * 8000)] * (HEAD_BYTES // 8000 + 1)
    assert (await served.talk(*pieces)).startswith(b"HTTP/1.1 431 ")
    large = await served.talk(b"GET / HTTP/1.1\r\nX: %b\r\nConnection: close\r\n\r\n" % (b"a" * (HEAD_BYTES - 1000)))
    assert large.startswith(b"HTTP/1.1 200 ")


UNENDED = {
    "nothing": b"",
    "half a head": b"GET / HTTP/1.1\r\nX: ",
    "a request and a blank line": GET + b"\r\n",
    "a request and half a head": GET + b"GET /",
}


@pytest.mark.parametrize("before", UNENDED.values(), ids=UNENDED.keys())
async def test_unfinished_head_ends_the_connection(
    served: Served, monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(before)

    async def drip() -> None:
        while True:
            await asyncio.sleep(0.05)
            writer.write(b"\r\n" if before.endswith(b"\r\n") else b"a" if before else b"")

    dripping = asyncio.create_task(drip())
    async with asyncio.timeout(5):
        try:
            while await reader.read(1000):
                pass
        except ConnectionError:
            pass
    dripping.cancel()
    writer.close()


async def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    answer = await served.talk(GET * 500, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200") == 501


async def test_reading_stops_while_pipelined_requests_wait(served: Served) -> None:
    served.is_released.clear()
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    large = b"GET / HTTP/1.1\r\nX: %b\r\n\r\n" % (b"a" * 1000)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(flood(writer, large * 100, 64 * 2**20), 0.5)
    served.is_released.set()
    received = b""
    while received.count(b"HTTP/1.1 200") < 3000:
        received += await reader.read(2**20)
    # One read of 256 KB at a time, and no read while a request is being processed.
    assert served.most_waiting < 600
    writer.transport.abort()


async def test_waiting_request_sees_a_disconnect_behind_pipelined_requests(served: Served) -> None:
    """Otherwise a long poll would claim a task for a client that has disconnected."""
    _, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(b"GET /wait HTTP/1.1\r\n\r\n" + GET * 3)
    await writer.drain()
    writer.close()
    await asyncio.wait_for(served.has_seen_disconnect.wait(), 10)


async def test_too_many_pipelined_requests_are_refused(served: Served) -> None:
    served.is_released.clear()
    answer = await served.talk(b"GET / HTTP/1.1\r\n\r\n" * (MAX_PIPELINED + 100))
    assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("length", ["whole", "chunked"])
@pytest.mark.parametrize("in_pieces", [False, True], ids=["in one piece", "in pieces"])
async def test_protocol_upgrade_offer_is_ignored(served: Served, length: str, in_pieces: bool) -> None:
    """The body must not become the next request. Java's client offers h2c without TLS."""
    body = b"GET /smuggled HTTP/1.1\r\n\r\n"
    framing = b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    if length == "chunked":
        framing = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    request = b"POST /two HTTP/1.1\r\nHost: x\r\n" + OFFER + framing
    pieces = [request[start : start + 40] for start in range(0, len(request), 40)] if in_pieces else [request]
    answer = await served.talk(*pieces, seconds=0.2)
    assert answer.count(b"HTTP/1.1 200") == 1
    assert parse_body(answer)["body"] == body.decode()
    assert "upgrade" not in parse_body(answer)["names"]
    assert "host" in parse_body(answer)["names"]
    twice = await served.talk(request + request + GET, seconds=0.2)
    assert twice.count(b"HTTP/1.1 200") == 3


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("end", [b"HTTP/1.1\r\n\r\n", b"HTTP/1.1\r\nConnection: close\r\n\r\n", b"HTTP/1.0\r\n\r\n"])
async def test_response_in_one_message_is_framed_like_one_in_two(served: Served, method: str, end: bytes) -> None:
    whole = await served.talk(b"%b /whole %b" % (method.encode(), end), seconds=0.2)
    parts = await served.talk(b"%b /parts %b" % (method.encode(), end), seconds=0.2)
    assert whole.startswith(b"HTTP/1.1 200 OK\r\n")
    assert whole == parts


async def test_connect_method_is_refused(served: Served) -> None:
    assert (await served.talk(b"CONNECT evil.example.com:443 HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


async def test_trailers_do_not_become_headers(served: Served) -> None:
    trailing = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Forwarded-Proto: https\r\n\r\n"
    assert parse_body(await served.talk(trailing, seconds=0.2))["names"] == ["transfer-encoding"]


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="TCP_USER_TIMEOUT exists only on Linux")
def test_client_that_reads_nothing_is_disconnected() -> None:
    listening = sockets.listen("127.0.0.1", 0)
    with listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == sockets.UNREAD_MS


async def test_idle_connection_serves_one_more_request_after_shutdown(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(GET)
    await reader.readuntil(b"}")
    served.connections[0].shutdown()
    writer.write(GET)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in head.lower()
    async with asyncio.timeout(protocol.LINGER_SECONDS / 2):
        await reader.read()
    writer.close()


async def test_connection_that_stays_idle_is_closed_after_shutdown(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(GET)
    await reader.readuntil(b"}")
    served.connections[0].shutdown()
    async with asyncio.timeout(2):
        assert await reader.read() == b""
    writer.close()
