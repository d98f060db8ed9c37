"""Send one POST request to an address that a tenant chose.

The request goes to the address that `core.url_check` has checked. A host name that resolves to another address after
the check (DNS rebinding) has no effect. Redirects are not followed and proxies are not used. One deadline covers name
resolution, the request and the response, and only the start of the response body is read.
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
from core.url_check import Address, AddressRefused, UrlTarget, check_resolved, parse

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

HEADER_BYTES = 16 * 2**10
CONNECT_SECONDS = 4.0  # for one address, so that there is time for the second if the first is unreachable
RESOLVER_THREADS = 32


class PostResult(msgspec.Struct, frozen=True):
    """The result of a request: the status and the start of the body, or an error."""

    status: int | None
    error: str
    duration_ms: int
    answer: bytes = b""
    retry_after: str = ""

    @property
    def is_delivered(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


class Unreachable(Exception):
    """There is no connection, or no HTTP response."""


async def post(
    url: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    deadline_seconds: float | None = None,
    resolve: Resolve | None = None,
    tls: ssl.SSLContext | None = None,
) -> PostResult:
    """Send a body once, and return the result. Raises no error except cancellation."""
    seconds = conf().webhooks.deadline_seconds if deadline_seconds is None else deadline_seconds
    started = time.monotonic()

    def elapsed_ms() -> int:
        return round((time.monotonic() - started) * 1000)

    try:
        async with asyncio.timeout(seconds):
            target = parse(url)
            addresses = await _resolve_addresses(target, resolve or system_resolve)
            reader, writer = await _connect(target, addresses, tls)
            try:
                status, answer, retry_after = await _exchange(target, headers, body, reader, writer, started + seconds)
            finally:
                # Abort instead of a clean close, which would wait for an endpoint that does not read.
                writer.transport.abort()
    except AddressRefused as error:
        return PostResult(None, f"refused: {error}", elapsed_ms())
    except Unreachable as error:
        return PostResult(None, str(error), elapsed_ms())
    except TimeoutError:
        return PostResult(None, f"no response within {seconds:g} s", elapsed_ms())
    return PostResult(status, "" if 200 <= status < 300 else f"HTTP {status}", elapsed_ms(), answer, retry_after)


async def _resolve_addresses(target: UrlTarget, resolve: Resolve) -> list[Address]:
    if target.literal is not None:
        return check_resolved(target, [target.literal])
    try:
        texts = await resolve(target.host, target.port)
        addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in texts]
    except (OSError, UnicodeError, ValueError) as error:
        # If the name does not resolve, the attempt fails. The check is never skipped.
        raise Unreachable(f"the name does not resolve: {_reason(error)}") from error
    if not addresses:
        raise Unreachable("the name does not resolve: no address")
    return check_resolved(target, addresses)


async def system_resolve(host: str, port: int) -> Sequence[str]:
    """Resolve a name with the system's resolver, in a thread.

    Concurrent calls for the same name share one lookup, so that a name whose servers hang occupies one thread only.
    """
    loop = asyncio.get_running_loop()
    lookups = _lookups.setdefault(loop, {})
    lookup = lookups.get(host)
    if lookup is None:
        lookup = lookups[host] = loop.run_in_executor(_resolver(), _getaddrinfo, host, port)
        lookup.add_done_callback(lambda done: lookups.pop(host, None) and (done.cancelled() or done.exception()))
    return await asyncio.shield(lookup)


_lookups: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Future[list[str]]]] = WeakKeyDictionary()


def _getaddrinfo(host: str, port: int) -> list[str]:
    return [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


@cache
def _resolver() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(RESOLVER_THREADS, thread_name_prefix="webhook-resolver")


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


async def _connect(
    target: UrlTarget, addresses: Sequence[Address], tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to one of the checked addresses. The certificate must match the URL's host name."""
    context = (tls or _tls()) if target.scheme == "https" else None
    last_error: Exception | None = None
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
            last_error = error
    raise Unreachable(f"no connection: {_reason(last_error)}") from last_error


async def _exchange(
    target: UrlTarget,
    headers: Mapping[str, str],
    body: bytes,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    deadline: float,
) -> tuple[int, bytes, str]:
    """Send the request and read the response: the status, the body and `Retry-After`.

    When the status has arrived, errors and delays of the body no longer matter: the body is only recorded.
    """
    http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEADER_BYTES)
    sent = [("Host", target.authority), ("Connection", "close"), ("Content-Length", str(len(body))), *headers.items()]
    try:
        head = http.send(h11.Request(method="POST", target=target.path, headers=sent))
        content = http.send(h11.Data(body))
        http.send(h11.EndOfMessage())
        writer.write((head or b"") + (content or b""))
        # Send and read concurrently, because an endpoint may respond before it has read the whole request.
        sending = asyncio.ensure_future(writer.drain())
        try:
            status, retry_after = await _read_head(http, reader)
        finally:
            sending.cancel()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await sending
    except h11.ProtocolError as error:
        raise Unreachable(f"invalid HTTP response: {_reason(error)}") from error
    except OSError as error:
        raise Unreachable(f"the connection was lost: {_reason(error)}") from error
    answer = bytearray()
    with contextlib.suppress(h11.ProtocolError, OSError, TimeoutError):
        async with asyncio.timeout(min(2.0, max(0.0, deadline - time.monotonic() - 0.1))):
            await _read_body(http, reader, answer)
    return status, bytes(answer[: conf().webhooks.answer_bytes]), retry_after


async def _read_head(http: h11.Connection, reader: asyncio.StreamReader) -> tuple[int, str]:
    received = 0
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            data = await reader.read(HEADER_BYTES)
            received += len(data)
            if received > 2 * HEADER_BYTES:  # for example an endless sequence of 1xx responses
                raise Unreachable("the response headers are too long")
            http.receive_data(data)
        elif isinstance(event, h11.Response):
            retry_after = dict(event.headers).get(b"retry-after", b"")
            return event.status_code, retry_after.decode("ascii", "replace")
        elif not isinstance(event, h11.InformationalResponse):
            raise Unreachable("the connection was closed without a response")


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
    """Return an error as one short line, because the endpoint may control its text."""
    return " ".join(f"{type(error).__name__} {error}".split())[:200]
