"""The routes of tasks: read the wire, call one verb, write the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from django.core.exceptions import RequestAborted
from django.http import HttpResponse

from codeq_site import errors
from codeq_site.errors import CodeqError
from queues import metrics, selectors, services, waiting
from queues import task as nouns
from queues.api import trace, wire
from queues.api.view import ApiView, answer, nothing, operation
from queues.engine.engine import CLAIM_QUEUES
from tenants.permissions import HasScope, IsEither, IsProducer, commands_for, refuse_new_work
from tenants.tenant import ANY_COMMAND, Caller

R = TypeVar("R")
HOLDER = (errors.TaskNotFound, errors.NotLeaseOwner, errors.LeaseLost, errors.TaskCancelled, errors.AlreadyEnded)
LEASE = {"X-CodeQ-Lease-Token": "The `leaseToken` the claim gave, if it is not in the body."}
TRACE = {"traceparent": "W3C trace context, kept with the task.", "tracestate": "Goes with `traceparent`."}
CAN_CLAIM = (HasScope("codeq:claim"),)


class TasksView(ApiView):
    @operation(
        "enqueue",
        tag="Producer",
        summary="Put a task on a queue",
        may=(IsProducer,),
        body=wire.NewTask,
        answers={202: wire.Task},
        errors=(errors.PayloadTooLarge, errors.IdempotencyMismatch, errors.StoreFull),
        headers=TRACE,
        answer_headers={
            "Idempotency-Replayed": "`true`: the key had made this task before.",
            "Idempotency-Mismatch": "`true`: and from another body.",
        },
    )
    async def post(self, caller: Caller, body: wire.NewTask) -> HttpResponse:
        """Acknowledged means on disk. A repeated `idempotencyKey` answers with the task that it made before, and says
        so in a header."""
        new = wire.new_task(body, *trace.context(self.request))
        (item,) = await services.enqueue(caller.tenant, [new])
        if isinstance(item, CodeqError):
            raise item
        if not item.is_replayed:
            metrics.created(item.task)
        response = answer(wire.task(item.task, caller.tenant.slug), 202)
        if item.is_replayed:
            response.headers["Idempotency-Replayed"] = "true"
        if item.is_mismatch:
            response.headers["Idempotency-Mismatch"] = "true"
        return response


class TaskBatchView(ApiView):
    @operation(
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
                new.append(wire.new_task(each, *context))
            except CodeqError as error:
                refused[at] = error
        stored = iter(await services.enqueue(caller.tenant, new) if new else ())
        items = [refused[at] if at in refused else next(stored) for at in range(len(body.tasks))]
        for item in items:
            if isinstance(item, nouns.Enqueued) and not item.is_replayed:
                metrics.created(item.task)
        return answer(wire.EnqueuedTasks(results=[wire.enqueued_item(item, caller.tenant.slug) for item in items]))


class TaskView(ApiView):
    @operation(
        "get_task",
        tag="Producer",
        summary="Read a task",
        may=(IsEither,),
        answers={200: wire.Task},
        errors=(errors.TaskNotFound,),
    )
    async def get(self, caller: Caller, task_id: str) -> HttpResponse:
        """A task of one's tenant, with where it is now."""
        found = await selectors.task(caller.tenant, task_id)
        return answer(wire.task(found, caller.tenant.slug))

    @operation(
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
        return answer(wire.task(found, caller.tenant.slug))


class ResultView(ApiView):
    @operation(
        "get_result",
        tag="Producer",
        summary="Read a task's result, waiting for it if asked",
        may=(IsEither,),
        query=wire.ResultQuery,
        answers={200: wire.TaskResult},
        errors=(errors.TaskNotFound, errors.ResultNotFound),
    )
    async def get(self, caller: Caller, task_id: str, query: wire.ResultQuery) -> HttpResponse:
        """404 `result_not_found` while there is none, at once for a task that ended without one."""
        found: list[tuple[nouns.Task, nouns.Result]] = []

        async def look(wait_ms: int) -> bool:
            try:
                found[:] = [await selectors.result(caller.tenant, task_id, watch=wait_ms > 0)]
            except errors.ResultNotFound:
                if wait_ms <= 0:
                    return False
                task = await selectors.task(caller.tenant, task_id)
                if not task.status.is_terminal:
                    return False
                # It has ended since, or without a result.
                found[:] = [await selectors.result(caller.tenant, task_id)]
            return True

        if query.wait_seconds:
            await _unless_gone(waiting.room().ended(task_id, look, self.request.disconnected, query.wait_seconds))
        else:
            await look(0)
        if not found:
            raise errors.ResultNotFound
        task, result = found[0]
        return answer(wire.TaskResult(task=wire.task(task, caller.tenant.slug), result=wire.result(result)))

    @operation(
        "submit",
        tag="Worker",
        summary="Hand in the result of a claimed task",
        may=(HasScope("codeq:result"),),
        is_finishing=True,
        body=wire.NewResult,
        answers={200: wire.Result},
        errors=(*HOLDER, errors.PayloadTooLarge),
        headers=LEASE,
    )
    async def post(self, caller: Caller, task_id: str, body: wire.NewResult) -> HttpResponse:
        """The same submission again gets the same answer; a different one is refused."""
        new = wire.new_result(task_id, body, lease_token(self, body.lease_token))
        (item,) = await services.submit(caller.tenant, caller.subject, [new])
        if isinstance(item, CodeqError):
            raise item
        return answer(wire.result(item))


class ClaimView(ApiView):
    @operation(
        "claim",
        tag="Worker",
        summary="Take a task",
        may=CAN_CLAIM,
        body=wire.NewClaim,
        is_body_optional=True,
        answers={200: wire.Task, 204: None},
    )
    async def post(self, caller: Caller, body: wire.NewClaim) -> HttpResponse:
        """The best ready task of the queues, under a lease. 204 when there is none, after `waitSeconds`."""
        tasks = await claim(self, caller, body, 1)
        return answer(wire.task(tasks[0], caller.tenant.slug)) if tasks else nothing()


class ClaimBatchView(ApiView):
    @operation(
        "claim_batch",
        tag="Worker",
        summary="Take several tasks",
        may=CAN_CLAIM,
        body=wire.NewClaims,
        is_body_optional=True,
        answers={200: wire.Tasks, 204: None},
    )
    async def post(self, caller: Caller, body: wire.NewClaims) -> HttpResponse:
        """Up to `count` ready tasks, each under a lease. 204 when there is none, after `waitSeconds`."""
        tasks = await claim(self, caller, body, body.count or wire.LIMITS.claim_batch)
        if not tasks:
            return nothing()
        return answer(wire.Tasks(tasks=[wire.task(task, caller.tenant.slug) for task in tasks]))


class HeartbeatView(ApiView):
    @operation(
        "heartbeat",
        tag="Worker",
        summary="Keep the lease of a task",
        may=(HasScope("codeq:heartbeat"),),
        is_finishing=True,
        body=wire.Heartbeat,
        is_body_optional=True,
        answers={200: wire.Extended},
        errors=HOLDER,
        headers=LEASE,
    )
    async def post(self, caller: Caller, task_id: str, body: wire.Heartbeat) -> HttpResponse:
        """The lease then ends `extendSeconds` from now. 409 when it is over, noticed or not, and when the task was
        cancelled."""
        lease = await services.heartbeat(
            caller.tenant,
            task_id,
            caller.subject,
            extend_seconds=body.extend_seconds,
            token=lease_token(self, body.lease_token),
            progress=wire.progress(body.progress),
        )
        return answer(wire.Extended(ok=True, lease_until=wire.moment(lease.until_ms)))


class AbandonView(ApiView):
    @operation(
        "abandon",
        tag="Worker",
        summary="Give a task back",
        may=(HasScope("codeq:abandon"),),
        is_finishing=True,
        body=wire.Abandon,
        is_body_optional=True,
        answers={200: wire.Abandoned},
        errors=HOLDER,
        headers=LEASE,
    )
    async def post(self, caller: Caller, task_id: str, body: wire.Abandon) -> HttpResponse:
        """To the back of its priority, at once. It counts as an attempt."""
        token = lease_token(self, body.lease_token)
        returned = await services.abandon(caller.tenant, task_id, caller.subject, token=token)
        return answer(wire.Abandoned(status="dlq" if returned.is_dead else "requeued"))


class NackView(ApiView):
    @operation(
        "nack",
        tag="Worker",
        summary="Say that this attempt failed",
        may=(HasScope("codeq:nack"),),
        is_finishing=True,
        body=wire.Nack,
        is_body_optional=True,
        answers={200: wire.Nacked},
        errors=HOLDER,
        headers=LEASE,
    )
    async def post(self, caller: Caller, task_id: str, body: wire.Nack) -> HttpResponse:
        """The task waits for its backoff and is tried again, or becomes a dead letter when its attempts are used up."""
        returned = await services.nack(
            caller.tenant,
            task_id,
            caller.subject,
            token=lease_token(self, body.lease_token),
            delay_seconds=body.delay_seconds,
            reason=body.reason,
        )
        return answer(
            wire.Nacked(
                status="dlq" if returned.is_dead else "requeued",
                delay_seconds=0 if returned.is_dead else returned.delay_ms / 1000,
            )
        )


class ResultBatchView(ApiView):
    @operation(
        "submit_batch",
        tag="Worker",
        summary="Hand in several results",
        may=(HasScope("codeq:result"),),
        is_finishing=True,
        body=wire.NewResults,
        answers={200: wire.SubmittedResults},
    )
    async def post(self, caller: Caller, body: wire.NewResults) -> HttpResponse:
        """Each result for itself, in one round trip; answered in order, an item with its error where it has one."""
        return answer(wire.SubmittedResults(results=await submit(caller, body.results)))


class ExchangeView(ApiView):
    @operation(
        "exchange",
        tag="Worker",
        summary="Hand in results and take the next tasks",
        may=(HasScope("codeq:result"), HasScope("codeq:claim")),
        is_finishing=True,
        body=wire.NewExchange,
        is_body_optional=True,
        answers={200: wire.Exchanged},
    )
    async def post(self, caller: Caller, body: wire.NewExchange) -> HttpResponse:
        """A worker's whole loop in one request. A suspended tenant's results are taken, and no new task is given."""
        # Before anything is stored: a claim that is refused must not leave half a request done.
        commands_for(caller, body.commands)
        results = await submit(caller, body.results) if body.results else []
        if caller.tenant.suspended:
            if not results:
                refuse_new_work(caller)
            tasks: Sequence[nouns.Task] = ()
        else:
            tasks = await claim(self, caller, body, body.count or wire.LIMITS.claim_batch)
        return answer(wire.Exchanged(results=results, tasks=[wire.task(task, caller.tenant.slug) for task in tasks]))


def lease_token(view: ApiView, in_body: str | None) -> str | None:
    """The lease token of the body or the header. Both, and they differ: the request contradicts itself."""
    in_header = view.request.header(b"x-codeq-lease-token")
    if in_body is not None and in_header is not None and in_body != in_header:
        raise errors.InvalidRequest("leaseToken: the header says another one than the body")
    return in_body if in_body is not None else in_header


async def submit(caller: Caller, bodies: Sequence[wire.NewResultOf]) -> list[wire.SubmittedItem]:
    new: list[nouns.NewResult] = []
    refused: dict[int, CodeqError] = {}
    for at, body in enumerate(bodies):
        try:
            new.append(wire.new_result(body.task_id, body, body.lease_token))
        except CodeqError as error:
            refused[at] = error
    stored = iter(await services.submit(caller.tenant, caller.subject, new) if new else ())
    return [
        wire.submitted_item(body.task_id, refused[at] if at in refused else next(stored))
        for at, body in enumerate(bodies)
    ]


async def claim(view: ApiView, caller: Caller, body: wire.NewClaim, count: int) -> list[nouns.Task]:
    """What the caller may have, now or within `waitSeconds`."""
    tenant = caller.tenant
    asked = commands_for(caller, body.commands)

    async def look(wait_ms: int) -> nouns.Claimed:
        commands = asked if asked != [ANY_COMMAND] else await _every_queue(caller)
        if not commands:
            return nouns.Claimed(tasks=[], now_ms=0)
        claimed = await services.claim(
            tenant, commands, caller.subject, lease_seconds=body.lease_seconds, count=count, wait_ms=wait_ms
        )
        metrics.claimed(claimed.tasks)
        return claimed

    if not body.wait_seconds:
        return (await look(0)).tasks

    async def give_back(claimed: nouns.Claimed) -> None:
        back: list[Any] = [
            services.abandon(tenant, task.id, caller.subject, token=task.lease_token) for task in claimed.tasks
        ]
        await asyncio.gather(*back)

    claimed = await _unless_gone(
        waiting.room().claim(
            [f"{tenant.tid}:{command}" for command in asked],
            look,
            give_back,
            view.request.disconnected,
            body.wait_seconds,
        )
    )
    return claimed.tasks


async def _every_queue(caller: Caller) -> list[str]:
    queues = await selectors.queues(caller.tenant)
    return [queue.command for queue in queues][:CLAIM_QUEUES]


async def _unless_gone(wait: Coroutine[Any, Any, R]) -> R:
    try:
        return await wait
    except waiting.Gone as gone:
        raise RequestAborted from gone
