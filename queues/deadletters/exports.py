"""Export dead letters with their payloads as JSON Lines or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from uuid import UUID

import msgspec

from queues.deadletters import queries
from queues.deadletters.queries import DeadLetter, Filter, TenantIds
from queues.models import AuditedResult
from queues.search import pagination

COLUMNS = (
    "id", "tenant", "command", "priority", "error", "failure", "deliveries", "attempts", "max_attempts", "worker",
    "created_at", "died_at", "payload",
)  # fmt: skip


def rows(tids: TenantIds, letter_filter: Filter) -> Iterator[tuple[DeadLetter, str]]:
    """Yield every matching dead letter with its whole payload, the newest first.

    They are read page by page.
    """
    row_filter, after = queries.to_row_filter(tids, letter_filter), None
    while True:
        keys, after = pagination.read_keys(row_filter, after, pagination.PAGE_LIMIT)
        payloads = dict(
            AuditedResult.objects.filter(pk__in=[key.task_id for key in keys]).values_list("task_id", "payload")
        )
        for letter in queries.read_letters(keys):
            yield letter, payloads.get(UUID(letter.id), "")
        if after is None:
            return


def as_json_lines(rows: Iterable[tuple[DeadLetter, str]]) -> Iterator[bytes]:
    """Yield one JSON object per line, with the payload as a string."""
    for letter, payload in rows:
        yield msgspec.json.encode(dict(zip(COLUMNS, _cells(letter, payload), strict=True))) + b"\n"


def as_csv(rows: Iterable[tuple[DeadLetter, str]]) -> Iterator[bytes]:
    """Yield CSV in which a spreadsheet does not run a producer's text as a formula."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for letter, payload in rows:
        writer.writerow([_escape_formula(cell) for cell in _cells(letter, payload)])
        if text.tell() > 64 * 2**10:
            yield text.getvalue().encode()
            text.seek(0)
            text.truncate()
    yield text.getvalue().encode()


def _cells(letter: DeadLetter, payload: str) -> list[object]:
    return [
        letter.id, letter.tid, letter.command, letter.priority, letter.error, letter.failure, letter.deliveries,
        letter.attempts, letter.max_attempts, letter.worker, letter.created_at.isoformat(), letter.died_at.isoformat(),
        payload,
    ]  # fmt: skip


def _escape_formula(cell: object) -> object:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell
