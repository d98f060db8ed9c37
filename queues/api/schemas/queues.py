"""What the queues hold, stopping one, removing what is over."""

from __future__ import annotations

import datetime as dt
from typing import Annotated

from msgspec import Meta

from queues.api.schemas import Body, Command, Moment, View


class QueueStats(View, kw_only=True):
    """What one queue holds."""

    command: Command
    ready: int
    delayed: int
    in_progress: int
    dlq: int
    paused: bool
    oldest_ready_seconds: Annotated[
        float | None, Meta(description="How long the task that is next in line has been ready.")
    ] = None
    ready_by_priority: Annotated[list[int], Meta(description="Ready tasks of priority 0, 1, … 9.")]


class Queues(View, kw_only=True):
    """Every queue of the tenant, by name."""

    queues: list[QueueStats]


class Paused(View, kw_only=True):
    """Whether claims are answered from this queue."""

    command: Command
    paused: bool


class NewCleanup(Body, kw_only=True):
    """Which ended tasks to remove."""

    limit: Annotated[float, Meta(multiple_of=1, ge=1, le=10_000)] = 1000
    before: (
        Annotated[dt.datetime, Meta(tz=True, description="Those whose retention ends before. Now, if absent.")] | None
    ) = None


class CleanedUp(View, kw_only=True):
    """What was removed."""

    deleted: int
    before: Moment
    limit: int
