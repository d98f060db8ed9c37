"""attempts, deliveries: from everything read to facts, for the days and tenants whose rows have changed."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import DataFrame

from pipeline.spark import schemas, sinks
from pipeline.spark.jobs.running import Context, Report
from pipeline.spark.lake import Manifest, Partition, new_run
from pipeline.spark.transforms.attempts import attempts as to_attempts
from pipeline.spark.transforms.webhooks import deliveries as to_deliveries


def attempts(context: Context) -> Report:
    return _facts(context, schemas.ATTEMPTS, to_attempts)


def deliveries(context: Context) -> Report:
    return _facts(context, schemas.DELIVERIES, to_deliveries)


def _facts(context: Context, table: schemas.Table, transform: Callable[[DataFrame], DataFrame]) -> Report:
    lake, spark, root = context.lake, context.spark, context.lake.root()
    source = schemas.TABLES[table.fact]
    raw, before = lake.manifest(source.name, root), lake.manifest(table.name, root)
    wanted = {key: source_of(table, part) for key, part in raw.partitions.items()}
    changed = before.stale(wanted, context.is_anew)
    if not changed:
        return Report(table.name)
    there = sorted(changed & wanted.keys())
    lake.check(raw, there, context.checked)
    sinks.check_files(spark, lake, source, raw, there)
    rows = {key: raw.partitions[key].rows for key in there}
    facts = transform(sinks.spread(sinks.load(spark, lake, source, raw, there, context.checked), table, rows))
    staged = sinks.stage(facts, lake, table, new_run())
    context.told(table.name, f"staged {len(staged)} partitions")
    fresh = sinks.counted(spark, lake, table, staged, digest=True)
    kept = {key: part for key, part in before.partitions.items() if key not in changed}
    context.told(table.name, "publishing")
    lake.commit(root, {table.name: Manifest({**kept, **fresh}, wanted)}, read=[source.name])
    return Report(
        table.name,
        rows_in=sum(raw.partitions[key].rows for key in there),
        rows_out=sum(part.rows for part in fresh.values()),
        partitions=len(fresh),
    )


def source_of(table: schemas.Table, raw: Partition) -> str:
    """What the facts of a day and tenant are computed from, as one word."""
    return f"{table.version}:{raw.identity}"
