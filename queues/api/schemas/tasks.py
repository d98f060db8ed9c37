"""Tasks: enqueued, read and searched by producers."""

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
from queues.domain import Location, TaskStatus

Priority = Annotated[
    float,
    Meta(
        multiple_of=1,
        ge=0,
        le=9,
        description="A higher priority runs first. If absent: 0, or the lowest priority of the queue's policy.",
    ),
]


class NewTask(Body, kw_only=True):
    """A task to enqueue."""

    command: Command
    payload: Annotated[
        Raw,
        Meta(
            description="Any JSON value but null. White space is removed; nothing else changes.",
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
                description=f"Maximum number of attempts. {LIMITS.max_attempts} if absent.",
            ),
        ]
        | None
    ) = None
    webhook: (
        Annotated[
            str,
            Meta(
                max_length=2048,
                description="URL that is called when the task has ended.",
                examples=["https://example.org/codeq/hook"],
                # Checked for each task (`core.url_check`), so that a bad URL does not fail the whole batch.
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
                description="Within the retention, the same key returns the same task.",
            ),
        ]
        | None
    ) = None
    run_at: (
        Annotated[dt.datetime, Meta(tz=True, description="Earliest time to run. Takes precedence over `delaySeconds`.")]
        | None
    ) = None
    delay_seconds: (
        Annotated[
            float, Meta(ge=0, le=LIMITS.max_schedule_ahead_seconds, description="Seconds before the task may run.")
        ]
        | None
    ) = None


class NewTasks(Body, kw_only=True):
    """Independent tasks to enqueue."""

    tasks: Annotated[list[NewTask], Meta(min_length=1, max_length=LIMITS.batch)]


class Task(View, kw_only=True):
    """A task."""

    id: TaskId
    command: Command
    payload: Annotated[str, Meta(description="The payload as compact JSON text.")]
    priority: int
    status: TaskStatus
    attempts: Annotated[int, Meta(description="Failed attempts.")]
    max_attempts: int
    webhook: str | None = None
    worker_id: str | None = None
    lease_until: Moment | None = None
    lease_token: Annotated[str | None, Meta(description="Proof of the lease. Only a claim returns it.")] = None
    error: Annotated[str | None, Meta(description="Why the last attempt failed.")] = None
    progress: Annotated[Raw | None, Meta(description="The progress in the worker's last heartbeat.")] = None
    result_key: Annotated[str | None, Meta(description="Path of the result.")] = None
    tenant_id: str
    trace_parent: str | None = None
    trace_state: str | None = None
    created_at: Moment
    updated_at: Moment
    visible_at: Annotated[Moment | None, Meta(description="A delayed task cannot be claimed before this time.")] = None
    last_known_location: Location | None = None


class EnqueuedItem(View, kw_only=True):
    """The answer for one task of a batch: the task, or an error."""

    task: Task | None = None
    error: Annotated[str | None, Meta(description="A problem's `code`.", examples=["payload_too_large"])] = None
    status: Annotated[int | None, Meta(description="The status that a request for this task alone would have.")] = None
    detail: str | None = None
    is_replayed: Annotated[bool, Meta(description="An earlier request created the task with this idempotency key.")] = (
        False
    )
    is_mismatch: Annotated[bool, Meta(description="The earlier request had a different body.")] = False


class EnqueuedTasks(View, kw_only=True):
    """The answers, in the order of the request."""

    results: list[EnqueuedItem]


class TasksQuery(Query, kw_only=True):
    """A search for tasks, and a page."""

    command: Command | None = None
    status: TaskStatus | None = None
    # Not a `Moment`, which accepts a bare number in a query string.
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
        Annotated[
            Words, Meta(description="Words in the payload, the error or the worker's name. The last may be a prefix.")
        ]
        | None
    ) = None
    cursor: Cursor | None = None
    limit: Limit = 50


class FoundTasks(View, kw_only=True):
    """Waiting and running tasks by queue, then ended tasks, the newest first.

    Live tasks move while pages are read, so that one may appear twice or not at all. Every ended task appears once. A
    page with few or no tasks may have a cursor: the search stops after a limited number of tasks.
    """

    tasks: list[Task]
    cursor: str | None = None
