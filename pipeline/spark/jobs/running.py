"""What a job is given, and what it says at its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date

from pyspark.sql import SparkSession

from pipeline.spark.lake import Lake

HORIZON_DAYS = 45


@dataclass(frozen=True)
class Report:
    """What a job did. `rows_in` were read, `rows_out` written, `quarantined` broke the contract."""

    job: str
    rows_in: int = 0
    rows_out: int = 0
    quarantined: int = 0
    late_dropped: int = 0
    partitions: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Context:
    """What every job is given. `dsn` is the database of the audit and of the marts; `since` and `until` (excluded)
    name days that are to be read and computed anew although nothing about them has changed."""

    spark: SparkSession
    lake: Lake
    dsn: str = ""
    files: str = ""  # read history from these files instead of from the audit
    since: date | None = None
    until: date | None = None
    horizon_days: int = HORIZON_DAYS
    checked: set[str] = field(default_factory=set)  # files that this run has held against their checksums
    told: Callable[[str, str], None] = field(default=lambda job, stage: None)

    @property
    def is_forced(self) -> bool:
        return self.since is not None or self.until is not None

    def is_anew(self, key: str) -> bool:
        """Whether the partition is to be made again though nothing about it has changed."""
        return self.is_forced and self.is_asked_for(key)

    def is_asked_for(self, key: str) -> bool:
        """Whether the partition's day is one of those asked for."""
        day = key.split("/")[0]
        return (self.since is None or day >= self.since.isoformat()) and (
            self.until is None or day < self.until.isoformat()
        )


Job = Callable[[Context], Report]
