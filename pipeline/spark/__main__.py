"""`python -m pipeline.spark run --lake … --dsn-file …`: the pipeline without Django."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pyspark.sql import SparkSession

from pipeline.spark import cli, session


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.spark", description=__doc__)
    parser.add_argument("--master", help="where Spark runs; SPARK_MASTER, or else this machine, if not given")
    parser.add_argument(
        "--dsn-file", type=argparse.FileType(), help="the audit's database, as libpq takes it; - = standard input"
    )
    cli.add_arguments(parser)
    options = parser.parse_args(arguments)
    if not options.lake and not (options.what == "generate" and options.to):
        parser.error("--lake: where is the lake?")
    if options.what == "files":
        cli.print_files(options.lake, options, print, lambda: session.start(options.master, conf=cli.conf(options)))
        return 0
    # Neither a password nor a token may be in the list of processes: they come by file.
    dsn = options.dsn_file.read().strip() if options.dsn_file else ""
    spark = session.start(options.master, conf=cli.conf(options))
    if options.what == "run":
        return _run(spark, options, dsn)
    if options.what == "load":
        if not (options.token_file and options.url):
            parser.error("load needs --url and --token-file")
        token = options.token_file.read().strip()
        cli.run_load(spark, options.lake, options, token, print, lambda line: print(line, file=sys.stderr))
    elif options.what == "simulate":
        cli.run_simulate(spark, options.lake, options, print)
    elif options.what == "export":
        cli.run_export(spark, options.lake, options, print)
    elif options.what == "generate":
        if not (options.to or dsn):
            parser.error("generate needs --to or --dsn-file")
        cli.run_generate(spark, options, print, dsn=dsn)
    return 0


def _run(spark: SparkSession, options: argparse.Namespace, dsn: str) -> int:
    from pipeline.spark import jobs
    from pipeline.spark.lake import Lake

    context = jobs.Context(
        spark,
        Lake(options.lake, spark),
        dsn,
        files=options.files,
        since=options.since,
        until=options.until,
        told=lambda job, stage: print(f"{job}: {stage}", flush=True),
    )
    for report in jobs.run(context, options.jobs):
        for note in report.notes:
            print(f"{report.job}: {note}")
    context.lake.vacuum()
    return 0


if __name__ == "__main__":
    sys.exit(main())
