"""Queues: counts, pausing, and the cleanup of ended tasks."""

from __future__ import annotations

import datetime as dt
from typing import Annotated

from msgspec import Meta

from queues.api.schemas import Command, Moment, RequestBody, ResponseBody


class QueueStats(ResponseBody, kw_only=True):
    """The number of tasks in each state of one queue."""

    command: Command
    ready: Annotated[int, Meta(description="Tasks that can be claimed.")]
    delayed: Annotated[int, Meta(description="Tasks that are scheduled or wait for a retry.")]
    in_progress: Annotated[int, Meta(description="Tasks that workers hold under a lease.")]
    dlq: Annotated[int, Meta(description="Dead letters.")]
    paused: Annotated[bool, Meta(description="Whether the queue is paused, so that claims get no task from it.")]
    oldest_ready_seconds: Annotated[
        float | None,
        Meta(description="Seconds for which the oldest ready task has been ready. It is absent if no task is ready."),
    ] = None
    ready_by_priority: Annotated[list[int], Meta(description="Number of ready tasks of each priority, from 0 to 9.")]


class Queues(ResponseBody, kw_only=True):
    """The queues of the tenant, sorted by name."""

    queues: list[QueueStats]


class Paused(ResponseBody, kw_only=True):
    """Whether the queue is paused."""

    command: Command
    paused: bool


class NewCleanup(RequestBody, kw_only=True):
    """The limits of a cleanup."""

    limit: Annotated[float, Meta(multiple_of=1, ge=1, le=10_000, description="Maximum number of tasks to delete.")] = (
        1000
    )
    before: (
        Annotated[
            dt.datetime,
            Meta(
                tz=True,
                description="Delete tasks whose retention ended before this time. If absent, the present time applies.",
            ),
        ]
        | None
    ) = None


class CleanedUp(ResponseBody, kw_only=True):
    """The outcome of a cleanup."""

    deleted: Annotated[int, Meta(description="Number of deleted tasks.")]
    before: Moment
    limit: int
