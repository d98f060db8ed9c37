"""The Spark job `publish`: copy the marts from the lake to PostgreSQL.

The console and the API read them there.
"""

from __future__ import annotations

from pipeline.spark import schemas, sinks
from pipeline.spark.jobs.context import JobContext, JobReport

PUBLISHED = "pipeline_published"


def publish(context: JobContext) -> JobReport:
    if not context.dsn:
        return JobReport("publish", notes=("no database is configured",))
    keys = rows = 0
    for table in schemas.MARTS.values():
        changed, written = sinks.publish_mart(
            context.spark,
            context.lake,
            context.dsn,
            table,
            target=f"pipeline_{table.name}",
            published=PUBLISHED,
            must_rewrite=context.must_recompute,
        )
        context.report_progress("publish", f"{table.name}: {changed} days and tenants, {written} rows")
        keys, rows = keys + changed, rows + written
    return JobReport("publish", rows_in=rows, rows_out=rows, partitions=keys)
