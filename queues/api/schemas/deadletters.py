"""Dead letters, and the bulk jobs that replay them."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from msgspec import Meta

from queues.api.schemas import NO_NUL, Body, Command, Cursor, Limit, Moment, Query, TaskId, View, Words
from queues.deadletters import bulk_jobs, queries

Reason = Annotated[
    str, Meta(max_length=1000, pattern=NO_NUL, description="Why you start the job. It is kept with the job.")
]


class DeadLettersQuery(Query, kw_only=True):
    """A filter of dead letters, and a page."""

    error: Annotated[Words, Meta(description="Words in the error.")] | None = None
    text: Annotated[Words, Meta(description="Words in the error, the payload or the worker's name.")] | None = None
    older_than: (
        Annotated[float, Meta(ge=0, le=3.2e9, description="Died this many seconds ago, or before this time.")]
        | Moment
        | None
    ) = None
    cursor: Cursor | None = None
    limit: Limit = 50


class DeadLetter(View, kw_only=True):
    """A task that is out of attempts."""

    id: TaskId
    command: Command
    priority: int
    error: str
    failure: Annotated[str, Meta(description="The failure id, which is the same for the same kind of error.")]
    deliveries: int
    attempts: int
    max_attempts: int
    worker_id: str
    payload_start: Annotated[str, Meta(description="The first characters of the payload.")]
    created_at: Moment
    died_at: Moment


class DeadLetters(View, kw_only=True):
    """Dead letters, the newest first.

    A page with few or no dead letters may have a cursor: the search stops after a limited number of rows.
    """

    dead_letters: list[DeadLetter]
    cursor: str | None = None


class NewReplay(Body, kw_only=True):
    """The dead letters of a queue to replay: those named, those that match a filter, or all."""

    ids: Annotated[list[TaskId], Meta(min_length=1, max_length=bulk_jobs.MAX_IDS)] | None = None
    filter: queries.Filter | None = None
    dry_run: Annotated[bool, Meta(description="Only count them.")] = False
    rate_per_second: Annotated[float, Meta(multiple_of=1, ge=1, le=1_000_000)] | None = None
    reason: Reason = ""


class DryRun(View, kw_only=True):
    """The dead letters that a replay would affect. Nothing has changed."""

    count: Annotated[int | None, Meta(description="Absent if counting would take too long.")] = None
    sample: list[DeadLetter]


class BulkJob(View, kw_only=True):
    """An operation on many dead letters, which continues in the background."""

    id: UUID
    kind: str
    state: str
    total: Annotated[int | None, Meta(description="Absent until the tasks are counted.")] = None
    done: int
    skipped: Annotated[int, Meta(description="Tasks that were no longer dead letters.")]
    failed: int
    error: Annotated[str | None, Meta(description="The error that stopped the whole job.")] = None
    rate_per_second: int | None = None
    reason: str = ""
    created_at: Moment
    started_at: Moment | None = None
    ended_at: Moment | None = None
