"""One web process: `python -m codeq_site.web`. Any number of them share the port, each with a socket of its own."""

from __future__ import annotations

import gc
import os
import socket
import sys

import django
import uvicorn

from codeq_site.errors import ConfigError

# Connections the kernel holds for a process that is busy; a burst of new clients fits.
BACKLOG = 4096
# Requests still running when the process is told to stop get this long.
GRACE_SECONDS = 4


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "codeq_site.settings")
    try:
        django.setup()
        from codeq_site.asgi import application
        from codeq_site.conf import conf

        web = conf().web
        server = uvicorn.Server(
            uvicorn.Config(
                application,
                loop="uvloop",
                http="httptools",
                ws="none",
                lifespan="auto",
                log_config=None,
                access_log=False,
                server_header=False,
                # Workers poll; a handshake for each look would cost more than the look.
                timeout_keep_alive=75,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )
        own_socket = listen(web.host, web.port)
    except (ConfigError, OSError) as error:
        sys.exit(str(error))
    settle_memory()
    server.run(sockets=[own_socket])


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that shares its port with the other web processes.

    The kernel spreads connections over such sockets; processes that accept from one common socket do not share
    keep-alive connections evenly.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    opened.bind(address)
    opened.listen(BACKLOG)
    return opened


def settle_memory() -> None:
    """What the imports made lives as long as the process: the collector need not look at it (p99 24 -> 5 ms)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


if __name__ == "__main__":
    main()
