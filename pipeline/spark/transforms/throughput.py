"""Attempts by outcome, per tenant, command and hour in which they ended."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from pipeline.spark import schemas
from pipeline.spark.transforms.common import count_where, truncate_to_hour


def throughput(attempts: DataFrame) -> DataFrame:
    """Count attempts by outcome.

    `retries` are attempts after a task's first one, `ended` are attempts after which the task was finished, and
    `dead` are attempts that made the task a dead letter.
    """
    ended = F.col("status").isin(*schemas.TERMINAL)
    return schemas.MARTS["throughput"].select(
        attempts.groupBy("date", "tenant", "command", truncate_to_hour(F.col("ended_at")).alias("hour")).agg(
            F.count("*").alias("attempts"),
            *(count_where(F.col("outcome") == outcome).alias(outcome.lower()) for outcome in schemas.OUTCOMES),
            count_where(F.col("number") > 1).alias("retries"),
            count_where(ended).alias("ended"),
            count_where(is_dead()).alias("dead"),
        )
    )


def is_dead() -> Column:
    """Return whether the attempt made its task a dead letter.

    It was the last attempt, and it failed without a worker reporting FAILED.
    """
    return (F.col("status") == "FAILED") & F.col("outcome").isin("NACKED", "ABANDONED", "EXPIRED")
