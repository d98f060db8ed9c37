"""Measure the rate at which events are copied from Valkey to PostgreSQL, and their delay.

    python -m bench.audit [--events 40000]

The benchmark starts its own Valkey and PostgreSQL, configured like those of `make run` (PostgreSQL with fsync). The
drain runs in this process: without other load to measure the rate, and with about 1,000 tasks per second to
measure the delay.
"""

from __future__ import annotations

import argparse
import threading
import time

from bench.servers import TENANTS, create_tenants, print_row, start_servers
from queues.engine import producer_commands, worker_commands

PAYLOAD = '{"to":"someone@example.com","subject":"' + "x" * 150 + '"}'


def end_tasks(tid: str, count: int, webhook: str | None = None) -> None:
    """Enqueue, claim and complete tasks, in batches."""
    from queues.current_engine import engine
    from queues.domain import NewResult, NewTask, TaskStatus

    new = NewTask(command="send", payload=PAYLOAD, webhook=webhook)
    while count > 0:
        batch = min(500, count)
        count -= batch
        producer_commands.enqueue(engine(), tid, "bench", [new] * batch, retention_ms=86_400_000).run_sync()
        tasks = worker_commands.claim(engine(), tid, ["send"], "w", lease_ms=300_000, limit=batch).run_sync().tasks
        results = [
            NewResult(task_id=task.id, status=TaskStatus.COMPLETED, result=b'{"ok":true}', lease_token=task.lease_token)
            for task in tasks
        ]
        worker_commands.submit(engine(), tid, "w", results, retention_ms=86_400_000).run_sync()


def measure_rate(events: int, webhook: str | None) -> float:
    """Return the events drained per second, the best of three repetitions."""
    from queues import periodic_tasks

    best = 0.0
    for _ in range(3):
        for tid in create_tenants():
            end_tasks(tid, events // TENANTS, webhook)
        started = time.perf_counter()
        stored, _ = periodic_tasks.run_drain(lambda: True, seconds=600)
        best = max(best, stored / (time.perf_counter() - started))
    return best


def measure_lag(seconds: int) -> float:
    """Return the 99th percentile of the seconds from a result to its row.

    The load is about 1,000 tasks/s. The drain runs every second.
    """
    from django.db import connection

    from queues import periodic_tasks
    from queues.models import AuditedResult

    AuditedResult.objects.all().delete()
    done = threading.Event()

    def run_tasks() -> None:
        deadline = time.monotonic() + seconds
        tids = create_tenants()
        while time.monotonic() < deadline:
            started = time.monotonic()
            for tid in tids:
                end_tasks(tid, 100 // TENANTS)
            time.sleep(max(0, 0.1 - (time.monotonic() - started)))
        done.set()
        connection.close()

    threading.Thread(target=run_tasks).start()
    delays: list[float] = []
    seen: set[object] = set()
    while not (done.is_set() and periodic_tasks.run_drain(lambda: True) == (0, 0)):
        started = time.monotonic()
        periodic_tasks.run_drain(lambda: True)
        now = time.time()
        for pk, ended in AuditedResult.objects.exclude(pk__in=seen).values_list("pk", "ended_at"):
            seen.add(pk)
            delays.append(now - ended.timestamp())
        time.sleep(max(0, 1 - (time.monotonic() - started)))
    return sorted(delays)[int(len(delays) * 0.99)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=40_000)
    events = parser.parse_args().events
    with start_servers():
        plain_rate = measure_rate(events, None)
        print_row(
            "drain: an attempt and a result for each event",
            f"{plain_rate:,.0f} events/s",
            ">= 10,000",
            plain_rate >= 10_000,
        )
        webhook_rate = measure_rate(events, "https://example.org/hook")
        print_row("drain: the same, with a delivery opened for each", f"{webhook_rate:,.0f} events/s")
        p99 = measure_lag(10)
        print_row("from result to row at 1,000 tasks/s, p99", f"{p99:.2f} s", "<= 3 s", p99 <= 3)


if __name__ == "__main__":
    main()
