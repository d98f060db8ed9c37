"""Hold a snapshot of an audit table in PostgreSQL, and find its last settled id.

When the highest id is visible, rows with lower ids may still be uncommitted, or may never be committed. So a snapshot
states up to which id the table is *settled*: every transaction that was writing to the table when the highest id was
read has ended. Rows with higher ids are read too, and read again by the next run. The jobs `attempts` and
`deliveries` remove the duplicates.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.spark import schemas

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 10.0
# Read implausible times (infinity, the year 44 BC) as null, so that the row is rejected for breaking the contract.
_TIME = "CASE WHEN {0} >= '2000-01-01Z' AND {0} < '2200-01-01Z' THEN {0} END"


@dataclass(frozen=True)
class AuditTable:
    """A table of the audit.

    `overrides` maps columns of the contract to SQL where the table has no such column.
    """

    table: str
    contract: schemas.TableContract
    day: str  # the column whose UTC day a row belongs to
    overrides: tuple[tuple[str, str], ...] = ()
    join: str = ""

    @property
    def rows(self) -> str:
        return f"{self.table} a {self.join}"

    def expressions(self) -> list[str]:
        overrides = dict(self.overrides)
        expressions = []
        for column in self.contract.columns:
            text = overrides.get(column.name, f"a.{column.name}")
            if column.type == "time":
                text = _TIME.format(text)
            elif column.type == "string":
                text = f"({text})::text"
            expressions.append(f"{text} AS {column.name}")
        return expressions


ATTEMPTS = AuditTable("queues_attempt", schemas.SOURCE, "ended_at", (("tenant", "a.tenant_id"),))
DELIVERIES = AuditTable(
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


def has_table(dsn: str, audit: AuditTable) -> bool:
    """Return whether the database has this table. An installation may not have webhooks."""
    import psycopg

    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT to_regclass(%s) IS NOT NULL", [audit.table]).fetchone()
        return bool(row and row[0])


class NotAPrimary(RuntimeError):
    """Use the primary: a standby does not show which transactions are still open."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot of an audit table.

    It is valid while the connection that exported it holds its transaction.
    """

    name: str
    lowest: int  # first id
    highest: int  # last id; lower than `lowest` if there are no rows
    settled: int  # every id up to this one is either committed or will never appear


@contextlib.contextmanager
def hold_snapshot(
    dsn: str, audit: AuditTable = ATTEMPTS, *, after: int = 0, settle_seconds: float | None = None
) -> Iterator[Snapshot]:
    """Hold a snapshot of the rows with ids above `after` while its partitions are read."""
    import psycopg

    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
        if row and row[0]:
            raise NotAPrimary(NotAPrimary.__doc__)
        _check_columns(connection, audit)
        settled = _settle(connection, audit, after, SETTLE_SECONDS if settle_seconds is None else settle_seconds)
        with connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            bounds: Any = connection.execute(
                f"SELECT pg_export_snapshot(), min(id), max(id) FROM {audit.table} WHERE id > %s",  # noqa: S608
                [after],
            ).fetchone()
            name, lowest, highest = bounds
            yield Snapshot(name, lowest or 1, highest or 0, settled)


def _check_columns(connection: Any, audit: AuditTable) -> None:
    """Let PostgreSQL check that every column exists.

    Additional columns of the table are ignored.
    """
    import psycopg

    try:
        connection.execute(f"SELECT {', '.join(audit.expressions())} FROM {audit.rows} LIMIT 0")  # noqa: S608
    except (psycopg.errors.UndefinedColumn, psycopg.errors.UndefinedTable) as error:
        raise schemas.ContractBroken(f"{audit.table}: {error.diag.message_primary}") from error


def _settle(connection: Any, audit: AuditTable, after: int, seconds: float) -> int:
    """Return the highest id below which no row can appear any more.

    An INSERT locks the table (ROW EXCLUSIVE) before it draws its id, and releases the lock only after its commit is
    visible. So this reads the highest visible id first, then the transactions that hold this lock, and waits until
    they have ended: then every id up to the highest one is decided. Writers are not blocked. If a writer does not end
    in time, this returns `after`, and the next run reads the same rows again.
    """
    highest = connection.execute(
        f"SELECT coalesce(max(id), %s) FROM {audit.table} WHERE id > %s",  # noqa: S608
        [after, after],
    ).fetchone()[0]
    writers = None
    deadline = time.monotonic() + seconds
    while True:
        holders = {
            row[0]
            for row in connection.execute(
                "SELECT virtualtransaction FROM pg_locks WHERE locktype = 'relation' AND relation = %s::regclass"
                " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
                " AND mode = 'RowExclusiveLock' AND granted AND pid IS DISTINCT FROM pg_backend_pid()",
                [audit.table],
            )
        }
        writers = holders if writers is None else writers & holders
        if not writers:
            return int(highest)
        if time.monotonic() > deadline:
            logger.warning(
                "%s: %d transactions are still open after %.0f s; the next run reads their rows again",
                audit.table,
                len(writers),
                seconds,
            )
            return after
        time.sleep(0.05)
