"""Failure groups: dead letters with the same command and the same kind of error."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
from django.db import connection

from queues import failure_ids
from queues.search import pagination
from queues.search.pagination import Condition

MAX_GROUPS = 100
TREND_HOURS = 24

# The groups to show, numbered from 1, and the dead letters of one of them.
_SHOWN = "unnest(%s::text[], %s::text[], %s::bigint[]) WITH ORDINALITY AS shown (tid, cmd, failure, number)"
_LETTERS = "FROM queues_auditedresult WHERE is_dead AND tenant_id = tid AND command = cmd AND fingerprint = failure"


class FailureGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters with the same tenant, command and kind of error."""

    tid: str
    command: str
    failure: str
    error: str  # of the newest dead letter
    count: int
    first_at: datetime
    last_at: datetime
    trend: list[int]  # dead letters of each of the last TREND_HOURS hours, the latest last


def groups(tids: Sequence[str] | None, *, command: str | None = None, limit: int = MAX_GROUPS) -> list[FailureGroup]:
    """Return the failure groups, the largest first.

    The counts are read from an index that contains only dead letters.
    """
    conditions = [Condition("is_dead AND fingerprint IS NOT NULL")]
    if command is not None:
        conditions.append(Condition("command = %s", (command,)))
    conditions += pagination.tenant_conditions(None if tids is None else tuple(tids))
    condition = pagination.all_of(conditions)
    group = "tenant_id, command, fingerprint"
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT {group}, count(*), min(ended_at), max(ended_at) FROM queues_auditedresult "  # noqa: S608
            f"WHERE {condition.sql} GROUP BY {group} ORDER BY count(*) DESC, {group} LIMIT %s",
            [*condition.params, limit],
        )
        counts = cursor.fetchall()
        # Read the newest error and the numbers by hour only for the groups to show.
        shown = _transpose(counts, 3)
        cursor.execute(
            f"SELECT newest.error FROM {_SHOWN} LEFT JOIN LATERAL ("  # noqa: S608
            f"SELECT left(error, 1000) AS error {_LETTERS} ORDER BY ended_at DESC LIMIT 1"
            ") AS newest ON true ORDER BY number",
            shown,
        )
        newest_errors = [error or "" for (error,) in cursor.fetchall()]
        cursor.execute(
            "SELECT number, floor(extract(epoch FROM now() - died.ended_at) / 3600)::int AS hours_ago, count(*) "  # noqa: S608
            f"FROM {_SHOWN} CROSS JOIN LATERAL ("
            f"SELECT ended_at {_LETTERS} AND ended_at > now() - make_interval(hours => %s)"
            ") AS died GROUP BY number, hours_ago",
            [*shown, TREND_HOURS],
        )
        trends = [[0] * TREND_HOURS for _ in counts]
        for number, hours_ago, died in cursor.fetchall():
            trends[number - 1][TREND_HOURS - 1 - min(max(hours_ago, 0), TREND_HOURS - 1)] += died
    return [
        FailureGroup(
            tid=tid,
            command=command_name,
            failure=failure_ids.to_text(failure),
            error=error,
            count=total,
            first_at=first,
            last_at=last,
            trend=trend,
        )
        for (tid, command_name, failure, total, first, last), error, trend in zip(
            counts, newest_errors, trends, strict=True
        )
    ]


def _transpose(rows: Sequence[Sequence[Any]], width: int) -> list[list[Any]]:
    """Return the first `width` columns of the rows."""
    return [[row[index] for row in rows] for index in range(width)]
