"""Usage per tenant and day: the figures for invoices and quotas."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.spark import schemas
from pipeline.spark.transforms.common import count_where


def usage(attempts: DataFrame) -> DataFrame:
    """Sum up what each tenant used.

    `tasks` counts tasks that ended on this day (a replayed task counts each time it ends), `compute_ms` is the time
    that workers held tasks, `payload_bytes` counts the tasks that ended, and `delivered_bytes` counts every claim.
    """
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
