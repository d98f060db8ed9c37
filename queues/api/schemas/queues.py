"""Queues: counts, pausing, and the cleanup of ended tasks."""

from __future__ import annotations

import datetime as dt
from typing import Annotated

from msgspec import Meta

from queues.api.schemas import Body, Command, Moment, View


class QueueStats(View, kw_only=True):
    """The number of tasks in each state of one queue."""

    command: Command
    ready: int
    delayed: int
    in_progress: int
    dlq: int
    paused: bool
    oldest_ready_seconds: Annotated[float | None, Meta(description="How long the next task has been ready.")] = None
    ready_by_priority: Annotated[list[int], Meta(description="Ready tasks of priority 0 to 9.")]


class Queues(View, kw_only=True):
    """Every queue of the tenant, in the order of their names."""

    queues: list[QueueStats]


class Paused(View, kw_only=True):
    """Whether the queue is paused."""

    command: Command
    paused: bool


class NewCleanup(Body, kw_only=True):
    """The ended tasks to delete."""

    limit: Annotated[float, Meta(multiple_of=1, ge=1, le=10_000)] = 1000
    before: (
        Annotated[
            dt.datetime,
            Meta(tz=True, description="Delete tasks whose retention ended before this time. Now if absent."),
        ]
        | None
    ) = None


class CleanedUp(View, kw_only=True):
    """The deleted tasks."""

    deleted: int
    before: Moment
    limit: int
