"""Producers: tasks in, read and cancelled."""

from __future__ import annotations

import datetime as dt

import msgspec
from django.http import HttpResponse

from core import errors, threadpool
from core.errors import CodeqError
from core.http.api_view import ApiView, json_response
from core.http.operation import Operation
from queues import domain as nouns
from queues import metrics, selectors, services
from queues.api import conversion, trace_context
from queues.api.schemas import Moment
from queues.api.schemas import tasks as wire
from queues.audit import audit_reader
from queues.search import tenant_search
from tenants.domain import Caller
from tenants.permissions import IsEither, IsProducer

TRACE = {"traceparent": "W3C trace context, kept with the task.", "tracestate": "Goes with `traceparent`."}


class TasksView(ApiView):
    @Operation(
        "search",
        tag="Producer",
        summary="Find tasks",
        may=(IsProducer,),
        query=wire.TasksQuery,
        answers={200: wire.FoundTasks},
    )
    async def get(self, caller: Caller, query: wire.TasksQuery) -> HttpResponse:
        """Live ones by queue, then ended ones, the latest first; those a second behind, as they come from the audit."""
        asked = tenant_search.TaskQuery(
            command=query.command, status=query.status, created_after=_moment(query.created_after), q=query.q
        )
        page = await threadpool.run_db(tenant_search.page, caller.tenant, asked, cursor=query.cursor, limit=query.limit)
        tasks = [conversion.task(task, caller.tenant.slug) for task in page.tasks]
        return json_response(wire.FoundTasks(tasks=tasks, cursor=page.cursor))

    @Operation(
        "enqueue",
        tag="Producer",
        summary="Put a task on a queue",
        may=(IsProducer,),
        body=wire.NewTask,
        answers={202: wire.Task},
        errors=(
            errors.PayloadTooLarge,
            errors.IdempotencyMismatch,
            errors.TooMany,
            errors.QueueFull,
            errors.StoreFull,
        ),
        headers=TRACE,
        answer_headers={
            "Idempotency-Replayed": "`true`: the key had made this task before.",
            "Idempotency-Mismatch": "`true`: and from another body.",
        },
    )
    async def post(self, caller: Caller, body: wire.NewTask) -> HttpResponse:
        """Acknowledged means on disk. A repeated `idempotencyKey` answers with the task that it made before, and says
        so in a header."""
        new = conversion.new_task(body, *trace_context.context(self.request))
        (item,) = await services.enqueue(caller.tenant, [new], by=caller.fingerprint)
        if isinstance(item, CodeqError):
            raise item
        if not item.is_replayed:
            metrics.created.add(item.task.spec.command)
        response = json_response(conversion.task(item.task, caller.tenant.slug), 202)
        if item.is_replayed:
            response.headers["Idempotency-Replayed"] = "true"
        if item.is_mismatch:
            response.headers["Idempotency-Mismatch"] = "true"
        return response


class TaskBatchView(ApiView):
    @Operation(
        "enqueue_batch",
        tag="Producer",
        summary="Put several tasks on queues",
        may=(IsProducer,),
        body=wire.NewTasks,
        answers={200: wire.EnqueuedTasks},
        errors=(errors.StoreFull,),
        headers=TRACE,
    )
    async def post(self, caller: Caller, body: wire.NewTasks) -> HttpResponse:
        """Each task for itself, in one round trip; answered in order, an item with its error where it has one."""
        context = trace_context.context(self.request)
        new: list[nouns.NewTask] = []
        refused: dict[int, CodeqError] = {}
        for at, each in enumerate(body.tasks):
            try:
                new.append(conversion.new_task(each, *context))
            except CodeqError as error:
                refused[at] = error
        stored = iter(await services.enqueue(caller.tenant, new, by=caller.fingerprint) if new else ())
        items = [refused[at] if at in refused else next(stored) for at in range(len(body.tasks))]
        for item in items:
            if isinstance(item, nouns.Enqueued) and not item.is_replayed:
                metrics.created.add(item.task.spec.command)
        return json_response(
            wire.EnqueuedTasks(results=[conversion.enqueued_item(item, caller.tenant.slug) for item in items])
        )


class TaskView(ApiView):
    @Operation(
        "get_task",
        tag="Producer",
        summary="Read a task",
        may=(IsEither,),
        answers={200: wire.Task},
        errors=(errors.TaskNotFound,),
    )
    async def get(self, caller: Caller, task_id: str) -> HttpResponse:
        """A task of one's tenant, with where it is now; one that Redis has let go, as the audit remembers it."""
        try:
            found = await selectors.task(caller.tenant, task_id)
        except errors.TaskNotFound:
            found = await threadpool.run_db(audit_reader.audited_task, caller.tenant, task_id)
        return json_response(conversion.task(found, caller.tenant.slug))

    @Operation(
        "cancel",
        tag="Producer",
        summary="Cancel a task",
        may=(IsProducer,),
        answers={200: wire.Task},
        errors=(errors.TaskNotFound, errors.AlreadyEnded),
    )
    async def delete(self, caller: Caller, task_id: str) -> HttpResponse:
        """A waiting task ends CANCELLED. A running one too: its worker learns of it at the next heartbeat, and a late
        result is refused."""
        found = await services.cancel(caller.tenant, task_id)
        return json_response(conversion.task(found, caller.tenant.slug))


def _moment(created_after: str | None) -> dt.datetime | None:
    try:
        return None if created_after is None else msgspec.convert(created_after, Moment)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest("createdAfter: not a moment in time") from error
