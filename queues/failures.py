"""Which failure a dead letter is one of: a number for what the pipeline calls by name; and which failures there are."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import msgspec
from django.db import connection

from pipeline.fingerprint import fingerprint as name_of
from queues import pages
from queues.pages import Condition

GROUPS = 100
TREND_HOURS = 24

_WANTED = "unnest(%s::text[], %s::text[], %s::bigint[]) WITH ORDINALITY AS wanted (tid, cmd, failure, nr)"
_OF_WANTED = "FROM queues_auditedresult WHERE is_dead AND tenant_id = tid AND command = cmd AND fingerprint = failure"


@lru_cache(maxsize=10_000)
def fingerprint(command: str, error: str) -> int:
    """The failure's number, 64 bit with a sign: as short in an index as such a thing can be. Two of a tenant's failures
    with one number come once in 10^8 installations with a million different failures each."""
    digest = blake2b(name_of(command, error).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def to_text(number: int) -> str:
    """A failure's number as it is shown and sent."""
    return f"{number & (2**64 - 1):016x}"


def from_text(text: str) -> int:
    """The other way. ValueError for what is none."""
    if len(text) != 16:
        raise ValueError(text)
    number = int(text, 16)
    return number - 2**64 if number >= 2**63 else number


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Dead letters that died of the same thing. `trend`: how many died in each of the last hours, the latest last."""

    tid: str
    command: str
    failure: str
    error: str
    count: int
    first_at: datetime
    last_at: datetime
    trend: list[int]


def groups(tids: Sequence[str] | None, *, command: str | None = None, limit: int = GROUPS) -> list[Group]:
    """The failures that dead letters died of, the most frequent first. Answered by an index, whatever their number."""
    named = [] if command is None else [Condition("command = %s", (command,))]
    known = Condition("is_dead AND fingerprint IS NOT NULL")
    condition = pages.all_of([known, *named, *pages.of_tenants(None if tids is None else tuple(tids))])
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
        Group(
            tid=tid,
            command=name,
            failure=to_text(failure),
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
