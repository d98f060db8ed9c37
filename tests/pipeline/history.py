"""Build audit rows, facts and manifests for tests, and read the audit and the lake."""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

from pipeline.spark import schemas
from pipeline.spark.lake import Lake, Manifest, Partition
from pipeline.spark.transforms.attempts import add_rejection_reason, attempts

DAY = datetime(2026, 3, 10, tzinfo=UTC)
DST_DAY = datetime(2026, 3, 8, tzinfo=UTC)  # clocks in New York change at 07:00 UTC
_numbers = itertools.count(1)
COLUMNS = (
    "task_id", "number", "tenant_id", "command", "priority", "created_at", "visible_at", "claimed_at", "ended_at",
    "outcome", "status", "worker", "error", "payload_bytes", "result_bytes",
)  # fmt: skip


def at(text: str, day: datetime = DAY) -> datetime:
    """Return a time of the day, written as `09:30` or `09:30:00.250`."""
    parts = [float(part) for part in text.split(":")]
    hours, minutes, seconds = [*parts, 0.0, 0.0][:3]
    return day + timedelta(hours=hours, minutes=minutes, seconds=seconds)


def build_attempt(
    ended: str | datetime = "12:00", *, wait: float = 1.0, run: float = 2.0, day: datetime = DAY, **more: Any
) -> dict[str, Any]:
    """Build an attempt that waited `wait` seconds, ran `run` seconds and ended at `ended`.

    By default, it completed. `more` replaces columns.
    """
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


def build_dead_attempt(**more: Any) -> dict[str, Any]:
    return build_attempt(**{"outcome": "NACKED", "status": "FAILED", "error": "boom", **more})


def build_retried_attempt(**more: Any) -> dict[str, Any]:
    return build_attempt(**{"outcome": "NACKED", "status": "PENDING", "error": "boom", **more})


def build_mixed_attempts(count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Build random attempts of three tenants and two commands over three days."""
    builders = (build_attempt, build_attempt, build_attempt, build_retried_attempt, build_dead_attempt)
    return [
        rng.choice(builders)(
            ended=DAY + timedelta(seconds=rng.randrange(3 * 86_400)),
            tenant_id=rng.choice(["acme0001", "acme0001", "beta0002", "corp0003"]),
            command=rng.choice(["render", "resize"]),
            run=rng.randrange(1, 100),
            wait=rng.randrange(60),
        )
        for _ in range(count)
    ]


def build_attempts_around_dst(seed: int, count: int = 200) -> list[dict[str, Any]]:
    """Build random attempts of two tenants on three days around `DST_DAY`."""
    rng = random.Random(seed)
    return [
        build_attempt(
            DST_DAY + timedelta(minutes=rng.randrange(-1440, 2880)), tenant_id=rng.choice(["acme0001", "beta0002"])
        )
        for _ in range(count)
    ]


class Audit:
    """The audit's table of attempts."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

    def add(self, rows: Iterable[dict[str, Any]], connection: Any = None) -> None:
        """Write rows. Without a connection, commit them."""
        statement = f"COPY queues_attempt ({', '.join(COLUMNS)}) FROM STDIN"
        if connection is None:
            with psycopg.connect(self.dsn) as new_connection:
                self.add(rows, new_connection)
            return
        with connection.cursor().copy(statement) as copy:
            for row in rows:
                copy.write_row([row[name] for name in COLUMNS])

    def query(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn) as connection:
            return connection.execute(query, values or None).fetchall()

    def count_per_partition(self) -> dict[str, int]:
        """Return the number of attempts per UTC day and tenant, counted by PostgreSQL."""
        query = (
            "SELECT (ended_at AT TIME ZONE 'UTC')::date::text || '/' || tenant_id, count(*)"
            " FROM queues_attempt GROUP BY 1"
        )
        return dict(self.query(query))


def count_rows(lake: Lake, table: str = "attempts") -> dict[str, int]:
    """Return the number of rows per partition, from the lake's manifest."""
    return {key: part.rows for key, part in lake.manifest(table).partitions.items()}


def read_digests(lake: Lake, *tables: str) -> dict[str, str]:
    """Return the digests of these tables. Equal digests mean equal rows, in any order."""
    return {f"{table}/{key}": part.digest for table in tables for key, part in lake.manifest(table).partitions.items()}


def build_source(spark: Any, rows: list[dict[str, Any]]) -> Any:
    """Build the frame that ingest reads from the audit."""
    values = [
        tuple((row | {"id": i, "tenant": row["tenant_id"]})[name] for name in schemas.SOURCE.names)
        for i, row in enumerate(rows)
    ]
    return spark.createDataFrame(values, schemas.SOURCE.struct)


def build_facts(spark: Any, *rows: dict[str, Any]) -> Any:
    """Compute the facts of these attempts."""
    return attempts(add_rejection_reason(build_source(spark, list(rows)), schemas.SOURCE, "ended_at"))


def build_manifest(file: str, rows: int = 1) -> Manifest:
    """Build the manifest of a table with one partition of one file."""
    return Manifest({"2026-03-10/a": Partition((file,), rows)})
