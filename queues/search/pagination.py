"""Keyset pagination of the audit's results, with a bound on the work for one page.

Conditions that an index supports narrow the rows that are read. All other conditions are checked on at most SCAN_LIMIT
rows per page. A page that reaches this limit ends early, with a cursor to continue. Words are looked up in their own
index first. If they match too many rows for this, the rows are scanned in the order of the pages.
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
SCAN_LIMIT = 5_000  # rows that one page scans
WINDOW = 1_000  # rows that one query of a scan reads
WINDOW_MS = 5_000  # time limit of this query: a JSON path may contain a regular expression of any cost
# Matches that are read from the index of words and sorted. If there are more, the page is read by a scan.
MAX_WORD_MATCHES = 2_000
WORDS_MS = 1_000
# Up to this number of tenants, the rows of each are read from its own part of the index.
MAX_TENANTS = 100

QUERY_CANCELED = "57014"  # SQLSTATE of a statement that statement_timeout has ended
TOO_LONG = "The search takes too long. Use a simpler filter."
INVALID_CURSOR = "cursor: not valid. Use the cursor of the previous page."
WORDS_CHARS = 300
MAX_WORDS = 32
WORD = re.compile(r"[^\W_]+")


class PageKey(NamedTuple):
    """The position of a row in the order of pages, the newest first."""

    ended_at: datetime
    task_id: UUID


class Condition(NamedTuple):
    """An SQL condition with its parameters."""

    sql: str
    params: tuple[Any, ...] = ()


class RowFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions on rows of the audit. A row must fulfil all of them."""

    tids: tuple[str, ...] | None  # None: all tenants
    indexed: tuple[Condition, ...] = ()  # conditions that an index supports
    scanned: tuple[Condition, ...] = ()  # conditions that are checked row by row
    words: str = ""  # a tsquery


class PageKeys(NamedTuple):
    """The keys of a page's rows."""

    keys: list[PageKey]
    after: PageKey | None  # the next page begins after this key; None: there is no next page


def in_utc(moment: datetime) -> datetime:
    """Convert a time to UTC, because PostgreSQL rejects offsets of sixteen hours and more."""
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        return (datetime.min if moment.year == MINYEAR else datetime.max).replace(tzinfo=UTC)


def split_words(text: str) -> list[str]:
    """Return the words of a text as the SQL function `queues_words` does, but keep the case."""
    return WORD.findall(text)[:MAX_WORDS]


def as_tsquery(text: str, name: str) -> str:
    """Return a tsquery that requires every word; the last may be the beginning of a word.

    Raises InvalidRequest if the text is too long or has no word.
    """
    if len(text) > WORDS_CHARS:
        raise InvalidRequest(f"{name}: at most {WORDS_CHARS} characters")
    words = split_words(text)
    if not words:
        raise InvalidRequest(f"{name}: must contain a letter or digit")
    return " & ".join([*words[:-1], f"{words[-1]}:*"])


def read_keys(row_filter: RowFilter, after: PageKey | None = None, limit: int = PAGE) -> PageKeys:
    """Return the keys of the next page, the newest first.

    Raises InvalidRequest if the search takes too long.
    """
    if row_filter.tids == ():
        return PageKeys([], None)
    if row_filter.words:
        page = _read_by_words(row_filter, after, limit)
        if page is not None:
            return page
    return _scan_page(row_filter, after, limit, ascending=False)


def read_keys_ascending(row_filter: RowFilter, after: PageKey | None, limit: int) -> PageKeys:
    """Return the keys of the next page, the oldest first, for a bulk job.

    Raises InvalidRequest if the search takes too long.
    """
    return _scan_page(row_filter, after, limit, ascending=True)


def count(row_filter: RowFilter, *, at_most: int, milliseconds: int) -> int | None:
    """Return the number of rows, up to `at_most`, or None if counting takes too long."""
    if row_filter.tids == ():
        return 0
    condition = all_of([*row_filter.indexed, *row_filter.scanned, *tenant_conditions(row_filter.tids)])
    if row_filter.words:
        condition = all_of([condition, _has_words(row_filter), *_has_tenant_word(row_filter)])
    sql = f"SELECT count(*) FROM (SELECT FROM queues_auditedresult WHERE {condition.sql} LIMIT %s) AS counted"  # noqa: S608
    try:
        with statement_timeout(milliseconds), connection.cursor() as cursor:
            cursor.execute(sql, [*condition.params, at_most])
            return int(cursor.fetchone()[0])
    except StatementTimeoutError:
        return None


class StatementTimeoutError(Exception):
    """A statement did not end within its time limit."""


@contextmanager
def statement_timeout(milliseconds: int, **settings: str) -> Iterator[None]:
    """Limit the time of each statement in the block, and set these PostgreSQL settings in it.

    Raises StatementTimeoutError if a statement takes longer.
    """
    settings["statement_timeout"] = str(milliseconds)
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            names = list(settings)
            cursor.execute("SELECT " + ", ".join("current_setting(%s)" for _ in names), names)
            before = dict(zip(names, cursor.fetchone(), strict=True))
            _apply_settings(cursor, settings)
            yield
            # Restore the settings of an outer transaction.
            _apply_settings(cursor, before)
    except OperationalError as error:
        if getattr(error.__cause__, "sqlstate", None) != QUERY_CANCELED:
            raise
        raise StatementTimeoutError from error


def _apply_settings(cursor: Any, settings: dict[str, str]) -> None:
    for name, value in settings.items():
        cursor.execute("SELECT set_config(%s, %s, true)", [name, value])


def _read_by_words(row_filter: RowFilter, after: PageKey | None, limit: int) -> PageKeys | None:
    """Read all rows with the words from their index and return one page of them.

    Return None if there are too many rows or if this takes too long.
    """
    others = all_of([*row_filter.indexed, *row_filter.scanned, *tenant_conditions(row_filter.tids)])
    words = all_of([_has_words(row_filter), *_has_tenant_word(row_filter)])
    sql = (
        f"SELECT ended_at, task_id, {others.sql} FROM queues_auditedresult "  # noqa: S608 - our own conditions
        f"WHERE {words.sql} LIMIT %s"
    )
    try:
        # With sequential scans enabled, the LIMIT can make the planner scan the table instead of the index.
        with statement_timeout(WORDS_MS, enable_seqscan="off"), connection.cursor() as cursor:
            cursor.execute(sql, [*others.params, *words.params, MAX_WORD_MATCHES + 1])
            rows = cursor.fetchall()
    except StatementTimeoutError:
        return None
    if len(rows) > MAX_WORD_MATCHES:
        return None
    keys = sorted((PageKey(ended_at, task_id) for ended_at, task_id, is_match in rows if is_match), reverse=True)
    return _cut_page([key for key in keys if after is None or key < after], limit)


def _scan_page(row_filter: RowFilter, after: PageKey | None, limit: int, *, ascending: bool) -> PageKeys:
    """Scan the rows in the order of the pages, with a time limit for each query."""
    if row_filter.words:
        row_filter = msgspec.structs.replace(row_filter, scanned=(*row_filter.scanned, _has_words(row_filter)))
    try:
        with statement_timeout(WINDOW_MS):
            return _scan(row_filter, after, limit, ascending)
    except StatementTimeoutError:
        raise InvalidRequest(TOO_LONG) from None


def _scan(row_filter: RowFilter, after: PageKey | None, limit: int, ascending: bool) -> PageKeys:
    """Read windows until the page is full, SCAN_LIMIT is reached, or all rows are read."""
    keys: list[PageKey] = []
    scanned, last = 0, after
    match = all_of(row_filter.scanned)
    while True:
        if row_filter.scanned:
            window = min(WINDOW, max(2 * limit, scanned), SCAN_LIMIT - scanned)
        else:
            window = limit + 1 - len(keys)
        rows = _read_window(row_filter, match, last, window, ascending)
        keys += [PageKey(ended_at, task_id) for ended_at, task_id, is_match in rows if is_match]
        scanned += len(rows)
        if len(keys) > limit:
            return _cut_page(keys, limit)
        if len(rows) < window:
            return PageKeys(keys, None)
        last = PageKey(rows[-1][0], rows[-1][1])
        if scanned >= SCAN_LIMIT:
            return PageKeys(keys, last)


def _read_window(
    row_filter: RowFilter, match: Condition, after: PageKey | None, window: int, ascending: bool
) -> list[Any]:
    """Return the next rows in order, each with the value of the condition `match`."""
    tids = row_filter.tids
    indexed = list(row_filter.indexed)
    if after is not None:
        indexed.append(Condition(f"(ended_at, task_id) {'>' if ascending else '<'} (%s, %s)", tuple(after)))
    direction = "ASC" if ascending else "DESC"
    order = f"ORDER BY ended_at {direction}, task_id {direction} LIMIT %s"
    if tids is not None and 1 < len(tids) <= MAX_TENANTS:
        # Read the next rows of each tenant by its index, then merge them.
        condition = all_of([Condition("tenant_id = tid"), *indexed])
        sql = (
            f"SELECT audited.* FROM unnest(%s::text[]) AS tid CROSS JOIN LATERAL ("  # noqa: S608
            f"SELECT ended_at, task_id, {match.sql} FROM queues_auditedresult WHERE {condition.sql} {order}"
            f") AS audited {order}"
        )
        params = [list(tids), *match.params, *condition.params, window, window]
    else:
        if tids is not None and len(tids) > MAX_TENANTS:
            match = all_of([match, *tenant_conditions(tids)])
        else:
            indexed += tenant_conditions(tids)
        condition = all_of(indexed)
        sql = f"SELECT ended_at, task_id, {match.sql} FROM queues_auditedresult WHERE {condition.sql} {order}"  # noqa: S608
        params = [*match.params, *condition.params, window]
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        return list(cursor.fetchall())


def _cut_page(keys: Sequence[PageKey], limit: int) -> PageKeys:
    return PageKeys(list(keys[:limit]), keys[limit - 1] if len(keys) > limit else None)


def tenant_conditions(tids: tuple[str, ...] | None) -> list[Condition]:
    """Return the condition that selects these tenants' rows. None stands for all tenants."""
    if tids is None:
        return []
    return [Condition("tenant_id = %s", tids) if len(tids) == 1 else Condition("tenant_id = ANY(%s)", (list(tids),))]


def _has_words(row_filter: RowFilter) -> Condition:
    return Condition(
        "queues_words(tenant_id, worker, error, payload) @@ to_tsquery('simple', %s)", (row_filter.words,)
    )  # fmt: skip


def _has_tenant_word(row_filter: RowFilter) -> list[Condition]:
    """Return the condition that excludes other tenants' rows from the index scan.

    The index contains each row's tenant as a word.
    """
    if row_filter.tids is None:
        return []
    any_of = " | ".join("'@" + tid.replace("'", "''").replace("\\", "") + "'" for tid in row_filter.tids)
    return [Condition("queues_words(tenant_id, worker, error, payload) @@ %s::tsquery", (any_of,))]


def all_of(conditions: Sequence[Condition]) -> Condition:
    """Join conditions with AND."""
    if not conditions:
        return Condition("true")
    return Condition(
        " AND ".join(f"({condition.sql})" for condition in conditions),
        tuple(param for condition in conditions for param in condition.params),
    )


# A cursor as text: microseconds since 1970 and the task's id.
_CURSOR_PATTERN = re.compile(r"([0-9]{1,17})-([0-9a-f]{32})")
_EPOCH = datetime.fromisoformat("1970-01-01T00:00:00+00:00")


def encode_cursor(key: PageKey) -> str:
    """Return the key as text for clients."""
    since = key.ended_at - _EPOCH
    return f"{(since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds}-{key.task_id.hex}"


def decode_cursor(text: str) -> PageKey:
    """Return the key of a client's cursor. Raises InvalidRequest if it is not valid."""
    match = _CURSOR_PATTERN.fullmatch(text)
    try:
        if match is None:
            raise ValueError(text)
        ended_at = _EPOCH + timedelta(microseconds=int(match[1]))
    except (ValueError, OverflowError):
        raise InvalidRequest(INVALID_CURSOR) from None
    return PageKey(ended_at, UUID(match[2]))
