"""Pages of the audit: found by an index, continued by a key, and never more work than a page may cost.

A condition that an index answers narrows what is read. Any other one is put to at most LOOK rows for one page; a page
that has looked at so many ends early, with the place to go on from. Words are looked up in their own index first, and
only where they are too common for that the rows are walked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import MINYEAR, UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from django.db import OperationalError, connection, transaction

from core.errors import InvalidRequest

PAGE = 50
PAGE_LIMIT = 1000
# Rows that one page looks at, and how many of them at once.
SCAN_LIMIT = 5_000
WINDOW = 1_000
PAGE_MS = 5_000  # for one WINDOW: a JSON path may hold a regular expression of any cost
# Rows that words may stand for, to be read from their index and sorted.
WORDS_ROWS = 2_000
WORDS_MS = 1_000
# More tenants than that are walked together, and not each by its own index.
TENANTS = 100

CANCELLED = "57014"
TOO_LONG = "This takes too long to find: ask for something simpler."
WORDS_CHARS = 300
WORD = re.compile(r"[^\W_]+")


class PageKey(NamedTuple):
    """Where a row stands in the order of pages, the newest first."""

    ended_at: datetime
    task_id: UUID


class Condition(NamedTuple):
    sql: str
    params: tuple[Any, ...] = ()


class RowFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The rows meant: of these tenants (None = of all), `within` what an index knows, `where` what it does not."""

    tids: tuple[str, ...] | None
    within: tuple[Condition, ...] = ()
    where: tuple[Condition, ...] = ()
    words: str = ""


class PageKeys(NamedTuple):
    found: list[PageKey]
    # Behind which key the next page begins; None where there is nothing behind.
    after: PageKey | None


def in_utc(moment: datetime) -> datetime:
    """The same moment as PostgreSQL takes it: it knows no zone sixteen hours away, and an offset may be any."""
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        return (datetime.min if moment.year == MINYEAR else datetime.max).replace(tzinfo=UTC)


def words_of(text: str) -> list[str]:
    """The words of a text as queues_words has them, but for their case."""
    return WORD.findall(text)[:32]


def as_tsquery(text: str, name: str) -> str:
    """Every word must be there; the last one may be the beginning of a word. InvalidRequest if there is none."""
    if len(text) > WORDS_CHARS:
        raise InvalidRequest(f"{name}: at most {WORDS_CHARS} characters")
    words = words_of(text)
    if not words:
        raise InvalidRequest(f"{name}: there is no word in it")
    return " & ".join([*words[:-1], f"{words[-1]}:*"])


def keys(which: RowFilter, after: PageKey | None = None, limit: int = PAGE) -> PageKeys:
    """The keys of the next page, the newest first."""
    if which.tids == ():
        return PageKeys([], None)
    if which.words:
        found = _by_words(which, after, limit)
        if found is not None:
            return found
        which = msgspec.structs.replace(which, where=(*which.where, _has_words(which)))
    try:
        with at_most_for(PAGE_MS):
            return _walk(which, after, limit)
    except TooLongError:
        raise InvalidRequest(TOO_LONG) from None


def ascending(which: RowFilter, after: PageKey | None, limit: int) -> PageKeys:
    """The keys of the next piece, the oldest first; for a job that goes through all of them."""
    if which.words:
        which = msgspec.structs.replace(which, where=(*which.where, _has_words(which)))
    try:
        with at_most_for(PAGE_MS):
            return _walk(which, after, limit, upwards=True)
    except TooLongError:
        raise InvalidRequest(TOO_LONG) from None


def count(which: RowFilter, *, at_most: int, milliseconds: int) -> int | None:
    """How many rows there are, no more than `at_most`; None if counting would take too long."""
    if which.tids == ():
        return 0
    condition = all_of([*which.within, *which.where, *of_tenants(which.tids)])
    if which.words:
        condition = all_of([condition, _has_words(which), *_their_words(which)])
    sql = f"SELECT count(*) FROM (SELECT FROM queues_auditedresult WHERE {condition.sql} LIMIT %s) AS found"  # noqa: S608
    try:
        with at_most_for(milliseconds), connection.cursor() as cursor:
            cursor.execute(sql, [*condition.params, at_most])
            return int(cursor.fetchone()[0])
    except TooLongError:
        return None


class TooLongError(Exception):
    """The database did not answer in the time given."""


@contextmanager
def at_most_for(milliseconds: int, **settings: str) -> Iterator[None]:
    """What is asked in this block ends after so long, with TooLongError; `settings` hold in it as well."""
    settings["statement_timeout"] = str(milliseconds)
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            names = list(settings)
            cursor.execute("SELECT " + ", ".join("current_setting(%s)" for _ in names), names)
            before = dict(zip(names, cursor.fetchone(), strict=True))
            _set(cursor, settings)
            yield
            # An outer transaction goes on as it was.
            _set(cursor, before)
    except OperationalError as error:
        if getattr(error.__cause__, "sqlstate", None) != CANCELLED:
            raise
        raise TooLongError from error


def _set(cursor: Any, settings: dict[str, str]) -> None:
    for name, value in settings.items():
        cursor.execute("SELECT set_config(%s, %s, true)", [name, value])


def _by_words(which: RowFilter, after: PageKey | None, limit: int) -> PageKeys | None:
    """From the index of words, all of them; None where that is too many, or takes too long."""
    asked = all_of([*which.within, *which.where, *of_tenants(which.tids)])
    words = all_of([_has_words(which), *_their_words(which)])
    sql = (
        f"SELECT ended_at, task_id, {asked.sql} FROM queues_auditedresult "  # noqa: S608 - conditions of ours
        f"WHERE {words.sql} LIMIT %s"
    )
    try:
        # The planner must not take a LIMIT as an invitation to read the table.
        with at_most_for(WORDS_MS, enable_seqscan="off"), connection.cursor() as cursor:
            cursor.execute(sql, [*asked.params, *words.params, WORDS_ROWS + 1])
            rows = cursor.fetchall()
    except TooLongError:
        return None
    if len(rows) > WORDS_ROWS:
        return None
    found = sorted((PageKey(ended_at, task_id) for ended_at, task_id, is_asked in rows if is_asked), reverse=True)
    return _page([key for key in found if after is None or key < after], limit)


def _walk(which: RowFilter, after: PageKey | None, limit: int, *, upwards: bool = False) -> PageKeys:
    found: list[PageKey] = []
    looked, last = 0, after
    hit = all_of(which.where)
    while True:
        window = limit + 1 - len(found) if not which.where else min(WINDOW, max(2 * limit, looked), SCAN_LIMIT - looked)
        rows = _window(which, hit, last, window, upwards)
        found += [PageKey(ended_at, task_id) for ended_at, task_id, is_hit in rows if is_hit]
        looked += len(rows)
        if len(found) > limit:
            return _page(found, limit)
        if len(rows) < window:
            return PageKeys(found, None)
        last = PageKey(rows[-1][0], rows[-1][1])
        if looked >= SCAN_LIMIT:
            return PageKeys(found, last)


def _window(which: RowFilter, hit: Condition, after: PageKey | None, window: int, upwards: bool) -> list[Any]:
    """The next rows in order, with whether each is meant."""
    within = list(which.within)
    if after is not None:
        within.append(Condition(f"(ended_at, task_id) {'>' if upwards else '<'} (%s, %s)", tuple(after)))
    way = "ASC" if upwards else "DESC"
    order = f"ORDER BY ended_at {way}, task_id {way} LIMIT %s"
    if which.tids is not None and 1 < len(which.tids) <= TENANTS:
        # Each tenant's next rows by its own index, and the first of them all.
        condition = all_of([Condition("tenant_id = tid"), *within])
        sql = (
            f"SELECT each.* FROM unnest(%s::text[]) AS tid CROSS JOIN LATERAL ("  # noqa: S608
            f"SELECT ended_at, task_id, {hit.sql} FROM queues_auditedresult WHERE {condition.sql} {order}"
            f") AS each {order}"
        )
        params = [list(which.tids), *hit.params, *condition.params, window, window]
    else:
        if which.tids is not None and len(which.tids) > TENANTS:
            hit = all_of([hit, *of_tenants(which.tids)])
        else:
            within += of_tenants(which.tids)
        condition = all_of(within)
        sql = f"SELECT ended_at, task_id, {hit.sql} FROM queues_auditedresult WHERE {condition.sql} {order}"  # noqa: S608
        params = [*hit.params, *condition.params, window]
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        return list(cursor.fetchall())


def _page(found: Sequence[PageKey], limit: int) -> PageKeys:
    return PageKeys(list(found[:limit]), found[limit - 1] if len(found) > limit else None)


def of_tenants(tids: tuple[str, ...] | None) -> list[Condition]:
    if tids is None:
        return []
    return [Condition("tenant_id = %s", tids) if len(tids) == 1 else Condition("tenant_id = ANY(%s)", (list(tids),))]


def _has_words(which: RowFilter) -> Condition:
    return Condition(
        "queues_words(tenant_id, worker, error, payload) @@ to_tsquery('simple', %s)", (which.words,)
    )  # fmt: skip


def _their_words(which: RowFilter) -> list[Condition]:
    """The tenant is a word of the index too: what others wrote is not read."""
    if which.tids is None:
        return []
    any_of = " | ".join("'@" + tid.replace("'", "''").replace("\\", "") + "'" for tid in which.tids)
    return [Condition("queues_words(tenant_id, worker, error, payload) @@ %s::tsquery", (any_of,))]


def all_of(conditions: Sequence[Condition]) -> Condition:
    if not conditions:
        return Condition("true")
    return Condition(
        " AND ".join(f"({each.sql})" for each in conditions),
        tuple(param for each in conditions for param in each.params),
    )


# How a place is sent to a client and comes back: to be passed on as it is, and checked as anything a client sends.
_cursor = re.compile(r"([0-9]{1,17})-([0-9a-f]{32})")
_EPOCH = datetime.fromisoformat("1970-01-01T00:00:00+00:00")


def to_text(key: PageKey) -> str:
    since = key.ended_at - _EPOCH
    return f"{(since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds}-{key.task_id.hex}"


def from_text(text: str) -> PageKey:
    match = _cursor.fullmatch(text)
    try:
        if match is None:
            raise ValueError(text)
        ended_at = _EPOCH + timedelta(microseconds=int(match[1]))
    except (ValueError, OverflowError):
        raise InvalidRequest("cursor: not one that a page gave") from None
    return PageKey(ended_at, UUID(match[2]))
