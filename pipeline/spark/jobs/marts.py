"""The Spark jobs of the marts.

Each job computes the days and tenants whose facts have changed, and keeps the other rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from datetime import date, timedelta

from pyspark.sql import DataFrame

from pipeline.spark import schemas, sinks
from pipeline.spark.jobs.context import JobContext, JobReport, SparkJob
from pipeline.spark.lake import Manifest, Partition, new_run_id
from pipeline.spark.transforms.capacity import capacity
from pipeline.spark.transforms.failures import failures
from pipeline.spark.transforms.latency import latency
from pipeline.spark.transforms.leases import leases
from pipeline.spark.transforms.throughput import throughput
from pipeline.spark.transforms.usage import usage
from pipeline.spark.transforms.webhooks import webhooks

TRANSFORMS: dict[str, Callable[[DataFrame], DataFrame]] = {
    transform.__name__: transform for transform in (throughput, latency, failures, usage, capacity, leases, webhooks)
}


def build_job(name: str) -> SparkJob:
    return lambda context: _compute_mart(context, schemas.MARTS[name], TRANSFORMS[name])


def _compute_mart(
    context: JobContext, table: schemas.TableContract, transform: Callable[[DataFrame], DataFrame]
) -> JobReport:
    lake, spark, root = context.lake, context.spark, context.lake.root()
    fact = schemas.TABLES[table.source]
    facts, before = lake.manifest(fact.name, root), lake.manifest(table.name, root)
    sources = {key: _build_source_id(table, facts, key) for key in _list_keys(table, facts.partitions)}
    changed = before.find_stale_keys(sources, context.must_recompute)
    if not changed:
        return JobReport(table.name)
    read = {fact_key for key in changed for fact_key in _list_window(table, key) if fact_key in facts.partitions}
    days = {key.split("/")[0] for key in changed}
    fresh = transform(sinks.load(spark, lake, fact, facts, read, context.verified_files))
    if table.lookahead_days:
        fresh = sinks.filter_keys(fresh, changed)
    unchanged = before.sources.keys() - changed
    if any(key.split("/")[0] in days for key in unchanged):
        fresh = fresh.unionByName(
            sinks.filter_keys(
                sinks.load(spark, lake, table, before, days, context.verified_files), changed, exclude=True
            )
        )
    staged = sinks.stage(sinks.distribute(fresh, table, {}), lake, table, new_run_id())
    context.report_progress(table.name, f"staged {len(staged)} days")
    new = sinks.count_rows(spark, lake, table, staged, digest=True)
    kept = {day: part for day, part in before.partitions.items() if day not in days}
    context.report_progress(table.name, "publishing")
    lake.commit(root, {table.name: Manifest({**kept, **new}, sources)}, read=[fact.name])
    return JobReport(
        table.name,
        rows_in=sum(facts.partitions[key].rows for key in read),
        rows_out=sum(part.rows for part in new.values()),
        partitions=len(new),
    )


def _list_keys(table: schemas.TableContract, facts: Mapping[str, Partition]) -> set[str]:
    """Return the days and tenants for which the facts may produce rows of this mart."""
    return {_shift_day(key, -days) for key in facts for days in range(table.lookahead_days + 1)}


def _list_window(table: schemas.TableContract, key: str) -> list[str]:
    return [_shift_day(key, days) for days in range(table.lookahead_days + 1)]


def _build_source_id(table: schemas.TableContract, facts: Manifest, key: str) -> str:
    """Return the identifier of the data that the mart's rows of this key are computed from."""
    parts = [facts.partitions[k].identity if k in facts.partitions else "" for k in _list_window(table, key)]
    return f"{table.version}:{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:32]}"


def _shift_day(key: str, days: int) -> str:
    day, _, tenant = key.partition("/")
    return f"{date.fromisoformat(day) + timedelta(days=days)}/{tenant}"
