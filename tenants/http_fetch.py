"""Fetching a JWKS document: one GET that ends in time and in size, whatever the other side does."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec

DEADLINE_SECONDS = 3.0
LARGEST_BYTES = 256 * 2**10


class FetchError(ValueError):
    """The document could not be fetched as it must be."""


def is_url(url: str) -> bool:
    """Whether this is something to fetch: http or https, with a host, and nothing to smuggle a line with."""
    try:
        where = urlsplit(url)
        return where.scheme in {"http", "https"} and bool(where.hostname) and url.isprintable() and " " not in url
    except ValueError:
        return False


def fetch_json(url: str, *, deadline_seconds: float = DEADLINE_SECONDS, largest: int = LARGEST_BYTES) -> object:
    """The JSON document at `url`: no redirect, no compression, at most `largest` bytes, one total deadline.

    Raises OSError or FetchError (a ValueError).
    """
    if not is_url(url):
        raise FetchError("not an http(s) URL")
    where = urlsplit(url)
    assert where.hostname is not None
    deadline = time.monotonic() + deadline_seconds
    connection = _connection(where.scheme, where.hostname, where.port, deadline_seconds)
    try:
        connection.connect()
        with _cut_at(deadline, connection.sock):
            path = (where.path or "/") + (f"?{where.query}" if where.query else "")
            connection.request("GET", path, headers={"Accept": "application/json", "Accept-Encoding": "identity"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise FetchError(f"answered {answer.status}")
            body = answer.read(largest + 1)
    except http.client.HTTPException as error:
        raise FetchError(f"no HTTP answer: {type(error).__name__}") from error
    finally:
        connection.close()
    if time.monotonic() >= deadline:
        raise FetchError("took too long")
    if len(body) > largest:
        raise FetchError("too large")
    try:
        return msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise FetchError("not JSON") from error


def _connection(scheme: str, host: str, port: int | None, seconds: float) -> http.client.HTTPConnection:
    if scheme == "https":
        return http.client.HTTPSConnection(host, port, timeout=seconds, context=ssl.create_default_context())
    return http.client.HTTPConnection(host, port, timeout=seconds)


@contextlib.contextmanager
def _cut_at(deadline: float, sock: socket.socket) -> Iterator[None]:
    """Shut the socket at `deadline` under whoever reads it.

    Its own timeout starts again with every byte, so a slow drip would never end.
    """

    def cut() -> None:
        with contextlib.suppress(OSError):
            # Past SSLSocket's own shutdown, which would first unwrap the connection under the reading thread.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    watchdog = threading.Timer(max(0.0, deadline - time.monotonic()), cut)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
