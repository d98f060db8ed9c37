"""Webhook delivery attempts by result, per endpoint and hour in which they were made."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.spark import schemas
from pipeline.spark.transforms.common import collect_sorted, count_where, keep_first, quantile, truncate_to_hour


def deliveries(raw: DataFrame) -> DataFrame:
    """Compute the facts of whole days, with one row per (delivery, number).

    If there are duplicates, it keeps the row that the audit wrote first.
    """
    return keep_first(raw, "delivery_id", "number", first=("id", "started_at"))


def webhooks(facts: DataFrame) -> DataFrame:
    """Count delivery attempts by result, and compute the latency of the responses.

    `refused` attempts got a response with a status other than 2xx, `unreachable` attempts got no response.
    """
    answered = F.col("status_code").isNotNull()
    grouped = facts.groupBy("date", "tenant", "endpoint", truncate_to_hour(F.col("started_at")).alias("hour")).agg(
        F.count("*").alias("attempts"),
        count_where(F.col("delivered") == 1).alias("delivered"),
        count_where((F.col("delivered") == 0) & answered).alias("refused"),
        count_where((F.col("delivered") == 0) & ~answered).alias("unreachable"),
        collect_sorted(F.when(answered, F.col("duration_ms"))).alias("latencies"),
    )
    values = F.col("latencies")
    return schemas.MARTS["webhooks"].select(
        grouped.select(
            *(name for name in grouped.columns if name != "latencies"),
            *(quantile(values, share).alias(f"latency_p{round(100 * share)}_ms") for share in (0.5, 0.95, 0.99)),
            quantile(values, 1.0).alias("latency_max_ms"),
        )
    )
