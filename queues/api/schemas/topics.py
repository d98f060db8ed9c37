"""Topics: what holds in one queue where it is not what holds everywhere."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from core.conf import BackoffPolicy
from queues.api.schemas import COMMAND_PATTERN, LIMITS, Body, Command, Moment, Query, View


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
    backoff_base_seconds: Annotated[float, Meta(ge=0, le=LIMITS.max_schedule_ahead_seconds)] | None = None
    backoff_cap_seconds: Annotated[float, Meta(ge=0, le=LIMITS.max_schedule_ahead_seconds)] | None = None


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
