"""How many workers a queue needs, per hour in which its tasks became due."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.spark import erlang, schemas
from pipeline.spark.transforms.common import hour, rounded

TARGETS_SECONDS = {"workers_1s": 1.0, "workers_10s": 10.0, "workers_60s": 60.0}


def capacity(attempts: DataFrame) -> DataFrame:
    """Arrivals are deliveries that became due in the hour, first ones and retries alike, whenever they ended: the
    facts of the day itself and of the next one are looked at. `load` is in Erlang: workers that would be busy all the
    time. `workers_10s` keep the mean wait at 10 s or below if such an hour goes on (M/G/c; see erlang.py)."""
    # Squares of milliseconds leave 64 bits after some thousand long runs.
    square = F.col("run_ms").cast("decimal(19,0)") * F.col("run_ms").cast("decimal(19,0)")
    grouped = (
        attempts.where("claimed_at IS NOT NULL")
        # However many days are looked at together, a day is computed from the same ones.
        .where(F.datediff("date", F.to_date("visible_at")) <= schemas.MARTS["capacity"].lookahead_days)
        .withColumn("date", F.to_date("visible_at"))
        .groupBy("date", "tenant", "command", hour(F.col("visible_at")).alias("hour"))
        .agg(
            F.count("*").alias("arrivals"),
            F.sum("run_ms").alias("run_ms"),
            F.sum("wait_ms").alias("wait_ms"),
            F.sum(square.cast("decimal(38,0)")).alias("squares"),
        )
    )
    mean = F.col("run_ms") / F.col("arrivals")
    variance = F.col("squares").cast("double") / F.col("arrivals") - mean * mean
    measured = grouped.select(
        "date",
        "tenant",
        "command",
        "hour",
        "arrivals",
        rounded(mean).alias("service_mean_ms"),
        rounded(F.when(mean > 0, F.greatest(variance, F.lit(0.0)) / (mean * mean)).otherwise(0.0)).alias("service_cv2"),
        rounded(F.col("run_ms") / 3_600_000).alias("load"),
        rounded(F.col("wait_ms") / F.col("arrivals")).alias("wait_mean_ms"),
    )
    struct = schemas.MARTS["capacity"].struct
    return measured.mapInPandas(_with_workers, struct)


def _with_workers(frames: Iterator[Any]) -> Iterator[Any]:
    for frame in frames:
        for name, seconds in TARGETS_SECONDS.items():
            frame[name] = erlang.workers_needed(
                frame["arrivals"].to_numpy() / 3600.0,
                frame["service_mean_ms"].to_numpy() / 1000.0,
                frame["service_cv2"].to_numpy(),
                seconds,
            )
        yield frame
