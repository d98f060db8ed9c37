"""publish: the marts of the lake to PostgreSQL, for the console and the API."""

from __future__ import annotations

from pipeline.spark import schemas, sinks
from pipeline.spark.jobs.running import Context, Report

PUBLISHED = "pipeline_published"


def publish(context: Context) -> Report:
    if not context.dsn:
        return Report("publish", notes=("no database was named",))
    keys = rows = 0
    for table in schemas.MARTS.values():
        changed, written = sinks.to_postgres(
            context.spark,
            context.lake,
            context.dsn,
            table,
            target=f"pipeline_{table.name}",
            published=PUBLISHED,
            anew=context.is_anew,
        )
        context.told("publish", f"{table.name}: {changed} days and tenants, {written} rows")
        keys, rows = keys + changed, rows + written
    return Report("publish", rows_in=rows, rows_out=rows, partitions=keys)
