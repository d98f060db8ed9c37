"""Topics: the policies of queues.

`queues.policies` checks the bounds, because the console sets policies too. The schemas only document them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from core.conf import BackoffPolicy
from queues import policies
from queues.api.schemas import COMMAND_PATTERN, LIMITS, Command, Moment, QueryParameters, RequestBody, ResponseBody


def _between(minimum: float, maximum: float) -> dict[str, float]:
    return {"minimum": minimum, "maximum": maximum}


BackoffSeconds = Annotated[float, Meta(extra_json_schema=_between(0, LIMITS.max_schedule_ahead_seconds))]
Backoff = Annotated[BackoffPolicy, Meta(description="How the delay before a retry grows with the failed attempts.")]


class NewTopic(RequestBody, kw_only=True):
    """The policy of a queue. The defaults apply to every field that is left out."""

    priority_tiers: (
        Annotated[
            list[Annotated[float, Meta(multiple_of=1, extra_json_schema=_between(0, 9))]],
            Meta(
                description="The priorities that a task may have. A task without a priority gets the lowest of them.",
                extra_json_schema={"minItems": 1, "maxItems": 10, "uniqueItems": True},
            ),
        ]
        | None
    ) = None
    max_attempts: (
        Annotated[
            float,
            Meta(
                multiple_of=1,
                description="Maximum number of attempts of a task that does not set its own.",
                extra_json_schema=_between(1, LIMITS.max_attempts_limit),
            ),
        ]
        | None
    ) = None
    dead_letter_topic_ref: (
        Annotated[
            str,
            Meta(
                min_length=1,
                description="The queue to which tasks are moved when their attempts are used up.",
                extra_json_schema={"pattern": COMMAND_PATTERN},
            ),
        ]
        | None
    ) = None
    retention_seconds: (
        Annotated[
            float,
            Meta(
                multiple_of=1,
                description="Seconds for which an ended task and its result are kept.",
                extra_json_schema=_between(policies.MIN_RETENTION_SECONDS, policies.MAX_RETENTION_SECONDS),
            ),
        ]
        | None
    ) = None
    max_consumers: (
        Annotated[
            float,
            Meta(
                multiple_of=1,
                description="Maximum number of tasks in progress at the same time.",
                extra_json_schema=_between(1, policies.MAX_CONSUMERS),
            ),
        ]
        | None
    ) = None
    backoff: Backoff | None = None
    backoff_base_seconds: Annotated[BackoffSeconds | None, Meta(description="Seconds before the first retry.")] = None
    backoff_cap_seconds: Annotated[BackoffSeconds | None, Meta(description="Maximum seconds before a retry.")] = None


class Topic(ResponseBody, kw_only=True):
    """The policy of a queue. The version increases with every change."""

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


class Topics(ResponseBody, kw_only=True):
    """The queues that have a policy, in the order of their names."""

    topics: list[Topic]


class DeletionQuery(QueryParameters, kw_only=True):
    """The confirmation that a policy is to be deleted."""

    deletion_policy: Annotated[Literal["Delete"], Meta(description="Confirms the deletion.")]
