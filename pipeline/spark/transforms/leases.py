"""The lease duration and the number of attempts that a command needs, per tenant and day."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.spark import schemas
from pipeline.spark.transforms.common import collect_sorted, count_where, quantile

MIN_RUNS = 20  # fewer completed runs give no advice
# A shorter lease than the minimum would expire while a worker restarts. The maximum is the API's limit.
MIN_LEASE_SECONDS, MAX_LEASE_SECONDS = 30, 43_200


def leases(attempts: DataFrame) -> DataFrame:
    """Compute the advised lease and number of attempts of each command.

    The advised lease is twice the 99th percentile of the completed runs: a longer lease delays the retry after a
    lost worker, a shorter one makes tasks run twice. The advised number of attempts is one more than the attempt by
    which 99.9 % of the completed tasks had completed. `duplicate_ms` is the run time of attempts whose lease
    expired, so that the work was done again.
    """
    completed = F.col("outcome") == "COMPLETED"
    expired = F.col("outcome") == "EXPIRED"
    grouped = (
        attempts.where("claimed_at IS NOT NULL")
        .groupBy("date", "tenant", "command")
        .agg(
            F.count("*").alias("attempts"),
            count_where(completed).alias("completed"),
            count_where(expired).alias("expired"),
            collect_sorted(F.when(completed, F.col("run_ms"))).alias("runs"),
            collect_sorted(F.when(completed, F.col("number"))).alias("numbers"),
            F.sum(F.when(expired, F.col("run_ms")).otherwise(0)).alias("duplicate_ms"),
        )
    )
    has_enough_runs = F.size("runs") >= MIN_RUNS
    seconds = F.ceil(2 * quantile(F.col("runs"), 0.99) / 1000)
    return schemas.MARTS["leases"].select(
        grouped.select(
            "date",
            "tenant",
            "command",
            "attempts",
            "completed",
            "expired",
            quantile(F.col("runs"), 0.5).alias("run_p50_ms"),
            quantile(F.col("runs"), 0.99).alias("run_p99_ms"),
            quantile(F.col("runs"), 1.0).alias("run_max_ms"),
            "duplicate_ms",
            F.when(
                has_enough_runs, F.least(F.greatest(seconds, F.lit(MIN_LEASE_SECONDS)), F.lit(MAX_LEASE_SECONDS))
            ).alias("lease_advice_seconds"),
            F.when(has_enough_runs, quantile(F.col("numbers"), 0.999) + 1).alias("max_attempts_advice"),
        )
    )
