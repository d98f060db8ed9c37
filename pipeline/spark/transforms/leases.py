"""How long a lease and how many attempts a command really needs, per tenant and day."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.spark import schemas
from pipeline.spark.transforms.common import at, count_where, sorted_values

LEAST_RUNS = 20  # no advice from fewer
SHORTEST_SECONDS, LONGEST_SECONDS = 30, 43_200  # what the API takes, and below what a restart would cost the lease


def leases(attempts: DataFrame) -> DataFrame:
    """The advised lease is twice the 99th percentile of the runs that completed: longer delays the repair of a lost
    worker, shorter runs tasks twice. The advised attempts are one more than the attempt by which 99.9 % of the tasks
    that succeeded had done so. `duplicate_ms` was worked by attempts whose lease ran out: work done again."""
    completed = F.col("outcome") == "COMPLETED"
    expired = F.col("outcome") == "EXPIRED"
    grouped = (
        attempts.where("claimed_at IS NOT NULL")
        .groupBy("date", "tenant", "command")
        .agg(
            F.count("*").alias("attempts"),
            count_where(completed).alias("completed"),
            count_where(expired).alias("expired"),
            sorted_values(F.when(completed, F.col("run_ms"))).alias("runs"),
            sorted_values(F.when(completed, F.col("number"))).alias("numbers"),
            F.sum(F.when(expired, F.col("run_ms")).otherwise(0)).alias("duplicate_ms"),
        )
    )
    enough = F.size("runs") >= LEAST_RUNS
    seconds = F.ceil(2 * at(F.col("runs"), 0.99) / 1000)
    return schemas.MARTS["leases"].select(
        grouped.select(
            "date",
            "tenant",
            "command",
            "attempts",
            "completed",
            "expired",
            at(F.col("runs"), 0.5).alias("run_p50_ms"),
            at(F.col("runs"), 0.99).alias("run_p99_ms"),
            at(F.col("runs"), 1.0).alias("run_max_ms"),
            "duplicate_ms",
            F.when(enough, F.least(F.greatest(seconds, F.lit(SHORTEST_SECONDS)), F.lit(LONGEST_SECONDS))).alias(
                "lease_advice_seconds"
            ),
            F.when(enough, at(F.col("numbers"), 0.999) + 1).alias("max_attempts_advice"),
        )
    )
