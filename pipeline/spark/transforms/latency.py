"""How long tasks waited for a worker and ran, per tenant, command and hour in which the attempt ended."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.spark import schemas
from pipeline.spark.transforms.common import at, hour, rounded, sorted_values


def latency(attempts: DataFrame) -> DataFrame:
    grouped = (
        attempts.where("claimed_at IS NOT NULL")
        .groupBy("date", "tenant", "command", hour(F.col("ended_at")).alias("hour"))
        .agg(
            F.count("*").alias("attempts"),
            sorted_values(F.col("wait_ms")).alias("waits"),
            sorted_values(F.col("run_ms")).alias("runs"),
            F.sum("wait_ms").alias("wait_ms"),
            F.sum("run_ms").alias("run_ms"),
        )
    )
    found = [F.col(name) for name in ("date", "tenant", "command", "hour", "attempts")]
    for what, values in (("wait", F.col("waits")), ("run", F.col("runs"))):
        found.append(rounded(F.col(f"{what}_ms") / F.col("attempts")).alias(f"{what}_mean_ms"))
        found += [at(values, share).alias(f"{what}_p{round(100 * share)}_ms") for share in (0.5, 0.95, 0.99)]
        found.append(at(values, 1.0).alias(f"{what}_max_ms"))
    return schemas.MARTS["latency"].select(grouped.select(*found))
