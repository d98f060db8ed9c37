"""Wait times and run times, per tenant, command and hour in which the attempt ended."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.spark import schemas
from pipeline.spark.transforms.common import collect_sorted, quantile, round_ratio, truncate_to_hour


def latency(attempts: DataFrame) -> DataFrame:
    grouped = (
        attempts.where("claimed_at IS NOT NULL")
        .groupBy("date", "tenant", "command", truncate_to_hour(F.col("ended_at")).alias("hour"))
        .agg(
            F.count("*").alias("attempts"),
            collect_sorted(F.col("wait_ms")).alias("waits"),
            collect_sorted(F.col("run_ms")).alias("runs"),
            F.sum("wait_ms").alias("wait_ms"),
            F.sum("run_ms").alias("run_ms"),
        )
    )
    columns = [F.col(name) for name in ("date", "tenant", "command", "hour", "attempts")]
    for measure, values in (("wait", F.col("waits")), ("run", F.col("runs"))):
        columns.append(round_ratio(F.col(f"{measure}_ms") / F.col("attempts")).alias(f"{measure}_mean_ms"))
        columns += [quantile(values, share).alias(f"{measure}_p{round(100 * share)}_ms") for share in (0.5, 0.95, 0.99)]
        columns.append(quantile(values, 1.0).alias(f"{measure}_max_ms"))
    return schemas.MARTS["latency"].select(grouped.select(*columns))
