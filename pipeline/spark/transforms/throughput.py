"""How much was done: attempts by how they ended, per tenant, command and hour in which they ended."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from pipeline.spark import schemas
from pipeline.spark.transforms.common import count_where, hour


def throughput(attempts: DataFrame) -> DataFrame:
    """`retries` are attempts after a task's first one, `ended` those after which the task was over, `dead` those
    that left it in the dead letters."""
    ended = F.col("status").isin(*schemas.TERMINAL)
    return schemas.MARTS["throughput"].select(
        attempts.groupBy("date", "tenant", "command", hour(F.col("ended_at")).alias("hour")).agg(
            F.count("*").alias("attempts"),
            *(count_where(F.col("outcome") == outcome).alias(outcome.lower()) for outcome in schemas.OUTCOMES),
            count_where(F.col("number") > 1).alias("retries"),
            count_where(ended).alias("ended"),
            count_where(is_dead()).alias("dead"),
        )
    )


def is_dead() -> Column:
    """The attempt was the task's last one without a worker having said FAILED itself."""
    return (F.col("status") == "FAILED") & F.col("outcome").isin("NACKED", "ABANDONED", "EXPIRED")
