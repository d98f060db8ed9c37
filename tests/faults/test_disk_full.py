"""The disk of the append-only file is full: Valkey ends sooner than acknowledge what it cannot keep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from codeq_site.devserver.embedded import Valkey
from core import errors
from queues.engine import producer_commands
from tests.queues.engine.world import DAY_MS, TID, World, new

# In the shell's unit of 512 bytes: 256 KiB.
LIMIT = 512


class OnASmallDisk(Valkey):
    """Its files may not grow past a limit. To the server that is a full disk: a short write, then none."""

    is_full = True

    def argv(self) -> list[str]:
        limited = ["sh", "-c", f"trap '' XFSZ; ulimit -f {LIMIT}; exec \"$@\"", "sh"]
        return [*(limited if self.is_full else []), *super().argv()]


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnASmallDisk]:
    room: Path = tmp_path_factory.mktemp("d")
    server = OnASmallDisk(room / "d", room / "log", room / "s")
    server.start()
    yield server
    server.kill()


@pytest.mark.spec("ENQ-2", "A full disk: nothing more is acknowledged, what was is there when there is room again")
def test_a_full_disk_loses_nothing_that_was_acknowledged(server: OnASmallDisk) -> None:
    made: set[str] = set()
    with redis.Redis.from_url(server.url) as client, pytest.raises(errors.Unavailable):
        fill(client, made)
    assert len(made) > 50
    assert server.process is not None
    assert server.process.wait(10) == 1

    server.is_full = False
    server.start()
    with redis.Redis.from_url(server.url) as client:
        found = World(client, partitions=1).check().tasks
    assert made <= found.keys()
    # One may have been written whole, and its answer lost with the server.
    assert len(found) - len(made) <= 1


def fill(client: redis.Redis, made: set[str]) -> None:
    engine = World(client, partitions=1).engine
    while True:
        (item,) = producer_commands.enqueue(
            engine, TID, "acme", [new(payload="x" * 2000)], retention_ms=DAY_MS
        ).run_sync()
        assert not isinstance(item, Exception)
        made.add(item.task.id)
