"""Writes what ended to PostgreSQL: in bulk, once however often it is asked, and never stopped by one odd
row.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
from django.db import DatabaseError, connection, transaction

from core import pg_copy
from queues.audit import events
from queues.audit.events import Aftermath, Blobs, Ended, Entry, Event
from queues.failure_ids import failure_id
from queues.models import Quarantine

log = logging.getLogger(__name__)
_decode_raw = msgspec.msgpack.Decoder(tuple[dict[bytes, bytes], Blobs]).decode

# Columns and their types, in the order of the rows below.
ATTEMPT = {
    "task_id": "uuid", "number": "int4", "tenant_id": "text", "command": "text", "priority": "int2",
    "created_at": "timestamptz", "visible_at": "timestamptz", "claimed_at": "timestamptz",
    "ended_at": "timestamptz", "outcome": "text", "status": "text", "worker": "text", "error": "text",
    "payload_bytes": "int8", "result_bytes": "int8",
}  # fmt: skip
RESULT = {
    "task_id": "uuid", "tenant_id": "text", "command": "text", "priority": "int2", "payload": "text",
    "status": "text", "outcome": "text", "is_dead": "bool", "error": "text", "result": "text",
    "artifacts": "text", "attempts": "int4", "deliveries": "int4", "max_attempts": "int4", "worker": "text",
    "webhook": "text", "trace_parent": "text", "trace_state": "text", "created_at": "timestamptz",
    "claimed_at": "timestamptz", "ended_at": "timestamptz", "position": "int8", "fingerprint": "int8",
}  # fmt: skip
ONCE = "ON CONFLICT (task_id, number) DO NOTHING"
# The last ending is the truth, whichever run comes last. The same one again changes nothing.
LAST = (
    "ON CONFLICT (task_id) DO UPDATE SET "
    + ", ".join(f"{column} = excluded.{column}" for column in RESULT if column != "task_id")
    + " WHERE queues_auditedresult.position < excluded.position"
)
# Between two statements of a batch lie milliseconds.
IDLE_MS = 15_000
# SQLSTATE classes that are about the row: data exception, integrity, program limit, raised by a trigger.
# All others are about the server or the schema, and would quarantine everything.
POISON = frozenset({"22", "23", "54", "P0"})


class Stored(NamedTuple):
    """What became of a batch: the events that could be read, and how many entries went to quarantine."""

    events: list[Event]
    refused: int


def store(batch: Sequence[tuple[Entry, Blobs]]) -> Stored:
    """Write a batch, in order. Entries that cannot be stored go to quarantine, one by one."""
    readable: list[tuple[Entry, Blobs, Ended]] = []
    refused = 0
    for entry, blobs in batch:
        try:
            readable.append((entry, blobs, events.read(entry, blobs)))
        except (ValueError, msgspec.MsgspecError) as error:
            quarantine(entry, blobs, str(error))
            refused += 1
    refused += _store(readable)
    return Stored([item.event for _, _, item in readable], refused)


def quarantine(entry: Entry, blobs: Blobs, reason: str) -> None:
    raw = msgspec.msgpack.encode((dict(entry.fields), blobs))
    row = Quarantine(partition=entry.partition, stream_id=entry.stream_id, reason=events.text(reason), raw=raw)
    Quarantine.objects.bulk_create([row], ignore_conflicts=True)
    log.error("audit: entry %s of partition %s is in quarantine", entry.stream_id, entry.partition)


def retry(rows: Iterable[Quarantine]) -> int:
    """Try quarantined entries again, after what was wrong with them was mended; how many are stored now."""
    stored = 0
    for row in rows:
        fields, blobs = _decode_raw(bytes(row.raw))
        if not store([(Entry(row.partition, row.stream_id, fields), blobs)]).refused:
            row.delete()
            stored += 1
    return stored


def _store(batch: Sequence[tuple[Entry, Blobs, Ended]]) -> int:
    if not batch:
        return 0
    try:
        with transaction.atomic():
            _let_go_of_us()
            _write([item for _, _, item in batch])
    except DatabaseError as error:
        if not is_about_the_row(error):
            raise
        if len(batch) == 1:
            quarantine(*batch[0][:2], str(error))
            return 1
    else:
        return 0
    middle = len(batch) // 2
    return _store(batch[:middle]) + _store(batch[middle:])


def _let_go_of_us() -> None:
    """A process that is frozen in here holds the rows it has inserted, and every other drain waits for them."""
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL idle_in_transaction_session_timeout = %s", [IDLE_MS])


def _write(batch: Sequence[Ended]) -> None:
    pg_copy.copy_rows(
        "queues_attempt", ATTEMPT, map(_attempt_row, (item for item in batch if item.event.attempt)), ONCE
    )
    over = [item for item in batch if item.event.is_terminal]
    if over:
        last = {item.event.task_id: item for item in over}
        pg_copy.copy_rows("queues_auditedresult", RESULT, map(_result_row, last.values()), LAST)
    if after := [item.event for item in batch if item.event.is_aftermath]:
        _mark(after)
    if over:
        for handler in events.handlers:
            handler(over)


def _mark(after: Sequence[Event]) -> None:
    """These are dead letters no more, or again, unless something has become of them since."""
    last = {event.task_id: event for event in after}.values()
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE queues_auditedresult AS audited SET is_dead = after.is_dead, position = after.position "
            "FROM unnest(%s::uuid[], %s::bool[], %s::bigint[]) AS after (task_id, is_dead, position) "
            "WHERE audited.task_id = after.task_id AND audited.position < after.position",
            [
                [event.task_id for event in last],
                [event.outcome == Aftermath.RECALLED for event in last],
                [event.position for event in last],
            ],
        )


def _attempt_row(item: Ended) -> tuple[Any, ...]:
    event = item.event
    return (
        event.task_id, event.attempt, event.tid, event.command, event.priority, _time(event.created_ms),
        _time(event.visible_ms), _time(event.claimed_ms), _time(event.ended_ms), event.outcome, event.status,
        event.worker, event.error, len(item.payload.encode()), len(item.answer.result or b""),
    )  # fmt: skip


def _result_row(item: Ended) -> tuple[Any, ...]:
    event, spec = item.event, item.spec
    webhook, trace_parent, trace_state = (
        (spec.webhook or "", spec.trace_parent or "", spec.trace_state or "") if spec else ("", "", "")
    )
    return (
        event.task_id, event.tid, event.command, event.priority, item.payload, event.status, event.outcome,
        event.is_dead, item.error, item.result, item.artifacts,
        event.attempts, event.attempt, item.max_attempts, event.worker, events.text(webhook),
        events.text(trace_parent), events.text(trace_state), _time(event.created_ms), _time(event.claimed_ms),
        _time(event.ended_ms), event.position,
        failure_id(event.command, item.error) if event.is_dead else None,
    )  # fmt: skip


def _time(ms: int | None) -> datetime | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)


def is_about_the_row(error: DatabaseError) -> bool:
    state = getattr(error.__cause__, "sqlstate", None)
    return state is not None and state[:2] in POISON
