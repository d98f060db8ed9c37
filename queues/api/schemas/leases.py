"""Leases: taken, kept and given back by workers."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from queues.api.schemas import LIMITS, NO_NUL, Body, Command, LeaseToken, Moment, Text, View
from queues.api.schemas.tasks import Task

LeaseSeconds = Annotated[
    float,
    Meta(
        multiple_of=1,
        ge=1,
        le=LIMITS.lease_limit_seconds,
        description=f"How long the lease lasts. {LIMITS.lease_seconds} if absent.",
    ),
]
WaitSeconds = Annotated[float, Meta(ge=0, le=30, description="How long to wait for a task before the answer is 204.")]
Count = Annotated[float, Meta(multiple_of=1, ge=1, le=LIMITS.claim_batch, description="The most tasks to take.")]


class NewClaim(Body, kw_only=True):
    """What to take."""

    commands: Annotated[
        list[Command],
        Meta(max_length=100, description="A part of the token's `eventTypes`. All of them if absent or empty."),
    ] = []
    lease_seconds: LeaseSeconds | None = None
    wait_seconds: WaitSeconds = 0


class NewClaims(NewClaim, kw_only=True):
    """What to take, several at once."""

    count: Count | None = None


class Tasks(View, kw_only=True):
    """Claimed tasks, the first to run first."""

    tasks: list[Task]


class Progress(Body, kw_only=True):
    """How far the work is."""

    percent: Annotated[float, Meta(ge=0, le=100)]
    note: Annotated[str, Meta(max_length=1024, pattern=NO_NUL)] | None = None


class Heartbeat(Body, kw_only=True):
    """Keep the lease."""

    extend_seconds: LeaseSeconds | None = None
    lease_token: LeaseToken | None = None
    progress: Annotated[float, Meta(ge=0, le=100)] | Progress | None = None


class Extended(View, kw_only=True):
    """The lease goes on."""

    ok: Literal[True]
    lease_until: Moment


class Abandon(Body, kw_only=True):
    """Give the task back."""

    lease_token: LeaseToken | None = None


class Nack(Body, kw_only=True):
    """This attempt failed; try again later."""

    delay_seconds: (
        Annotated[
            float,
            Meta(ge=0, description="Instead of the backoff; never more than its cap."),
        ]
        | None
    ) = None
    reason: Text | None = None
    lease_token: LeaseToken | None = None


class Abandoned(View, kw_only=True):
    """Where the task is now."""

    status: Literal["requeued", "dlq"]


class Nacked(View, kw_only=True):
    """Where the task is now, and how long it waits there."""

    status: Literal["requeued", "dlq"]
    delay_seconds: float
