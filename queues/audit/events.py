"""Entries of the events stream as typed values, and the handlers of ended tasks.

Other apps register a handler with `on_ended` to be called with ended tasks. It runs in the transaction that stores the
tasks. There is no other way to be notified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple
from uuid import UUID

import msgspec

from queues.domain import TERMINAL, Outcome, Spec, StoredResult, TaskStatus
from queues.engine.replies import decode_answer, decode_spec

# 9999-12-31, the last day that both `datetime` and PostgreSQL support.
MAX_MS = 253_402_300_799_999
MAX_INTEGER = 2**31 - 1
MAX_SMALL_INTEGER = 2**15 - 1
# 20 bits count a million entries in one millisecond. The other bits hold milliseconds until the year 2248.
SEQUENCE_BITS = 20


class DeadLetterChange(StrEnum):
    """The outcomes of entries about dead letters, in addition to those of attempts."""

    REPLAYED = "REPLAYED"  # no longer a dead letter
    PURGED = "PURGED"  # no longer a dead letter
    RECALLED = "RECALLED"  # its replay was undone: a dead letter again


DEAD_LETTER_CHANGES = frozenset(DeadLetterChange)


class UnreadableError(ValueError):
    """The entry lacks a field that every entry has, or a field has an invalid value."""


class StreamEntry(NamedTuple):
    """An entry of the events stream as read from Redis."""

    partition: int
    stream_id: str
    fields: Mapping[bytes, bytes]


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The end of an attempt, of a task, or of both; or a change of a dead letter.

    Times are Unix milliseconds of Redis' clock.
    """

    partition: int
    stream_id: str
    task_bytes: bytes  # the task's UUID as 16 bytes: PostgreSQL needs only these
    tid: str
    command: str
    attempt: int  # counted over the whole life of the task; 0: no attempt ended
    outcome: str
    status: str
    attempts: int
    priority: int
    worker: str
    created_ms: int
    visible_ms: int
    claimed_ms: int | None
    ended_ms: int
    error: str

    @property
    def task_id(self) -> UUID:
        return UUID(bytes=self.task_bytes)

    @property
    def is_terminal(self) -> bool:
        return self.status in TERMINAL

    @property
    def is_dead(self) -> bool:
        """Whether the task became a dead letter: it failed without a result from a worker."""
        return self.status == TaskStatus.FAILED and self.outcome != Outcome.FAILED

    @property
    def is_dead_letter_change(self) -> bool:
        """Whether a dead letter was replayed or removed, or its replay was undone."""
        return self.outcome in DEAD_LETTER_CHANGES

    @property
    def position(self) -> int:
        """The stream id as one number. It grows within a partition, even if the clock moves back."""
        ms, _, sequence = self.stream_id.partition("-")
        return int(ms) << SEQUENCE_BITS | int(sequence)


class Blobs(NamedTuple):
    """The task's data in Redis when its entry was read.

    Every field is None if the task was purged before.
    """

    spec: bytes | None = None
    max_attempts: bytes | None = None
    answer: bytes | None = None


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An event with the producer's spec of the task and the worker's answer."""

    event: Event
    spec: Spec | None
    max_attempts: int
    answer: StoredResult

    @property
    def result(self) -> str:
        return storable_text(self.answer.result or b"")

    @property
    def artifacts(self) -> str:
        return storable_text(self.answer.artifacts or b"")

    @property
    def error(self) -> str:
        """The error of the attempt or of the result; MAX_ATTEMPTS for a dead letter without one."""
        message = self.event.error or storable_text(self.answer.error or "")
        return message or ("MAX_ATTEMPTS" if self.event.is_dead else "")

    @property
    def payload(self) -> str:
        return storable_text(self.spec.payload) if self.spec else ""


def parse(entry: StreamEntry) -> Event:
    """Parse the fields of an entry. Raises UnreadableError if a field is missing or invalid.

    Unknown fields are ignored, so that an older drain can run beside a newer engine.
    """
    fields = entry.fields
    try:
        tid, command = _split_queue(fields[b"queue"])
        return Event(
            partition=entry.partition,
            stream_id=entry.stream_id,
            task_bytes=_uuid_bytes(fields[b"id"]),
            tid=tid,
            command=command,
            attempt=_number(fields[b"attempt"], MAX_INTEGER),
            outcome=_repeated_text(fields[b"outcome"]),
            status=_repeated_text(fields[b"status"]),
            attempts=_number(fields[b"attempts"], MAX_INTEGER),
            priority=_number(fields[b"priority"], MAX_SMALL_INTEGER),
            worker=_repeated_text(fields.get(b"worker", b"")),
            created_ms=_number(fields[b"created"], MAX_MS),
            visible_ms=_number(fields[b"visible"], MAX_MS),
            claimed_ms=_number(fields[b"claimed"], MAX_MS) or None,
            ended_ms=_number(fields[b"ended"], MAX_MS),
            error=storable_text(fields.get(b"error", b"")),
        )
    except KeyError as error:
        raise UnreadableError(f"no field {error}") from error
    except ValueError as error:
        raise UnreadableError(str(error)) from error


def read(entry: StreamEntry, blobs: Blobs) -> AuditRecord:
    """Parse an entry and decode its blobs.

    Use the answer only if this attempt ended with a worker's result. If a dead letter was replayed before the drain
    read its entry, the answer in Redis may be that of a later attempt.
    """
    event = parse(entry)
    is_answered = event.outcome in (Outcome.COMPLETED, Outcome.FAILED)
    return AuditRecord(
        event=event,
        spec=decode_spec(blobs.spec) if blobs.spec else None,
        max_attempts=_number(blobs.max_attempts or b"0", MAX_INTEGER),
        answer=decode_answer(blobs.answer) if blobs.answer and is_answered else StoredResult(),
    )


def storable_text(raw: bytes | str) -> str:
    """Return any text or bytes as text that PostgreSQL can store.

    NUL characters, lone surrogates and invalid UTF-8 are escaped, so that they remain visible.
    """
    if isinstance(raw, bytes):
        raw = raw.decode("utf-8", "backslashreplace")
    elif not raw.isascii():
        raw = raw.encode("utf-8", "backslashreplace").decode()
    return raw.replace("\0", "\\u0000") if "\0" in raw else raw


# Most values occur in many entries: queues, workers, and the times of tasks that were sent in one batch.
_repeated_text = lru_cache(maxsize=10_000)(storable_text)


@lru_cache(maxsize=10_000)
def _split_queue(raw: bytes) -> tuple[str, str]:
    tid, _, command = storable_text(raw).partition(":")
    if not tid or not command:
        raise UnreadableError("no queue")
    return tid, command


@lru_cache(maxsize=10_000)
def _number(raw: bytes, maximum: int) -> int:
    try:
        # Lua writes some numbers as floats.
        number = int(float(raw)) if b"." in raw or b"e" in raw else int(raw)
    except OverflowError as error:
        raise UnreadableError(f"out of range: {raw!r}") from error
    if not 0 <= number <= maximum:
        raise UnreadableError(f"out of range: {number}")
    return number


def _uuid_bytes(raw: bytes) -> bytes:
    uuid = bytes.fromhex(raw.decode().replace("-", ""))
    if len(uuid) != 16:
        raise UnreadableError("the id is not a UUID")
    return uuid


Handler = Callable[[Sequence[AuditRecord]], None]
handlers: list[Handler] = []


def on_ended(handler: Handler) -> Handler:
    """Register a handler, to be called with ended tasks in the transaction that stores them.

    It must be idempotent, because it may be called again with the same tasks. If the row of one task causes a database
    error, only the entry of that task goes to quarantine.
    """
    if handler not in handlers:
        handlers.append(handler)
    return handler
