"""The number of workers that a queue needs, per hour in which its tasks became due."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.spark import erlang, schemas
from pipeline.spark.transforms.common import round_ratio, truncate_to_hour

TARGETS_SECONDS = {"workers_1s": 1.0, "workers_10s": 10.0, "workers_60s": 60.0}


def capacity(attempts: DataFrame) -> DataFrame:
    """Compute the load of each hour and the workers that keep the mean wait at each target.

    Arrivals are attempts that became due in the hour, both first attempts and retries, even if they ended later:
    the input is the facts of the day itself and of the next day. `load` is in Erlang: the number of workers that
    would be busy all the time. `workers_10s` workers keep the mean wait at 10 s or below if the hour's load
    continues (M/G/c; see erlang.py).
    """
    # The sum of squared milliseconds exceeds 64 bits after a few thousand long runs.
    square = F.col("run_ms").cast("decimal(19,0)") * F.col("run_ms").cast("decimal(19,0)")
    grouped = (
        attempts.where("claimed_at IS NOT NULL")
        # A day's result must not depend on how many days are computed together.
        .where(F.datediff("date", F.to_date("visible_at")) <= schemas.MARTS["capacity"].lookahead_days)
        .withColumn("date", F.to_date("visible_at"))
        .groupBy("date", "tenant", "command", truncate_to_hour(F.col("visible_at")).alias("hour"))
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
        round_ratio(mean).alias("service_mean_ms"),
        round_ratio(F.when(mean > 0, F.greatest(variance, F.lit(0.0)) / (mean * mean)).otherwise(0.0)).alias(
            "service_cv2"
        ),
        round_ratio(F.col("run_ms") / 3_600_000).alias("load"),
        round_ratio(F.col("wait_ms") / F.col("arrivals")).alias("wait_mean_ms"),
    )
    struct = schemas.MARTS["capacity"].struct
    return measured.mapInPandas(_add_workers_needed, struct)


def _add_workers_needed(frames: Iterator[Any]) -> Iterator[Any]:
    for frame in frames:
        for name, seconds in TARGETS_SECONDS.items():
            frame[name] = erlang.workers_needed(
                frame["arrivals"].to_numpy() / 3600.0,
                frame["service_mean_ms"].to_numpy() / 1000.0,
                frame["service_cv2"].to_numpy(),
                seconds,
            )
        yield frame
