"""Dead letters, and bulk jobs that bring them back in line."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from msgspec import Meta

from queues.api.schemas import NO_NUL, Body, Command, Cursor, Limit, Moment, Query, TaskId, View, Words
from queues.deadletters import bulk_jobs, queries

Reason = Annotated[str, Meta(max_length=1000, pattern=NO_NUL, description="Why, for whoever asks later.")]


class DeadLettersQuery(Query, kw_only=True):
    error: Annotated[Words, Meta(description="Words of the error.")] | None = None
    text: Annotated[Words, Meta(description="Words of error, payload or worker.")] | None = None
    older_than: (
        Annotated[float, Meta(ge=0, le=3.2e9, description="Died so many seconds ago, or before that moment.")]
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
    failure: Annotated[str, Meta(description="What it died of, as a number: the same for the same kind of error.")]
    deliveries: int
    attempts: int
    max_attempts: int
    worker_id: str
    payload_start: Annotated[str, Meta(description="The first characters of the payload.")]
    created_at: Moment
    died_at: Moment


class DeadLetters(View, kw_only=True):
    """The newest first. A page may be short, even empty, and still have a cursor: it has looked at enough."""

    dead_letters: list[DeadLetter]
    cursor: str | None = None


class NewReplay(Body, kw_only=True):
    """Which dead letters of the queue come back in line: those named, or those a filter means; all, if neither."""

    ids: Annotated[list[TaskId], Meta(min_length=1, max_length=bulk_jobs.MAX_IDS)] | None = None
    filter: queries.Filter | None = None
    dry_run: Annotated[bool, Meta(description="Only say how many it would be.")] = False
    rate_per_second: Annotated[float, Meta(multiple_of=1, ge=1, le=1_000_000)] | None = None
    reason: Reason = ""


class DryRun(View, kw_only=True):
    """What a replay would be about. Nothing was changed."""

    count: Annotated[int | None, Meta(description="Absent if it would take too long to count.")] = None
    sample: list[DeadLetter]


class BulkJob(View, kw_only=True):
    """Something done to many dead letters; beat carries it on."""

    id: UUID
    kind: str
    state: str
    total: Annotated[int | None, Meta(description="Absent until they are counted.")] = None
    done: int
    skipped: Annotated[int, Meta(description="No dead letter any more when its turn came.")]
    failed: int
    error: Annotated[str | None, Meta(description="Why the job as a whole could not go on.")] = None
    rate_per_second: int | None = None
    reason: str = ""
    created_at: Moment
    started_at: Moment | None = None
    ended_at: Moment | None = None
