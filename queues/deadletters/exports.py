"""Dead letters taken away: all that are meant, with their payloads, a piece at a time, for people or programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from uuid import UUID

import msgspec

from queues.deadletters import queries
from queues.deadletters.queries import DeadLetter, Filter, Tids
from queues.models import AuditedResult
from queues.search import pagination

COLUMNS = (
    "id", "tenant", "command", "priority", "error", "failure", "deliveries", "attempts", "max_attempts", "worker",
    "created_at", "died_at", "payload",
)  # fmt: skip


def rows(tids: Tids, asked: Filter) -> Iterator[tuple[DeadLetter, str]]:
    """Every dead letter that is meant, with its whole payload, the newest first; a piece at a time."""
    meant, after = queries.which(tids, asked), None
    while True:
        found, after = pagination.keys(meant, after, pagination.PAGE_LIMIT)
        payloads = dict(
            AuditedResult.objects.filter(pk__in=[key.task_id for key in found]).values_list("task_id", "payload")
        )
        for letter in queries.letters(found):
            yield letter, payloads.get(UUID(letter.id), "")
        if after is None:
            return


def as_json_lines(found: Iterable[tuple[DeadLetter, str]]) -> Iterator[bytes]:
    """One JSON object a line, the payload as text."""
    for letter, payload in found:
        yield msgspec.json.encode(dict(zip(COLUMNS, _cells(letter, payload), strict=True))) + b"\n"


def as_csv(found: Iterable[tuple[DeadLetter, str]]) -> Iterator[bytes]:
    """For a spreadsheet, which must not take what a producer wrote for a formula."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for letter, payload in found:
        writer.writerow([_harmless(cell) for cell in _cells(letter, payload)])
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


def _harmless(cell: object) -> object:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell
