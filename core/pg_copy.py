"""Bulk inserts with COPY.

Measured with 2,000 rows at a time, PostgreSQL's CPU for a row in each of the audit's two tables: 18 µs with COPY into
the table, 23 µs with COPY into a temporary table and INSERT with a conflict clause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.db import DatabaseError, connection, transaction

UNIQUE_VIOLATION = "23505"
# Types under which binary COPY sends values that are already in PostgreSQL's binary form: a uuid as its 16 bytes, and a
# timestamptz as `timestamp(…)`. This is several times faster than to send UUID and datetime objects.
UUID_BYTES = "bytea"
TIMESTAMP = "int8"
_YEAR_2000_MS = 946_684_800_000


def timestamp(unix_ms: int) -> int:
    """Return a time as the value of a column with the type TIMESTAMP.

    This is the number of microseconds since the year 2000.
    """
    return (unix_ms - _YEAR_2000_MS) * 1000


def copy_rows(table: str, columns: Mapping[str, str], rows: Sequence[Sequence[Any]], on_conflict: str) -> None:
    """Insert rows, with a conflict clause for those that exist. Call it inside a transaction.

    `columns` maps column names to the types of the values, in the order of the values in each row. The rows are copied
    into the table first. If one of them exists, they are copied into a temporary table and inserted from there.
    """
    if not rows:
        return
    try:
        with transaction.atomic():
            _copy(table, columns, rows)
    except DatabaseError as error:
        if getattr(error.__cause__, "sqlstate", None) != UNIQUE_VIOLATION:
            raise
        _insert(table, columns, rows, on_conflict)


def _insert(table: str, columns: Mapping[str, str], rows: Sequence[Sequence[Any]], on_conflict: str) -> None:
    names = ", ".join(columns)
    with connection.cursor() as cursor:
        # An error drops the table with the transaction. No state stays in the session, so a pooler may be used.
        cursor.execute(f"CREATE TEMP TABLE incoming ON COMMIT DROP AS SELECT {names} FROM {table} WITH NO DATA")  # noqa: S608
        _copy("incoming", columns, rows)
        cursor.execute(f"INSERT INTO {table} ({names}) SELECT {names} FROM incoming {on_conflict}")  # noqa: S608
        # A second call in the same transaction creates the table again.
        cursor.execute("DROP TABLE incoming")


def _copy(table: str, columns: Mapping[str, str], rows: Sequence[Sequence[Any]]) -> None:
    statement = f"COPY {table} ({', '.join(columns)}) FROM STDIN (FORMAT binary)"
    with connection.cursor() as cursor, connection.wrap_database_errors, cursor.copy(statement) as copy:
        copy.set_types(list(columns.values()))
        for row in rows:
            copy.write_row(row)
