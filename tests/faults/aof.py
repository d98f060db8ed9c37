"""Valkey's append-only file: parse its records, and start a server on any prefix of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from codeq_site.devserver.embedded import DURABLE, Valkey


def find_aof(server: Valkey) -> Path:
    """Return the path of the incremental file.

    There is exactly one while the file is not rewritten.
    """
    [path] = (server.data / "appendonlydir").glob("*.incr.aof")
    return path


def parse_records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the end offset and the command of each record.

    A record is `*<n>`, followed by n strings, each written as `$<length>` and its bytes.
    """
    offset = 0
    while offset < len(data):
        end = data.index(b"\r\n", offset)
        assert data[offset : offset + 1] == b"*"
        count, offset = int(data[offset + 1 : end]), end + 2
        command = b""
        for n in range(count):
            end = data.index(b"\r\n", offset)
            length = int(data[offset + 1 : end])
            if n == 0:
                command = data[end + 2 : end + 2 + length].upper()
            offset = end + 2 + length + 2
        yield offset, command


@contextmanager
def start_from_prefix(server: Valkey, size: int, directory: Path) -> Iterator[redis.Redis]:
    """Start a server on the first `size` bytes of another server's file, as after a power cut."""
    shutil.rmtree(directory, ignore_errors=True)
    files = directory / "data" / "appendonlydir"
    shutil.copytree(find_aof(server).parent, files)
    with (files / find_aof(server).name).open("r+b") as file:
        file.truncate(size)
    other = Valkey(directory / "data", directory / "log", directory / "s", DURABLE)
    other.start()
    try:
        with redis.Redis.from_url(other.url) as client:
            yield client
    finally:
        other.kill()
