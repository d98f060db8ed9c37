"""Write ended attempts and tasks to PostgreSQL, in bulk.

Writing an entry again changes nothing. An entry that PostgreSQL rejects goes to quarantine and does not stop the
others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
from django.db import DatabaseError, connection, transaction

from core import pg_copy
from core.pg_copy import timestamp
from queues.audit import events
from queues.audit.events import AuditRecord, Blobs, DeadLetterChange, Event, StreamEntry, storable_text
from queues.failure_ids import failure_id
from queues.models import Quarantine

log = logging.getLogger(__name__)
_decode_raw = msgspec.msgpack.Decoder(tuple[dict[bytes, bytes], Blobs]).decode

# Columns and the types of their values, in the order of the values in `_attempt_row` and `_result_row`.
ATTEMPT_COLUMNS = {
    "task_id": pg_copy.UUID_BYTES, "number": "int4", "tenant_id": "text", "command": "text", "priority": "int2",
    "created_at": pg_copy.TIMESTAMP, "visible_at": pg_copy.TIMESTAMP, "claimed_at": pg_copy.TIMESTAMP,
    "ended_at": pg_copy.TIMESTAMP, "outcome": "text", "status": "text", "worker": "text", "error": "text",
    "payload_bytes": "int8", "result_bytes": "int8",
}  # fmt: skip
RESULT_COLUMNS = {
    "task_id": pg_copy.UUID_BYTES, "tenant_id": "text", "command": "text", "priority": "int2", "payload": "text",
    "status": "text", "outcome": "text", "is_dead": "bool", "error": "text", "result": "text",
    "artifacts": "text", "attempts": "int4", "deliveries": "int4", "max_attempts": "int4", "worker": "text",
    "webhook": "text", "trace_parent": "text", "trace_state": "text", "created_at": pg_copy.TIMESTAMP,
    "claimed_at": pg_copy.TIMESTAMP, "ended_at": pg_copy.TIMESTAMP, "position": "int8", "fingerprint": "int8",
}  # fmt: skip
KEEP_EXISTING = "ON CONFLICT (task_id, number) DO NOTHING"
# Keep the ending with the highest position, regardless of the order in which drains write.
KEEP_LAST = (
    "ON CONFLICT (task_id) DO UPDATE SET "
    + ", ".join(f"{column} = excluded.{column}" for column in RESULT_COLUMNS if column != "task_id")
    + " WHERE queues_auditedresult.position < excluded.position"
)
# How long a drain may block others after its process was frozen. The statements of a batch take milliseconds.
FROZEN_AFTER_MS = 15_000
LOCK_NOT_AVAILABLE = "55P03"
# SQLSTATE classes of errors that one row causes: data exception, integrity violation, program limit, exception of a
# trigger. Other errors concern the server or the schema: if they were included, every row would go to quarantine.
ROW_ERROR_CLASSES = frozenset({"22", "23", "54", "P0"})


class StoreResult(NamedTuple):
    """The events of a batch, and the number of entries that went to quarantine."""

    events: list[Event]
    quarantined: int


def store(batch: Sequence[tuple[StreamEntry, Blobs]]) -> StoreResult:
    """Write a batch in order. Entries that cannot be stored go to quarantine, one by one."""
    readable: list[tuple[StreamEntry, Blobs, AuditRecord]] = []
    quarantined = 0
    for entry, blobs in batch:
        try:
            readable.append((entry, blobs, events.read(entry, blobs)))
        except (ValueError, msgspec.MsgspecError) as error:
            quarantine(entry, blobs, str(error))
            quarantined += 1
    quarantined += _store(readable)
    return StoreResult([record.event for _, _, record in readable], quarantined)


def quarantine(entry: StreamEntry, blobs: Blobs, reason: str) -> None:
    raw = msgspec.msgpack.encode((dict(entry.fields), blobs))
    row = Quarantine(partition=entry.partition, stream_id=entry.stream_id, reason=storable_text(reason), raw=raw)
    Quarantine.objects.bulk_create([row], ignore_conflicts=True)
    log.error("audit: entry %s of partition %s is in quarantine", entry.stream_id, entry.partition)


def retry(rows: Iterable[Quarantine]) -> int:
    """Try to store quarantined entries again, and return the number of stored ones."""
    stored = 0
    for row in rows:
        fields, blobs = _decode_raw(bytes(row.raw))
        if not store([(StreamEntry(row.partition, row.stream_id, fields), blobs)]).quarantined:
            row.delete()
            stored += 1
    return stored


def _store(batch: Sequence[tuple[StreamEntry, Blobs, AuditRecord]]) -> int:
    """Write the records in one transaction, and return the number of quarantined entries.

    If a row causes an error, each half of the batch is tried again, down to the entry of that row.
    """
    if not batch:
        return 0
    try:
        with transaction.atomic():
            _set_timeouts()
            _write([record for _, _, record in batch])
    except DatabaseError as error:
        if _sqlstate(error) == LOCK_NOT_AVAILABLE:
            _end_frozen_copies()
        if not is_row_error(error):
            raise
        if len(batch) == 1:
            quarantine(*batch[0][:2], str(error))
            return 1
    else:
        return 0
    middle = len(batch) // 2
    return _store(batch[:middle]) + _store(batch[middle:])


def _set_timeouts() -> None:
    """Let PostgreSQL end the transaction of a frozen process, and a wait for its locks.

    Otherwise a frozen process would keep the locks on its inserted rows, and every other drain would wait for them.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT set_config('idle_in_transaction_session_timeout', %s, true), set_config('lock_timeout', %s, true)",
            [str(FROZEN_AFTER_MS)] * 2,
        )


def _end_frozen_copies() -> None:
    """End the database sessions of processes that were frozen while they sent rows.

    PostgreSQL's timeouts do not apply to a session that waits for the next row of a COPY. `incoming` is the temporary
    table of `core.pg_copy`: before it is filled, the same transaction may have inserted rows into other tables.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND usename = current_user AND state = 'active' "
            "AND wait_event = 'ClientRead' AND query ~ '^COPY (queues_|webhooks_|incoming )' "
            "AND query_start < clock_timestamp() - %s * interval '1 ms'",
            [FROZEN_AFTER_MS],
        )
        if cursor.rowcount:
            log.warning("audit: ended %d database sessions of frozen processes", cursor.rowcount)


def _write(batch: Sequence[AuditRecord]) -> None:
    attempts = [_attempt_row(record) for record in batch if record.event.attempt]
    pg_copy.copy_rows("queues_attempt", ATTEMPT_COLUMNS, attempts, KEEP_EXISTING)
    ended_tasks = [record for record in batch if record.event.is_terminal]
    last_endings = {record.event.task_bytes: record for record in ended_tasks}
    results = [_result_row(record) for record in last_endings.values()]
    pg_copy.copy_rows("queues_auditedresult", RESULT_COLUMNS, results, KEEP_LAST)
    if changes := [record.event for record in batch if record.event.is_dead_letter_change]:
        _update_dead_flags(changes)
    if ended_tasks:
        for handler in events.handlers:
            handler(ended_tasks)


def _update_dead_flags(changes: Sequence[Event]) -> None:
    """Set or clear the dead flag of tasks after a replay, a removal or the undo of a replay.

    A row with a later event is not changed.
    """
    last_changes = {event.task_id: event for event in changes}.values()
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE queues_auditedresult AS audited SET is_dead = change.is_dead, position = change.position "
            "FROM unnest(%s::uuid[], %s::bool[], %s::bigint[]) AS change (task_id, is_dead, position) "
            "WHERE audited.task_id = change.task_id AND audited.position < change.position",
            [
                [event.task_id for event in last_changes],
                [event.outcome == DeadLetterChange.RECALLED for event in last_changes],
                [event.position for event in last_changes],
            ],
        )


def _attempt_row(record: AuditRecord) -> tuple[Any, ...]:
    event, payload = record.event, record.payload
    payload_bytes = len(payload) if payload.isascii() else len(payload.encode())
    return (
        event.task_bytes, event.attempt, event.tid, event.command, event.priority, timestamp(event.created_ms),
        timestamp(event.visible_ms), timestamp(event.claimed_ms) if event.claimed_ms else None,
        timestamp(event.ended_ms), event.outcome, event.status, event.worker, event.error, payload_bytes,
        len(record.answer.result or b""),
    )  # fmt: skip


def _result_row(record: AuditRecord) -> tuple[Any, ...]:
    event, spec, is_dead = record.event, record.spec, record.event.is_dead
    webhook, trace_parent, trace_state = (
        (spec.webhook or "", spec.trace_parent or "", spec.trace_state or "") if spec else ("", "", "")
    )
    return (
        event.task_bytes, event.tid, event.command, event.priority, record.payload, event.status, event.outcome,
        is_dead, record.error, record.result, record.artifacts,
        event.attempts, event.attempt, record.max_attempts, event.worker, storable_text(webhook),
        storable_text(trace_parent), storable_text(trace_state), timestamp(event.created_ms),
        timestamp(event.claimed_ms) if event.claimed_ms else None, timestamp(event.ended_ms), event.position,
        failure_id(event.command, record.error) if is_dead else None,
    )  # fmt: skip


def is_row_error(error: DatabaseError) -> bool:
    """Return whether one row caused the error, and not the server or the schema."""
    return _sqlstate(error)[:2] in ROW_ERROR_CLASSES


def _sqlstate(error: DatabaseError) -> str:
    return getattr(error.__cause__, "sqlstate", None) or ""
