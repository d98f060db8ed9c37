"""The Spark jobs `attempts` and `deliveries`: compute the facts from the raw rows.

Only days and tenants whose rows have changed are computed.
"""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import DataFrame

from pipeline.spark import schemas, sinks
from pipeline.spark.jobs.context import JobContext, JobReport
from pipeline.spark.lake import Manifest, Partition, new_run_id
from pipeline.spark.transforms.attempts import attempts as to_attempts
from pipeline.spark.transforms.webhooks import deliveries as to_deliveries


def attempts(context: JobContext) -> JobReport:
    return _compute_facts(context, schemas.ATTEMPTS, to_attempts)


def deliveries(context: JobContext) -> JobReport:
    return _compute_facts(context, schemas.DELIVERIES, to_deliveries)


def _compute_facts(
    context: JobContext, table: schemas.TableContract, transform: Callable[[DataFrame], DataFrame]
) -> JobReport:
    lake, spark, root = context.lake, context.spark, context.lake.root()
    source = schemas.TABLES[table.source]
    raw, before = lake.manifest(source.name, root), lake.manifest(table.name, root)
    sources = {key: build_source_id(table, part) for key, part in raw.partitions.items()}
    changed = before.find_stale_keys(sources, context.must_recompute)
    if not changed:
        return JobReport(table.name)
    existing = sorted(changed & sources.keys())
    lake.verify(raw, existing, context.verified_files)
    sinks.check_files(spark, lake, source, raw, existing)
    rows = {key: raw.partitions[key].rows for key in existing}
    facts = transform(
        sinks.distribute(sinks.load(spark, lake, source, raw, existing, context.verified_files), table, rows)
    )
    staged = sinks.stage(facts, lake, table, new_run_id())
    context.report_progress(table.name, f"staged {len(staged)} partitions")
    new = sinks.count_rows(spark, lake, table, staged, digest=True)
    kept = {key: part for key, part in before.partitions.items() if key not in changed}
    context.report_progress(table.name, "publishing")
    lake.commit(root, {table.name: Manifest({**kept, **new}, sources)}, read=[source.name])
    return JobReport(
        table.name,
        rows_in=sum(raw.partitions[key].rows for key in existing),
        rows_out=sum(part.rows for part in new.values()),
        partitions=len(new),
    )


def build_source_id(table: schemas.TableContract, raw: Partition) -> str:
    """Return the identifier of the data that the facts of a day and tenant are computed from."""
    return f"{table.version}:{raw.identity}"
