"""Valkey's append-only file: where its records end, and a server that boots from any part of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from codeq_site.devserver.embedded import DURABLE, Valkey


def path_of(server: Valkey) -> Path:
    """The file that grows; there is one as long as nothing rewrites it."""
    [found] = (server.data / "appendonlydir").glob("*.incr.aof")
    return found


def records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The end of each record and its command: `*<n>`, then n times `$<length>` and so many bytes."""
    at = 0
    while at < len(data):
        end = data.index(b"\r\n", at)
        assert data[at : at + 1] == b"*"
        words, at = int(data[at + 1 : end]), end + 2
        command = b""
        for n in range(words):
            end = data.index(b"\r\n", at)
            length = int(data[at + 1 : end])
            if n == 0:
                command = data[end + 2 : end + 2 + length].upper()
            at = end + 2 + length + 2
        yield at, command


@contextmanager
def booted(server: Valkey, size: int, directory: Path) -> Iterator[redis.Redis]:
    """A new server on the first `size` bytes of what another has written, as after a power cut at that moment."""
    shutil.rmtree(directory, ignore_errors=True)
    files = directory / "data" / "appendonlydir"
    shutil.copytree(path_of(server).parent, files)
    with (files / path_of(server).name).open("r+b") as file:
        file.truncate(size)
    other = Valkey(directory / "data", directory / "log", directory / "s", DURABLE)
    other.start()
    try:
        with redis.Redis.from_url(other.url) as client:
            yield client
    finally:
        other.kill()
