"""How fast what ended gets from Valkey into PostgreSQL, and how late it is there.

    python -m bench.audit [--events 40000]

A Valkey and a PostgreSQL of its own, both configured as `make run` does it (PostgreSQL with fsync). The drain runs in
this process, beside nothing else for the rate, and beside 1,000 tasks a second for the lag.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.engine import row
from codeq_site.devserver.embedded import DURABLE, PostgreSQL, Valkey
from queues.engine import producer_commands, worker_commands

TENANTS = 8
PAYLOAD = '{"to":"someone@example.com","subject":"' + "x" * 150 + '"}'


@contextmanager
def stack(**settings: str) -> Iterator[None]:
    """The two servers, the settings that name them, and the tables."""
    tenant_cache = Path(tempfile.mkdtemp(prefix="codeq-b"))
    valkey = Valkey(tenant_cache / "valkey", tenant_cache / "valkey.log", tenant_cache / "v.sock", DURABLE)
    postgresql = PostgreSQL(tenant_cache / "postgresql", tenant_cache / "postgresql.log", tenant_cache / "p")
    os.environ.update(
        REDIS_URL=valkey.url, DATABASE_URL=postgresql.url, CODEQ_HOME=str(tenant_cache),
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
        yield
        from tenants.cache import tenant_cache

        tenant_cache.stop()
    finally:
        postgresql.stop(5)
        valkey.kill()
        shutil.rmtree(tenant_cache, ignore_errors=True)


def end_tasks(tid: str, count: int, webhook: str | None = None) -> None:
    """Tasks that were enqueued, claimed and completed, in batches."""
    from queues.current_engine import engine
    from queues.domain import NewResult, NewTask, Status

    new = NewTask(command="send", payload=PAYLOAD, webhook=webhook)
    while count > 0:
        batch = min(500, count)
        count -= batch
        producer_commands.enqueue(engine(), tid, "bench", [new] * batch, retention_ms=86_400_000).run_sync()
        tasks = worker_commands.claim(engine(), tid, ["send"], "w", lease_ms=300_000, limit=batch).run_sync().tasks
        results = [
            NewResult(task_id=task.id, status=Status.COMPLETED, result=b'{"ok":true}', lease_token=task.lease_token)
            for task in tasks
        ]
        worker_commands.submit(engine(), tid, "w", results, retention_ms=86_400_000).run_sync()


def tenants() -> list[str]:
    from tenants.models import Tenant

    return [Tenant.objects.get_or_create(slug=f"bench-{number}")[0].tid for number in range(TENANTS)]


def rate(events: int, webhook: str | None) -> float:
    from queues import periodic_tasks

    best = 0.0
    for _ in range(3):
        for tid in tenants():
            end_tasks(tid, events // TENANTS, webhook)
        started = time.perf_counter()
        stored, _ = periodic_tasks.run_drain(lambda: True, seconds=600)
        best = max(best, stored / (time.perf_counter() - started))
    return best


def lag(seconds: int) -> float:
    """Seconds from a result to its row: the 99th percentile at 1,000 tasks/s, with the drain run every second."""
    from django.db import connection

    from queues import periodic_tasks
    from queues.models import AuditedResult

    AuditedResult.objects.all().delete()
    done = threading.Event()

    def work() -> None:
        until = time.monotonic() + seconds
        tids = tenants()
        while time.monotonic() < until:
            started = time.monotonic()
            for tid in tids:
                end_tasks(tid, 100 // TENANTS)
            time.sleep(max(0, 0.1 - (time.monotonic() - started)))
        done.set()
        connection.close()

    threading.Thread(target=work).start()
    late: list[float] = []
    seen: set[object] = set()
    while not (done.is_set() and periodic_tasks.run_drain(lambda: True) == (0, 0)):
        started = time.monotonic()
        periodic_tasks.run_drain(lambda: True)
        now = time.time()
        for pk, ended in AuditedResult.objects.exclude(pk__in=seen).values_list("pk", "ended_at"):
            seen.add(pk)
            late.append(now - ended.timestamp())
        time.sleep(max(0, 1 - (time.monotonic() - started)))
    return sorted(late)[int(len(late) * 0.99)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=40_000)
    events = parser.parse_args().events
    with stack():
        plain = rate(events, None)
        row("drain: an attempt and a result each", f"{plain:,.0f} events/s", ">= 10,000", plain >= 10_000)
        told = rate(events, "https://example.org/hook")
        row("drain: and a delivery opened for each", f"{told:,.0f} events/s")
        p99 = lag(10)
        row("from result to row at 1,000 tasks/s, p99", f"{p99:.2f} s", "<= 3 s", p99 <= 3)


if __name__ == "__main__":
    main()
