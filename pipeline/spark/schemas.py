"""The contracts: what a row of the fact and of each mart holds, and what a file or table must offer to be read.

A mart's `version` is part of what its rows were computed from: raise it when its transform changes, and the next
run computes it anew.
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
# What a value may have been written as and still be read without loss.
WIDENS = {"long": ("bigint", "int", "smallint", "tinyint"), "int": ("int", "smallint", "tinyint")}

OUTCOMES = ("COMPLETED", "FAILED", "NACKED", "ABANDONED", "EXPIRED", "CANCELLED")
STATUSES = ("PENDING", "IN_PROGRESS", "COMPLETED", "FAILED", "CANCELLED")
TERMINAL = ("COMPLETED", "FAILED", "CANCELLED")


@dataclass(frozen=True)
class Column:
    name: str
    type: str
    optional: bool = False  # may be null, and may be missing in what was written before the column existed


@dataclass(frozen=True)
class Table:
    """One table of the lake. `keys` make a row unique and are the order rows are stored in."""

    name: str
    columns: tuple[Column, ...]
    keys: tuple[str, ...]
    partitions: tuple[str, ...]
    version: int = 1
    lookahead_days: int = 0  # days of the fact after a mart's own day that its rows are computed from
    fact: str = "attempts"

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    @property
    def struct(self) -> StructType:
        return StructType([StructField(c.name, TYPES[c.type], True) for c in self.columns])

    def select(self, frame: DataFrame) -> DataFrame:
        """The frame as this contract has it: these columns, in this order, of these types."""
        return frame.select(*(F.col(c.name).cast(TYPES[c.type]).alias(c.name) for c in self.columns))


class ContractBroken(ValueError):
    """What was to be read does not offer what the contract asks for."""


def check(table: Table, found: StructType, where: str, *, but: Iterable[str] = ()) -> None:
    """Raise `ContractBroken` where a column is missing, unknown, or of a type that cannot be read without loss.

    A column that is missing would be read as nulls and one that is unknown is perhaps a renamed one: neither may
    pass in silence.
    """
    types = {field.name: field.dataType.simpleString() for field in found.fields if field.name not in set(but)}
    problems = []
    for column in table.columns:
        if column.name in set(but):
            continue
        actual = types.pop(column.name, None)
        wanted = TYPES[column.type].simpleString()
        if actual is None:
            if not column.optional:
                problems.append(f"{column.name} is missing")
        elif actual != wanted and actual not in WIDENS.get(column.type, ()):
            problems.append(f"{column.name} is {actual}, not {wanted}")
    problems += [f"{name} is unknown" for name in types]
    if problems:
        raise ContractBroken(f"{where}: {', '.join(problems)}")


def _columns(text: str) -> tuple[Column, ...]:
    """`name:type`, `name:type?` for one that may be null."""
    found = []
    for word in text.split():
        name, _, kind = word.partition(":")
        found.append(Column(name, kind.rstrip("?"), kind.endswith("?")))
    return tuple(found)


_ATTEMPT = """id:long task_id:string number:int command:string priority:int created_at:time visible_at:time
    claimed_at:time? ended_at:time outcome:string status:string worker:string? error:string?
    payload_bytes:long result_bytes:long"""
_DELIVERY = """id:long delivery_id:string number:int endpoint:string command:string started_at:time duration_ms:long
    status_code:int? delivered:int error:string?"""

# As read: everything the audit holds, each row with why it is not counted, if it is not.
SOURCE = Table("source", _columns(f"tenant:string {_ATTEMPT}"), ("id",), ())
DELIVERY_SOURCE = Table("delivery_source", _columns(f"tenant:string {_DELIVERY}"), ("id",), ())
_BY_DAY = ("date", "tenant")
RAW = Table("raw", _columns(f"date:date tenant:string {_ATTEMPT}"), ("id",), _BY_DAY)
REJECTED = Table("rejected", _columns(f"date:date tenant:string {_ATTEMPT} reason:string"), ("id",), _BY_DAY)
DELIVERIES_REJECTED = Table(
    "deliveries_rejected", _columns(f"date:date tenant:string {_DELIVERY} reason:string"), ("id",), _BY_DAY
)
DELIVERIES_RAW = Table("deliveries_raw", _columns(f"date:date tenant:string {_DELIVERY}"), ("id",), _BY_DAY)

# The facts: typed, one row for one attempt.
ATTEMPTS = Table(
    "attempts",
    _columns(f"date:date tenant:string {_ATTEMPT} wait_ms:long? run_ms:long?"),
    ("task_id", "number"),
    _BY_DAY,
    fact="raw",
)

_HOUR = "date:date tenant:string command:string hour:time"
_HOUR_KEYS = ("date", "tenant", "command", "hour")
_COUNTS = "attempts:long completed:long failed:long nacked:long abandoned:long expired:long cancelled:long"
MARTS: dict[str, Table] = {
    table.name: table
    for table in (
        Table(
            "throughput",
            _columns(f"{_HOUR} {_COUNTS} retries:long ended:long dead:long"),
            _HOUR_KEYS,
            ("date",),
        ),
        Table(
            "latency",
            _columns(
                f"{_HOUR} attempts:long wait_mean_ms:double wait_p50_ms:long wait_p95_ms:long wait_p99_ms:long "
                "wait_max_ms:long run_mean_ms:double run_p50_ms:long run_p95_ms:long run_p99_ms:long run_max_ms:long"
            ),
            _HOUR_KEYS,
            ("date",),
        ),
        Table(
            "failures",
            _columns(
                "date:date tenant:string command:string fingerprint:string attempts:long dead:long "
                "first_at:time last_at:time example:string"
            ),
            ("date", "tenant", "command", "fingerprint"),
            ("date",),
        ),
        Table(
            "usage",
            _columns(
                "date:date tenant:string tasks:long attempts:long compute_ms:long payload_bytes:long "
                "result_bytes:long delivered_bytes:long"
            ),
            ("date", "tenant"),
            ("date",),
        ),
        Table(
            "capacity",
            _columns(
                f"{_HOUR} arrivals:long service_mean_ms:double service_cv2:double load:double wait_mean_ms:double "
                "workers_1s:int workers_10s:int workers_60s:int"
            ),
            _HOUR_KEYS,
            ("date",),
            lookahead_days=1,
        ),
        Table(
            "leases",
            _columns(
                "date:date tenant:string command:string attempts:long completed:long expired:long run_p50_ms:long? "
                "run_p99_ms:long? run_max_ms:long? duplicate_ms:long lease_advice_seconds:int? "
                "max_attempts_advice:int?"
            ),
            ("date", "tenant", "command"),
            ("date",),
        ),
        Table(
            "webhooks",
            _columns(
                "date:date tenant:string endpoint:string hour:time attempts:long delivered:long refused:long "
                "unreachable:long latency_p50_ms:long? latency_p95_ms:long? latency_p99_ms:long? latency_max_ms:long?"
            ),
            ("date", "tenant", "endpoint", "hour"),
            ("date",),
            fact="deliveries",
        ),
    )
}
DELIVERIES = Table(
    "deliveries",
    _columns(f"date:date tenant:string {_DELIVERY}"),
    ("delivery_id", "number"),
    _BY_DAY,
    fact="deliveries_raw",
)
_FACTS = (RAW, REJECTED, ATTEMPTS, DELIVERIES_RAW, DELIVERIES_REJECTED, DELIVERIES)
TABLES = {table.name: table for table in (*_FACTS, *MARTS.values())}
