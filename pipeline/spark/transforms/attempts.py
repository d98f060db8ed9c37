"""From rows of the audit to facts: which rows can be counted, typed, each attempt once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from pipeline.spark import schemas
from pipeline.spark.transforms.common import FILE, ms_between, once

NOWHERE = "1970-01-01"  # the day under which a row without a day is kept
NOBODY = "none"
LATE = "late"
TENANT = r"^[A-Za-z0-9_.-]{1,128}\z"  # `$` would let a newline follow; it becomes the name of a directory


def judged(source: DataFrame, contract: schemas.Table, day: str, *, closed_before: date | None = None) -> DataFrame:
    """Each row of the audit with its `date` and `reason`: null, or why it is not counted.

    Days before `closed_before` are beyond the horizon: they stay as they were published.
    """
    named = F.col("tenant").rlike(TENANT)
    numbers = [c.name for c in contract.columns if c.type in ("int", "long")]
    reason = F.coalesce(
        *(F.when(F.col(c.name).isNull(), F.lit(f"no {c.name}")) for c in contract.columns if not c.optional),
        F.when(~named, F.lit("malformed tenant")),
        *(F.when(F.col(name) < 0, F.lit(f"negative {name}")) for name in numbers),
        *(F.when(broken, F.lit(words)) for words, broken in RULES[contract.name]()),
        F.when(F.to_date(day) < F.lit(closed_before), F.lit(LATE)),
    )
    return source.select(
        F.coalesce(F.to_date(day), F.lit(NOWHERE).cast("date")).alias("date"),
        F.when(named, F.col("tenant")).otherwise(F.lit(NOBODY)).alias("tenant"),
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
    """The facts of whole days: one row per (task, number), the one the audit wrote first."""
    return timed(once(raw, "task_id", "number", first=("id", "ended_at")))


def timed(rows: DataFrame) -> DataFrame:
    """Rows with how long each waited and ran.

    A wait is never negative: a Redis that failed over may have told the claim an earlier time than the enqueue.
    """
    wait = ms_between(F.col("visible_at"), F.col("claimed_at"))
    return rows.select(
        "date",
        *(c.name for c in schemas.SOURCE.columns),
        F.when(wait < 0, 0).otherwise(wait).alias("wait_ms"),
        ms_between(F.col("claimed_at"), F.col("ended_at")).alias("run_ms"),
        *(name for name in rows.columns if name == FILE),
    )
