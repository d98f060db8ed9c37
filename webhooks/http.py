"""The one way out: a POST to an address that a tenant chose.

The call goes to exactly the address that was judged (`core.url_check`), so that a name which changes its mind
between the look and the call (DNS rebinding) gains nothing. No redirect is followed, no proxy asked, one deadline
covers everything from the resolver to the last byte, and only a little of the answer is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from weakref import WeakKeyDictionary

import h11
import msgspec

from core.conf import conf
from core.url_check import Address, Refused, Target, judged, parse

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

HEADER_BYTES = 16 * 2**10
CONNECT_SECONDS = 4.0  # for one address, so that a dead first one leaves time for the second
RESOLVER_THREADS = 32


class Posted(msgspec.Struct, frozen=True):
    """What came of one attempt: a status, or why there is none."""

    status: int | None
    error: str
    duration_ms: int
    answer: bytes = b""
    retry_after: str = ""

    @property
    def is_delivered(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


class Unreachable(Exception):
    """Nobody answered, or not in HTTP."""


async def post(
    url: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    deadline_seconds: float | None = None,
    resolve: Resolve | None = None,
    tls: ssl.SSLContext | None = None,
) -> Posted:
    """POST a body, once. Whatever happens is in the answer; nothing is raised but cancellation."""
    seconds = conf().webhooks.deadline_seconds if deadline_seconds is None else deadline_seconds
    started = time.monotonic()

    def took() -> int:
        return round((time.monotonic() - started) * 1000)

    try:
        async with asyncio.timeout(seconds):
            target = parse(url)
            addresses = await _addresses(target, resolve or system_resolve)
            reader, writer = await _connect(target, addresses, tls)
            try:
                status, answer, retry_after = await _exchange(target, headers, body, reader, writer, started + seconds)
            finally:
                # Not closed in order: a peer that does not read must not be waited for.
                writer.transport.abort()
    except Refused as error:
        return Posted(None, f"refused: {error}", took())
    except Unreachable as error:
        return Posted(None, str(error), took())
    except TimeoutError:
        return Posted(None, f"no answer within {seconds:g} s", took())
    return Posted(status, "" if 200 <= status < 300 else f"HTTP {status}", took(), answer, retry_after)


async def _addresses(target: Target, resolve: Resolve) -> list[Address]:
    if target.literal is not None:
        return judged(target, [target.literal])
    try:
        texts = await resolve(target.host, target.port)
        found = [ipaddress.ip_address(text.partition("%")[0]) for text in texts]
    except (OSError, UnicodeError, ValueError) as error:
        # Not knowing is not being allowed: a resolver that fails is a failed attempt, never a skipped check.
        raise Unreachable(f"the name does not resolve: {_reason(error)}") from error
    if not found:
        raise Unreachable("the name does not resolve: no address")
    return judged(target, found)


async def system_resolve(host: str, port: int) -> Sequence[str]:
    """The system's resolver, in threads of its own. Those who ask for one name at once share the question, so that a
    name whose servers hang holds one thread and no more."""
    loop = asyncio.get_running_loop()
    asked = _asked.setdefault(loop, {})
    question = asked.get(host)
    if question is None:
        question = asked[host] = loop.run_in_executor(_resolver(), _getaddrinfo, host, port)
        question.add_done_callback(lambda done: asked.pop(host, None) and (done.cancelled() or done.exception()))
    return await asyncio.shield(question)


_asked: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Future[list[str]]]] = WeakKeyDictionary()


def _getaddrinfo(host: str, port: int) -> list[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


@cache
def _resolver() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(RESOLVER_THREADS, thread_name_prefix="webhook-resolver")


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


async def _connect(
    target: Target, addresses: Sequence[Address], tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """To one of the checked addresses, as the host the URL names: the certificate must be the name's."""
    context = (tls or _tls()) if target.scheme == "https" else None
    problem: Exception | None = None
    for address in addresses:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await asyncio.open_connection(
                    str(address),
                    target.port,
                    ssl=context,
                    server_hostname=target.host if context else None,
                    limit=HEADER_BYTES,
                )
        except ssl.SSLError as error:
            raise Unreachable(f"TLS: {_reason(error)}") from error
        except (OSError, TimeoutError) as error:
            problem = error
    raise Unreachable(f"no connection: {_reason(problem)}") from problem


async def _exchange(
    target: Target,
    headers: Mapping[str, str],
    body: bytes,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    until: float,
) -> tuple[int, bytes, str]:
    """One request, one answer. Once the status is there it counts: the rest of the answer is only for the record."""
    http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEADER_BYTES)
    sent = [("Host", target.authority), ("Connection", "close"), ("Content-Length", str(len(body))), *headers.items()]
    try:
        head = http.send(h11.Request(method="POST", target=target.path, headers=sent))
        content = http.send(h11.Data(body))
        http.send(h11.EndOfMessage())
        writer.write((head or b"") + (content or b""))
        # Sending and reading go side by side: a receiver may answer before it has read everything.
        sending = asyncio.ensure_future(writer.drain())
        try:
            status, retry_after = await _read_head(http, reader)
        finally:
            sending.cancel()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await sending
    except h11.ProtocolError as error:
        raise Unreachable(f"not HTTP: {_reason(error)}") from error
    except OSError as error:
        raise Unreachable(f"the connection broke: {_reason(error)}") from error
    answer = bytearray()
    with contextlib.suppress(h11.ProtocolError, OSError, TimeoutError):
        async with asyncio.timeout(min(2.0, max(0.0, until - time.monotonic() - 0.1))):
            await _read_body(http, reader, answer)
    return status, bytes(answer[: conf().webhooks.answer_bytes]), retry_after


async def _read_head(http: h11.Connection, reader: asyncio.StreamReader) -> tuple[int, str]:
    received = 0
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            data = await reader.read(HEADER_BYTES)
            received += len(data)
            if received > 2 * HEADER_BYTES:  # 1xx answers without end
                raise Unreachable("the answer's head is too long")
            http.receive_data(data)
        elif isinstance(event, h11.Response):
            named = {name: value for name, value in event.headers if name == b"retry-after"}
            return event.status_code, named.get(b"retry-after", b"").decode("ascii", "replace")
        elif not isinstance(event, h11.InformationalResponse):
            raise Unreachable("the connection was closed without an answer")


async def _read_body(http: h11.Connection, reader: asyncio.StreamReader, answer: bytearray) -> None:
    while len(answer) < conf().webhooks.answer_bytes:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(HEADER_BYTES))
        elif isinstance(event, h11.Data):
            answer += event.data
        else:
            break


def _reason(error: BaseException | None) -> str:
    """One line for the record, without what the peer may have put into it at length."""
    return " ".join(f"{type(error).__name__} {error}".split())[:200]
