"""The commands, for `python -m pipeline.spark` and for `manage.py pipeline` alike: arguments, and what they do."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from datetime import date
from typing import Any

from pipeline.spark import simulate
from pipeline.spark.synthetic import Shape

Say = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lake", default="", help="where the lake is: a directory, file:// or s3a://")
    parser.add_argument("--conf", action="append", default=[], metavar="KEY=VALUE", help="a setting of Spark's")
    commands = parser.add_subparsers(dest="what", required=True)

    run = commands.add_parser("run", help="bring the lake and the marts up to date")
    run.add_argument("jobs", nargs="*", metavar="JOB", help="these jobs only")
    _period(run, "compute these days anew: from this one (UTC)", "until this one, which is not included")
    run.add_argument("--from", dest="files", default="", help="read history from Parquet or JSON lines here")

    load = commands.add_parser("load", help="enqueue each row of a dataset as a task")
    load.add_argument("--from", dest="source", required=True, help="a Parquet, CSV or JSON-lines file, or a table")
    load.add_argument("--command", required=True)
    load.add_argument("--tenant", default="", help="whose tasks they are")
    load.add_argument("--key", default="", help="column that makes a row unique; without it, its content does")
    load.add_argument("--priority", type=int, default=0)
    load.add_argument("--format", default="", choices=["", "parquet", "csv", "json"])
    load.add_argument("--again", default="", metavar="WORD", help="load what was loaded before once more")
    load.add_argument("--url", default="", help="where the API is")
    load.add_argument("--batch", type=int, default=100, help="tasks in a request")
    load.add_argument("--token-file", type=argparse.FileType(), help="a producer's token; - = standard input")

    what_if = commands.add_parser("simulate", help="play history again with other workers, leases or priorities")
    what_if.add_argument("--tenant", default="", help="one tenant's history only")
    what_if.add_argument("--command", action="append", default=[], help="these commands only")
    _period(what_if, "history from this day on", "until this one, which is not included")
    what_if.add_argument("--workers", type=int, help="workers for each tenant; as many as were busy if not given")
    what_if.add_argument("--concurrency", type=int, default=1, help="tasks a worker has at once")
    what_if.add_argument("--lease", type=int, metavar="SECONDS")
    what_if.add_argument("--max-attempts", type=int)
    what_if.add_argument("--backoff", type=simulate.Backoff.parse, metavar="POLICY[:BASE[:CAP]]")
    what_if.add_argument("--priority", action="append", default=[], metavar="COMMAND=0..9")

    invent = commands.add_parser("generate", help="invent history with the shape of real history")
    invent.add_argument("--tasks", type=int, default=100_000)
    invent.add_argument("--days", type=int, default=Shape.days)
    invent.add_argument("--first-day", type=date.fromisoformat, default=Shape.first_day)
    invent.add_argument("--tenants", type=int, default=Shape.tenants)
    invent.add_argument("--seed", type=int, default=Shape.seed)
    invent.add_argument("--to", default="", help="write Parquet here instead of into the audit")

    files = commands.add_parser("files", help="print the Parquet files that a table is made of now")
    files.add_argument("table")
    files.add_argument("--tenant")

    export = commands.add_parser("export", help="write one tenant's rows of a table as Parquet")
    export.add_argument("table")
    export.add_argument("--tenant", required=True)
    export.add_argument("--to", required=True)


def _period(parser: argparse.ArgumentParser, since: str, until: str) -> None:
    parser.add_argument("--since", type=date.fromisoformat, metavar="YYYY-MM-DD", help=since)
    parser.add_argument("--until", type=date.fromisoformat, metavar="YYYY-MM-DD", help=until)


def conf(options: Any) -> dict[str, str]:
    """The settings of Spark's that were given."""
    pairs = [text.partition("=") for text in options.conf]
    return {key: value for key, _, value in pairs}


def print_files(lake: str, options: Any, say: Say, start: Callable[[], Any]) -> None:
    """A lake on this machine's disk is read without Spark; `start` gives the session for any other."""
    from pipeline.spark.lake import files
    from pipeline.spark.store import is_local

    spark = None if is_local(lake) else start()
    for file in files(lake, options.table, tenant=options.tenant, spark=spark):
        say(file)


def run_load(spark: Any, lake: str, options: Any, token: str, say: Say, progress: Say) -> None:
    from pipeline.spark.lake import Lake
    from pipeline.spark.load import Target, load

    target = Target(options.url, token, options.command, options.priority, options.batch)
    loaded = load(
        spark,
        Lake(lake, spark),
        options.source,
        target,
        key=options.key,
        kind=options.format,
        again=options.again,
        told=lambda done, total: progress(bar(done, total)),
    )
    rate = loaded.sent / loaded.seconds if loaded.seconds else 0.0
    say(
        f"{loaded.sent} of {loaded.rows} rows sent{' (resumed)' if loaded.resumed else ''}, {loaded.refused} refused,"
        f" {loaded.quarantined} quarantined, {loaded.seconds} s, {rate:.0f} tasks/s"
    )
    for reason in loaded.reasons:
        say(f"  refused: {reason}")


def bar(done: int, total: int, width: int = 40) -> str:
    filled = width * done // total if total else width
    return f"[{'#' * filled}{'.' * (width - filled)}] {done}/{total}"


def run_simulate(spark: Any, lake: str, options: Any, say: Say) -> None:
    scenario = simulate.Scenario(
        options.workers,
        options.concurrency,
        options.lease,
        options.max_attempts,
        options.backoff,
        {name: int(value) for name, _, value in (text.partition("=") for text in options.priority)},
    )
    history = _history(spark, lake, options).persist()
    before = {(row["tenant"], row["command"]): row for row in simulate.measured(history).collect()}
    as_is = simulate.simulated(history, simulate.Scenario()).collect()
    after = {(row["tenant"], row["command"]): row for row in simulate.simulated(history, scenario).collect()}
    history.unpersist()
    heads = ("tenant", "command", "", "workers", "attempts", "dead", "wait mean", "p50", "p95", "p99", "duplicate s")
    lines: list[tuple[Any, ...]] = [heads]
    for row in sorted(as_is, key=lambda r: (r["tenant"], r["command"])):
        key = (row["tenant"], row["command"])
        for label, shown in (("measured", before[key]), ("simulated", row), ("what if", after[key])):
            waits = (f"{shown[f'wait_{name}_ms'] / 1000:.2f}" for name in ("mean", "p50", "p95", "p99"))
            workers = "" if label == "measured" else shown["workers"]
            spent = f"{shown['duplicate_ms'] / 1000:.0f}"
            lines.append((*key, label, workers, shown["attempts"], shown["dead"], *waits, spent))
    for line in table(lines):
        say(line)


def _history(spark: Any, lake: str, options: Any) -> Any:
    from pipeline.spark import schemas, sinks
    from pipeline.spark.lake import Lake

    opened = Lake(lake, spark)
    manifest = opened.manifest(schemas.ATTEMPTS.name)
    since, until = (str(day) if day else "" for day in (options.since, options.until))
    keys = [
        key
        for key in manifest.partitions
        if key.split("/")[0] >= since
        and (not until or key.split("/")[0] < until)
        and (not options.tenant or key.split("/")[1] == options.tenant)
    ]
    history = sinks.load(spark, opened, schemas.ATTEMPTS, manifest, keys)
    return history.where(history.command.isin(options.command)) if options.command else history


def run_export(spark: Any, lake: str, options: Any, say: Say) -> None:
    from pyspark.sql import functions as F

    from pipeline.spark import schemas, sinks
    from pipeline.spark.lake import Lake

    if options.table not in schemas.TABLES:
        raise ValueError(f"no such table: {options.table} (there are {', '.join(schemas.TABLES)})")
    opened, contract = Lake(lake, spark), schemas.TABLES[options.table]
    manifest = opened.manifest(contract.name)
    rows = sinks.load(spark, opened, contract, manifest, manifest.partitions).where(F.col("tenant") == options.tenant)
    rows.coalesce(1).sortWithinPartitions(*contract.keys).write.mode("error").parquet(options.to)
    say(f"{options.table} of {options.tenant} is in {options.to}")


def run_generate(spark: Any, options: Any, say: Say, tenant_ids: Iterable[str] = (), dsn: str = "") -> None:
    from pipeline.spark.synthetic import history, to_audit

    names = tuple(tenant_ids)
    shape = Shape(
        options.tasks, options.days, options.first_day, len(names) or options.tenants, seed=options.seed,
        tenant_ids=names,
    )  # fmt: skip
    if options.to:
        history(spark, shape).drop("arrived_at").write.mode("error").parquet(options.to)
        say(f"{options.tasks} tasks are in {options.to}")
    else:
        say(f"{to_audit(history(spark, shape), dsn)} attempts are in the audit")


def table(rows: list[tuple[Any, ...]]) -> list[str]:
    """Columns side by side: words to the left, numbers to the right."""
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(str(v).ljust(w) if i < 3 else str(v).rjust(w) for i, (v, w) in enumerate(zip(r, widths, strict=True)))
        for r in rows
    ]
