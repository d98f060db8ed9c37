"""Rows of the audit for tests: one line each, everything that is not said is as an ordinary success has it."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

from pipeline.spark.lake import Lake

DAY = datetime(2026, 3, 10, tzinfo=UTC)
_numbers = itertools.count(1)
COLUMNS = (
    "task_id", "number", "tenant_id", "command", "priority", "created_at", "visible_at", "claimed_at", "ended_at",
    "outcome", "status", "worker", "error", "payload_bytes", "result_bytes",
)  # fmt: skip


def at(text: str, day: datetime = DAY) -> datetime:
    """`09:30` or `09:30:00.250` of the day."""
    parts = [float(part) for part in text.split(":")]
    hours, minutes, seconds = [*parts, 0.0, 0.0][:3]
    return day + timedelta(hours=hours, minutes=minutes, seconds=seconds)


def attempt(
    ended: str | datetime = "12:00", *, wait: float = 1.0, run: float = 2.0, day: datetime = DAY, **more: Any
) -> dict[str, Any]:
    """One attempt that ended then, after so many seconds of waiting and running."""
    ended_at = at(ended, day) if isinstance(ended, str) else ended
    claimed_at = ended_at - timedelta(seconds=run)
    visible_at = claimed_at - timedelta(seconds=wait)
    row = {
        "task_id": str(uuid.UUID(int=next(_numbers))),
        "number": 1,
        "tenant_id": "acme0001",
        "command": "render",
        "priority": 0,
        "created_at": visible_at,
        "visible_at": visible_at,
        "claimed_at": claimed_at,
        "ended_at": ended_at,
        "outcome": "COMPLETED",
        "status": "COMPLETED",
        "worker": "w1",
        "error": "",
        "payload_bytes": 100,
        "result_bytes": 10,
    }
    unknown = more.keys() - row.keys()
    assert not unknown, unknown
    return row | more


class Audit:
    """The attempts' table, and what is asked of it."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

    def add(self, rows: Iterable[dict[str, Any]], connection: Any = None) -> None:
        """Write rows; without a connection of one's own, committed at once."""
        statement = f"COPY queues_attempt ({', '.join(COLUMNS)}) FROM STDIN"
        if connection is None:
            with psycopg.connect(self.dsn) as own:
                self.add(rows, own)
            return
        with connection.cursor().copy(statement) as copy:
            for row in rows:
                copy.write_row([row[name] for name in COLUMNS])

    def ask(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn) as connection:
            return connection.execute(query, values or None).fetchall()

    def totals(self) -> dict[str, int]:
        """Attempts per UTC day and tenant, as the audit itself counts them."""
        query = (
            "SELECT (ended_at AT TIME ZONE 'UTC')::date::text || '/' || tenant_id, count(*)"
            " FROM queues_attempt GROUP BY 1"
        )
        return dict(self.ask(query))


def counts(lake: Lake, table: str = "attempts") -> dict[str, int]:
    """Rows per partition, as the lake's pointer says."""
    return {key: part.rows for key, part in lake.manifest(table).partitions.items()}


def digests(lake: Lake, *tables: str) -> dict[str, str]:
    """What these tables hold, in any order of rows: equal digests are equal content."""
    return {f"{table}/{key}": part.digest for table in tables for key, part in lake.manifest(table).partitions.items()}
