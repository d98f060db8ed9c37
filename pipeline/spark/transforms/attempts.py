"""Turn audit rows into facts: reject invalid rows, add durations, remove duplicates."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from pipeline.spark import schemas
from pipeline.spark.transforms.common import FILE_COLUMN, keep_first, ms_between

UNKNOWN_DAY = "1970-01-01"  # the partition of rows that have no day
UNKNOWN_TENANT = "none"  # the partition of rows whose tenant is malformed
LATE = "late"
# The tenant becomes the name of a directory. `\z` instead of `$`, which also matches before a final newline.
TENANT_PATTERN = r"^[A-Za-z0-9_.-]{1,128}\z"


def add_rejection_reason(
    source: DataFrame, contract: schemas.TableContract, day: str, *, closed_before: date | None = None
) -> DataFrame:
    """Add the columns `date` and `reason` to the audit rows.

    `reason` is null for a valid row and otherwise states why the row is rejected. `day` names the column whose UTC day
    the row belongs to. Rows of days before `closed_before` are rejected as late: days beyond the horizon stay as they
    were published.
    """
    has_valid_tenant = F.col("tenant").rlike(TENANT_PATTERN)
    numbers = [c.name for c in contract.columns if c.type in ("int", "long")]
    reason = F.coalesce(
        *(F.when(F.col(c.name).isNull(), F.lit(f"no {c.name}")) for c in contract.columns if not c.optional),
        F.when(~has_valid_tenant, F.lit("malformed tenant")),
        *(F.when(F.col(name) < 0, F.lit(f"negative {name}")) for name in numbers),
        *(F.when(is_violated, F.lit(text)) for text, is_violated in RULES[contract.name]()),
        F.when(F.to_date(day) < F.lit(closed_before), F.lit(LATE)),
    )
    return source.select(
        F.coalesce(F.to_date(day), F.lit(UNKNOWN_DAY).cast("date")).alias("date"),
        F.when(has_valid_tenant, F.col("tenant")).otherwise(F.lit(UNKNOWN_TENANT)).alias("tenant"),
        *(F.col(c.name) for c in contract.columns if c.name != "tenant"),
        reason.alias("reason"),
    )


def _attempt_rules() -> list[tuple[str, Column]]:
    return [
        ("unknown outcome", ~F.col("outcome").isin(*schemas.OUTCOMES)),
        ("unknown status", ~F.col("status").isin(*schemas.STATUSES)),
        ("ended before it was claimed", F.col("ended_at") < F.col("claimed_at")),
    ]


RULES: dict[str, Callable[[], list[tuple[str, Column]]]] = {
    schemas.SOURCE.name: _attempt_rules,
    schemas.DELIVERY_SOURCE.name: list,
}


def attempts(raw: DataFrame) -> DataFrame:
    """Compute the facts of whole days, with one row per (task, number).

    If there are duplicates, it keeps the row that the audit wrote first.
    """
    return add_durations(keep_first(raw, "task_id", "number", first=("id", "ended_at")))


def add_durations(rows: DataFrame) -> DataFrame:
    """Add the time that each attempt waited and ran.

    A wait is never negative: after a failover of Redis, the claim may carry an earlier time than the enqueue.
    """
    wait = ms_between(F.col("visible_at"), F.col("claimed_at"))
    return rows.select(
        "date",
        *(c.name for c in schemas.SOURCE.columns),
        F.when(wait < 0, 0).otherwise(wait).alias("wait_ms"),
        ms_between(F.col("claimed_at"), F.col("ended_at")).alias("run_ms"),
        *(name for name in rows.columns if name == FILE_COLUMN),
    )
