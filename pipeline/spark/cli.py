"""The command-line interface shared by `python -m pipeline.spark` and `manage.py pipeline`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from datetime import date
from typing import Any

from pipeline.spark import simulate
from pipeline.spark.synthetic import HistoryShape

WriteLine = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lake", default="", help="location of the lake: a directory, file:// or s3a:// URL")
    parser.add_argument("--conf", action="append", default=[], metavar="KEY=VALUE", help="Spark setting")
    commands = parser.add_subparsers(dest="action", required=True)

    run = commands.add_parser("run", help="update the lake and the marts")
    run.add_argument("jobs", nargs="*", metavar="JOB", help="run only these Spark jobs")
    _add_period(run, "first day (UTC) to read and compute again", "day after the last day to compute again")
    run.add_argument(
        "--from", dest="files", default="", help="read history from Parquet or JSON-lines files at this location"
    )

    load = commands.add_parser("load", help="enqueue each row of a dataset as a task")
    load.add_argument("--from", dest="source", required=True, help="Parquet, CSV or JSON-lines file, or a table")
    load.add_argument("--command", required=True)
    load.add_argument("--tenant", default="", help="tenant that the tasks belong to")
    load.add_argument("--key", default="", help="column that identifies a row (default: the row's content)")
    load.add_argument("--priority", type=int, default=0)
    load.add_argument("--format", default="", choices=["", "parquet", "csv", "json"])
    load.add_argument(
        "--again", default="", metavar="WORD", help="load a dataset once more; WORD distinguishes the loads"
    )
    load.add_argument("--url", default="", help="base URL of the API")
    load.add_argument("--batch", type=int, default=100, help="tasks per request")
    load.add_argument("--token-file", type=argparse.FileType(), help="file with a producer token; - = standard input")

    simulation = commands.add_parser("simulate", help="simulate history with other workers, leases or priorities")
    simulation.add_argument("--tenant", default="", help="use only this tenant's history")
    simulation.add_argument("--command", action="append", default=[], help="use only these commands")
    _add_period(simulation, "first day of the history", "day after the last day of the history")
    simulation.add_argument(
        "--workers", type=int, help="workers for each tenant (default: the largest number that was busy)"
    )
    simulation.add_argument("--concurrency", type=int, default=1, help="tasks that a worker runs at the same time")
    simulation.add_argument("--lease", type=int, metavar="SECONDS")
    simulation.add_argument("--max-attempts", type=int)
    simulation.add_argument("--backoff", type=simulate.Backoff.parse, metavar="POLICY[:BASE[:CAP]]")
    simulation.add_argument("--priority", action="append", default=[], metavar="COMMAND=0..9")

    generate = commands.add_parser("generate", help="generate synthetic history with realistic proportions")
    generate.add_argument("--tasks", type=int, default=100_000)
    generate.add_argument("--days", type=int, default=HistoryShape.days)
    generate.add_argument("--first-day", type=date.fromisoformat, default=HistoryShape.first_day)
    generate.add_argument("--tenants", type=int, default=HistoryShape.tenants)
    generate.add_argument("--seed", type=int, default=HistoryShape.seed)
    generate.add_argument("--to", default="", help="write Parquet files here instead of rows in the audit")

    files = commands.add_parser("files", help="print the URLs of the Parquet files of a table's current version")
    files.add_argument("table")
    files.add_argument("--tenant")

    export = commands.add_parser("export", help="write one tenant's rows of a table as Parquet files")
    export.add_argument("table")
    export.add_argument("--tenant", required=True)
    export.add_argument("--to", required=True)


def _add_period(parser: argparse.ArgumentParser, since: str, until: str) -> None:
    parser.add_argument("--since", type=date.fromisoformat, metavar="YYYY-MM-DD", help=since)
    parser.add_argument("--until", type=date.fromisoformat, metavar="YYYY-MM-DD", help=until)


def parse_conf(options: Any) -> dict[str, str]:
    """Return the Spark settings from the options `--conf KEY=VALUE`."""
    pairs = [text.partition("=") for text in options.conf]
    return {key: value for key, _, value in pairs}


def print_files(lake: str, options: Any, write: WriteLine, start: Callable[[], Any]) -> None:
    """Print the URLs of the files of a table.

    A local lake is read without Spark; any other lake needs the session from `start`.
    """
    from pipeline.spark.lake import files
    from pipeline.spark.store import is_local

    spark = None if is_local(lake) else start()
    for file in files(lake, options.table, tenant=options.tenant, spark=spark):
        write(file)


def run_load(spark: Any, lake: str, options: Any, token: str, write: WriteLine, progress: WriteLine) -> None:
    from pipeline.spark.lake import Lake
    from pipeline.spark.load import LoadTarget, load

    target = LoadTarget(options.url, token, options.command, options.priority, options.batch)
    result = load(
        spark,
        Lake(lake, spark),
        options.source,
        target,
        key=options.key,
        kind=options.format,
        again=options.again,
        on_progress=lambda done, total: progress(format_progress(done, total)),
    )
    rate = result.sent / result.seconds if result.seconds else 0.0
    write(
        f"{result.sent} of {result.rows} rows sent{' (resumed)' if result.resumed else ''}, {result.refused} refused,"
        f" {result.quarantined} quarantined, {result.seconds} s, {rate:.0f} tasks/s"
    )
    for reason in result.reasons:
        write(f"  refused: {reason}")


def format_progress(done: int, total: int, width: int = 40) -> str:
    filled = width * done // total if total else width
    return f"[{'#' * filled}{'.' * (width - filled)}] {done}/{total}"


def run_simulate(spark: Any, lake: str, options: Any, write: WriteLine) -> None:
    scenario = simulate.Scenario(
        options.workers,
        options.concurrency,
        options.lease,
        options.max_attempts,
        options.backoff,
        {name: int(value) for name, _, value in (text.partition("=") for text in options.priority)},
    )
    history = _load_history(spark, lake, options).persist()
    measured = {(row["tenant"], row["command"]): row for row in simulate.measure_tenants(history).collect()}
    unchanged = simulate.simulate_tenants(history, simulate.Scenario()).collect()
    changed = {(row["tenant"], row["command"]): row for row in simulate.simulate_tenants(history, scenario).collect()}
    history.unpersist()
    header = ("tenant", "command", "", "workers", "attempts", "dead", "wait mean", "p50", "p95", "p99", "duplicate s")
    lines: list[tuple[Any, ...]] = [header]
    for row in sorted(unchanged, key=lambda r: (r["tenant"], r["command"])):
        key = (row["tenant"], row["command"])
        for label, values in (("measured", measured[key]), ("simulated", row), ("what if", changed[key])):
            waits = (f"{values[f'wait_{name}_ms'] / 1000:.2f}" for name in ("mean", "p50", "p95", "p99"))
            workers = "" if label == "measured" else values["workers"]
            duplicate_s = f"{values['duplicate_ms'] / 1000:.0f}"
            lines.append((*key, label, workers, values["attempts"], values["dead"], *waits, duplicate_s))
    for line in format_table(lines):
        write(line)


def _load_history(spark: Any, lake: str, options: Any) -> Any:
    from pipeline.spark import schemas, sinks
    from pipeline.spark.lake import Lake

    opened_lake = Lake(lake, spark)
    manifest = opened_lake.manifest(schemas.ATTEMPTS.name)
    since, until = (str(day) if day else "" for day in (options.since, options.until))
    keys = [
        key
        for key in manifest.partitions
        if key.split("/")[0] >= since
        and (not until or key.split("/")[0] < until)
        and (not options.tenant or key.split("/")[1] == options.tenant)
    ]
    history = sinks.load(spark, opened_lake, schemas.ATTEMPTS, manifest, keys)
    return history.where(history.command.isin(options.command)) if options.command else history


def run_export(spark: Any, lake: str, options: Any, write: WriteLine) -> None:
    from pyspark.sql import functions as F

    from pipeline.spark import schemas, sinks
    from pipeline.spark.lake import Lake

    if options.table not in schemas.TABLES:
        raise ValueError(f"no such table: {options.table} (tables: {', '.join(schemas.TABLES)})")
    opened_lake, contract = Lake(lake, spark), schemas.TABLES[options.table]
    manifest = opened_lake.manifest(contract.name)
    rows = sinks.load(spark, opened_lake, contract, manifest, manifest.partitions).where(
        F.col("tenant") == options.tenant
    )
    rows.coalesce(1).sortWithinPartitions(*contract.keys).write.mode("error").parquet(options.to)
    write(f"Exported {options.table} of tenant {options.tenant} to {options.to}")


def run_generate(spark: Any, options: Any, write: WriteLine, tenant_ids: Iterable[str] = (), dsn: str = "") -> None:
    from pipeline.spark.synthetic import generate_history, write_to_audit

    names = tuple(tenant_ids)
    shape = HistoryShape(
        options.tasks, options.days, options.first_day, len(names) or options.tenants, seed=options.seed,
        tenant_ids=names,
    )  # fmt: skip
    if options.to:
        generate_history(spark, shape).drop("arrived_at").write.mode("error").parquet(options.to)
        write(f"Wrote the history of {options.tasks} tasks to {options.to}")
    else:
        write(f"Wrote {write_to_audit(generate_history(spark, shape), dsn)} attempts to the audit")


def format_table(rows: list[tuple[Any, ...]]) -> list[str]:
    """Align the rows in columns: the first three to the left, the numbers to the right."""
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(str(v).ljust(w) if i < 3 else str(v).rjust(w) for i, (v, w) in enumerate(zip(r, widths, strict=True)))
        for r in rows
    ]
