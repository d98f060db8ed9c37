"""The wire types of administration: dead letters, bulk jobs, topics, subscriptions, search."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Literal
from uuid import UUID

import msgspec
from msgspec import Meta, Struct

from codeq_site import errors
from codeq_site.conf import BackoffPolicy
from queues import bulk, deadletters
from queues.api.wire import (
    CALLBACK_PATTERN,
    COMMAND_PATTERN,
    LIMITS,
    NO_NEWLINE,
    NO_NUL,
    Body,
    Command,
    Moment,
    Task,
    TaskId,
    View,
)
from queues.models import BulkJob as BulkJobRow
from queues.models import QueuePolicy
from queues.task import Status
from webhooks.models import Subscription as SubscriptionRow


class Query(Struct, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What a query string may say."""


Cursor = Annotated[str, Meta(min_length=1, max_length=512, description="`cursor` of the page before.")]
Limit = Annotated[int, Meta(ge=1, le=200, description="The most to answer.")]
Words = Annotated[str, Meta(min_length=1, max_length=200, pattern=NO_NUL)]
Reason = Annotated[str, Meta(max_length=1000, pattern=NO_NUL, description="Why, for whoever asks later.")]


# Dead letters


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

    ids: Annotated[list[TaskId], Meta(min_length=1, max_length=bulk.IDS)] | None = None
    filter: deadletters.Filter | None = None
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


def dead_letter(found: deadletters.DeadLetter) -> DeadLetter:
    return DeadLetter(
        id=found.id,
        command=found.command,
        priority=found.priority,
        error=found.error,
        failure=found.failure,
        deliveries=found.deliveries,
        attempts=found.attempts,
        max_attempts=found.max_attempts,
        worker_id=found.worker,
        payload_start=found.payload_start,
        created_at=found.created_at,
        died_at=found.died_at,
    )


def bulk_job(row: BulkJobRow) -> BulkJob:
    return BulkJob(
        id=row.id,
        kind=row.kind,
        state=row.state,
        total=row.total,
        done=row.done,
        skipped=row.skipped,
        failed=row.failed,
        error=row.error or None,
        rate_per_second=row.rate_per_second,
        reason=row.reason,
        created_at=row.created_at,
        started_at=row.started_at,
        ended_at=row.ended_at,
    )


# Topics


class NewTopic(Body, kw_only=True):
    """What holds in one queue where it is not what holds everywhere. What is left out is what holds everywhere."""

    priority_tiers: (
        Annotated[
            list[Annotated[float, Meta(multiple_of=1, ge=0, le=9)]],
            Meta(
                min_length=1,
                max_length=10,
                description="The priorities a task may have. One that says none gets the lowest of them.",
                extra_json_schema={"uniqueItems": True},
            ),
        ]
        | None
    ) = None
    max_attempts: Annotated[float, Meta(multiple_of=1, ge=1, le=LIMITS.max_attempts_limit)] | None = None
    dead_letter_topic_ref: (
        Annotated[str, Meta(pattern=COMMAND_PATTERN, description="The queue that takes tasks out of attempts.")] | None
    ) = None
    retention_seconds: Annotated[float, Meta(multiple_of=1, ge=60, le=10 * 366 * 86_400)] | None = None
    max_consumers: (
        Annotated[float, Meta(multiple_of=1, ge=1, le=100_000, description="Tasks that may be in progress at once.")]
        | None
    ) = None
    backoff: BackoffPolicy | None = None
    backoff_base_seconds: Annotated[float, Meta(ge=0, le=LIMITS.horizon_seconds)] | None = None
    backoff_cap_seconds: Annotated[float, Meta(ge=0, le=LIMITS.horizon_seconds)] | None = None


class Topic(View, kw_only=True):
    """A queue's policy. The version grows with every change."""

    name: Command
    version: int
    priority_tiers: list[int] | None = None
    max_attempts: int | None = None
    dead_letter_topic_ref: str | None = None
    retention_seconds: int | None = None
    max_consumers: int | None = None
    backoff: str | None = None
    backoff_base_seconds: float | None = None
    backoff_cap_seconds: float | None = None
    created_at: Moment
    updated_at: Moment


class Topics(View, kw_only=True):
    """The queues that have a policy of their own, by name."""

    topics: list[Topic]


class DeletionQuery(Query, kw_only=True):
    deletion_policy: Annotated[Literal["Delete"], Meta(description="Says that it is meant.")]


def topic(row: QueuePolicy) -> Topic:
    return Topic(
        name=row.command,
        version=row.version,
        priority_tiers=row.priority_tiers,
        max_attempts=row.max_attempts,
        dead_letter_topic_ref=row.dead_letter_topic or None,
        retention_seconds=row.retention_seconds,
        max_consumers=row.max_consumers,
        backoff=row.backoff or None,
        backoff_base_seconds=row.backoff_base_seconds,
        backoff_cap_seconds=row.backoff_cap_seconds,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


# Subscriptions


class NewSubscription(Body, kw_only=True):
    """Call this address when one of these queues has work again."""

    callback_url: Annotated[str, Meta(max_length=2048, pattern=CALLBACK_PATTERN)]
    event_types: (
        Annotated[list[Command], Meta(max_length=100, description="A part of the token's; all of them if absent.")]
        | None
    ) = None
    ttl_seconds: Annotated[float, Meta(multiple_of=1, ge=1, le=86_400)] = 300
    delivery_mode: (
        Annotated[
            Literal["fanout", "group", "hash"],
            Meta(description="Everybody; one of each group in turn; always the same for a queue."),
        ]
        | None
    ) = None
    group_id: Annotated[str, Meta(min_length=1, max_length=128, pattern=NO_NUL)] | None = None
    min_interval_seconds: Annotated[
        float, Meta(multiple_of=1, ge=0, le=86_400, description="No call sooner after the last one.")
    ] = 5


class Renewal(Body, kw_only=True):
    """Let it live on from now."""

    ttl_seconds: Annotated[float, Meta(multiple_of=1, ge=1, le=86_400, description="As before, if absent.")] | None = (
        None
    )


class Subscribed(View, kw_only=True):
    """The subscription, and until when."""

    subscription_id: UUID
    expires_at: Moment


class Ended(View, kw_only=True):
    """It is over."""

    ok: Literal[True]


class Subscription(View, kw_only=True):
    """A worker's subscription."""

    subscription_id: UUID
    callback_url: str
    event_types: list[str]
    delivery_mode: str
    group_id: str | None = None
    min_interval_seconds: int
    expires_at: Moment
    created_at: Moment


class Subscriptions(View, kw_only=True):
    """The worker's own, the oldest first."""

    subscriptions: list[Subscription]


def subscribed(row: SubscriptionRow) -> Subscribed:
    return Subscribed(subscription_id=row.pk, expires_at=row.expires_at)


def subscription(row: SubscriptionRow) -> Subscription:
    return Subscription(
        subscription_id=row.pk,
        callback_url=row.callback_url,
        event_types=row.event_types,
        delivery_mode=row.mode,
        group_id=row.group or None,
        min_interval_seconds=row.min_interval_seconds,
        expires_at=row.expires_at,
        created_at=row.created_at,
    )


# Search


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


def created_after(text: str | None) -> dt.datetime | None:
    try:
        return None if text is None else msgspec.convert(text, Moment)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest("createdAfter: not a moment in time") from error


def older_than(value: float | dt.datetime | None) -> dt.datetime | None:
    """The moment that `olderThan` means."""
    if isinstance(value, (int, float)):
        return dt.datetime.now(dt.UTC) - dt.timedelta(seconds=value)
    return value
