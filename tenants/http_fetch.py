"""Fetch a JSON document with one GET request.

A deadline bounds the whole request and a limit bounds the body, regardless of how the server behaves.
"""

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
MAX_BYTES = 256 * 2**10


class FetchError(ValueError):
    """The server's response is not a usable JSON document."""


def is_url(url: str) -> bool:
    """Whether this is an http or https URL with a host.

    Spaces and control characters are refused: a line break could inject a request header.
    """
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and url.isprintable() and " " not in url
    except ValueError:
        return False


def fetch_json(url: str, *, deadline_seconds: float = DEADLINE_SECONDS, max_bytes: int = MAX_BYTES) -> object:
    """Return the JSON document at `url`.

    Follows no redirect, accepts no compression, and reads at most `max_bytes` before the deadline. Raises OSError, or
    FetchError, which is a ValueError.
    """
    if not is_url(url):
        raise FetchError("not an http(s) URL")
    parts = urlsplit(url)
    assert parts.hostname is not None
    deadline = time.monotonic() + deadline_seconds
    connection = _open_connection(parts.scheme, parts.hostname, parts.port, deadline_seconds)
    try:
        connection.connect()
        with _shut_down_at(deadline, connection.sock):
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", path, headers={"Accept": "application/json", "Accept-Encoding": "identity"})
            response = connection.getresponse()
            if response.status != 200:
                raise FetchError(f"the server responded with status {response.status}")
            body = response.read(max_bytes + 1)
    except http.client.HTTPException as error:
        raise FetchError(f"invalid HTTP response: {type(error).__name__}") from error
    finally:
        connection.close()
    if time.monotonic() >= deadline:
        raise FetchError("the deadline has passed")
    if len(body) > max_bytes:
        raise FetchError(f"the document is larger than {max_bytes} bytes")
    try:
        return msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise FetchError("the document is not JSON") from error


def _open_connection(scheme: str, host: str, port: int | None, seconds: float) -> http.client.HTTPConnection:
    if scheme == "https":
        return http.client.HTTPSConnection(host, port, timeout=seconds, context=ssl.create_default_context())
    return http.client.HTTPConnection(host, port, timeout=seconds)


@contextlib.contextmanager
def _shut_down_at(deadline: float, sock: socket.socket) -> Iterator[None]:
    """Shut the socket down at `deadline`, which ends a blocked read.

    The socket's own timeout starts again with every byte, so a server that sends slowly could hold the thread forever.
    """

    def shut_down() -> None:
        with contextlib.suppress(OSError):
            # Not SSLSocket.shutdown: it would first unwrap the TLS connection that another thread reads from.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    watchdog = threading.Timer(max(0.0, deadline - time.monotonic()), shut_down)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
