"""HTTP client for requests to URLs that tenants or operators chose.

A request goes to the addresses that were checked. A host name that resolves to another address after the check (DNS
rebinding) has no effect. Redirects are not followed and proxies are not used. One deadline covers name resolution, the
request and the response, and limits bound the size of the response.
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

from core.url_check import Address, UrlTarget

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
# Returns the addresses without duplicates. Raises AddressRefused if any of them must not be called.
CheckAddresses = Callable[[Sequence[Address]], list[Address]]

HEADER_BYTES = 16 * 2**10
CONNECT_SECONDS = 4.0  # timeout for one address; leaves time for a second one if the first is unreachable
RESOLVER_THREADS = 32


class Response(msgspec.Struct, frozen=True):
    """A response, with at most `max_bytes` of its body."""

    status: int
    body: bytes
    is_complete: bool  # the body was read to its end
    retry_after: str


class Unreachable(Exception):
    """There is no connection, or no HTTP response."""


async def request(
    method: str,
    target: UrlTarget,
    headers: Mapping[str, str],
    body: bytes = b"",
    *,
    check: CheckAddresses,
    deadline_seconds: float,
    max_bytes: int,
    body_seconds: float = float("inf"),
    resolve: Resolve | None = None,
    tls: ssl.SSLContext | None = None,
) -> Response:
    """Send a request once and return the response.

    `body_seconds` limits the time for the body of the response, within the deadline. Raises Unreachable, TimeoutError,
    or AddressRefused from `check`.
    """
    deadline = time.monotonic() + deadline_seconds
    async with asyncio.timeout(deadline_seconds):
        addresses = check(await _resolve_target(target, resolve or system_resolve))
        reader, writer = await _connect(target, addresses, tls)
        try:
            http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEADER_BYTES)
            head = await _exchange_heads(http, method, target, headers, body, reader, writer)
            content = bytearray()
            # The status counts even if the body does not arrive.
            with contextlib.suppress(h11.ProtocolError, OSError, TimeoutError):
                async with asyncio.timeout(min(body_seconds, max(0.0, deadline - time.monotonic() - 0.1))):
                    await _read_body(http, reader, content, max_bytes)
        finally:
            # Abort instead of a clean close, which would wait for a server that does not read.
            writer.transport.abort()
    retry_after = dict(head.headers).get(b"retry-after", b"")
    return Response(
        status=head.status_code,
        body=bytes(content[:max_bytes]),
        is_complete=http.their_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED),
        retry_after=retry_after.decode("ascii", "replace"),
    )


async def _resolve_target(target: UrlTarget, resolve: Resolve) -> list[Address]:
    if target.literal is not None:
        return [target.literal]
    try:
        texts = await resolve(target.host, target.port)
        addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in texts]
    except (OSError, UnicodeError, ValueError) as error:
        # If the name does not resolve, the request fails. The check is never skipped.
        raise Unreachable(f"the name does not resolve: {_reason(error)}") from error
    if not addresses:
        raise Unreachable("the name does not resolve: no address")
    return addresses


async def system_resolve(host: str, port: int) -> Sequence[str]:
    """Resolve a name with the system's resolver, in separate threads.

    Concurrent calls for the same name share one lookup, so that a name whose servers hang occupies one thread only.
    """
    loop = asyncio.get_running_loop()
    lookups = _lookups.setdefault(loop, {})
    lookup = lookups.get(host)
    if lookup is None:
        lookup = lookups[host] = loop.run_in_executor(_resolver_threads(), _getaddrinfo, host, port)

        def end(done: asyncio.Future[list[str]]) -> None:
            lookups.pop(host, None)
            if not done.cancelled():
                done.exception()  # mark it as retrieved: asyncio logs a warning otherwise if all callers were cancelled

        lookup.add_done_callback(end)
    return await asyncio.shield(lookup)


_lookups: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Future[list[str]]]] = WeakKeyDictionary()


def _getaddrinfo(host: str, port: int) -> list[str]:
    return [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


@cache
def _resolver_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(RESOLVER_THREADS, thread_name_prefix="resolver")


@cache
def _default_tls() -> ssl.SSLContext:
    return ssl.create_default_context()


async def _connect(
    target: UrlTarget, addresses: Sequence[Address], tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to one of the checked addresses. The certificate must match the URL's host name."""
    context = (tls or _default_tls()) if target.scheme == "https" else None
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


async def _exchange_heads(
    http: h11.Connection,
    method: str,
    target: UrlTarget,
    headers: Mapping[str, str],
    body: bytes,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> h11.Response:
    """Send the request and return the head of the response."""
    sent = [("Host", target.authority), ("Connection", "close"), *headers.items()]
    if body or method == "POST":
        sent.append(("Content-Length", str(len(body))))
    try:
        head = http.send(h11.Request(method=method, target=target.path, headers=sent))
        content = http.send(h11.Data(body))
        http.send(h11.EndOfMessage())
        writer.write((head or b"") + (content or b""))
        # Send and read concurrently, because a server may respond before it has read the whole request.
        sending = asyncio.ensure_future(writer.drain())
        try:
            return await _read_head(http, reader)
        finally:
            sending.cancel()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await sending
    except h11.ProtocolError as error:
        raise Unreachable(f"invalid HTTP response: {_reason(error)}") from error
    except OSError as error:
        raise Unreachable(f"the connection was lost: {_reason(error)}") from error


async def _read_head(http: h11.Connection, reader: asyncio.StreamReader) -> h11.Response:
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
            return event
        elif not isinstance(event, h11.InformationalResponse):
            raise Unreachable("the connection was closed without a response")


async def _read_body(http: h11.Connection, reader: asyncio.StreamReader, content: bytearray, max_bytes: int) -> None:
    while len(content) < max_bytes:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(HEADER_BYTES))
        elif isinstance(event, h11.Data):
            content += event.data
        else:
            break


def _reason(error: BaseException | None) -> str:
    """Return an error as one short line, because the server may control its text."""
    return " ".join(f"{type(error).__name__} {error}".split())[:200]
