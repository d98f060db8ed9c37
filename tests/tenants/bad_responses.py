"""Responses of a key server that are not a usable JSON document."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler

from tests.tenants.conftest import JwksServer


def redirect(server: JwksServer) -> Callable[[BaseHTTPRequestHandler], None]:
    def respond(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", server.url)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return respond


def send_endless_body(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" " * 65536)


def send_endless_headers(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        handler.wfile.write(b"X: " + b"y" * 60000 + b"\r\n")


BAD_RESPONSES: dict[str, Callable[[JwksServer], Callable[[BaseHTTPRequestHandler], None]]] = {
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
    "endless": lambda server: send_endless_body,
    "endless-header": lambda server: send_endless_headers,
    "not-http": lambda server: lambda handler: handler.wfile.write(b"SSH-2.0-OpenSSH\r\n"),
}
