"""A million dead letters: how long the console's list and groups take, and what a bulk replay does to other tenants.

    python -m bench.deadletters [--dead 1000000] [--replay 100000]

A Valkey and a PostgreSQL of its own, as `make run` configures them. The lists are timed right after the rows came (the
worst case: nothing is vacuumed) and again after a vacuum. The replay runs in this process; another tenant's worker,
a process of its own, claims one task after the other meanwhile, and before.
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

from bench.audit import stack
from bench.engine import row
from queues.engine import maintenance_commands, producer_commands, worker_commands

MESSAGES = 40  # different failures
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


def fastest(work: Callable[[], Any], repeats: int = 3) -> float:
    """Seconds, the least of the repeats."""
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


def lists(tid: str, count: int) -> None:
    from django.db import connection

    from queues.deadletters import failure_groups, queries
    from queues.deadletters.queries import Filter
    from queues.search import pagination

    with connection.cursor() as cursor:
        for start in range(0, count, 50_000):
            cursor.execute(INSERT, [tid, MESSAGES, MESSAGES, start + 1, min(start + 50_000, count)])
        cursor.execute("ANALYZE queues_auditedresult")
    newest = pagination.keys(queries.which([tid], Filter())).found[0]
    middle = pagination.to_text(pagination.PageKey(newest.ended_at - timedelta(seconds=count / 4), uuid.UUID(int=0)))
    for when in ("as they came", "vacuumed"):
        if when == "vacuumed":
            with connection.cursor() as cursor:
                cursor.execute("VACUUM (ANALYZE) queues_auditedresult")
        asked: dict[str, Callable[[], Any]] = {
            "groups with trends": lambda: failure_groups.groups([tid]),
            "groups of all tenants": lambda: failure_groups.groups(None),
            "first page of a tenant": lambda: queries.page([tid], Filter()),
            "first page of a queue": lambda: queries.page([tid], Filter(command="command-1")),
            "a page in the middle": lambda: queries.page([tid], Filter(), cursor=middle),
            "a rare word": lambda: queries.page([tid], Filter(text=f"order {count // 2}")),
            "a common word": lambda: queries.page([tid], Filter(text="failure")),
            "a JSON path that little fits": lambda: queries.page([tid], Filter(json_path="$.customer.id == 17")),
            "a JSON path that nothing fits": lambda: queries.page([tid], Filter(json_path="$.nothing")),
            "the count": lambda: queries.count([tid], Filter()),
        }
        for name, work in asked.items():
            seconds = fastest(work)
            row(f"{name}, {count:,} dead, {when}", f"{seconds * 1000:,.0f} ms", "<= 1,000 ms", seconds <= 1)


def claims(url: str, tid: str, seconds: float, told: Any) -> None:
    """One worker of another tenant: the time of each claim."""
    import redis

    from core.redis.runners import SyncRunner
    from queues.engine import Engine, Options

    engine = Engine(SyncRunner(redis.Redis.from_url(url)), Options())
    took = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        started = time.perf_counter()
        found = worker_commands.claim(engine, tid, ["send"], "w", lease_ms=300_000, limit=1).run_sync()
        took.append(time.perf_counter() - started)
        assert found.tasks
        time.sleep(0.002)
    told.put(took)


def p99(took: list[float]) -> float:
    return statistics.quantiles(took, n=100)[98] * 1000


def replay(count: int) -> None:
    from core.conf import conf
    from queues import periodic_tasks
    from queues.current_engine import engine
    from queues.deadletters import bulk_jobs, bulk_runner
    from queues.deadletters.queries import Filter
    from queues.domain import NewTask
    from tenants.cache import tenant_cache
    from tenants.models import Tenant

    for slug in ("dying", "working"):
        Tenant.objects.get_or_create(slug=slug)
    dying, working = tenant_cache.find("dying"), tenant_cache.find("working")
    assert dying is not None
    assert working is not None
    new = [NewTask(command="send", payload='{"order":17}', max_attempts=1)] * 500
    for _ in range(count // 500):
        producer_commands.enqueue(engine(), dying.tid, "dying", new, retention_ms=86_400_000).run_sync()
        worker_commands.claim(engine(), dying.tid, ["send"], "w", lease_ms=1, limit=500).run_sync()
    while maintenance_commands.reap(engine(), dying.tid, "send", 500).run_sync()[0]:
        pass
    periodic_tasks.run_drain(lambda: True, seconds=600)
    new = [NewTask(command="send", payload='{"order":18}')] * 500
    for _ in range(100):
        producer_commands.enqueue(engine(), working.tid, "working", new, retention_ms=86_400_000).run_sync()

    told = multiprocessing.get_context("spawn").Queue()
    arguments = (conf().redis_url, working.tid)

    def watched(seconds: float) -> Any:
        process = multiprocessing.get_context("spawn").Process(target=claims, args=(*arguments, seconds, told))
        process.start()
        return process

    quiet = watched(10)
    before = told.get()
    quiet.join()
    job = bulk_jobs.start(dying, "replay", Filter(command="send"), actor="bench")
    busy = watched(count / 8_000)
    time.sleep(1)  # until it claims
    started = time.perf_counter()
    while bulk_runner.run(lambda: True, seconds=600):
        pass
    seconds = time.perf_counter() - started
    during = told.get()
    busy.join()
    job.refresh_from_db()
    assert (job.state, job.done) == ("done", count), (job.state, job.done)
    rate = count / seconds
    row(f"replay of {count:,} dead letters", f"{rate:,.0f}/s", ">= 5,000/s", rate >= 5_000)
    row("another tenant's claim, p50 and p99: alone", f"{statistics.median(before) * 1000:.2f}, {p99(before):.2f} ms")
    ratio = p99(during) / p99(before)
    busy_ms = f"{statistics.median(during) * 1000:.2f}, {p99(during):.2f} ms"
    row("another tenant's claim, p50 and p99: meanwhile", busy_ms, "p99 <= 2 x alone", ratio <= 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dead", type=int, default=1_000_000)
    parser.add_argument("--replay", type=int, default=100_000)
    asked = parser.parse_args()
    with stack():
        if asked.replay:
            replay(asked.replay)
        if asked.dead:
            from tenants.models import Tenant

            lists(Tenant.objects.get_or_create(slug="graveyard")[0].tid, asked.dead)


if __name__ == "__main__":
    main()
