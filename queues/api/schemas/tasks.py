"""Tasks: enqueued, read and searched by producers."""

from __future__ import annotations

import datetime as dt
from typing import Annotated

from msgspec import UNSET, Meta, Raw, UnsetType

from queues.api.schemas import (
    CALLBACK_PATTERN,
    LIMITS,
    NO_NEWLINE,
    Command,
    Cursor,
    Limit,
    Moment,
    QueryParameters,
    RequestBody,
    ResponseBody,
    TaskId,
    Words,
)
from queues.domain import Location, TaskStatus

Priority = Annotated[
    float,
    Meta(
        multiple_of=1,
        ge=0,
        le=9,
        description="Tasks of a higher priority are claimed first. If absent, the task gets the lowest priority that "
        "the queue's policy allows, or 0 without a policy.",
    ),
]


class NewTask(RequestBody, kw_only=True):
    """A task to enqueue."""

    command: Command
    payload: Annotated[
        Raw,
        Meta(
            description="Any JSON value except null. White space between values is removed; the rest is kept.",
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
                description="Maximum number of attempts. If absent, the value of the queue's policy applies, or else "
                f"{LIMITS.max_attempts}.",
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
                description="Other requests with the same key return the same task until the task's retention has "
                "ended.",
            ),
        ]
        | None
    ) = None
    run_at: (
        Annotated[
            dt.datetime,
            Meta(
                tz=True,
                description="Time before which the task cannot be claimed. Takes precedence over `delaySeconds`.",
            ),
        ]
        | None
    ) = None
    delay_seconds: (
        Annotated[
            float,
            Meta(ge=0, le=LIMITS.max_schedule_ahead_seconds, description="Seconds before the task can be claimed."),
        ]
        | None
    ) = None


class NewTasks(RequestBody, kw_only=True):
    """Independent tasks to enqueue."""

    tasks: Annotated[list[NewTask], Meta(min_length=1, max_length=LIMITS.batch)]


class Task(ResponseBody, kw_only=True):
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
    lease_token: Annotated[
        str | None, Meta(description="Identifies the lease. Only the response to a claim has it.")
    ] = None
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


class EnqueuedItem(ResponseBody, kw_only=True):
    """The answer for one task of a batch: the task, or an error."""

    task: Task | None = None
    error: Annotated[
        str | None,
        Meta(description="The `code` of the error, if the task was refused.", examples=["payload_too_large"]),
    ] = None
    status: Annotated[int | None, Meta(description="The HTTP status of the error.")] = None
    detail: Annotated[str | None, Meta(description="The text of the error.")] = None
    is_replayed: Annotated[bool, Meta(description="An earlier request created the task with this idempotency key.")] = (
        False
    )
    is_mismatch: Annotated[bool, Meta(description="The earlier request had a different body.")] = False


class EnqueuedTasks(ResponseBody, kw_only=True):
    """One answer for each task, in the order of the request."""

    results: list[EnqueuedItem]


class TasksQuery(QueryParameters, kw_only=True):
    """Filters for tasks, and the page to return."""

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
            Words,
            Meta(
                description="Finds ended tasks by words in the payload, the error or the worker's name; the last word "
                "may be a prefix. Finds other tasks by their id, their idempotency key or their worker."
            ),
        ]
        | None
    ) = None
    cursor: Cursor | None = None
    limit: Limit = 50


class FoundTasks(ResponseBody, kw_only=True):
    """Waiting and running tasks by queue, then ended tasks, the newest first.

    Waiting and running tasks move while pages are read, so one may appear twice or not at all. Every ended task appears
    once. The search stops after a limited number of tasks, so a page with few or no tasks may have a `cursor`. Read
    pages until there is no `cursor`.
    """

    tasks: list[Task]
    cursor: str | None = None
