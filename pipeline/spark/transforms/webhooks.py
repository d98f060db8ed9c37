"""How the outside answers: deliveries per endpoint and hour in which they were tried."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.spark import schemas
from pipeline.spark.transforms.common import at, count_where, hour, once, sorted_values


def deliveries(raw: DataFrame) -> DataFrame:
    """The facts of whole days: one row per (delivery, number), the one the audit wrote first."""
    return once(raw, "delivery_id", "number", first=("id", "started_at"))


def webhooks(facts: DataFrame) -> DataFrame:
    """`refused` were answered with another status than 2xx, `unreachable` not at all. Latencies are of the answers."""
    answered = F.col("status_code").isNotNull()
    grouped = facts.groupBy("date", "tenant", "endpoint", hour(F.col("started_at")).alias("hour")).agg(
        F.count("*").alias("attempts"),
        count_where(F.col("delivered") == 1).alias("delivered"),
        count_where((F.col("delivered") == 0) & answered).alias("refused"),
        count_where((F.col("delivered") == 0) & ~answered).alias("unreachable"),
        sorted_values(F.when(answered, F.col("duration_ms"))).alias("latencies"),
    )
    values = F.col("latencies")
    return schemas.MARTS["webhooks"].select(
        grouped.select(
            *(name for name in grouped.columns if name != "latencies"),
            *(at(values, share).alias(f"latency_p{round(100 * share)}_ms") for share in (0.5, 0.95, 0.99)),
            at(values, 1.0).alias("latency_max_ms"),
        )
    )
