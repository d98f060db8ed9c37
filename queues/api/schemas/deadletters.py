"""Dead letters, and the bulk jobs that replay them."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from msgspec import Meta

from queues.api.schemas import (
    NO_NUL,
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
from queues.deadletters import bulk_jobs, queries

Reason = Annotated[str, Meta(max_length=1000, pattern=NO_NUL, description="The reason for the job, stored with it.")]


class DeadLettersQuery(QueryParameters, kw_only=True):
    """Filters for dead letters, and the page to return."""

    error: Annotated[Words, Meta(description="Selects dead letters with these words in the error.")] | None = None
    text: (
        Annotated[
            Words,
            Meta(description="Selects dead letters with these words in the error, the payload or the worker's name."),
        ]
        | None
    ) = None
    older_than: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=3.2e9,
                description="A number selects dead letters that died at least so many seconds ago. A time selects "
                "those that died before it.",
            ),
        ]
        | Moment
        | None
    ) = None
    cursor: Cursor | None = None
    limit: Limit = 50


class DeadLetter(ResponseBody, kw_only=True):
    """A task that is out of attempts."""

    id: TaskId
    command: Command
    priority: int
    error: str
    failure: Annotated[
        str, Meta(description="The id of the kind of error. Similar errors of a queue have the same id.")
    ]
    deliveries: Annotated[int, Meta(description="Attempts over the whole life of the task, including replays.")]
    attempts: Annotated[int, Meta(description="Failed attempts since the task was enqueued or last replayed.")]
    max_attempts: int
    worker_id: Annotated[str, Meta(description="The worker of the last attempt.")]
    payload_start: Annotated[str, Meta(description="The first characters of the payload.")]
    created_at: Moment
    died_at: Moment


class DeadLetters(ResponseBody, kw_only=True):
    """Dead letters, the newest first.

    The search stops after a limited number of rows, so a page with few or no dead letters may have a `cursor`. Read
    pages until there is no `cursor`.
    """

    dead_letters: list[DeadLetter]
    cursor: str | None = None


class NewReplay(RequestBody, kw_only=True):
    """The dead letters of a queue to replay: those in `ids`, those that match `filter`, or all."""

    ids: Annotated[list[TaskId], Meta(min_length=1, max_length=bulk_jobs.MAX_IDS)] | None = None
    filter: queries.Filter | None = None
    dry_run: Annotated[bool, Meta(description="Count the dead letters and replay none.")] = False
    rate_per_second: (
        Annotated[
            float,
            Meta(
                multiple_of=1,
                ge=1,
                le=1_000_000,
                description="Maximum number of tasks to replay per second. If absent, there is no limit.",
            ),
        ]
        | None
    ) = None
    reason: Reason = ""


class DryRun(ResponseBody, kw_only=True):
    """The dead letters that a replay would affect. The dry run changes no task."""

    count: Annotated[int | None, Meta(description="It is absent if counting would take too long.")] = None
    sample: Annotated[
        list[DeadLetter],
        Meta(description="The newest of these dead letters. The list is empty if the request has `ids`."),
    ]


class BulkJob(ResponseBody, kw_only=True):
    """An operation on many dead letters, which continues in the background."""

    id: UUID
    kind: Annotated[str, Meta(description="`replay`, `delete`, or `recall` for the undo of a replay.")]
    state: Annotated[
        str, Meta(description="`running`, `watching`, `done`, `stopped`, `cancelling`, `cancelled` or `failed`.")
    ]
    total: Annotated[
        int | None, Meta(description="Number of tasks to handle. It is absent until the tasks are counted.")
    ] = None
    done: Annotated[int, Meta(description="Tasks that were replayed or deleted, or whose replay was undone.")]
    skipped: Annotated[int, Meta(description="Tasks that were no longer dead letters.")]
    failed: Annotated[int, Meta(description="Tasks that could not be handled because of an error.")]
    error: Annotated[str | None, Meta(description="The error that stopped the whole job.")] = None
    rate_per_second: int | None = None
    reason: str = ""
    created_at: Moment
    started_at: Moment | None = None
    ended_at: Moment | None = None
