"""What a client may do to its connection before, between and behind requests. Real sockets."""

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
from core.http.protocol import HEAD_BYTES, PIPELINED, BoundedHttpProtocol

GET = b"GET /one HTTP/1.1\r\nHost: x\r\n\r\n"
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"


class Served:
    """A server whose application says what it was asked."""

    def __init__(self) -> None:
        self.connections: list[BoundedHttpProtocol] = []
        self.is_held = asyncio.Event()
        self.is_held.set()
        self.has_seen_leave = asyncio.Event()
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
            self.has_seen_leave.set()
            return
        await self.is_held.wait()
        self.most_waiting = max(self.most_waiting, *(len(each.pipeline) for each in self.connections))
        names = sorted(name.decode() for name, _ in scope["headers"])
        said = json.dumps({"method": scope["method"], "body": body.decode(), "names": names}).encode()
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(said))]}
        await send(start)
        await send({"type": "http.response.body", "body": said})

    async def talk(self, *pieces: bytes, seconds: float = 5) -> bytes:
        """Send, and read until the server closes or has said nothing for a while."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        found = b""
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)  # so that pieces do not arrive as one
            async with asyncio.timeout(seconds):
                while piece := await reader.read(2**20):
                    found += piece
        except (TimeoutError, ConnectionError):
            pass
        finally:
            writer.close()
        return found


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
    for each in app.connections:
        each.transport.abort()


async def flood(writer: asyncio.StreamWriter, piece: bytes, size: int) -> None:
    for _ in range(size // len(piece)):
        writer.write(piece)
        await writer.drain()


def said(answer: bytes) -> dict[str, Any]:
    words: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return words


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
async def test_what_never_becomes_a_request_is_read_no_further(served: Served, begin: bytes, more: bytes) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(begin)
    with pytest.raises(ConnectionError):
        await flood(writer, more, 64 * 2**20)
    writer.close()


async def test_a_head_too_large_is_told_so(served: Served) -> None:
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
async def test_a_head_that_does_not_end_costs_its_connection(
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


async def test_requests_behind_one_another_are_answered_in_turn(served: Served) -> None:
    answer = await served.talk(GET * 500, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200") == 501


async def test_requests_behind_one_that_waits_are_not_read_on_and_on(served: Served) -> None:
    served.is_held.clear()
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    large = b"GET / HTTP/1.1\r\nX: %b\r\n\r\n" % (b"a" * 1000)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(flood(writer, large * 100, 64 * 2**20), 0.5)
    served.is_held.set()
    found = b""
    while found.count(b"HTTP/1.1 200") < 3000:
        found += await reader.read(2**20)
    # A read of 256 KB at a time, and never one while another is in hand.
    assert served.most_waiting < 600
    writer.transport.abort()


async def test_who_waits_sees_the_client_leave_behind_another_request(served: Served) -> None:
    """Or a long poll would take a task for nobody."""
    _, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(b"GET /wait HTTP/1.1\r\n\r\n" + GET * 3)
    await writer.drain()
    writer.close()
    await asyncio.wait_for(served.has_seen_leave.wait(), 10)


async def test_a_thousand_tiny_requests_in_one_piece_are_refused(served: Served) -> None:
    served.is_held.clear()
    answer = await served.talk(b"GET / HTTP/1.1\r\n\r\n" * (PIPELINED + 100))
    assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("length", ["whole", "chunked"])
@pytest.mark.parametrize("in_pieces", [False, True], ids=["in one piece", "in pieces"])
async def test_who_offers_another_protocol_is_answered_in_this_one(
    served: Served, length: str, in_pieces: bool
) -> None:
    """As Java's client does at every server without TLS. Its body is a body, and not the next request."""
    body = b"GET /smuggled HTTP/1.1\r\n\r\n"
    framing = b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    if length == "chunked":
        framing = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    request = b"POST /two HTTP/1.1\r\nHost: x\r\n" + OFFER + framing
    pieces = [request[start : start + 40] for start in range(0, len(request), 40)] if in_pieces else [request]
    answer = await served.talk(*pieces, seconds=0.2)
    assert answer.count(b"HTTP/1.1 200") == 1
    assert said(answer)["body"] == body.decode()
    assert "upgrade" not in said(answer)["names"]
    assert "host" in said(answer)["names"]
    twice = await served.talk(request + request + GET, seconds=0.2)
    assert twice.count(b"HTTP/1.1 200") == 3


async def test_a_tunnel_is_refused(served: Served) -> None:
    assert (await served.talk(b"CONNECT evil.example.com:443 HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


async def test_lines_behind_a_body_join_no_header(served: Served) -> None:
    trailing = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Forwarded-Proto: https\r\n\r\n"
    assert said(await served.talk(trailing, seconds=0.2))["names"] == ["transfer-encoding"]


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux knows TCP_USER_TIMEOUT")
def test_a_client_that_reads_nothing_is_given_up() -> None:
    listening = sockets.listen("127.0.0.1", 0)
    with listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == sockets.UNREAD_MS
