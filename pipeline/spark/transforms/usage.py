"""What a tenant used, per day: the numbers an invoice or a quota is made of."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.spark import schemas
from pipeline.spark.transforms.common import count_where


def usage(attempts: DataFrame) -> DataFrame:
    """`tasks` ended this day (a replayed one counts each time it ends), `compute_ms` is the time workers held tasks,
    `payload_bytes` are those of the tasks that ended, `delivered_bytes` those of every delivery."""
    ended = F.col("status").isin(*schemas.TERMINAL)
    return schemas.MARTS["usage"].select(
        attempts.groupBy("date", "tenant").agg(
            count_where(ended).alias("tasks"),
            F.count("*").alias("attempts"),
            F.sum(F.coalesce("run_ms", F.lit(0))).alias("compute_ms"),
            F.sum(F.when(ended, F.col("payload_bytes")).otherwise(0)).alias("payload_bytes"),
            F.sum("result_bytes").alias("result_bytes"),
            F.sum(F.when(F.col("claimed_at").isNotNull(), F.col("payload_bytes")).otherwise(0)).alias(
                "delivered_bytes"
            ),
        )
    )
