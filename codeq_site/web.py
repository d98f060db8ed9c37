"""One web process: `python -m codeq_site.web`. Any number of them share the port, each with a socket of its own."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import sys

import django
import redis
import uvicorn

from codeq_site import sockets
from core.errors import ConfigError
from core.http.protocol import BoundedHttpProtocol

# Requests still running when the process is told to stop get this long.
GRACE_SECONDS = 4


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "codeq_site.settings")
    try:
        django.setup()
        from codeq_site.asgi import application
        from core.conf import conf
        from core.redis.connections import client, settle_partitions

        # Without Redis it starts nevertheless: /readyz says so, and settles them when Redis is there.
        with contextlib.suppress(redis.RedisError, OSError):
            settle_partitions(client())

        web = conf().web
        server = Server(
            uvicorn.Config(
                application,
                loop="uvloop",
                http=BoundedHttpProtocol,
                ws="none",
                lifespan="auto",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                # Workers poll; a handshake for each look would cost more than the look.
                timeout_keep_alive=75,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )
        own_socket = sockets.listen(web.host, web.port)
    except (ConfigError, OSError) as error:
        sys.exit(str(error))
    settle_memory()
    allow_files()
    server.run(sockets=[own_socket])


class Server(uvicorn.Server):
    """uvicorn, which waits for requests to end before it tells the application that it stops."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        from queues import long_poll

        # Or a deployment would have to wait for the longest poll.
        long_poll.registry().end_polls()
        await super().shutdown(sockets)


def allow_files() -> None:
    """As many connections as the machine's owner allows: a shell or a unit begins with 1,024, for old programs."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS says "unlimited" and takes no such number.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def settle_memory() -> None:
    """What the imports made lives as long as the process: the collector need not look at it (p99 24 -> 5 ms)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


if __name__ == "__main__":
    main()
