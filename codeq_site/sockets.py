"""The TCP port that the web processes share: reserved by the supervisor, listened on by each, asked for readiness."""

from __future__ import annotations

import errno
import http.client
import socket

from core.errors import ConfigError

# Connections the kernel holds for a process that is busy; a burst of new clients fits.
BACKLOG = 4096
# A client that takes nothing of its answer for so long has gone, or wants to keep the connection busy.
UNREAD_MS = 30_000
_LOOPBACK_OF = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that shares its port with the other web processes.

    The kernel spreads connections over such sockets; processes that accept from one common socket do not share
    keep-alive connections evenly.
    """
    opened = _bind(host, port, is_shared=True)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
    opened.listen(BACKLOG)
    return opened


def reserve(host: str, port: int) -> socket.socket:
    """Take the port, or say that it is taken. The socket is bound and does not listen: the web processes do.

    With SO_REUSEPORT a second codeQ of the same user would share the port and answer half of the requests; so first
    the port is tried without.
    """
    try:
        _bind(host, port, is_shared=False).close()
        return _bind(host, port, is_shared=True)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"Port {port} is in use: stop what listens there, or choose another with --port or CODEQ_PORT."
            ) from error
        raise ConfigError(
            f"Cannot listen on {host} port {port} ({error.strerror}): choose others with CODEQ_WEB_HOST and --port."
        ) from error


def _bind(host: str, port: int, *, is_shared: bool) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def url(host: str, port: int) -> str:
    """Where a browser on this machine finds what listens on that address."""
    host = _LOOPBACK_OF.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def probe(host: str, port: int, path: str) -> tuple[int, str]:
    """What a path answers: the status (0 = nobody answers) and the body or the reason."""
    connection = http.client.HTTPConnection(_LOOPBACK_OF.get(host, host), port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read(2000).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, f"nobody answers on port {port} ({error})."
    finally:
        connection.close()
