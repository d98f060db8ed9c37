"""Queues for a tenant's administrators: counts, pausing, and the cleanup of ended tasks."""

from __future__ import annotations

import time

from django.http import HttpResponse

from core import errors, threadpool
from core.http.api_view import ApiView, json_response
from core.http.operation import Operation
from queues import maintenance, selectors, services
from queues.api import conversion
from queues.api.schemas import queues as wire
from queues.domain import QueueStats
from tenants.domain import Caller
from tenants.permissions import IsAdmin


class QueuesView(ApiView):
    @Operation(
        "list_queues",
        tag="Admin",
        summary="List the tenant's queues",
        permission_classes=(IsAdmin,),
        rate="admin",
        answers={200: wire.Queues},
    )
    async def get(self, caller: Caller) -> HttpResponse:
        """Count the tasks of every queue. The queues are sorted by name."""
        queues = await selectors.queues(caller.tenant)
        return json_response(wire.Queues(queues=[_stats(queue) for queue in queues]))


class QueueView(ApiView):
    @Operation(
        "queue_stats",
        tag="Admin",
        summary="Count the tasks of a queue",
        permission_classes=(IsAdmin,),
        rate="admin",
        answers={200: wire.QueueStats},
        errors=(errors.InvalidRequest,),
    )
    async def get(self, caller: Caller, command: str) -> HttpResponse:
        """Count the tasks of one queue. The counts of an unknown queue are 0."""
        return json_response(_stats(await selectors.queue_stats(caller.tenant, command)))


class PauseView(ApiView):
    @Operation(
        "pause",
        tag="Admin",
        summary="Pause a queue",
        permission_classes=(IsAdmin,),
        rate="admin",
        answers={200: wire.Paused},
        errors=(errors.InvalidRequest,),
    )
    async def post(self, caller: Caller, command: str) -> HttpResponse:
        """Pause a queue: claims get no task from it. Enqueues, results and retries continue."""
        await services.pause(caller.tenant, command)
        return json_response(wire.Paused(command=command, paused=True))


class ResumeView(ApiView):
    @Operation(
        "resume",
        tag="Admin",
        summary="Resume a queue",
        permission_classes=(IsAdmin,),
        rate="admin",
        answers={200: wire.Paused},
        errors=(errors.InvalidRequest,),
    )
    async def post(self, caller: Caller, command: str) -> HttpResponse:
        """Resume a queue, and wake the claims that wait for it."""
        await services.resume(caller.tenant, command)
        return json_response(wire.Paused(command=command, paused=False))


class CleanupView(ApiView):
    @Operation(
        "cleanup",
        tag="Admin",
        summary="Delete ended tasks whose retention has ended",
        permission_classes=(IsAdmin,),
        rate="admin",
        body=wire.NewCleanup,
        is_body_optional=True,
        answers={200: wire.CleanedUp},
    )
    async def post(self, caller: Caller, body: wire.NewCleanup) -> HttpResponse:
        """Delete tasks whose retention has ended, without waiting for the next periodic cleanup.

        Tasks that are not in the audit yet are kept.
        """
        before = body.before or conversion.moment(now_ms())
        before_ms = max(0, round(before.timestamp() * 1000))
        deleted = await threadpool.run_db(
            maintenance.cleanup_tenant, caller.tenant.tid, before_ms=before_ms, limit=int(body.limit)
        )
        return json_response(wire.CleanedUp(deleted=deleted, before=before, limit=int(body.limit)))


def now_ms() -> int:
    """Return the time by the clock of this process.

    It is used for the ages of tasks and as a default. Transitions of tasks use only the clock of Redis.
    """
    return round(time.time() * 1000)


def _stats(queue: QueueStats) -> wire.QueueStats:
    oldest = queue.oldest_ready_ms
    return wire.QueueStats(
        command=queue.command,
        ready=queue.ready,
        delayed=queue.delayed,
        in_progress=queue.in_progress,
        dlq=queue.dlq,
        paused=queue.is_paused,
        oldest_ready_seconds=None if oldest is None else max(0.0, (now_ms() - oldest) / 1000),
        ready_by_priority=queue.ready_by_priority,
    )
