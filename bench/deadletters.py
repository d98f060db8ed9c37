"""Measure lists of a million dead letters, and a bulk replay's effect on other tenants.

    python -m bench.deadletters [--dead 1000000] [--replay 100000]

The benchmark starts its own Valkey and PostgreSQL, configured like those of `make run`. The lists are timed right after
the rows are inserted (the worst case: nothing is vacuumed) and again after a vacuum. The replay runs in this process.
A worker of another tenant, in a separate process, claims one task after the other, first before and then during the
replay.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from bench.servers import print_row, start_servers
from queues.engine import maintenance_commands, producer_commands, worker_commands

FAILURES = 40  # kinds of failure in each queue; every message also contains its order's number
INSERT = """
    INSERT INTO queues_auditedresult (
        task_id, tenant_id, command, priority, payload, status, outcome, is_dead, fingerprint, error, result, artifacts,
        attempts, deliveries, max_attempts, worker, webhook, trace_parent, trace_state, created_at, ended_at, position
    )
    SELECT gen_random_uuid(), %s, 'command-' || n %% 3, 0,
        '{"order":' || n || ',"customer":{"id":' || n %% 1000 || '}}', 'FAILED', 'NACKED', true,
        hashtextextended((n %% 3) || (n %% %s)::text, 0), 'failure ' || n %% %s || ' of order ' || n,
        '', '', 5, 5, 5, 'w-' || n %% 50, '', '', '', now() - n * interval '0.5 second' - interval '1 hour',
        now() - n * interval '0.5 second', n
    FROM generate_series(%s::int, %s::int) AS n
"""


def measure_fastest(work: Callable[[], Any], repeats: int = 3) -> float:
    """Return the shortest duration of the repetitions in seconds."""
    durations = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        durations.append(time.perf_counter() - started)
    return min(durations)


def measure_lists(tid: str, count: int) -> None:
    from django.db import connection

    from queues.deadletters import failure_groups, queries
    from queues.deadletters.queries import Filter
    from queues.search import pagination

    with connection.cursor() as cursor:
        for start in range(0, count, 50_000):
            cursor.execute(INSERT, [tid, FAILURES, FAILURES, start + 1, min(start + 50_000, count)])
        cursor.execute("ANALYZE queues_auditedresult")
    newest = pagination.read_keys(queries.to_row_filter([tid], Filter())).keys[0]
    middle_key = pagination.PageKey(newest.ended_at - timedelta(seconds=count / 4), uuid.UUID(int=0))
    middle = pagination.encode_cursor(middle_key)
    for state in ("not vacuumed", "vacuumed"):
        if state == "vacuumed":
            with connection.cursor() as cursor:
                cursor.execute("VACUUM (ANALYZE) queues_auditedresult")
        measurements: dict[str, Callable[[], Any]] = {
            "groups with trends": lambda: failure_groups.groups([tid]),
            "groups of all tenants": lambda: failure_groups.groups(None),
            "first page of a tenant": lambda: queries.page([tid], Filter()),
            "first page of a queue": lambda: queries.page([tid], Filter(command="command-1")),
            "a page in the middle": lambda: queries.page([tid], Filter(), cursor=middle),
            "a rare word": lambda: queries.page([tid], Filter(text=f"order {count // 2}")),
            "a common word": lambda: queries.page([tid], Filter(text="failure")),
            "a JSON path that matches few": lambda: queries.page([tid], Filter(json_path="$.customer.id == 17")),
            "a JSON path that matches nothing": lambda: queries.page([tid], Filter(json_path="$.nothing")),
            "the count": lambda: queries.count([tid], Filter()),
        }
        for name, work in measurements.items():
            seconds = measure_fastest(work)
            print_row(f"{name}, {count:,} dead, {state}", f"{seconds * 1000:,.0f} ms", "<= 1,000 ms", seconds <= 1)


def measure_claims(url: str, tid: str, seconds: float, results: Any) -> None:
    """Claim tasks as a worker, and put the durations of the claims on the queue `results`."""
    import redis

    from core.redis.runners import SyncRunner
    from queues.engine import Engine, Options

    engine = Engine(SyncRunner(redis.Redis.from_url(url)), Options())
    durations = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        started = time.perf_counter()
        claimed = worker_commands.claim(engine, tid, ["send"], "w", lease_ms=300_000, limit=1).run_sync()
        durations.append(time.perf_counter() - started)
        assert claimed.tasks
        time.sleep(0.002)
    results.put(durations)


def compute_p99_ms(durations: list[float]) -> float:
    return statistics.quantiles(durations, n=100)[98] * 1000


def measure_replay(count: int) -> None:
    from core.conf import conf
    from queues import periodic_tasks
    from queues.current_engine import engine
    from queues.deadletters import bulk_jobs, bulk_runner
    from queues.deadletters.queries import Filter
    from queues.domain import NewTask
    from tenants.cache import tenant_cache
    from tenants.models import Tenant

    for slug in ("failing", "other"):
        Tenant.objects.get_or_create(slug=slug)
    failing_tenant, other_tenant = tenant_cache.find("failing"), tenant_cache.find("other")
    assert failing_tenant is not None
    assert other_tenant is not None
    new = [NewTask(command="send", payload='{"order":17}', max_attempts=1)] * 500
    for _ in range(count // 500):
        producer_commands.enqueue(engine(), failing_tenant.tid, "failing", new, retention_ms=86_400_000).run_sync()
        worker_commands.claim(engine(), failing_tenant.tid, ["send"], "w", lease_ms=1, limit=500).run_sync()
    while maintenance_commands.reap(engine(), failing_tenant.tid, "send", 500).run_sync()[0]:
        pass
    periodic_tasks.run_drain(lambda: True, seconds=600)
    new = [NewTask(command="send", payload='{"order":18}')] * 500
    for _ in range(100):
        producer_commands.enqueue(engine(), other_tenant.tid, "other", new, retention_ms=86_400_000).run_sync()

    results = multiprocessing.get_context("spawn").Queue()
    arguments = (conf().redis_url, other_tenant.tid)

    def start_worker(seconds: float) -> Any:
        process = multiprocessing.get_context("spawn").Process(
            target=measure_claims, args=(*arguments, seconds, results)
        )
        process.start()
        return process

    worker = start_worker(10)
    before = results.get()
    worker.join()
    job = bulk_jobs.start(failing_tenant, "replay", Filter(command="send"), actor="bench")
    worker = start_worker(count / 8_000)  # about as long as the replay takes
    time.sleep(1)  # the worker needs this time to start
    started = time.perf_counter()
    while bulk_runner.run(lambda: True, seconds=600):
        pass
    seconds = time.perf_counter() - started
    during = results.get()
    worker.join()
    job.refresh_from_db()
    assert (job.state, job.done) == ("done", count), (job.state, job.done)
    rate = count / seconds
    print_row(f"replay of {count:,} dead letters", f"{rate:,.0f}/s", ">= 5,000/s", rate >= 5_000)
    print_row(
        "another tenant's claim, p50 and p99: alone",
        f"{statistics.median(before) * 1000:.2f}, {compute_p99_ms(before):.2f} ms",
    )
    ratio = compute_p99_ms(during) / compute_p99_ms(before)
    during_ms = f"{statistics.median(during) * 1000:.2f}, {compute_p99_ms(during):.2f} ms"
    print_row("another tenant's claim, p50 and p99: during the replay", during_ms, "p99 <= 2 x alone", ratio <= 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dead", type=int, default=1_000_000)
    parser.add_argument("--replay", type=int, default=100_000)
    options = parser.parse_args()
    with start_servers():
        if options.replay:
            measure_replay(options.replay)
        if options.dead:
            from tenants.models import Tenant

            measure_lists(Tenant.objects.get_or_create(slug="bench")[0].tid, options.dead)


if __name__ == "__main__":
    main()
