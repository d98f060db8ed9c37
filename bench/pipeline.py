"""Measure the marts (compared to DuckDB), the effect of a skewed tenant, ingest, and loads.

    python -m bench.pipeline [marts|skew|ingest|load …] [--attempts 1000000,5000000,20000000] [--master local[*]]

Every measurement runs in a separate process, so that start-up, compiled code and memory do not affect the next one.
The time of the marts does not include the start of the session. Memory is the peak of driver, JVM and Python workers
together.
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
from pipeline.spark.transforms.attempts import add_durations, add_rejection_reason

MARTS = [name for name in TRANSFORMS if name != "webhooks"]
ATTEMPTS_PER_TASK = 1.065  # of the synthetic history
DAYS, TENANTS = 30, 20

# The marts as DuckDB queries on the same facts, also written to Parquet. DuckDB's regular expressions do not support
# look-around, so `failures` only replaces digits. `capacity` is computed without the numbers of workers.
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
def record_peak_memory() -> Iterator[Callable[[], float]]:
    """Sample the memory of this process and its children, without shared pages.

    Yield a function that returns the peak in GiB.
    """
    peak, done = [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.2):
            total = 0
            for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
                try:
                    total += process.memory_info().rss - process.memory_info().shared
                except psutil.Error:
                    continue
            peak[0] = max(peak[0], total)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield lambda: peak[0] / 2**30
    finally:
        done.set()
        thread.join()


def prepare(directory: str, count: int, master: str) -> dict[str, Any]:
    """Write the facts of `count` attempts to the lake, as the Spark job `attempts` does."""
    spark, lake = session.start(master), Lake(f"{directory}/lake")
    shape = HistoryShape(round(count / ATTEMPTS_PER_TASK), days=DAYS, tenants=TENANTS)
    rows = add_rejection_reason(
        generate_history(spark, shape).drop("arrived_at"), schemas.SOURCE, snapshots.ATTEMPTS.day
    ).drop("reason")
    staged = sinks.stage(
        sinks.distribute(add_durations(rows), schemas.ATTEMPTS, {}), lake, schemas.ATTEMPTS, new_run_id()
    )
    facts = sinks.count_rows(spark, lake, schemas.ATTEMPTS, staged, digest=True)
    lake.commit(lake.root(), {schemas.ATTEMPTS.name: Manifest(facts)})
    return {"rows": lake.manifest(schemas.ATTEMPTS.name).rows}


def measure_marts(directory: str, count: int, master: str) -> dict[str, Any]:
    started = time.monotonic()
    with record_peak_memory() as get_peak_gib:
        spark, lake = session.start(master), Lake(f"{directory}/lake")
        session_started = time.monotonic()
        seconds = {r.job: r.seconds for r in jobs.run(JobContext(spark, lake), MARTS)}
        return {
            "start_s": session_started - started,
            "total_s": time.monotonic() - session_started,
            "GiB": get_peak_gib(),
            "rows": lake.manifest("attempts").rows,
            "each": seconds,
        }


def measure_duckdb(directory: str, count: int, master: str) -> dict[str, Any]:
    import duckdb as engine

    paths = [path.removeprefix("file://") for path in files(f"{directory}/lake", "attempts")]
    with record_peak_memory() as get_peak_gib:
        connection = engine.connect()
        connection.execute("SET TimeZone = 'UTC'")
        started, seconds = time.monotonic(), {}
        connection.execute(f"CREATE VIEW facts AS SELECT * FROM read_parquet({paths}, hive_partitioning = true)")
        for name, query in DUCKDB.items():
            query_started = time.monotonic()
            connection.execute(f"CREATE OR REPLACE TABLE mart AS {query}")
            connection.execute(f"COPY mart TO '{directory}/duckdb-{name}.parquet'")
            seconds[name] = round(time.monotonic() - query_started, 3)
        return {"total_s": time.monotonic() - started, "GiB": get_peak_gib(), "each": seconds}


def measure_ingest(directory: str, count: int, master: str) -> dict[str, Any]:
    from bench.servers import start_servers

    with start_servers():
        from pipeline import services
        from tenants.services import create_tenant

        tids = tuple(create_tenant(f"tenant-{i}").tid for i in range(TENANTS))
        spark = session.start(master)
        shape = HistoryShape(round(count / ATTEMPTS_PER_TASK), days=DAYS, tenants=TENANTS, tenant_ids=tids)
        rows = write_to_audit(generate_history(spark, shape), services.dsn())
        started = time.monotonic()
        with snapshots.hold_snapshot(services.dsn()) as snapshot:
            sources.read(spark, services.dsn(), snapshot, via="python").write.format("noop").mode("overwrite").save()
        read_s = time.monotonic() - started
        report, facts = jobs.run(
            JobContext(spark, Lake(f"{directory}/ingested"), services.dsn()), ["ingest", "attempts"]
        )
        assert report.rows_out == facts.rows_out == rows
        return {"rows": rows, "read_s": read_s, "total_s": report.seconds, "facts_s": facts.seconds}


def measure_load(directory: str, count: int, master: str) -> dict[str, Any]:
    from bench.servers import start_servers

    count = min(count, 500_000)
    with start_servers(CODEQ_WEB_PORT="18765"):
        from tenants.services import create_tenant, issue_token

        create_tenant("bench")
        token = issue_token("bench", "producer")
        processes = [subprocess.Popen([sys.executable, "-m", "codeq_site.web"]) for _ in range(os.cpu_count() or 1)]
        try:
            spark, lake = session.start(master), Lake(f"{directory}/loads")
            rows = spark.range(count).selectExpr(
                "id", "concat('customer-', id % 1000) AS customer", "repeat('x', 80) t"
            )
            rows.write.mode("overwrite").parquet(f"{directory}/dataset.parquet")
            target = LoadTarget("http://127.0.0.1:18765", token, "import")
            result = load(spark, lake, f"{directory}/dataset.parquet", target, key="id")
            assert result.sent == count, result
            return {"rows": count, "total_s": result.seconds}
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(10)


def measure_day(directory: str, count: int, master: str, top_share: float) -> dict[str, Any]:
    """Measure the jobs from files to marts for one day. One tenant has `top_share` of the rows."""
    shape = HistoryShape(round(count / ATTEMPTS_PER_TASK), days=1, tenants=TENANTS, top_share=top_share)
    with record_peak_memory() as get_peak_gib:
        spark, lake = session.start(master), Lake(f"{directory}/{top_share}/lake")
        generate_history(spark, shape).drop("arrived_at").write.parquet(f"{directory}/{top_share}/source")
        context = JobContext(spark, lake, files=f"{directory}/{top_share}/source")
        seconds = {r.job: r.seconds for r in jobs.run(context, ["ingest", "attempts", *MARTS])}
        parts = lake.manifest("attempts").partitions.values()
        return {
            "rows": sum(part.rows for part in parts),
            "most": max(part.rows for part in parts),
            "total_s": sum(seconds.values()),
            "GiB": get_peak_gib(),
            "each": seconds,
        }


STEPS = {
    "prepare": prepare,
    "marts": measure_marts,
    "duckdb": measure_duckdb,
    "ingest": measure_ingest,
    "load": measure_load,
    "balanced": lambda directory, count, master: measure_day(directory, count, master, 0),
    "skewed": lambda directory, count, master: measure_day(directory, count, master, 0.95),
}


def run_step(step: str, directory: str, count: int, master: str) -> dict[str, Any]:
    """Run a measurement in a separate process. Return its result, the last line of output."""
    command = [sys.executable, "-m", "bench.pipeline", "--step", step, "--directory", directory]
    command += ["--attempts", str(count), "--master", master]
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    if process.returncode:
        raise SystemExit(f"{step} failed. To see the error, run: {' '.join(command)}")
    result: dict[str, Any] = json.loads(process.stdout.strip().rpartition("\n")[2])
    return result


def print_results(counts: list[int], master: str, selected: list[str], directory: str) -> None:
    if "marts" in selected:
        print("| attempts | session, s | all marts, s | peak, GiB | rows/s | DuckDB, s | peak, GiB |")
        print("|---|---|---|---|---|---|---|")
        per_row: list[float] = []
        for count in counts:
            run_step("prepare", directory, count, master)
            spark = run_step("marts", directory, count, master)
            duckdb = (
                run_step("duckdb", directory, count, master) if has_duckdb() else {"total_s": float("nan"), "GiB": 0.0}
            )
            per_row.append(spark["total_s"] / spark["rows"])
            print(
                f"| {spark['rows']:,} | {spark['start_s']:.1f} | {spark['total_s']:.1f} |"
                f" {spark['GiB']:.2f} | {spark['rows'] / spark['total_s']:,.0f} | {duckdb['total_s']:.1f} |"
                f" {duckdb['GiB']:.2f} |",
                flush=True,
            )
            print("  " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in spark["each"].items()), flush=True)
            shutil.rmtree(f"{directory}/lake", ignore_errors=True)
        for smaller, larger, count in zip(per_row, per_row[1:], counts[1:], strict=False):
            print(f"  scaling to {count:,}: {larger / smaller:.2f} x linear (target: at most 1.2)")
    if "skew" in selected:
        balanced, skewed = (run_step(step, directory, counts[0], master) for step in ("balanced", "skewed"))
        print(
            f"skew: {skewed['rows']:,} attempts of a day, {skewed['most'] / skewed['rows']:.0%} from one tenant:"
            f" {skewed['total_s']:.1f} s and {skewed['GiB']:.2f} GiB; with balanced tenants"
            f" {balanced['total_s']:.1f} s and {balanced['GiB']:.2f} GiB;"
            f" {skewed['total_s'] / balanced['total_s']:.2f} x (target: at most 3)"
        )
        for name, result in (("balanced", balanced), ("skewed", skewed)):
            times = ", ".join(f"{job} {seconds:.1f}" for job, seconds in result["each"].items())
            print(f"  {name}: {times}", flush=True)
    if "ingest" in selected:
        result = run_step("ingest", directory, counts[0], master)
        print(
            f"ingest: {result['rows']:,} rows, {result['rows'] / result['total_s']:,.0f} rows/s into the lake,"
            f" {result['rows'] / result['read_s']:,.0f} rows/s read alone (target: 50,000); then to facts in"
            f" {result['facts_s']:.1f} s"
        )
    if "load" in selected:
        result = run_step("load", directory, counts[0], master)
        print(f"load: {result['rows']:,} tasks, {result['rows'] / result['total_s']:,.0f} tasks/s (target: 10,000)")


def has_duckdb() -> bool:
    import importlib.util

    return importlib.util.find_spec("duckdb") is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "selected", nargs="*", metavar="marts|skew|ingest|load", help="measurements to run (default: all)"
    )
    parser.add_argument(
        "--attempts", default="1000000,5000000,20000000", help="numbers of attempts, separated by commas"
    )
    parser.add_argument("--master", default="local[*]")
    parser.add_argument("--directory", default="", help="directory for the data (default: a temporary directory)")
    parser.add_argument("--step", choices=list(STEPS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    selected = options.selected or ["marts", "skew", "ingest", "load"]
    counts = [int(number) for number in options.attempts.split(",")]
    if options.step:
        print(json.dumps(STEPS[options.step](options.directory, counts[0], options.master)))
        return
    with tempfile.TemporaryDirectory(prefix="codeq-bench-") as temporary_directory:
        cores = len(os.sched_getaffinity(0))
        print(f"{cores} cores, load {os.getloadavg()[0]:.1f} before, {DAYS} days, {TENANTS} tenants, {options.master}")
        print_results(counts, options.master, selected, options.directory or temporary_directory)


if __name__ == "__main__":
    main()
