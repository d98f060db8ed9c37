"""Measure what changes with time and with the backlog.

    python -m bench.sustained [wear] [--tasks 2000000] [--allocators libc,tbbmalloc,jemalloc]
    python -m bench.sustained idle [--seconds 60]  (bench/idle.py)
    python -m bench.sustained backlog [--seconds 60]  (bench/backlog.py)
    python -m bench.sustained stalls [--scale 1]  (bench/stalls.py)

`wear` measures the CPU time and the memory of Valkey over millions of tasks, by allocator. Each allocator gets a
separate Valkey, configured like that of `make run` but with fsync once per second. The servers process blocks of
100,000 tasks one after the other, in batches of 100: enqueue, claim and submit. The events are read, acknowledged and
trimmed. An ended task is deleted when 20,000 more have ended. The CPU time is that of the Valkey process, so other load
on the machine has little effect.

`backlog` measures how far the audit falls behind at full load. `stalls` measures the CPU time of each command at a
backlog of 100,000 ready, 100,000 delayed and 100,000 leased tasks, 300,000 events and 10,000 queues, in about two
minutes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections import deque
from pathlib import Path

import psutil
import redis

from bench.backlog import measure_backlog
from bench.idle import measure_idle
from bench.servers import DAY_MS, PAYLOAD
from bench.stalls import measure_stalls
from codeq_site.devserver.embedded import DURABLE, Valkey
from codeq_site.devserver.embedded.allocator import Allocator, find_allocator, find_tbb
from core.redis.runners import SyncRunner
from queues.domain import NewResult, NewTask, TaskStatus
from queues.engine import Engine, Options, keys, maintenance_commands, producer_commands, worker_commands

BLOCK = 100_000
BATCH = 100
RETAINED = 20_000
TID = "sustained"


class AllocatorRun:
    """A Valkey with one allocator, and a client that sends it tasks."""

    def __init__(self, directory: Path, name: str, allocator: Allocator | None) -> None:
        self.name = name
        directory.mkdir()
        config = {**DURABLE, "appendfsync": "everysec"}  # the disk is not measured
        self.server = Valkey(directory / "data", directory / "log", directory / "s", config)
        self.server.allocator = allocator
        self.server.start()
        self.client = redis.Redis.from_url(self.server.url)
        self.engine = Engine(SyncRunner(self.client), Options(partitions=1))
        self.ended: deque[list[str]] = deque()
        self.events = keys.of_partition(0).events

    def run_block(self) -> float:
        """Work through a block, and return the CPU of Valkey in microseconds per task."""
        process = psutil.Process(self.server.pid)
        before = process.cpu_times()
        for _ in range(BLOCK // (BATCH * 10)):
            for _ in range(10):
                new = [NewTask(command="send", payload=PAYLOAD)] * BATCH
                producer_commands.enqueue(self.engine, TID, "bench", new, retention_ms=DAY_MS).run_sync()
            for _ in range(10):
                claimed = worker_commands.claim(
                    self.engine, TID, ["send"], "w", lease_ms=300_000, limit=BATCH
                ).run_sync()
                results = [
                    NewResult(
                        task_id=task.id,
                        status=TaskStatus.COMPLETED,
                        result=b'{"ok":true}',
                        lease_token=task.lease_token,
                    )
                    for task in claimed.tasks
                ]
                worker_commands.submit(self.engine, TID, "w", results, retention_ms=DAY_MS).run_sync()
                self.ended.append([task.id for task in claimed.tasks])
            self._drain()
            while len(self.ended) * BATCH > RETAINED:
                maintenance_commands.purge(self.engine, TID, self.ended.popleft()).run_sync()
        after = process.cpu_times()
        return (after.user + after.system - before.user - before.system) / BLOCK * 1e6

    def _drain(self) -> None:
        if not self.client.exists(self.events):
            return
        if not self.client.xinfo_groups(self.events):
            self.client.xgroup_create(self.events, "audit", id="0")
        while entries := self.client.xreadgroup("audit", "drain", {self.events: ">"}, count=500):
            ids = [stream_id for stream_id, _ in entries[0][1]]
            self.client.xack(self.events, "audit", *ids)
        self.client.xtrim(self.events, maxlen=0, approximate=False)

    def memory(self) -> tuple[float, float]:
        """Return the memory that Valkey has allocated and its resident memory, in MiB."""
        held = self.client.info("memory")["used_memory"] / 2**20
        return held, psutil.Process(self.server.pid).memory_info().rss / 2**20

    def close(self) -> None:
        self.client.close()
        self.server.kill()


def compare_allocators(tasks: int, names: list[str]) -> None:
    system, tbb = find_allocator(), find_tbb()
    available: dict[str, Allocator | None] = {"libc": None}
    available |= {allocator.name: allocator for allocator in (system, tbb) if allocator}
    directory = Path(tempfile.mkdtemp(prefix="codeq-w"))
    runs = [AllocatorRun(directory / name, name, available[name]) for name in names if name in available]
    print(f"{'tasks':>10}" + "".join(f"{run.name:>32}" for run in runs))
    first: dict[str, float] = {}
    try:
        for block in range(1, tasks // BLOCK + 1):
            cells = []
            for run in runs:
                us = run.run_block()
                first.setdefault(run.name, us)
                held, resident = run.memory()
                cells.append(f"{us:6.1f} µs {us / first[run.name]:5.2f}x {resident:5.0f}/{held:.0f} MiB")
            print(f"{block * BLOCK:>10,}" + "".join(f"{cell:>32}" for cell in cells), flush=True)
    finally:
        for run in runs:
            run.close()
        shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["wear", "idle", "backlog", "stalls"], default="wear")
    parser.add_argument("--tasks", type=int, default=2_000_000)
    parser.add_argument("--allocators", default="libc,tbbmalloc,jemalloc")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--scale", type=float, default=1.0)
    arguments = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "codeq_site.settings")
    if arguments.what == "idle":
        measure_idle(arguments.seconds, settle_seconds=20.0)
    elif arguments.what == "backlog":
        measure_backlog(arguments.seconds)
    elif arguments.what == "stalls":
        measure_stalls(arguments.scale)
    else:
        compare_allocators(arguments.tasks, arguments.allocators.split(","))


if __name__ == "__main__":
    main()
