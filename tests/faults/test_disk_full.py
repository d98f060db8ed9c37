"""A full disk: Valkey exits instead of acknowledging data that it cannot write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from codeq_site.devserver.embedded import Valkey
from core import errors
from queues.engine import producer_commands
from tests.queues.engine.checked_engine import DAY_MS, TID, CheckedEngine, build_task

# 256 KiB, in the shell's unit of 512 bytes.
LIMIT = 512


class ValkeyOnFullDisk(Valkey):
    """A Valkey with a limit on file sizes.

    The limit acts like a full disk: a partial write, then errors.
    """

    is_limited = True

    def argv(self) -> list[str]:
        limited = ["sh", "-c", f"trap '' XFSZ; ulimit -f {LIMIT}; exec \"$@\"", "sh"]
        return [*(limited if self.is_limited else []), *super().argv()]


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyOnFullDisk]:
    directory: Path = tmp_path_factory.mktemp("d")
    server = ValkeyOnFullDisk(directory / "d", directory / "log", directory / "s")
    server.start()
    yield server
    server.kill()


@pytest.mark.spec(
    "ENQ-2", "With a full disk, nothing more is acknowledged; acknowledged data is available when space is free again"
)
def test_full_disk_loses_no_acknowledged_data(server: ValkeyOnFullDisk) -> None:
    created: set[str] = set()
    with redis.Redis.from_url(server.url) as client, pytest.raises(errors.Unavailable):
        enqueue_until_full(client, created)
    assert len(created) > 50
    assert server.process is not None
    assert server.process.wait(10) == 1

    server.is_limited = False
    server.start()
    with redis.Redis.from_url(server.url) as client:
        tasks = CheckedEngine(client, partitions=1).check().tasks
    assert created <= tasks.keys()
    # The last task may have been written completely before its reply was lost.
    assert len(tasks) - len(created) <= 1


def enqueue_until_full(client: redis.Redis, created: set[str]) -> None:
    engine = CheckedEngine(client, partitions=1).engine
    while True:
        (item,) = producer_commands.enqueue(
            engine, TID, "acme", [build_task(payload="x" * 2000)], retention_ms=DAY_MS
        ).run_sync()
        assert not isinstance(item, Exception)
        created.add(item.task.id)
