"""The input and the result of a Spark job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date

from pyspark.sql import SparkSession

from pipeline.spark.lake import Lake

# Rows are dropped as late if their day is more than this many days before the newest day in the lake: days that old
# stay as they were published.
HORIZON_DAYS = 45


@dataclass(frozen=True)
class JobReport:
    """The result of a job."""

    job: str
    rows_in: int = 0
    rows_out: int = 0
    quarantined: int = 0  # rows that break the contract
    late_dropped: int = 0  # rows of days beyond the horizon
    partitions: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobContext:
    """The input of every job.

    `dsn` is the connection string of the database with the audit and the marts. `since` and `until` (excluded) name
    days to read and compute again even if nothing has changed.
    """

    spark: SparkSession
    lake: Lake
    dsn: str = ""
    files: str = ""  # read history from these files instead of from the audit
    since: date | None = None
    until: date | None = None
    horizon_days: int = HORIZON_DAYS
    verified_files: set[str] = field(default_factory=set)  # files whose checksums this run has verified
    report_progress: Callable[[str, str], None] = field(default=lambda job, stage: None)

    @property
    def is_forced(self) -> bool:
        return self.since is not None or self.until is not None

    def must_recompute(self, key: str) -> bool:
        """Return whether the partition must be computed even if nothing has changed."""
        return self.is_forced and self.is_in_period(key)

    def is_in_period(self, key: str) -> bool:
        """Return whether the partition's day is in the period from `since` to `until`."""
        day = key.split("/")[0]
        return (self.since is None or day >= self.since.isoformat()) and (
            self.until is None or day < self.until.isoformat()
        )


SparkJob = Callable[[JobContext], JobReport]
