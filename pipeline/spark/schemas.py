"""The contracts: the columns of each table, and the check of data before it is read.

A table's `version` is part of the identifier of its source. Raise it when the table's transform changes: the next run
then computes the table again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    DataType,
    DateType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

TYPES: dict[str, DataType] = {
    "string": StringType(),
    "int": IntegerType(),
    "long": LongType(),
    "double": DoubleType(),
    "date": DateType(),
    "time": TimestampType(),
}
# Type of a contract -> types of a file's column that can be read as that type without loss.
LOSSLESS_SOURCES = {"long": ("bigint", "int", "smallint", "tinyint"), "int": ("int", "smallint", "tinyint")}

OUTCOMES = ("COMPLETED", "FAILED", "NACKED", "ABANDONED", "EXPIRED", "CANCELLED")
STATUSES = ("PENDING", "IN_PROGRESS", "COMPLETED", "FAILED", "CANCELLED")
TERMINAL = ("COMPLETED", "FAILED", "CANCELLED")


@dataclass(frozen=True)
class ContractColumn:
    """A column of a contract. `type` is a key of `TYPES`."""

    name: str
    type: str
    optional: bool = False  # may be null, and may be missing in files written before the column existed


@dataclass(frozen=True)
class TableContract:
    """One table of the lake. `keys` identify a row, and rows are stored in their order."""

    name: str
    columns: tuple[ContractColumn, ...]
    keys: tuple[str, ...]
    partitions: tuple[str, ...]
    version: int = 1
    lookahead_days: int = 0  # a day of a mart is computed from the facts of that day and this many following days
    source: str = "attempts"  # the table that this one is computed from

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    @property
    def struct(self) -> StructType:
        return StructType([StructField(c.name, TYPES[c.type], True) for c in self.columns])

    def select(self, frame: DataFrame) -> DataFrame:
        """Select the columns of this contract, in its order and cast to its types."""
        return frame.select(*(F.col(c.name).cast(TYPES[c.type]).alias(c.name) for c in self.columns))


class ContractBroken(ValueError):
    """A file or table does not have the columns and types of its contract."""


def check(table: TableContract, schema: StructType, location: str, *, ignore: Iterable[str] = ()) -> None:
    """Raise `ContractBroken` if a column is missing, unknown, or of an incompatible type.

    A type is compatible if it can be read without loss. Spark would read a missing column as nulls, and an unknown
    column may be a renamed one: both must be errors.
    """
    types = {field.name: field.dataType.simpleString() for field in schema.fields if field.name not in set(ignore)}
    problems = []
    for column in table.columns:
        if column.name in set(ignore):
            continue
        actual = types.pop(column.name, None)
        expected = TYPES[column.type].simpleString()
        if actual is None:
            if not column.optional:
                problems.append(f"{column.name} is missing")
        elif actual != expected and actual not in LOSSLESS_SOURCES.get(column.type, ()):
            problems.append(f"{column.name} is {actual}, not {expected}")
    problems += [f"{name} is unknown" for name in types]
    if problems:
        raise ContractBroken(f"{location}: {', '.join(problems)}")


def _parse_columns(text: str) -> tuple[ContractColumn, ...]:
    """Parse columns written as `name:type`, or `name:type?` for a column that may be null."""
    columns = []
    for word in text.split():
        name, _, kind = word.partition(":")
        columns.append(ContractColumn(name, kind.rstrip("?"), kind.endswith("?")))
    return tuple(columns)


_ATTEMPT = """id:long task_id:string number:int command:string priority:int created_at:time visible_at:time
    claimed_at:time? ended_at:time outcome:string status:string worker:string? error:string?
    payload_bytes:long result_bytes:long"""
_DELIVERY = """id:long delivery_id:string number:int endpoint:string command:string started_at:time duration_ms:long
    status_code:int? delivered:int error:string?"""

# The tables as read from the audit, and the rejected rows with the reason.
SOURCE = TableContract("source", _parse_columns(f"tenant:string {_ATTEMPT}"), ("id",), ())
DELIVERY_SOURCE = TableContract("delivery_source", _parse_columns(f"tenant:string {_DELIVERY}"), ("id",), ())
_BY_DAY = ("date", "tenant")
RAW = TableContract("raw", _parse_columns(f"date:date tenant:string {_ATTEMPT}"), ("id",), _BY_DAY)
REJECTED = TableContract(
    "rejected", _parse_columns(f"date:date tenant:string {_ATTEMPT} reason:string"), ("id",), _BY_DAY
)
DELIVERIES_REJECTED = TableContract(
    "deliveries_rejected", _parse_columns(f"date:date tenant:string {_DELIVERY} reason:string"), ("id",), _BY_DAY
)
DELIVERIES_RAW = TableContract(
    "deliveries_raw", _parse_columns(f"date:date tenant:string {_DELIVERY}"), ("id",), _BY_DAY
)

# The facts: one typed row for each attempt.
ATTEMPTS = TableContract(
    "attempts",
    _parse_columns(f"date:date tenant:string {_ATTEMPT} wait_ms:long? run_ms:long?"),
    ("task_id", "number"),
    _BY_DAY,
    source="raw",
)

_HOUR = "date:date tenant:string command:string hour:time"
_HOUR_KEYS = ("date", "tenant", "command", "hour")
_COUNTS = "attempts:long completed:long failed:long nacked:long abandoned:long expired:long cancelled:long"
MARTS: dict[str, TableContract] = {
    table.name: table
    for table in (
        TableContract(
            "throughput",
            _parse_columns(f"{_HOUR} {_COUNTS} retries:long ended:long dead:long"),
            _HOUR_KEYS,
            ("date",),
        ),
        TableContract(
            "latency",
            _parse_columns(
                f"{_HOUR} attempts:long wait_mean_ms:double wait_p50_ms:long wait_p95_ms:long wait_p99_ms:long "
                "wait_max_ms:long run_mean_ms:double run_p50_ms:long run_p95_ms:long run_p99_ms:long run_max_ms:long"
            ),
            _HOUR_KEYS,
            ("date",),
        ),
        TableContract(
            "failures",
            _parse_columns(
                "date:date tenant:string command:string fingerprint:string attempts:long dead:long "
                "first_at:time last_at:time example:string"
            ),
            ("date", "tenant", "command", "fingerprint"),
            ("date",),
        ),
        TableContract(
            "usage",
            _parse_columns(
                "date:date tenant:string tasks:long attempts:long compute_ms:long payload_bytes:long "
                "result_bytes:long delivered_bytes:long"
            ),
            ("date", "tenant"),
            ("date",),
        ),
        TableContract(
            "capacity",
            _parse_columns(
                f"{_HOUR} arrivals:long service_mean_ms:double service_cv2:double load:double wait_mean_ms:double "
                "workers_1s:int workers_10s:int workers_60s:int"
            ),
            _HOUR_KEYS,
            ("date",),
            lookahead_days=1,
        ),
        TableContract(
            "leases",
            _parse_columns(
                "date:date tenant:string command:string attempts:long completed:long expired:long run_p50_ms:long? "
                "run_p99_ms:long? run_max_ms:long? duplicate_ms:long lease_advice_seconds:int? "
                "max_attempts_advice:int?"
            ),
            ("date", "tenant", "command"),
            ("date",),
        ),
        TableContract(
            "webhooks",
            _parse_columns(
                "date:date tenant:string endpoint:string hour:time attempts:long delivered:long refused:long "
                "unreachable:long latency_p50_ms:long? latency_p95_ms:long? latency_p99_ms:long? latency_max_ms:long?"
            ),
            ("date", "tenant", "endpoint", "hour"),
            ("date",),
            source="deliveries",
        ),
    )
}
DELIVERIES = TableContract(
    "deliveries",
    _parse_columns(f"date:date tenant:string {_DELIVERY}"),
    ("delivery_id", "number"),
    _BY_DAY,
    source="deliveries_raw",
)
_HISTORY_TABLES = (RAW, REJECTED, ATTEMPTS, DELIVERIES_RAW, DELIVERIES_REJECTED, DELIVERIES)
TABLES = {table.name: table for table in (*_HISTORY_TABLES, *MARTS.values())}
