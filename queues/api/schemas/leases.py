"""Leases: claims, heartbeats, and tasks that workers return."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from queues.api.schemas import LIMITS, NO_NUL, Body, Command, LeaseToken, Moment, Text, View
from queues.api.schemas.tasks import Task
from queues.engine.options import CLAIM_QUEUES

LeaseSeconds = Annotated[
    float,
    Meta(
        multiple_of=1,
        ge=1,
        le=LIMITS.lease_limit_seconds,
        description=f"Length of the lease. {LIMITS.lease_seconds} if absent.",
    ),
]
WaitSeconds = Annotated[float, Meta(ge=0, le=30, description="How long to wait for a task before answering 204.")]
Count = Annotated[
    float, Meta(multiple_of=1, ge=1, le=LIMITS.claim_batch, description="Maximum number of tasks to claim.")
]


class NewClaim(Body, kw_only=True):
    """The queues to claim from, and the lease."""

    commands: Annotated[
        list[Command],
        Meta(
            max_length=CLAIM_QUEUES,
            description="A subset of the token's `eventTypes`. All of them if absent or empty.",
        ),
    ] = []
    lease_seconds: LeaseSeconds | None = None
    wait_seconds: WaitSeconds = 0


class NewClaims(NewClaim, kw_only=True):
    """A claim of several tasks."""

    count: Count | None = None


class Tasks(View, kw_only=True):
    """Claimed tasks, in the order in which to run them."""

    tasks: list[Task]


class Progress(Body, kw_only=True):
    """The progress of a task."""

    percent: Annotated[float, Meta(ge=0, le=100)]
    note: Annotated[str, Meta(max_length=1024, pattern=NO_NUL)] | None = None


class Heartbeat(Body, kw_only=True):
    """A heartbeat."""

    extend_seconds: LeaseSeconds | None = None
    lease_token: LeaseToken | None = None
    progress: Annotated[float, Meta(ge=0, le=100)] | Progress | None = None


class Extended(View, kw_only=True):
    """The new end of the lease."""

    ok: Literal[True]
    lease_until: Moment


class Abandon(Body, kw_only=True):
    """A task to return unprocessed."""

    lease_token: LeaseToken | None = None


class Nack(Body, kw_only=True):
    """A failed attempt."""

    delay_seconds: (
        Annotated[
            float,
            Meta(ge=0, description="Delay instead of the backoff, limited by the backoff's cap."),
        ]
        | None
    ) = None
    reason: Text | None = None
    lease_token: LeaseToken | None = None


class Abandoned(View, kw_only=True):
    """The outcome: the task is ready again, or a dead letter."""

    status: Literal["requeued", "dlq"]


class Nacked(View, kw_only=True):
    """The outcome: the task retries after a delay, or is a dead letter."""

    status: Literal["requeued", "dlq"]
    delay_seconds: float
