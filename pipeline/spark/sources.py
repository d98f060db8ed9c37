"""Read the rows of a snapshot of the audit, in partitions of id ranges."""

from __future__ import annotations

import io
from collections.abc import Iterator
from datetime import date
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from pipeline.spark import schemas
from pipeline.spark.snapshots import ATTEMPTS, AuditTable, Snapshot

ROWS_PER_PARTITION = 250_000
JDBC_DRIVER = "org.postgresql.Driver"


def read(
    spark: SparkSession,
    dsn: str,
    snapshot: Snapshot,
    audit: AuditTable = ATTEMPTS,
    *,
    between: tuple[date, date] | None = None,
    via: str | None = None,
) -> DataFrame:
    """Return the rows of the snapshot, in partitions of id ranges.

    With `between`, only rows from the first day up to, but not including, the second day are read. Evaluate the frame
    while the snapshot is held. `via="jdbc"` reads through PostgreSQL's JDBC driver. It is the default if the driver is
    on the class path and supports every parameter of the DSN.
    """
    where = "true"
    if between:
        where = f"a.{audit.day} >= '{between[0]:%Y-%m-%d}Z' AND a.{audit.day} < '{between[1]:%Y-%m-%d}Z'"
    if (via or ("jdbc" if is_jdbc_compatible(dsn) and has_jdbc(spark) else "python")) == "jdbc":
        return _read_jdbc(spark, dsn, snapshot, audit, where)
    spark.dataSource.register(AuditSource)
    return (
        spark.read.format("codeq_audit")
        .schema(audit.contract.struct)
        .options(
            dsn=dsn,
            rows=audit.rows,
            select=", ".join(audit.expressions()),
            where=where,
            snapshot=snapshot.name,
            lowest=str(snapshot.lowest),
            highest=str(snapshot.highest),
        )
        .load()
    )


def split_ids(lowest: int, highest: int) -> list[tuple[int, int]]:
    """Split the ids, both ends included, into ranges. A Spark task reads one range."""
    return [
        (first, min(first + ROWS_PER_PARTITION - 1, highest))
        for first in range(lowest, highest + 1, ROWS_PER_PARTITION)
    ]


class AuditSource(DataSource):
    """A Spark Python data source that reads an audit table."""

    @classmethod
    def name(cls) -> str:
        return "codeq_audit"

    def schema(self) -> StructType:
        return schemas.SOURCE.struct

    def reader(self, schema: StructType) -> DataSourceReader:
        return AuditReader(self.options, schema)


class AuditReader(DataSourceReader):
    """Read one range of ids per Spark task with COPY.

    Arrow parses the CSV, so no Python object is created per row.
    """

    def __init__(self, options: Any, schema: StructType) -> None:
        self.options = dict(options)
        self.fields = schema

    def partitions(self) -> list[InputPartition]:
        bounds = split_ids(int(self.options["lowest"]), int(self.options["highest"]))
        return [InputPartition(pair) for pair in bounds] or [InputPartition((1, 0))]

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
    """A readable file over the data that COPY sends."""

    def __init__(self, copy: Any) -> None:
        self.copy = copy
        self.remaining = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self.remaining:
            self.remaining = memoryview(self.copy.read())
        size = min(len(buffer), len(self.remaining))
        buffer[:size] = self.remaining[:size]
        self.remaining = self.remaining[size:]
        return size


def has_jdbc(spark: SparkSession) -> bool:
    """Return whether PostgreSQL's JDBC driver is on the class path."""
    jvm: Any = spark.sparkContext._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    return loader.getResource(JDBC_DRIVER.replace(".", "/") + ".class") is not None


def is_jdbc_compatible(dsn: str) -> bool:
    """Return whether all parameters of the DSN can be passed on to the JDBC driver.

    Ignoring a parameter is unsafe: without `sslmode`, the driver would send the password to an unverified server.
    """
    from psycopg.conninfo import conninfo_to_dict

    parameters = conninfo_to_dict(dsn)
    is_one_host = not {"/", ","} & set(str(parameters.get("host") or ""))
    return is_one_host and parameters.keys() <= {"host", "port", "dbname", "user", "password"}


def _read_jdbc(spark: SparkSession, dsn: str, snapshot: Snapshot, audit: AuditTable, where: str) -> DataFrame:
    from psycopg.conninfo import conninfo_to_dict

    parts = conninfo_to_dict(dsn)
    # A snapshot must be set before the first query of a transaction. The session's initial statement runs before it.
    frame = spark.read.jdbc(
        f"jdbc:postgresql://{parts.get('host') or 'localhost'}:{parts.get('port') or 5432}/{parts.get('dbname')}",
        f"(SELECT {', '.join(audit.expressions())} FROM {audit.rows} WHERE {where}) AS audit",  # noqa: S608
        predicates=[f"id BETWEEN {a} AND {b}" for a, b in split_ids(snapshot.lowest, snapshot.highest)] or ["false"],
        properties={
            "driver": JDBC_DRIVER,
            "user": str(parts.get("user") or ""),
            "password": str(parts.get("password") or ""),
            "fetchsize": "20000",
            "sessionInitStatement": (
                "SET TIME ZONE 'UTC'; SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY;"
                f" SET TRANSACTION SNAPSHOT '{snapshot.name}'"
            ),
        },
    )
    return audit.contract.select(frame)
