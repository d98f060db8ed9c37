"""The TCP port that the web processes share.

`manage.py up` reserves it and probes it for readiness, and each web process listens on it.
"""

from __future__ import annotations

import errno
import http.client
import socket

from core.errors import ConfigError

# Connections that the kernel queues for a busy process; enough for a burst of new clients.
BACKLOG = 4096
# A connection is closed if its client has read nothing of a response for this time.
UNREAD_MS = 30_000
_LOOPBACK_OF = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket that shares its port with the other web processes.

    The kernel distributes connections evenly over such sockets. Processes that accept from one common socket would get
    uneven numbers of keep-alive connections.
    """
    listener = _bind(host, port, is_shared=True)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
    listener.listen(BACKLOG)
    return listener


def reserve(host: str, port: int) -> socket.socket:
    """Reserve the port with a socket that is bound but does not listen. Raises ConfigError.

    With SO_REUSEPORT a second codeQ of the same user could share the port and would receive half of the requests. So
    the port is first bound without that option.
    """
    try:
        _bind(host, port, is_shared=False).close()
        return _bind(host, port, is_shared=True)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"Port {port} is in use: stop the program that uses it, or set another port with --port or CODEQ_PORT."
            ) from error
        raise ConfigError(
            f"Cannot listen on {host} port {port} ({error.strerror}): set others with CODEQ_WEB_HOST and --port."
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
    """Return the URL under which a browser on this machine reaches the address."""
    host = _LOOPBACK_OF.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def probe(host: str, port: int, path: str) -> tuple[int, str]:
    """Request a path. Return the status and the body, or 0 and the reason of the failure."""
    connection = http.client.HTTPConnection(_LOOPBACK_OF.get(host, host), port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read(2000).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, f"no answer on port {port} ({error})."
    finally:
        connection.close()
