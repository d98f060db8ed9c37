"""The routes of a tenant's administrator: what the queues hold, stopping one, removing what is over."""

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
        may=(IsAdmin,),
        rate="admin",
        answers={200: wire.Queues},
    )
    async def get(self, caller: Caller) -> HttpResponse:
        """Every queue with what it holds, by name."""
        found = await selectors.queues(caller.tenant)
        return json_response(wire.Queues(queues=[_stats(queue) for queue in found]))


class QueueView(ApiView):
    @Operation(
        "queue_stats",
        tag="Admin",
        summary="Count what one queue holds",
        may=(IsAdmin,),
        rate="admin",
        answers={200: wire.QueueStats},
        errors=(errors.InvalidRequest,),
    )
    async def get(self, caller: Caller, command: str) -> HttpResponse:
        """A queue that nobody has used yet is empty."""
        return json_response(_stats(await selectors.queue_stats(caller.tenant, command)))


class PauseView(ApiView):
    @Operation(
        "pause",
        tag="Admin",
        summary="Stop giving out a queue's tasks",
        may=(IsAdmin,),
        rate="admin",
        answers={200: wire.Paused},
        errors=(errors.InvalidRequest,),
    )
    async def post(self, caller: Caller, command: str) -> HttpResponse:
        """Claims take nothing from it any more. Enqueues, results and retries go on."""
        await services.pause(caller.tenant, command)
        return json_response(wire.Paused(command=command, paused=True))


class ResumeView(ApiView):
    @Operation(
        "resume",
        tag="Admin",
        summary="Give out a queue's tasks again",
        may=(IsAdmin,),
        rate="admin",
        answers={200: wire.Paused},
        errors=(errors.InvalidRequest,),
    )
    async def post(self, caller: Caller, command: str) -> HttpResponse:
        """Waiting claims are woken."""
        await services.resume(caller.tenant, command)
        return json_response(wire.Paused(command=command, paused=False))


class CleanupView(ApiView):
    @Operation(
        "cleanup",
        tag="Admin",
        summary="Remove ended tasks whose retention is over",
        may=(IsAdmin,),
        rate="admin",
        body=wire.NewCleanup,
        is_body_optional=True,
        answers={200: wire.CleanedUp},
    )
    async def post(self, caller: Caller, body: wire.NewCleanup) -> HttpResponse:
        """Beat does this by itself. Never removes live work, nor anything that is not audited yet."""
        before = body.before or conversion.moment(now_ms())
        before_ms = max(0, round(before.timestamp() * 1000))
        deleted = await threadpool.run_db(
            maintenance.cleanup_tenant, caller.tenant.tid, before_ms=before_ms, limit=int(body.limit)
        )
        return json_response(wire.CleanedUp(deleted=deleted, before=before, limit=int(body.limit)))


def now_ms() -> int:
    """For showing ages and echoing defaults; Redis' clock decides about tasks."""
    return round(time.time() * 1000)


def _stats(found: QueueStats) -> wire.QueueStats:
    oldest = found.oldest_ready_ms
    return wire.QueueStats(
        command=found.command,
        ready=found.ready,
        delayed=found.delayed,
        in_progress=found.in_progress,
        dlq=found.dlq,
        paused=found.is_paused,
        oldest_ready_seconds=None if oldest is None else max(0.0, (now_ms() - oldest) / 1000),
        ready_by_priority=found.ready_by_priority,
    )
