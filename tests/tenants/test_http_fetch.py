"""Limits on the time and size of a fetch."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from tenants import http_fetch
from tenants.http_fetch import FetchError, fetch_json
from tests.tenants.conftest import JwksServer

pytestmark = pytest.mark.spec("AUT-1", "A JWKS is fetched within 3 s and 256 KiB, or not at all")


def test_limits_are_the_documented_ones() -> None:
    assert http_fetch.DEADLINE_SECONDS <= 3
    assert http_fetch.MAX_BYTES <= 256 * 1024


def test_document_is_fetched(jwks_server: JwksServer) -> None:
    jwks_server.keys = [{"kid": "a"}]
    assert fetch_json(jwks_server.url) == {"keys": [{"kid": "a"}]}
    assert fetch_json(jwks_server.url + "?v=1") == {"keys": [{"kid": "a"}]}


def redirect(server: JwksServer) -> Callable[[BaseHTTPRequestHandler], None]:
    def respond(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", server.url)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return respond


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" " * 65536)


def endless_header(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        handler.wfile.write(b"X: " + b"y" * 60000 + b"\r\n")


BAD: dict[str, Callable[[JwksServer], Callable[[BaseHTTPRequestHandler], None]]] = {
    "500": lambda server: lambda handler: server.send(handler, 500, b'{"keys": []}'),
    "404": lambda server: lambda handler: server.send(handler, 404, b'{"keys": []}'),
    "redirect": redirect,
    "html": lambda server: lambda handler: server.send(handler, 200, b"<html><h1>Sign in</h1></html>"),
    "nothing": lambda server: lambda handler: server.send(handler, 200, b""),
    "half": lambda server: lambda handler: server.send(handler, 200, b'{"keys": [{"kid"'),
    "deep": lambda server: lambda handler: server.send(handler, 200, b"[" * 100_000),
    "not-utf8": lambda server: lambda handler: server.send(handler, 200, b'{"a": "\xff"}'),
    "gzip": lambda server: lambda handler: server.send(handler, 200, b"\x1f\x8b\x08\x00"),
    "huge": lambda server: lambda handler: server.send(handler, 200, b'"' + b"x" * (256 * 1024) + b'"'),
    "endless": lambda server: endless,
    "endless-header": lambda server: endless_header,
    "not-http": lambda server: lambda handler: handler.wfile.write(b"SSH-2.0-OpenSSH\r\n"),
}


@pytest.mark.parametrize("kind", BAD)
def test_unusable_response_is_an_error(kind: str, jwks_server: JwksServer) -> None:
    jwks_server.respond = BAD[kind](jwks_server)
    with pytest.raises(FetchError):
        fetch_json(jwks_server.url)


@pytest.fixture
def slow_server() -> Iterator[Callable[[bytes], str]]:
    """A server that sends single bytes, too fast for a timeout between two bytes."""
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
    with pytest.raises((FetchError, OSError)):
        fetch_json(url, deadline_seconds=0.5)
    assert time.monotonic() - started < 15


@pytest.mark.real_time
def test_missing_response_ends_at_the_deadline(jwks_server: JwksServer) -> None:
    jwks_server.respond = jwks_server.hang
    started = time.monotonic()
    with pytest.raises((FetchError, OSError)):
        fetch_json(jwks_server.url, deadline_seconds=0.3)
    assert time.monotonic() - started < 15


def test_refused_connection_is_an_os_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(OSError, match=r"refused"):
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
