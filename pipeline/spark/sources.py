"""Where history comes from: the audit in PostgreSQL, by partitioned reads of one snapshot.

Not every id below the highest one has been committed when that one is seen, and an id may never be. So a read says
up to which id everything is *settled*: no transaction that was writing the table when the highest id was looked up
is still open. What lies above is read too, and read again next time; the `attempts` job drops what came twice.
"""

from __future__ import annotations

import contextlib
import io
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from pipeline.spark import schemas

logger = logging.getLogger(__name__)

ROWS_PER_PARTITION = 250_000
SETTLE_SECONDS = 10.0
JDBC_DRIVER = "org.postgresql.Driver"
# Times that no clock of ours can have said (infinity, the year 44 BC) are read as absent, which is a broken contract.
_TIME = "CASE WHEN {0} >= '2000-01-01Z' AND {0} < '2200-01-01Z' THEN {0} END"


@dataclass(frozen=True)
class Audit:
    """A table of the audit, and how each column of the contract is said in SQL where it is not the column itself."""

    table: str
    contract: schemas.Table
    day: str  # the column whose UTC day a row belongs to
    said: tuple[tuple[str, str], ...] = ()
    join: str = ""

    @property
    def rows(self) -> str:
        return f"{self.table} a {self.join}"

    def expressions(self) -> list[str]:
        said = dict(self.said)
        found = []
        for column in self.contract.columns:
            text = said.get(column.name, f"a.{column.name}")
            if column.type == "time":
                text = _TIME.format(text)
            elif column.type == "string":
                text = f"({text})::text"
            found.append(f"{text} AS {column.name}")
        return found


ATTEMPTS = Audit("queues_attempt", schemas.SOURCE, "ended_at", (("tenant", "a.tenant_id"),))
DELIVERIES = Audit(
    "webhooks_deliveryattempt",
    schemas.DELIVERY_SOURCE,
    "started_at",
    (
        ("tenant", "d.tenant_id"),
        ("endpoint", "d.address"),
        ("command", "d.command"),
        ("delivered", "coalesce(a.status_code BETWEEN 200 AND 299, false)::int"),
    ),
    "LEFT JOIN webhooks_delivery d ON d.id = a.delivery_id",
)


def exists(dsn: str, audit: Audit) -> bool:
    """Whether the database has this table. An installation may have no webhooks."""
    import psycopg

    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT to_regclass(%s) IS NOT NULL", [audit.table]).fetchone()
        return bool(row and row[0])


class NotAPrimary(RuntimeError):
    """History is read from the primary: a standby cannot say which ids are still being written."""


@dataclass(frozen=True)
class Snapshot:
    """One moment of the audit, held open by the connection that made it."""

    name: str
    lowest: int  # the ids it holds, both ends included; lowest > highest = nothing
    highest: int
    settled: int


@contextlib.contextmanager
def snapshot(
    dsn: str, audit: Audit = ATTEMPTS, *, after: int = 0, settle_seconds: float | None = None
) -> Iterator[Snapshot]:
    """Hold one snapshot of the audit while its partitions are read. Ids up to `after` are known and not wanted."""
    import psycopg

    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
        if row and row[0]:
            raise NotAPrimary(NotAPrimary.__doc__)
        _check_columns(connection, audit)
        settled = _settle(connection, audit, after, SETTLE_SECONDS if settle_seconds is None else settle_seconds)
        with connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            found: Any = connection.execute(
                f"SELECT pg_export_snapshot(), min(id), max(id) FROM {audit.table} WHERE id > %s",  # noqa: S608
                [after],
            ).fetchone()
            name, lowest, highest = found
            yield Snapshot(name, lowest or 1, highest or 0, settled)


def _check_columns(connection: Any, audit: Audit) -> None:
    """Let PostgreSQL itself say whether every column is there; what else the table has is not our business."""
    import psycopg

    try:
        connection.execute(f"SELECT {', '.join(audit.expressions())} FROM {audit.rows} LIMIT 0")  # noqa: S608
    except (psycopg.errors.UndefinedColumn, psycopg.errors.UndefinedTable) as error:
        raise schemas.ContractBroken(f"{audit.table}: {error.diag.message_primary}") from error


def _settle(connection: Any, audit: Audit, after: int, seconds: float) -> int:
    """The highest id below which no row can appear any more.

    An INSERT locks the table (ROW EXCLUSIVE) before it draws its id and until its transaction is over, and the lock
    goes after the commit is visible. So: the highest id visible now, then who holds that lock; once those have ended,
    every id up to it is decided. Writers are not blocked, and one that does not end in time only means that we read
    from the old mark again.
    """
    highest = connection.execute(
        f"SELECT coalesce(max(id), %s) FROM {audit.table} WHERE id > %s",  # noqa: S608
        [after, after],
    ).fetchone()[0]
    writers = None
    deadline = time.monotonic() + seconds
    while True:
        now = {
            row[0]
            for row in connection.execute(
                "SELECT virtualtransaction FROM pg_locks WHERE locktype = 'relation' AND relation = %s::regclass"
                " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
                " AND mode = 'RowExclusiveLock' AND granted AND pid IS DISTINCT FROM pg_backend_pid()",
                [audit.table],
            )
        }
        writers = now if writers is None else writers & now
        if not writers:
            return int(highest)
        if time.monotonic() > deadline:
            logger.warning("%s: %d writers have not ended in %.0f s", audit.table, len(writers), seconds)
            return after
        time.sleep(0.05)


def read(
    spark: SparkSession,
    dsn: str,
    moment: Snapshot,
    audit: Audit = ATTEMPTS,
    *,
    between: tuple[date, date] | None = None,
    via: str | None = None,
) -> DataFrame:
    """The rows of the snapshot, in partitions of their ids; `between` two days (the second one excluded) only.

    Read while the snapshot is held. `via="jdbc"` reads through PostgreSQL's JDBC driver, and is what is done where it
    is on the class path, can be told all that the DSN says, and nothing else is said.
    """
    where = "true"
    if between:
        where = f"a.{audit.day} >= '{between[0]:%Y-%m-%d}Z' AND a.{audit.day} < '{between[1]:%Y-%m-%d}Z'"
    if (via or ("jdbc" if is_plain(dsn) and has_jdbc(spark) else "python")) == "jdbc":
        return _read_jdbc(spark, dsn, moment, audit, where)
    spark.dataSource.register(AuditSource)
    return (
        spark.read.format("codeq_audit")
        .schema(audit.contract.struct)
        .options(
            dsn=dsn,
            rows=audit.rows,
            select=", ".join(audit.expressions()),
            where=where,
            snapshot=moment.name,
            lowest=str(moment.lowest),
            highest=str(moment.highest),
        )
        .load()
    )


def ranges(lowest: int, highest: int) -> list[tuple[int, int]]:
    """The ids, both ends included, in ranges that one task reads."""
    return [
        (first, min(first + ROWS_PER_PARTITION - 1, highest))
        for first in range(lowest, highest + 1, ROWS_PER_PARTITION)
    ]


class AuditSource(DataSource):
    """Spark's Python data source over the audit."""

    @classmethod
    def name(cls) -> str:
        return "codeq_audit"

    def schema(self) -> StructType:
        return schemas.SOURCE.struct

    def reader(self, schema: StructType) -> DataSourceReader:
        return AuditReader(self.options, schema)


class AuditReader(DataSourceReader):
    """Reads one range of ids per task with COPY: PostgreSQL writes CSV, Arrow parses it, no row becomes an object."""

    def __init__(self, options: Any, schema: StructType) -> None:
        self.options = dict(options)
        self.fields = schema

    def partitions(self) -> list[InputPartition]:
        found = ranges(int(self.options["lowest"]), int(self.options["highest"]))
        return [InputPartition(bounds) for bounds in found] or [InputPartition((1, 0))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        import psycopg
        import pyarrow as pa
        from pyarrow import csv
        from pyspark.sql.pandas.types import to_arrow_schema

        first, last = partition.value
        schema = to_arrow_schema(self.fields, timezone="UTC")
        query = (
            f"COPY (SELECT {self.options['select']} FROM {self.options['rows']}"  # noqa: S608
            f" WHERE a.id BETWEEN {int(first)} AND {int(last)} AND {self.options['where']}) TO STDOUT (FORMAT csv)"
        )
        with psycopg.connect(self.options["dsn"], autocommit=True) as connection:
            connection.execute("SET timezone = 'UTC'")
            connection.execute("SET datestyle = 'ISO'")
            with connection.transaction():
                connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                connection.execute(f"SET TRANSACTION SNAPSHOT '{self.options['snapshot']}'")
                with connection.cursor().copy(query) as copy:
                    stream = io.BufferedReader(_Stream(copy), 1 << 20)
                    if not stream.peek(1):
                        return
                    batches = csv.open_csv(
                        stream,
                        read_options=csv.ReadOptions(column_names=schema.names, block_size=4 << 20, use_threads=False),
                        parse_options=csv.ParseOptions(newlines_in_values=True),
                        convert_options=csv.ConvertOptions(
                            column_types=dict(zip(schema.names, schema.types, strict=True)),
                            null_values=[""],
                            strings_can_be_null=True,
                            quoted_strings_can_be_null=False,
                        ),
                    )
                    for batch in batches:
                        yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)


class _Stream(io.RawIOBase):
    """What COPY sends, as a file to read from."""

    def __init__(self, copy: Any) -> None:
        self.copy = copy
        self.rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self.rest:
            self.rest = memoryview(self.copy.read())
        size = min(len(buffer), len(self.rest))
        buffer[:size] = self.rest[:size]
        self.rest = self.rest[size:]
        return size


def has_jdbc(spark: SparkSession) -> bool:
    """Whether PostgreSQL's JDBC driver is on the class path."""
    jvm: Any = spark.sparkContext._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    return loader.getResource(JDBC_DRIVER.replace(".", "/") + ".class") is not None


def is_plain(dsn: str) -> bool:
    """Whether this says nothing that the JDBC driver would not be told: without the DSN's `sslmode` it would send the
    password to whoever answers."""
    from psycopg.conninfo import conninfo_to_dict

    said = conninfo_to_dict(dsn)
    is_one_host = not {"/", ","} & set(str(said.get("host") or ""))
    return is_one_host and said.keys() <= {"host", "port", "dbname", "user", "password"}


def _read_jdbc(spark: SparkSession, dsn: str, moment: Snapshot, audit: Audit, where: str) -> DataFrame:
    from psycopg.conninfo import conninfo_to_dict

    parts = conninfo_to_dict(dsn)
    # Each partition's query is the first statement of its transaction, so it can join the snapshot there.
    frame = spark.read.jdbc(
        f"jdbc:postgresql://{parts.get('host') or 'localhost'}:{parts.get('port') or 5432}/{parts.get('dbname')}",
        f"(SELECT {', '.join(audit.expressions())} FROM {audit.rows} WHERE {where}) AS audit",  # noqa: S608
        predicates=[f"id BETWEEN {a} AND {b}" for a, b in ranges(moment.lowest, moment.highest)] or ["false"],
        properties={
            "driver": JDBC_DRIVER,
            "user": str(parts.get("user") or ""),
            "password": str(parts.get("password") or ""),
            "fetchsize": "20000",
            "sessionInitStatement": (
                "SET TIME ZONE 'UTC'; SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY;"
                f" SET TRANSACTION SNAPSHOT '{moment.name}'"
            ),
        },
    )
    return audit.contract.select(frame)
