"""The events stream, entry by entry: what ended, as a typed value, and who else wants to hear of it.

Other apps learn of tasks here and nowhere else: `on_ended` registers what is to happen, in the transaction
that stores them, with the tasks that ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple
from uuid import UUID

import msgspec

from queues.domain import TERMINAL, Outcome, Spec, StoredResult, TaskStatus
from queues.engine.replies import decode_answer, decode_spec

# 9999-12-31: what `datetime` and PostgreSQL can both hold.
LAST_MS = 253_402_300_799_999
LAST_INTEGER = 2**31 - 1
LAST_PRIORITY = 2**15 - 1
# Room for a million entries in one millisecond; the milliseconds then last until the year 2248.
SEQUENCE_BITS = 20


class Aftermath(StrEnum):
    """What else than an end the stream tells of: a dead letter is none any more, or is one again."""

    REPLAYED = "REPLAYED"
    PURGED = "PURGED"
    RECALLED = "RECALLED"


AFTERMATHS = frozenset(Aftermath)


class UnreadableError(ValueError):
    """An entry that does not say what every entry must say."""


class Entry(NamedTuple):
    """An entry as it was read."""

    partition: int
    stream_id: str
    fields: Mapping[bytes, bytes]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt ended, or a task did, or both; or something became of a dead letter. Times are Unix milliseconds of
    Redis' clock."""

    partition: int
    stream_id: str
    task_id: UUID
    tid: str
    command: str
    attempt: int  # over the whole life of the task; 0 = a waiting task was cancelled
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
    def is_terminal(self) -> bool:
        return self.status in TERMINAL

    @property
    def is_dead(self) -> bool:
        """A dead letter: failed without a worker's word. It may be replayed, and then end again."""
        return self.status == TaskStatus.FAILED and self.outcome != Outcome.FAILED

    @property
    def is_aftermath(self) -> bool:
        """A dead letter was replayed or removed, or the replay taken back."""
        return self.outcome in AFTERMATHS

    @property
    def position(self) -> int:
        """The stream id as one number: grows within a partition, also when the clock goes back."""
        ms, _, sequence = self.stream_id.partition("-")
        return int(ms) << SEQUENCE_BITS | int(sequence)


class Blobs(NamedTuple):
    """What Redis still held of the task when its entry was read. Nothing, if an operator had purged it."""

    spec: bytes | None = None
    max_attempts: bytes | None = None
    answer: bytes | None = None


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """An entry together with what the task was and what the worker said."""

    event: Event
    spec: Spec | None
    max_attempts: int
    answer: StoredResult

    @property
    def result(self) -> str:
        return text(self.answer.result or b"")

    @property
    def artifacts(self) -> str:
        return text(self.answer.artifacts or b"")

    @property
    def error(self) -> str:
        """What the task died of. The event says what its last attempt did; given up without a word is said so."""
        said = self.event.error or text(self.answer.error or "")
        return said or ("MAX_ATTEMPTS" if self.event.is_dead else "")

    @property
    def payload(self) -> str:
        return text(self.spec.payload) if self.spec else ""


def parse(entry: Entry) -> Event:
    """Read an entry. Unknown fields are ignored, so that an older drain can run beside a newer engine."""
    fields = entry.fields
    try:
        tid, _, command = text(fields[b"queue"]).partition(":")
        event = Event(
            partition=entry.partition,
            stream_id=entry.stream_id,
            task_id=UUID(fields[b"id"].decode()),
            tid=tid,
            command=command,
            attempt=_number(fields[b"attempt"], LAST_INTEGER),
            outcome=text(fields[b"outcome"]),
            status=text(fields[b"status"]),
            attempts=_number(fields[b"attempts"], LAST_INTEGER),
            priority=_number(fields[b"priority"], LAST_PRIORITY),
            worker=text(fields.get(b"worker", b"")),
            created_ms=_number(fields[b"created"], LAST_MS),
            visible_ms=_number(fields[b"visible"], LAST_MS),
            claimed_ms=_number(fields[b"claimed"], LAST_MS) or None,
            ended_ms=_number(fields[b"ended"], LAST_MS),
            error=text(fields.get(b"error", b"")),
        )
    except KeyError as error:
        raise UnreadableError(f"no field {error}") from error
    except ValueError as error:
        raise UnreadableError(str(error)) from error
    if not tid or not command:
        raise UnreadableError("no queue")
    return event


def read(entry: Entry, blobs: Blobs) -> Ended:
    """An entry with its blobs. Only what a worker said itself has an answer: a dead letter that was
    replayed in the meantime must not show the result of its next life."""
    event = parse(entry)
    is_answered = event.outcome in (Outcome.COMPLETED, Outcome.FAILED)
    return Ended(
        event=event,
        spec=decode_spec(blobs.spec) if blobs.spec else None,
        max_attempts=_number(blobs.max_attempts or b"0", LAST_INTEGER),
        answer=decode_answer(blobs.answer) if blobs.answer and is_answered else StoredResult(),
    )


def text(raw: bytes | str) -> str:
    """Anything a worker may have sent, as text PostgreSQL stores: what it refuses is escaped, and so stays
    visible.
    """
    if isinstance(raw, bytes):
        raw = raw.decode("utf-8", "backslashreplace")
    elif not raw.isascii():
        raw = raw.encode("utf-8", "backslashreplace").decode()
    return raw.replace("\0", "\\u0000") if "\0" in raw else raw


def _number(raw: bytes, most: int) -> int:
    number = int(float(raw)) if b"." in raw or b"e" in raw else int(raw)
    if not 0 <= number <= most:
        raise UnreadableError(f"out of range: {number}")
    return number


Handler = Callable[[Sequence[Ended]], None]
handlers: list[Handler] = []


def on_ended(handler: Handler) -> Handler:
    """Have `handler` called with the tasks that ended, in the transaction that stores them.

    It may be called again with the same ones, and must then change nothing; what it raises from the
    database about one task quarantines that task alone.
    """
    if handler not in handlers:
        handlers.append(handler)
    return handler
