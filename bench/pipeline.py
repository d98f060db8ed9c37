"""How fast history becomes marts, beside DuckDB on the same files; what a tenant with nearly all of it costs;
how fast it is ingested; how fast tasks are loaded.

    python -m bench.pipeline [marts|skew|ingest|load …] [--attempts 1000000,5000000,20000000] [--master local[*]]

Every measurement is a process of its own, so that start-up, compiled code and memory of one are not another's. Marts
are add_durations from the moment the session stands; memory is the most that driver, JVM and Python workers held together.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from pipeline.spark import jobs, schemas, session, sinks, snapshots, sources
from pipeline.spark.jobs import JobContext
from pipeline.spark.jobs.marts import TRANSFORMS
from pipeline.spark.lake import Lake, Manifest, files, new_run_id
from pipeline.spark.load import LoadTarget, load
from pipeline.spark.synthetic import HistoryShape, generate_history, write_to_audit
from pipeline.spark.transforms.attempts import add_rejection_reason, add_durations

MARTS = [name for name in TRANSFORMS if name != "webhooks"]
ATTEMPTS_PER_TASK = 1.065  # of the synthetic history
DAYS, TENANTS = 30, 20

# The marts in DuckDB's words, over the same facts and to Parquet as well. Its regular expressions have no look-around,
# so `failures` names groups by digits alone; `capacity` is without the numbers of workers.
DUCKDB = {
    "throughput": """SELECT date, tenant, command, date_trunc('hour', ended_at) AS hour, count(*),
        count(*) FILTER (outcome = 'COMPLETED'), count(*) FILTER (outcome = 'FAILED'),
        count(*) FILTER (outcome = 'NACKED'), count(*) FILTER (outcome = 'ABANDONED'),
        count(*) FILTER (outcome = 'EXPIRED'), count(*) FILTER (number > 1) FROM facts GROUP BY ALL ORDER BY ALL""",
    "latency": """SELECT date, tenant, command, date_trunc('hour', ended_at) AS hour, count(*), avg(wait_ms),
        quantile_disc(wait_ms, [0.5, 0.95, 0.99, 1]), avg(run_ms), quantile_disc(run_ms, [0.5, 0.95, 0.99, 1])
        FROM facts WHERE claimed_at IS NOT NULL GROUP BY ALL ORDER BY ALL""",
    "failures": """SELECT date, tenant, command, regexp_replace(error, '[0-9]+', '<n>', 'g') AS name, count(*),
        min(ended_at), max(ended_at), min(task_id) FROM facts
        WHERE outcome IN ('FAILED', 'NACKED', 'ABANDONED', 'EXPIRED') GROUP BY ALL ORDER BY ALL""",
    "usage": """SELECT date, tenant, count(*) FILTER (status IN ('COMPLETED', 'FAILED', 'CANCELLED')), count(*),
        sum(run_ms), sum(payload_bytes), sum(result_bytes) FROM facts GROUP BY ALL ORDER BY ALL""",
    "capacity": """SELECT visible_at::date AS date, tenant, command, date_trunc('hour', visible_at) AS hour, count(*),
        avg(run_ms), var_pop(run_ms), sum(run_ms), avg(wait_ms) FROM facts
        WHERE claimed_at IS NOT NULL GROUP BY ALL ORDER BY ALL""",
    "leases": """SELECT date, tenant, command, count(*), quantile_disc(run_ms, [0.5, 0.99, 1]),
        quantile_disc(number, 0.999), sum(run_ms) FILTER (outcome = 'EXPIRED') FROM facts
        WHERE claimed_at IS NOT NULL GROUP BY ALL ORDER BY ALL""",
}


@contextmanager
def peak_memory() -> Iterator[Callable[[], float]]:
    """The most that this process and its children held at once, in GiB; sampled, pages they share counted once each."""
    most, done = [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.2):
            total = 0
            for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
                try:
                    total += process.memory_info().rss - process.memory_info().shared
                except psutil.Error:
                    continue
            most[0] = max(most[0], total)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield lambda: most[0] / 2**30
    finally:
        done.set()
        thread.join()


def prepare(at: str, count: int, master: str) -> dict[str, Any]:
    """The facts of so many attempts, straight into the lake as the `attempts` job would leave them."""
    spark, lake = session.start(master), Lake(f"{at}/lake")
    shape = HistoryShape(round(count / ATTEMPTS_PER_TASK), days=DAYS, tenants=TENANTS)
    rows = add_rejection_reason(generate_history(spark, shape).drop("arrived_at"), schemas.SOURCE, snapshots.ATTEMPTS.day).drop("reason")
    staged = sinks.stage(sinks.distribute(add_durations(rows), schemas.ATTEMPTS, {}), lake, schemas.ATTEMPTS, new_run_id())
    facts = sinks.count_rows(spark, lake, schemas.ATTEMPTS, staged, digest=True)
    lake.commit(lake.root(), {schemas.ATTEMPTS.name: Manifest(facts)})
    return {"rows": lake.manifest(schemas.ATTEMPTS.name).rows}


def marts(at: str, count: int, master: str) -> dict[str, Any]:
    began = time.monotonic()
    with peak_memory() as gib:
        spark, lake = session.start(master), Lake(f"{at}/lake")
        started = time.monotonic()
        seconds = {r.job: r.seconds for r in jobs.run(JobContext(spark, lake), MARTS)}
        total = time.monotonic() - started
        return {"start_s": started - began, "total_s": total, "GiB": gib(), "rows": lake.manifest("attempts").rows} | {
            "each": seconds
        }


def duckdb(at: str, count: int, master: str) -> dict[str, Any]:
    import duckdb as engine

    paths = [path.removeprefix("file://") for path in files(f"{at}/lake", "attempts")]
    with peak_memory() as gib:
        connection = engine.connect()
        connection.execute("SET TimeZone = 'UTC'")
        began, seconds = time.monotonic(), {}
        connection.execute(f"CREATE VIEW facts AS SELECT * FROM read_parquet({paths}, hive_partitioning = true)")
        for name, query in DUCKDB.items():
            start = time.monotonic()
            connection.execute(f"CREATE OR REPLACE TABLE mart AS {query}")
            connection.execute(f"COPY mart TO '{at}/duckdb-{name}.parquet'")
            seconds[name] = round(time.monotonic() - start, 3)
        return {"total_s": time.monotonic() - began, "GiB": gib(), "each": seconds}


def ingest(at: str, count: int, master: str) -> dict[str, Any]:
    from bench.audit import stack

    with stack():
        from pipeline import services
        from tenants.services import create_tenant

        tids = tuple(create_tenant(f"tenant-{i}").tid for i in range(TENANTS))
        spark = session.start(master)
        shape = HistoryShape(round(count / ATTEMPTS_PER_TASK), days=DAYS, tenants=TENANTS, tenant_ids=tids)
        rows = write_to_audit(generate_history(spark, shape), services.dsn())
        began = time.monotonic()
        with snapshots.hold_snapshot(services.dsn()) as moment:
            sources.read(spark, services.dsn(), moment, via="python").write.format("noop").mode("overwrite").save()
        read_s = time.monotonic() - began
        report, facts = jobs.run(JobContext(spark, Lake(f"{at}/ingested"), services.dsn()), ["ingest", "attempts"])
        assert report.rows_out == facts.rows_out == rows
        return {"rows": rows, "read_s": read_s, "total_s": report.seconds, "facts_s": facts.seconds}


def loading(at: str, count: int, master: str) -> dict[str, Any]:
    from bench.audit import stack

    count = min(count, 500_000)
    with stack(CODEQ_WEB_PORT="18765"):
        from tenants.services import create_tenant, issue_token

        create_tenant("bench")
        token = issue_token("bench", "producer")
        webs = [subprocess.Popen([sys.executable, "-m", "codeq_site.web"]) for _ in range(os.cpu_count() or 1)]
        try:
            spark, lake = session.start(master), Lake(f"{at}/loads")
            rows = spark.range(count).selectExpr(
                "id", "concat('customer-', id % 1000) AS customer", "repeat('x', 80) t"
            )
            rows.write.mode("overwrite").parquet(f"{at}/dataset.parquet")
            target = LoadTarget("http://127.0.0.1:18765", token, "import")
            result = load(spark, lake, f"{at}/dataset.parquet", target, key="id")
            assert result.sent == count, result
            return {"rows": count, "total_s": result.seconds}
        finally:
            for web in webs:
                web.terminate()
            for web in webs:
                web.wait(10)


def one_day(at: str, count: int, master: str, top_share: float) -> dict[str, Any]:
    """From files to marts: one day whose rows the tenants share alike, or of which one tenant has most."""
    shape = HistoryShape(round(count / ATTEMPTS_PER_TASK), days=1, tenants=TENANTS, top_share=top_share)
    with peak_memory() as gib:
        spark, lake = session.start(master), Lake(f"{at}/{top_share}/lake")
        generate_history(spark, shape).drop("arrived_at").write.parquet(f"{at}/{top_share}/source")
        context = JobContext(spark, lake, files=f"{at}/{top_share}/source")
        seconds = {r.job: r.seconds for r in jobs.run(context, ["ingest", "attempts", *MARTS])}
        parts = lake.manifest("attempts").partitions.values()
        return {
            "rows": sum(part.rows for part in parts),
            "most": max(part.rows for part in parts),
            "total_s": sum(seconds.values()),
            "GiB": gib(),
            "each": seconds,
        }


STEPS = {
    "prepare": prepare,
    "marts": marts,
    "duckdb": duckdb,
    "ingest": ingest,
    "load": loading,
    "balanced": lambda at, count, master: one_day(at, count, master, 0),
    "skewed": lambda at, count, master: one_day(at, count, master, 0.95),
}


def apart(step: str, at: str, count: int, master: str) -> dict[str, Any]:
    """Run one measurement in a process of its own; its answer is the last line it prints."""
    command = [sys.executable, "-m", "bench.pipeline", "--step", step, "--at", at, "--attempts", str(count)]
    told = subprocess.run([*command, "--master", master], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    if told.returncode:
        raise SystemExit(f"{step} failed: run `{' '.join(command)}` to see why")
    answer: dict[str, Any] = json.loads(told.stdout.strip().rpartition("\n")[2])
    return answer


def table(counts: list[int], master: str, wanted: list[str], at: str) -> None:
    if "marts" in wanted:
        print("| attempts | session, s | all marts, s | peak, GiB | rows/s | DuckDB, s | peak, GiB |")
        print("|---|---|---|---|---|---|---|")
        per_row: list[float] = []
        for count in counts:
            apart("prepare", at, count, master)
            ours = apart("marts", at, count, master)
            theirs = apart("duckdb", at, count, master) if has_duckdb() else {"total_s": float("nan"), "GiB": 0.0}
            per_row.append(ours["total_s"] / ours["rows"])
            print(
                f"| {ours['rows']:,} | {ours['start_s']:.1f} | {ours['total_s']:.1f} |"
                f" {ours['GiB']:.2f} | {ours['rows'] / ours['total_s']:,.0f} | {theirs['total_s']:.1f} |"
                f" {theirs['GiB']:.2f} |",
                flush=True,
            )
            print("  " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in ours["each"].items()), flush=True)
            shutil.rmtree(f"{at}/lake", ignore_errors=True)
        for smaller, larger, count in zip(per_row, per_row[1:], counts[1:], strict=False):
            print(f"  scaling to {count:,}: {larger / smaller:.2f} x linear (promised: at most 1.2)")
    if "skew" in wanted:
        even, skewed = (apart(step, at, counts[0], master) for step in ("balanced", "skewed"))
        print(
            f"skew: {skewed['rows']:,} attempts of a day, {skewed['most'] / skewed['rows']:.0%} of one tenant:"
            f" {skewed['total_s']:.1f} s and {skewed['GiB']:.2f} GiB; of tenants alike {even['total_s']:.1f} s and"
            f" {even['GiB']:.2f} GiB; {skewed['total_s'] / even['total_s']:.2f} x (promised: at most 3)"
        )
        for name, told in (("alike", even), ("skewed", skewed)):
            each = ", ".join(f"{job} {seconds:.1f}" for job, seconds in told["each"].items())
            print(f"  {name}: {each}", flush=True)
    if "ingest" in wanted:
        done = apart("ingest", at, counts[0], master)
        print(
            f"ingest: {done['rows']:,} rows, {done['rows'] / done['total_s']:,.0f} rows/s into the lake,"
            f" {done['rows'] / done['read_s']:,.0f} rows/s read alone (promised: 50,000); then to facts in"
            f" {done['facts_s']:.1f} s"
        )
    if "load" in wanted:
        done = apart("load", at, counts[0], master)
        print(f"load: {done['rows']:,} tasks, {done['rows'] / done['total_s']:,.0f} tasks/s (promised: 10,000)")


def has_duckdb() -> bool:
    import importlib.util

    return importlib.util.find_spec("duckdb") is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="*", metavar="marts|skew|ingest|load", help="all four if none is named")
    parser.add_argument("--attempts", default="1000000,5000000,20000000", help="how many, once for each number")
    parser.add_argument("--master", default="local[*]")
    parser.add_argument("--at", default="", help="a directory with room for it")
    parser.add_argument("--step", choices=list(STEPS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    wanted = options.wanted or ["marts", "skew", "ingest", "load"]
    counts = [int(number) for number in options.attempts.split(",")]
    if options.step:
        print(json.dumps(STEPS[options.step](options.at, counts[0], options.master)))
        return
    with tempfile.TemporaryDirectory(prefix="codeq-bench-") as directory:
        cores = len(os.sched_getaffinity(0))
        print(f"{cores} cores, load {os.getloadavg()[0]:.1f} before, {DAYS} days, {TENANTS} tenants, {options.master}")
        table(counts, options.master, wanted, options.at or directory)


if __name__ == "__main__":
    main()
