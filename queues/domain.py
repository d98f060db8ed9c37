"""Tasks, results and their states as plain values, without Django or Redis."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class TaskStatus(StrEnum):
    """The state of a task."""

    PENDING = "PENDING"  # enqueued, retried or replayed: ready or delayed
    IN_PROGRESS = "IN_PROGRESS"  # PENDING -> claimed under a lease
    COMPLETED = "COMPLETED"  # IN_PROGRESS -> result
    FAILED = "FAILED"  # IN_PROGRESS -> result with an error, or out of attempts (a dead letter)
    CANCELLED = "CANCELLED"  # PENDING or IN_PROGRESS -> cancelled by the producer

    @property
    def is_terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.CANCELLED})


class Location(StrEnum):
    """The Redis structure that holds a task. The values are the names that the API uses.

    NONE is the location of an ended task that is not a dead letter.
    """

    PENDING_LIST = "PENDING_LIST"
    DELAYED_ZSET = "DELAYED_ZSET"
    INPROG_SET = "INPROG_SET"
    DLQ_SET = "DLQ_SET"
    NONE = "NONE"


class Outcome(StrEnum):
    """The outcome of an attempt, or of a task that ended while no worker held it."""

    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    NACKED = "NACKED"
    ABANDONED = "ABANDONED"
    EXPIRED = "EXPIRED"
    CANCELLED = "CANCELLED"


class Spec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of a task that its transitions do not change. Only a replay can replace them.

    They are stored as one blob that no script decodes.
    """

    command: str
    payload: str
    tenant: str
    webhook: str | None = None
    trace_parent: str | None = None
    trace_state: str | None = None


class NewTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task to enqueue. `run_at_ms` (Unix time) takes precedence over `delay_ms`."""

    command: str
    payload: str
    priority: int = 0
    has_priority: bool = True  # False: the producer gave none, so the lowest tier of the queue's policy applies
    max_attempts: int | None = None
    webhook: str | None = None
    idempotency_key: str | None = None
    run_at_ms: int | None = None
    delay_ms: int = 0
    trace_parent: str | None = None
    trace_state: str | None = None


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A task in Redis. All times are Unix milliseconds of the Redis clock."""

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
    """A new task, or the task that an earlier request created with the same idempotency key.

    In the second case `is_repeated` is true. `is_mismatch` is true if the earlier request had a different body.
    """

    task: Task
    is_repeated: bool = False
    is_mismatch: bool = False


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """The claimed tasks.

    If there are none, `next_due_ms` is the time at which the next delayed task becomes due or the next lease expires.
    `expired` is the number of leases that the claim ended, `dead` the number of their tasks that became dead letters.
    """

    tasks: list[Task]
    now_ms: int
    next_due_ms: int | None = None
    expired: int = 0
    dead: int = 0


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease and the time at which it expires."""

    task_id: str
    until_ms: int


class NewResult(msgspec.Struct, frozen=True, kw_only=True):
    """A result to store.

    `result` and `artifacts` (a list of stored artifacts) are compact JSON, or None. `worker` is set if the results of
    a call are of several workers.
    """

    task_id: str
    status: TaskStatus
    result: bytes | None = None
    error: str | None = None
    artifacts: bytes | None = None
    lease_token: str | None = None
    worker: str | None = None


class StoredResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A result as Redis stores it beside the task: compact JSON that no script decodes."""

    result: bytes | None = None
    error: str | None = None
    artifacts: bytes | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of an ended task. It never changes."""

    task_id: str
    status: TaskStatus
    worker: str
    completed_ms: int
    attempts: int
    result: msgspec.Raw | None = None
    error: str | None = None
    artifacts: msgspec.Raw | None = None


class ReturnOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a nack or an abandon.

    The task is ready after `delay_ms`, or is a dead letter.
    """

    is_dead: bool
    delay_ms: int


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """The number of tasks in each state of one queue."""

    command: str
    ready: int
    delayed: int
    in_progress: int
    dlq: int
    is_paused: bool
    oldest_ready_ms: int | None = None
    ready_by_priority: list[int] = []


class QueueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A task in a peek at its queue, without the payload.

    `due_ms` is the time at which the lease of a running task expires, or a delayed task becomes due.
    """

    id: str
    priority: int
    attempts: int
    max_attempts: int
    created_ms: int
    visible_ms: int
    due_ms: int | None = None
    worker: str | None = None
    claimed_ms: int | None = None
    progress: str | None = None


class QueuePeek(msgspec.Struct, frozen=True, kw_only=True):
    """The first tasks of a queue: the next to run, the next to expire, the next to fall due."""

    ready: list[QueueEntry]
    in_progress: list[QueueEntry]
    delayed: list[QueueEntry]


class QueuePosition(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a task in its queue.

    `command` is the queue that has the task now. It differs from the queue of its `spec` if a policy has moved the task
    to a dead letter queue. `higher` is the number of ready tasks of a higher priority, `ahead` the number of tasks of
    the same priority that come first. `ahead` is None if the task is not ready, or too many tasks come first to count
    them.
    """

    command: str
    now_ms: int
    is_paused: bool
    is_busy: bool  # the queue has as many tasks in progress as its policy allows
    in_progress: int
    higher: int
    ahead: int | None
    is_awaited: bool  # a worker is waiting for a task of this queue
