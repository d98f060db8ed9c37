"""Run the pipeline without Django: `python -m pipeline.spark run --lake … --dsn-file …`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pyspark.sql import SparkSession

from pipeline.spark import cli, session


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.spark", description=__doc__)
    parser.add_argument("--master", help="Spark master URL (default: SPARK_MASTER, or this machine)")
    parser.add_argument(
        "--dsn-file",
        type=argparse.FileType(),
        help="file with the connection string of the audit's database, in libpq format; - = standard input",
    )
    cli.add_arguments(parser)
    options = parser.parse_args(arguments)
    if not options.lake and not (options.action == "generate" and options.to):
        parser.error("--lake is required")
    if options.action == "files":
        cli.print_files(
            options.lake, options, print, lambda: session.start(options.master, conf=cli.parse_conf(options))
        )
        return 0
    # Passwords and tokens are read from files, because command-line arguments appear in the process list.
    dsn = options.dsn_file.read().strip() if options.dsn_file else ""
    spark = session.start(options.master, conf=cli.parse_conf(options))
    if options.action == "run":
        return _run_jobs(spark, options, dsn)
    if options.action == "load":
        if not (options.token_file and options.url):
            parser.error("load requires --url and --token-file")
        token = options.token_file.read().strip()
        cli.run_load(spark, options.lake, options, token, print, lambda line: print(line, file=sys.stderr))
    elif options.action == "simulate":
        cli.run_simulate(spark, options.lake, options, print)
    elif options.action == "export":
        cli.run_export(spark, options.lake, options, print)
    elif options.action == "generate":
        if not (options.to or dsn):
            parser.error("generate requires --to or --dsn-file")
        cli.run_generate(spark, options, print, dsn=dsn)
    return 0


def _run_jobs(spark: SparkSession, options: argparse.Namespace, dsn: str) -> int:
    from pipeline.spark import jobs
    from pipeline.spark.lake import Lake

    context = jobs.JobContext(
        spark,
        Lake(options.lake, spark),
        dsn,
        files=options.files,
        since=options.since,
        until=options.until,
        report_progress=lambda job, stage: print(f"{job}: {stage}", flush=True),
    )
    for report in jobs.run(context, options.jobs):
        for note in report.notes:
            print(f"{report.job}: {note}")
    context.lake.vacuum()
    return 0


if __name__ == "__main__":
    sys.exit(main())
