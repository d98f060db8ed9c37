"""Limits on the time and size of a fetch."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tenants import http_fetch
from tenants.http_fetch import FetchError, fetch_json
from tests.tenants.bad_responses import BAD_RESPONSES
from tests.tenants.conftest import JwksServer

pytestmark = pytest.mark.spec("AUT-1", "A JWKS is fetched within 3 s and 256 KiB, or not at all")


def test_limits_are_the_documented_ones() -> None:
    assert http_fetch.DEADLINE_SECONDS <= 3
    assert http_fetch.MAX_BYTES <= 256 * 1024


def test_document_is_fetched(jwks_server: JwksServer) -> None:
    jwks_server.keys = [{"kid": "a"}]
    assert fetch_json(jwks_server.url) == {"keys": [{"kid": "a"}]}
    assert fetch_json(jwks_server.url + "?v=1") == {"keys": [{"kid": "a"}]}


@pytest.mark.parametrize("kind", BAD_RESPONSES)
def test_unusable_response_is_an_error(kind: str, jwks_server: JwksServer) -> None:
    jwks_server.respond = BAD_RESPONSES[kind](jwks_server)
    with pytest.raises(FetchError):
        fetch_json(jwks_server.url)


@pytest.fixture
def slow_server() -> Iterator[Callable[[bytes], str]]:
    """A server that sends single bytes, so often that no timeout of a single read expires."""
    done = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def serve(first: bytes) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            try:
                connection.sendall(first)
                while not done.wait(0.05):
                    connection.sendall(b"x")
            except OSError:
                return

    def start(first: bytes) -> str:
        thread = threading.Thread(target=serve, args=[first])
        threads.append(thread)
        thread.start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/"

    yield start
    done.set()
    listener.close()
    for thread in threads:
        thread.join(5)


@pytest.mark.real_time
@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nX-Slow: ",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n",
    ],
    ids=["status", "header", "body", "body-until-close", "chunk"],
)
def test_slow_response_ends_at_the_deadline(first: bytes, slow_server: Callable[[bytes], str]) -> None:
    url = slow_server(first)
    started = time.monotonic()
    with pytest.raises(FetchError):
        fetch_json(url, deadline_seconds=0.5)
    assert time.monotonic() - started < 15


@pytest.mark.real_time
def test_missing_response_ends_at_the_deadline(jwks_server: JwksServer) -> None:
    jwks_server.respond = jwks_server.hang
    started = time.monotonic()
    with pytest.raises(FetchError):
        fetch_json(jwks_server.url, deadline_seconds=0.3)
    assert time.monotonic() - started < 15


def test_refused_connection_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(FetchError, match=r"(?i)refused"):
        fetch_json(f"http://127.0.0.1:{port}/")


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://127.0.0.1/",
        "jwks.json",
        "http://",
        "https:///x",
        "",
        "http://[",
        "http://a/\r\nX: y",
    ],
    ids=ascii,
)
def test_only_http_urls_are_fetched(url: str) -> None:
    with pytest.raises(FetchError):
        fetch_json(url)
