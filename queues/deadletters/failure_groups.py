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

GROUPS = 100
TREND_HOURS = 24

_WANTED = "unnest(%s::text[], %s::text[], %s::bigint[]) WITH ORDINALITY AS wanted (tid, cmd, failure, nr)"
_OF_WANTED = "FROM queues_auditedresult WHERE is_dead AND tenant_id = tid AND command = cmd AND fingerprint = failure"


class FailureGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters that died of the same thing. `trend`: how many died in each of the last hours, the latest last."""

    tid: str
    command: str
    failure: str
    error: str
    count: int
    first_at: datetime
    last_at: datetime
    trend: list[int]


def groups(tids: Sequence[str] | None, *, command: str | None = None, limit: int = GROUPS) -> list[FailureGroup]:
    """The failures that dead letters died of, the most frequent first. Answered by an index, whatever their number."""
    named = [] if command is None else [Condition("command = %s", (command,))]
    known = Condition("is_dead AND fingerprint IS NOT NULL")
    condition = pagination.all_of([known, *named, *pagination.of_tenants(None if tids is None else tuple(tids))])
    group = "tenant_id, command, fingerprint"
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT {group}, count(*), min(ended_at), max(ended_at) FROM queues_auditedresult "  # noqa: S608
            f"WHERE {condition.sql} GROUP BY {group} ORDER BY count(*) DESC, {group} LIMIT %s",
            [*condition.params, limit],
        )
        found = cursor.fetchall()
        # Only of those that are shown: the newest error of each, and how many died in each hour.
        shown = _columns(found, 3)
        cursor.execute(
            f"SELECT newest.error FROM {_WANTED} LEFT JOIN LATERAL ("  # noqa: S608
            f"SELECT left(error, 1000) AS error {_OF_WANTED} ORDER BY ended_at DESC LIMIT 1"
            ") AS newest ON true ORDER BY nr",
            shown,
        )
        newest = [error or "" for (error,) in cursor.fetchall()]
        cursor.execute(
            "SELECT nr, floor(extract(epoch FROM now() - died.ended_at) / 3600)::int AS ago, count(*) "  # noqa: S608
            f"FROM {_WANTED} CROSS JOIN LATERAL ("
            f"SELECT ended_at {_OF_WANTED} AND ended_at > now() - make_interval(hours => %s)"
            ") AS died GROUP BY nr, ago",
            [*shown, TREND_HOURS],
        )
        trends = [[0] * TREND_HOURS for _ in found]
        for number, hours_ago, died in cursor.fetchall():
            trends[number - 1][TREND_HOURS - 1 - min(max(hours_ago, 0), TREND_HOURS - 1)] += died
    return [
        FailureGroup(
            tid=tid,
            command=name,
            failure=failure_ids.to_text(failure),
            error=error,
            count=number,
            first_at=first,
            last_at=last,
            trend=trend,
        )
        for (tid, name, failure, number, first, last), error, trend in zip(found, newest, trends, strict=True)
    ]


def _columns(found: Sequence[Sequence[Any]], width: int) -> list[list[Any]]:
    return [[row[at] for row in found] for at in range(width)]
