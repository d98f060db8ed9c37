"""Leases: claims, heartbeats, and tasks that workers return."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from queues.api.schemas import LIMITS, NO_NUL, Command, LeaseToken, Moment, RequestBody, ResponseBody, Text
from queues.api.schemas.tasks import Task
from queues.engine.options import CLAIM_QUEUES

LeaseSeconds = Annotated[
    float,
    Meta(
        multiple_of=1,
        ge=1,
        le=LIMITS.lease_limit_seconds,
        description=f"Seconds from now until the lease expires. If absent, {LIMITS.lease_seconds} applies.",
    ),
]
WaitSeconds = Annotated[float, Meta(ge=0, le=30, description="Seconds to wait for a task if there is none.")]
Count = Annotated[
    float,
    Meta(
        multiple_of=1,
        ge=1,
        le=LIMITS.claim_batch,
        description=f"Maximum number of tasks to claim. If absent, {LIMITS.claim_batch} applies.",
    ),
]
ExchangeCount = Annotated[
    float,
    Meta(
        multiple_of=1,
        ge=1,
        le=LIMITS.batch,
        description=f"Maximum number of tasks to claim. If absent, {LIMITS.batch} applies.",
    ),
]
ReturnStatus = Annotated[
    Literal["requeued", "dlq"],
    Meta(
        description="`dlq` if the task became a dead letter, otherwise `requeued`. A task without attempts left is "
        "also `requeued` if the policy of its queue has a `deadLetterTopicRef`: it is ready in that queue."
    ),
]


class NewClaim(RequestBody, kw_only=True):
    """The queues to claim from, the length of the lease, and the time to wait for a task."""

    commands: Annotated[
        list[Command],
        Meta(
            max_length=CLAIM_QUEUES,
            description="The queues to claim from: a subset of the token's `eventTypes`. If empty, all queues that the "
            "token allows.",
        ),
    ] = []
    lease_seconds: LeaseSeconds | None = None
    wait_seconds: WaitSeconds = 0


class NewClaims(NewClaim, kw_only=True):
    """A claim of several tasks."""

    count: Count | None = None


class Tasks(ResponseBody, kw_only=True):
    """Claimed tasks, in the order in which to run them."""

    tasks: list[Task]


class Progress(RequestBody, kw_only=True):
    """The progress of a task."""

    percent: Annotated[float, Meta(ge=0, le=100, description="The completed part of the task, in percent.")]
    note: Annotated[str, Meta(max_length=1024, pattern=NO_NUL, description="A text about the progress.")] | None = None


class Heartbeat(RequestBody, kw_only=True):
    """A request to extend a lease, optionally with the progress of the task."""

    extend_seconds: LeaseSeconds | None = None
    lease_token: LeaseToken | None = None
    progress: Annotated[float, Meta(ge=0, le=100)] | Progress | None = None


class Extended(ResponseBody, kw_only=True):
    """The new end of the lease."""

    ok: Literal[True]
    lease_until: Moment


class Abandon(RequestBody, kw_only=True):
    """A request to return a task unprocessed."""

    lease_token: LeaseToken | None = None


class Nack(RequestBody, kw_only=True):
    """A report of a failed attempt."""

    delay_seconds: (
        Annotated[
            float,
            Meta(
                ge=0,
                description="Seconds before the task is retried, at most the cap of the backoff. If absent, the "
                "backoff applies.",
            ),
        ]
        | None
    ) = None
    reason: Annotated[Text, Meta(description="Why the attempt failed. It becomes the `error` of the task.")] | None = (
        None
    )
    lease_token: LeaseToken | None = None


class Abandoned(ResponseBody, kw_only=True):
    """The outcome: the task is ready again, or a dead letter."""

    status: ReturnStatus


class Nacked(ResponseBody, kw_only=True):
    """The outcome: the task is retried after a delay, or is a dead letter."""

    status: ReturnStatus
    delay_seconds: Annotated[float, Meta(description="Seconds before the task is retried. It is 0 for a dead letter.")]
