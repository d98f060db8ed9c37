"""Servers, tenants and printed rows that several benchmarks use."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import redis

from codeq_site.devserver.embedded import DURABLE, PostgreSQL, Valkey
from core.redis.runners import SyncRunner
from queues.domain import NewResult, NewTask, Task, TaskStatus
from queues.engine import Engine, Options, producer_commands, worker_commands

TENANTS = 8
DAY_MS = 86_400_000
PAYLOAD = json.dumps({"to": "someone@example.com", "subject": "x" * 120, "n": 1234567, "at": "2026-01-01T00:00:00Z"})
PAYLOAD += " " * (200 - len(PAYLOAD))


class Bench:
    """A client and an engine on a Valkey, with shortcuts for a task's life cycle."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.engine = Engine(SyncRunner(client), Options())

    def script_us(self, work: Callable[[], int], repeats: int = 3) -> float:
        """Return the script time in microseconds per unit of work, the shortest of the repetitions.

        `work` returns the number of units.
        """
        times = []
        for _ in range(repeats):
            self.client.config_resetstat()
            units = work()
            times.append(self.client.info("commandstats")["cmdstat_evalsha"]["usec"] / units)
        return min(times)

    def enqueue(self, tid: str, count: int, batch: int, **options: Any) -> int:
        new = NewTask(command="send", payload=PAYLOAD, **options)
        for _ in range(count // batch):
            producer_commands.enqueue(self.engine, tid, "bench", [new] * batch, retention_ms=DAY_MS).run_sync()
        return count

    def claim(self, tid: str, count: int, batch: int, lease_ms: int = 300_000) -> list[list[Task]]:
        return [
            worker_commands.claim(self.engine, tid, ["send"], "w", lease_ms=lease_ms, limit=batch).run_sync().tasks
            for _ in range(count // batch)
        ]

    def submit(self, tid: str, claims: list[list[Task]]) -> int:
        for tasks in claims:
            results = [
                NewResult(task_id=t.id, status=TaskStatus.COMPLETED, result=b'{"ok":true}', lease_token=t.lease_token)
                for t in tasks
            ]
            worker_commands.submit(self.engine, tid, "w", results, retention_ms=DAY_MS).run_sync()
        return sum(map(len, claims))


@contextmanager
def start_bench() -> Iterator[Bench]:
    """Start a Valkey that is configured like that of `make run`, but without persistence."""
    directory = Path(tempfile.mkdtemp(prefix="codeq-b"))
    server = Valkey(directory / "data", directory / "log", directory / "s", {**DURABLE, "appendonly": "no"})
    server.start()
    try:
        yield Bench(redis.Redis.from_url(server.url))
    finally:
        server.kill()
        shutil.rmtree(directory, ignore_errors=True)


class Servers(NamedTuple):
    """The processes of the benchmark's servers."""

    valkey: psutil.Process
    postgresql: psutil.Process


@contextmanager
def start_servers(valkey_config: Mapping[str, str] = DURABLE, **settings: str) -> Iterator[Servers]:
    """Start Valkey and PostgreSQL, set the environment to use them, and create the tables."""
    directory = Path(tempfile.mkdtemp(prefix="codeq-b"))
    valkey = Valkey(directory / "valkey", directory / "valkey.log", directory / "v.sock", valkey_config)
    postgresql = PostgreSQL(directory / "postgresql", directory / "postgresql.log", directory / "p")
    os.environ.update(
        REDIS_URL=valkey.url, DATABASE_URL=postgresql.url, CODEQ_HOME=str(directory),
        DJANGO_SETTINGS_MODULE="codeq_site.settings", **settings,
    )  # fmt: skip
    valkey.start()
    try:
        postgresql.start()
        postgresql.ensure_database()
        import django
        from django.core.management import call_command

        django.setup()
        call_command("migrate", verbosity=0, skip_checks=True)
        assert valkey.process
        assert postgresql.process
        yield Servers(psutil.Process(valkey.process.pid), psutil.Process(postgresql.process.pid))
        from tenants.cache import tenant_cache

        tenant_cache.stop()
    finally:
        postgresql.stop(5)
        valkey.kill()
        shutil.rmtree(directory, ignore_errors=True)


def create_tenants() -> list[str]:
    from tenants.models import Tenant

    return [Tenant.objects.get_or_create(slug=f"bench-{number}")[0].tid for number in range(TENANTS)]


def print_row(label: str, figure: str, target: str = "", is_met: bool | None = None) -> None:
    mark = {True: "ok", False: "MISSED", None: ""}[is_met]
    print(f"{label:<58} {figure:>24}   {target:<18} {mark}", flush=True)
