"""One job per mart: the days and tenants whose facts have changed are computed, the others of those days kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from datetime import date, timedelta

from pyspark.sql import DataFrame

from pipeline.spark import schemas, sinks
from pipeline.spark.jobs.running import Context, Job, Report
from pipeline.spark.lake import Manifest, Partition, new_run
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


def job(name: str) -> Job:
    return lambda context: _mart(context, schemas.MARTS[name], TRANSFORMS[name])


def _mart(context: Context, table: schemas.Table, transform: Callable[[DataFrame], DataFrame]) -> Report:
    lake, spark, root = context.lake, context.spark, context.lake.root()
    fact = schemas.TABLES[table.fact]
    facts, before = lake.manifest(fact.name, root), lake.manifest(table.name, root)
    wanted = {key: _source(table, facts, key) for key in _keys(table, facts.partitions)}
    changed = before.stale(wanted, context.is_anew)
    if not changed:
        return Report(table.name)
    read = {fact_key for key in changed for fact_key in _window(table, key) if fact_key in facts.partitions}
    days = {key.split("/")[0] for key in changed}
    fresh = transform(sinks.load(spark, lake, fact, facts, read, context.checked))
    if table.lookahead_days:
        fresh = sinks.only(fresh, changed)
    stay = before.sources.keys() - changed
    if any(key.split("/")[0] in days for key in stay):
        fresh = fresh.unionByName(
            sinks.only(sinks.load(spark, lake, table, before, days, context.checked), changed, but=True)
        )
    staged = sinks.stage(sinks.spread(fresh, table, {}), lake, table, new_run())
    context.told(table.name, f"staged {len(staged)} days")
    new = sinks.counted(spark, lake, table, staged, digest=True)
    kept = {day: part for day, part in before.partitions.items() if day not in days}
    context.told(table.name, "publishing")
    lake.commit(root, {table.name: Manifest({**kept, **new}, wanted)}, read=[fact.name])
    return Report(
        table.name,
        rows_in=sum(facts.partitions[key].rows for key in read),
        rows_out=sum(part.rows for part in new.values()),
        partitions=len(new),
    )


def _keys(table: schemas.Table, facts: Mapping[str, Partition]) -> set[str]:
    """The days and tenants that the facts may give rows of this mart for."""
    return {_shifted(key, -days) for key in facts for days in range(table.lookahead_days + 1)}


def _window(table: schemas.Table, key: str) -> list[str]:
    return [_shifted(key, days) for days in range(table.lookahead_days + 1)]


def _source(table: schemas.Table, facts: Manifest, key: str) -> str:
    """What this day and tenant of the mart is computed from, as one word."""
    parts = [facts.partitions[k].identity if k in facts.partitions else "" for k in _window(table, key)]
    return f"{table.version}:{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:32]}"


def _shifted(key: str, days: int) -> str:
    day, _, tenant = key.partition("/")
    return f"{date.fromisoformat(day) + timedelta(days=days)}/{tenant}"
