"""One moment of the audit in PostgreSQL, held while its rows are read, and up to which id it is settled.

Not every id below the highest one has been committed when that one is seen, and an id may never be. So a snapshot says
up to which id everything is *settled*: no transaction that was writing the table when the highest id was looked up
is still open. What lies above is read too, and read again next time; the `attempts` job drops what came twice.
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
def held(
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
