"""Tasks: enqueued, searched, read and cancelled by producers."""

from __future__ import annotations

import datetime as dt

import msgspec
from django.http import HttpResponse

from core import errors, threadpool
from core.errors import CodeqError
from core.http.api_view import ApiView, json_response
from core.http.operation import Operation
from queues import domain, merging, metrics, selectors, services
from queues.api import conversion, trace_context
from queues.api.schemas import Moment
from queues.api.schemas import tasks as wire
from queues.audit import audit_reader
from queues.batch import convert_each, merge_in_order
from queues.search import tenant_search
from tenants.domain import Caller
from tenants.permissions import IsProducer, IsProducerOrWorker

TRACE_HEADERS = {
    "traceparent": "W3C trace context, stored with the task.",
    "tracestate": "The vendor-specific part of the trace context. Ignored without `traceparent`.",
}


class TasksView(ApiView):
    @Operation(
        "search",
        tag="Producer",
        summary="Search tasks",
        permission_classes=(IsProducer,),
        query=wire.TasksQuery,
        answers={200: wire.FoundTasks},
    )
    async def get(self, caller: Caller, query: wire.TasksQuery) -> HttpResponse:
        """Search live tasks by queue, then ended tasks, the newest first.

        Ended tasks are read from the audit, which is about a second behind.
        """
        task_query = tenant_search.TaskQuery(
            command=query.command,
            status=query.status,
            created_after=_parse_created_after(query.created_after),
            q=query.q,
        )
        page = await threadpool.run_db(
            tenant_search.page, caller.tenant, task_query, cursor=query.cursor, limit=query.limit
        )
        tasks = [conversion.task(task, caller.tenant.slug) for task in page.tasks]
        return json_response(wire.FoundTasks(tasks=tasks, cursor=page.cursor))

    @Operation(
        "enqueue",
        tag="Producer",
        summary="Enqueue a task",
        permission_classes=(IsProducer,),
        body=wire.NewTask,
        answers={202: wire.Task},
        errors=(
            errors.PayloadTooLarge,
            errors.IdempotencyMismatch,
            errors.TooMany,
            errors.QueueFull,
            errors.StoreFull,
        ),
        headers=TRACE_HEADERS,
        answer_headers={
            "Idempotency-Replayed": "`true` if an earlier request created the task with this key.",
            "Idempotency-Mismatch": "`true` if the earlier request had a different body.",
        },
    )
    async def post(self, caller: Caller, body: wire.NewTask) -> HttpResponse:
        """Enqueue a task. It is stored on disk before the response is sent.

        A repeated `idempotencyKey` returns the earlier task, with the header `Idempotency-Replayed`.
        """
        new = conversion.new_task(body, *trace_context.from_request(self.request))
        item = await merging.enqueue(caller.tenant, new, token_fingerprint=caller.fingerprint)
        if isinstance(item, CodeqError):
            raise item
        if not item.is_repeated:
            metrics.created.add(item.task.spec.command)
        response = json_response(conversion.task(item.task, caller.tenant.slug), 202)
        if item.is_repeated:
            response.headers["Idempotency-Replayed"] = "true"
        if item.is_mismatch:
            response.headers["Idempotency-Mismatch"] = "true"
        return response


class TaskBatchView(ApiView):
    @Operation(
        "enqueue_batch",
        tag="Producer",
        summary="Enqueue several tasks",
        permission_classes=(IsProducer,),
        body=wire.NewTasks,
        answers={200: wire.EnqueuedTasks},
        errors=(errors.StoreFull,),
        headers=TRACE_HEADERS,
    )
    async def post(self, caller: Caller, body: wire.NewTasks) -> HttpResponse:
        """Enqueue independent tasks.

        The answers are in the order of the request. A task that was refused has its own error.
        """
        context = trace_context.from_request(self.request)
        new, refused = convert_each(body.tasks, lambda task: conversion.new_task(task, *context))
        items = merge_in_order(
            refused, await services.enqueue(caller.tenant, new, token_fingerprint=caller.fingerprint) if new else []
        )
        for item in items:
            if isinstance(item, domain.Enqueued) and not item.is_repeated:
                metrics.created.add(item.task.spec.command)
        return json_response(
            wire.EnqueuedTasks(results=[conversion.enqueued_item(item, caller.tenant.slug) for item in items])
        )


class TaskView(ApiView):
    @Operation(
        "get_task",
        tag="Producer",
        summary="Read a task",
        permission_classes=(IsProducerOrWorker,),
        answers={200: wire.Task},
        errors=(errors.TaskNotFound,),
    )
    async def get(self, caller: Caller, task_id: str) -> HttpResponse:
        """Read a task. A task whose retention has ended is read from the audit."""
        try:
            task = await selectors.task(caller.tenant, task_id)
        except errors.TaskNotFound:
            task = await threadpool.run_db(audit_reader.audited_task, caller.tenant, task_id)
        return json_response(conversion.task(task, caller.tenant.slug))

    @Operation(
        "cancel",
        tag="Producer",
        summary="Cancel a task",
        permission_classes=(IsProducer,),
        answers={200: wire.Task},
        errors=(errors.TaskNotFound, errors.AlreadyEnded),
    )
    async def delete(self, caller: Caller, task_id: str) -> HttpResponse:
        """Cancel a task. The next heartbeat of its worker fails, and a late result is refused."""
        task = await services.cancel(caller.tenant, task_id)
        return json_response(conversion.task(task, caller.tenant.slug))


def _parse_created_after(created_after: str | None) -> dt.datetime | None:
    try:
        return None if created_after is None else msgspec.convert(created_after, Moment)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest("createdAfter: not a time with a zone, such as 2026-01-31T12:00:00Z") from error
