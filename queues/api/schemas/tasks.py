"""Producers: a task on its way in, as it is, and found again."""

from __future__ import annotations

import datetime as dt
from typing import Annotated

from msgspec import UNSET, Meta, Raw, UnsetType

from queues.api.schemas import (
    CALLBACK_PATTERN,
    LIMITS,
    NO_NEWLINE,
    Body,
    Command,
    Cursor,
    Limit,
    Moment,
    Query,
    TaskId,
    View,
    Words,
)
from queues.domain import Location, Status

Priority = Annotated[
    float,
    Meta(
        multiple_of=1,
        ge=0,
        le=9,
        description="Higher goes first. If absent: 0, or the lowest that the queue's policy knows.",
    ),
]


class NewTask(Body, kw_only=True):
    """A task to put on a queue."""

    command: Command
    payload: Annotated[
        Raw,
        Meta(
            description="Any JSON value but null; kept byte-exact, without the spaces.",
            extra_json_schema={"not": {"type": "null"}},
        ),
    ]
    priority: Priority | UnsetType = UNSET
    max_attempts: (
        Annotated[
            float,
            Meta(
                multiple_of=1,
                ge=1,
                le=LIMITS.max_attempts_limit,
                description=f"Deliveries in all. {LIMITS.max_attempts} if absent.",
            ),
        ]
        | None
    ) = None
    webhook: (
        Annotated[
            str,
            Meta(
                max_length=2048,
                description="Called when the task has ended.",
                examples=["https://example.org/codeq/hook"],
                # Judged task by task (`core.url_check`), so that a bad one does not refuse its batch.
                extra_json_schema={"pattern": CALLBACK_PATTERN},
            ),
        ]
        | None
    ) = None
    idempotency_key: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=255,
                pattern=r"^[ -~]+" + NO_NEWLINE,
                description="The same key inside the retention window stands for the same task.",
            ),
        ]
        | None
    ) = None
    run_at: (
        Annotated[dt.datetime, Meta(tz=True, description="Not before this moment; wins over `delaySeconds`.")] | None
    ) = None
    delay_seconds: (
        Annotated[
            float, Meta(ge=0, le=LIMITS.max_schedule_ahead_seconds, description="Not before so many seconds from now.")
        ]
        | None
    ) = None


class NewTasks(Body, kw_only=True):
    """Tasks to put on queues, each for itself."""

    tasks: Annotated[list[NewTask], Meta(min_length=1, max_length=LIMITS.batch)]


class Task(View, kw_only=True):
    """A task."""

    id: TaskId
    command: Command
    payload: Annotated[str, Meta(description="The payload as compact JSON text.")]
    priority: int
    status: Status
    attempts: Annotated[int, Meta(description="Ended attempts without success.")]
    max_attempts: int
    webhook: str | None = None
    worker_id: str | None = None
    lease_until: Moment | None = None
    lease_token: Annotated[
        str | None, Meta(description="Only in the answer to a claim: proves this lease, and no other one.")
    ] = None
    error: Annotated[str | None, Meta(description="Why the last attempt failed.")] = None
    progress: Annotated[Raw | None, Meta(description="What the worker's last heartbeat said of its progress.")] = None
    result_key: Annotated[str | None, Meta(description="Where the result is.")] = None
    tenant_id: str
    trace_parent: str | None = None
    trace_state: str | None = None
    created_at: Moment
    updated_at: Moment
    visible_at: Annotated[Moment | None, Meta(description="A delayed task is not claimed before.")] = None
    last_known_location: Location | None = None


class EnqueuedItem(View, kw_only=True):
    """One answer of a batch: a task, or why there is none."""

    task: Task | None = None
    error: Annotated[str | None, Meta(description="A problem's `code`.", examples=["payload_too_large"])] = None
    status: Annotated[int | None, Meta(description="The status that the single call would have had.")] = None
    detail: str | None = None
    is_replayed: Annotated[bool, Meta(description="The idempotency key had made this task before.")] = False
    is_mismatch: Annotated[bool, Meta(description="… and from another body.")] = False


class EnqueuedTasks(View, kw_only=True):
    """The answers, in the order of the request."""

    results: list[EnqueuedItem]


class TasksQuery(Query, kw_only=True):
    command: Command | None = None
    status: Status | None = None
    # Not a `Moment`: in a query a bare number would be taken for one.
    created_after: (
        Annotated[
            str,
            Meta(
                pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9:.]+([Zz]|[+-][0-9]{2}:[0-9]{2})" + NO_NEWLINE,
                extra_json_schema={"format": "date-time"},
            ),
        ]
        | None
    ) = None
    q: (
        Annotated[Words, Meta(description="Words of payload, error or worker; the last may be the start of one.")]
        | None
    ) = None
    cursor: Cursor | None = None
    limit: Limit = 50


class FoundTasks(View, kw_only=True):
    """Waiting and running tasks queue by queue, then ended ones, the newest first.

    Live tasks move while pages are read: one may be shown twice or not at all. Of ended ones every one is shown once. A
    page may be short, even empty, and still have a cursor: it has looked at enough.
    """

    tasks: list[Task]
    cursor: str | None = None
