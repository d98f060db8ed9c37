"""Producers: tasks in, read and cancelled."""

from __future__ import annotations

import datetime as dt

import msgspec
from django.http import HttpResponse

from codeq_site import errors, offloop
from codeq_site.errors import CodeqError
from queues import archive, metrics, search, selectors, services
from queues import task as nouns
from queues.api import trace, translate
from queues.api.operation import Operation
from queues.api.view import ApiView, answer
from queues.api.wire import Moment
from queues.api.wire import tasks as wire
from tenants.permissions import IsEither, IsProducer
from tenants.tenant import Caller

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
        asked = search.Asked(
            command=query.command, status=query.status, created_after=_moment(query.created_after), q=query.q
        )
        page = await offloop.run(search.page, caller.tenant, asked, cursor=query.cursor, limit=query.limit)
        tasks = [translate.task(task, caller.tenant.slug) for task in page.tasks]
        return answer(wire.FoundTasks(tasks=tasks, cursor=page.cursor))

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
        new = translate.new_task(body, *trace.context(self.request))
        (item,) = await services.enqueue(caller.tenant, [new], by=caller.fingerprint)
        if isinstance(item, CodeqError):
            raise item
        if not item.is_replayed:
            metrics.created(item.task)
        response = answer(translate.task(item.task, caller.tenant.slug), 202)
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
        context = trace.context(self.request)
        new: list[nouns.NewTask] = []
        refused: dict[int, CodeqError] = {}
        for at, each in enumerate(body.tasks):
            try:
                new.append(translate.new_task(each, *context))
            except CodeqError as error:
                refused[at] = error
        stored = iter(await services.enqueue(caller.tenant, new, by=caller.fingerprint) if new else ())
        items = [refused[at] if at in refused else next(stored) for at in range(len(body.tasks))]
        for item in items:
            if isinstance(item, nouns.Enqueued) and not item.is_replayed:
                metrics.created(item.task)
        return answer(wire.EnqueuedTasks(results=[translate.enqueued_item(item, caller.tenant.slug) for item in items]))


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
            found = await offloop.run(archive.task, caller.tenant, task_id)
        return answer(translate.task(found, caller.tenant.slug))

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
        return answer(translate.task(found, caller.tenant.slug))


def _moment(created_after: str | None) -> dt.datetime | None:
    try:
        return None if created_after is None else msgspec.convert(created_after, Moment)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest("createdAfter: not a moment in time") from error
