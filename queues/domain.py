"""The nouns of a queue as plain values: Task, Result, and the states they go through. No Django, no Redis."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class TaskStatus(StrEnum):
    PENDING = "PENDING"  # waits in a ready list, or is delayed
    IN_PROGRESS = "IN_PROGRESS"  # PENDING -> claimed under a lease
    COMPLETED = "COMPLETED"  # IN_PROGRESS -> result
    FAILED = "FAILED"  # IN_PROGRESS -> result with an error, or out of attempts (a dead letter)
    CANCELLED = "CANCELLED"  # PENDING or IN_PROGRESS -> withdrawn by the producer

    @property
    def is_terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.CANCELLED})


class Location(StrEnum):
    PENDING_LIST = "PENDING_LIST"
    DELAYED_ZSET = "DELAYED_ZSET"
    INPROG_SET = "INPROG_SET"
    DLQ_SET = "DLQ_SET"
    NONE = "NONE"


class Outcome(StrEnum):
    """How one attempt ended, or what ended a task that was not being worked on."""

    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    NACKED = "NACKED"
    ABANDONED = "ABANDONED"
    EXPIRED = "EXPIRED"
    CANCELLED = "CANCELLED"


class Spec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the producer asked for. Immutable: stored once, as one blob, and never opened by a script."""

    command: str
    payload: str
    tenant: str
    webhook: str | None = None
    trace_parent: str | None = None
    trace_state: str | None = None


class NewTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task on its way in. `run_at_ms` (Unix time) wins over `delay_ms`."""

    command: str
    payload: str
    priority: int = 0
    is_priority_said: bool = True  # else the lowest is meant that the queue's policy knows
    max_attempts: int | None = None
    webhook: str | None = None
    idempotency_key: str | None = None
    run_at_ms: int | None = None
    delay_ms: int = 0
    trace_parent: str | None = None
    trace_state: str | None = None


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A live task as Redis knows it. All times are Unix milliseconds of Redis' clock."""

    id: str
    spec: Spec
    priority: int
    max_attempts: int
    status: TaskStatus
    created_ms: int
    updated_ms: int
    visible_ms: int
    location: Location
    attempts: int = 0
    worker: str | None = None
    lease_token: str | None = None
    lease_until_ms: int | None = None
    error: str | None = None
    progress: str | None = None


class Enqueued(msgspec.Struct, frozen=True, kw_only=True):
    """The task an enqueue stands for: new, or the one its idempotency key had made before."""

    task: Task
    is_replayed: bool = False
    is_mismatch: bool = False


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """What a claim took. Empty: `next_due_ms` says when one of the queues has something due, if it has."""

    tasks: list[Task]
    now_ms: int
    next_due_ms: int | None = None
    expired: int = 0
    dead: int = 0


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    task_id: str
    until_ms: int


class NewResult(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's answer. `result` is compact JSON; `artifacts` the compact JSON list already stored, or None."""

    task_id: str
    status: TaskStatus
    result: bytes | None = None
    error: str | None = None
    artifacts: bytes | None = None
    lease_token: str | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker said, as it is stored beside the task: compact JSON, never opened by a script."""

    result: bytes | None = None
    error: str | None = None
    artifacts: bytes | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of an ended task with its circumstances: the same on every read."""

    task_id: str
    status: TaskStatus
    worker: str
    completed_ms: int
    attempts: int
    result: msgspec.Raw | None = None
    error: str | None = None
    artifacts: msgspec.Raw | None = None


class ReleaseOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Where a nack sent the task: back to wait `delay_ms`, or to the dead letters."""

    is_dead: bool
    delay_ms: int


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    command: str
    ready: int
    delayed: int
    in_progress: int
    dlq: int
    is_paused: bool
    oldest_ready_ms: int | None = None
    ready_by_priority: list[int] = []


class QueueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A task as a look at its queue shows it: no payload. `moment_ms` is its deadline, or when it is due."""

    id: str
    priority: int
    attempts: int
    max_attempts: int
    created_ms: int
    visible_ms: int
    moment_ms: int | None = None
    worker: str | None = None
    claimed_ms: int | None = None
    progress: str | None = None


class QueuePeek(msgspec.Struct, frozen=True, kw_only=True):
    """A look at a queue: who is next, whose lease ends first, who is due first."""

    in_line: list[QueueEntry]
    in_progress: list[QueueEntry]
    delayed: list[QueueEntry]


class QueuePosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where a task stands. `higher` and `ahead` are taken before it; `ahead` None = not in line, or too far back."""

    now_ms: int
    is_paused: bool
    is_busy: bool  # as many of its tasks are in progress as its policy allows
    in_progress: int
    higher: int
    ahead: int | None
    is_awaited: bool  # a worker waits for this queue right now
