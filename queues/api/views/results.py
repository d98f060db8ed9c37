"""Results: handed in by workers, read by anybody of the tenant."""

from __future__ import annotations

from collections.abc import Sequence

from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.utils.http import content_disposition_header

from codeq_site import errors, offloop
from codeq_site.errors import CodeqError
from queues import archive, artifacts, selectors, services, waiting
from queues import task as nouns
from queues.api import claiming, translate
from queues.api.operation import Operation
from queues.api.view import ApiView, answer
from queues.api.views.leases import HOLDER, LEASE, lease_token
from queues.api.wire import LIMITS
from queues.api.wire import results as wire
from tenants.permissions import HasScope, IsEither, commands_for, refuse_new_work
from tenants.tenant import Caller


class ResultView(ApiView):
    @Operation(
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
            except errors.TaskNotFound:
                found[:] = [await offloop.run(archive.result, caller.tenant, task_id)]
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
            await claiming.unless_gone(
                waiting.room().ended(task_id, look, self.request.disconnected, query.wait_seconds)
            )
        else:
            await look(0)
        if not found:
            raise errors.ResultNotFound
        task, result = found[0]
        return answer(wire.TaskResult(task=translate.task(task, caller.tenant.slug), result=translate.result(result)))

    @Operation(
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
        (item,) = await submit(caller, [(task_id, body, lease_token(self, body.lease_token))])
        if isinstance(item, CodeqError):
            raise item
        return answer(translate.result(item))


class ResultBatchView(ApiView):
    @Operation(
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
        return answer(wire.SubmittedResults(results=await submit_each(caller, body.results)))


class ExchangeView(ApiView):
    @Operation(
        "exchange",
        tag="Worker",
        summary="Hand in results and take the next tasks",
        may=(HasScope("codeq:result"), HasScope("codeq:claim")),
        is_finishing=True,
        body=wire.NewExchange,
        is_body_optional=True,
        answers={200: wire.Exchanged},
        errors=(errors.TooMany,),
    )
    async def post(self, caller: Caller, body: wire.NewExchange) -> HttpResponse:
        """A worker's whole loop in one request. A suspended tenant's results are taken, and no new task is given."""
        # Before anything is stored: a claim that is refused must not leave half a request done.
        commands_for(caller, body.commands)
        results = await submit_each(caller, body.results) if body.results else []
        if caller.tenant.suspended:
            if not results:
                refuse_new_work(caller)
            tasks: Sequence[nouns.Task] = ()
        else:
            tasks = await claiming.claim(self.request, caller, body, int(body.count or LIMITS.claim_batch))
        return answer(
            wire.Exchanged(results=results, tasks=[translate.task(task, caller.tenant.slug) for task in tasks])
        )


class ArtifactView(ApiView):
    @Operation(
        "get_artifact",
        tag="Producer",
        summary="Download an artifact",
        may=(IsEither,),
        answers={200: "application/octet-stream"},
        errors=(errors.TaskNotFound, errors.ResultNotFound, errors.NotFound),
        answer_headers={"Content-Disposition": "The artifact's name."},
    )
    async def get(self, caller: Caller, task_id: str, artifact_id: str) -> HttpResponseBase:
        """The bytes that came inline with the result."""
        kept, file = await offloop.store(artifacts.opened, caller.tenant, task_id, artifact_id)
        response = StreamingHttpResponse(offloop.read(file), content_type="application/octet-stream")
        # Never shown by a browser: a worker's bytes must not become a page of this host.
        # And the name, by which a program may save them, is not a path of its machine.
        name = kept.name.replace("/", "_").replace("\\", "_")
        response.headers["Content-Disposition"] = content_disposition_header(True, name) or "attachment"
        response.headers["Content-Security-Policy"] = "sandbox; default-src 'none'"
        response.headers["Content-Length"] = str(kept.size)
        return response


async def submit_each(caller: Caller, bodies: Sequence[wire.NewResultOf]) -> list[wire.SubmittedItem]:
    items = await submit(caller, [(body.task_id, body, body.lease_token) for body in bodies])
    return [translate.submitted_item(body.task_id, item) for body, item in zip(bodies, items, strict=True)]


async def submit(
    caller: Caller, handed_in: Sequence[tuple[str, wire.NewResult, str | None]]
) -> list[nouns.Result | CodeqError]:
    """Results in one round trip, what is inline beside them stored before, and removed where one is refused."""
    tid = caller.tenant.tid
    new: list[nouns.NewResult] = []
    refused: dict[int, CodeqError] = {}
    inline: dict[int, tuple[str, list[artifacts.New], list[str]]] = {}
    for at, (task_id, body, token) in enumerate(handed_in):
        try:
            beside = translate.new_artifacts(body)
            result = translate.new_result(task_id, body, token)  # says what is wrong before anything is stored
            if beside:
                kept, stored = await _keep(tid, task_id, beside)
                if any(each.content is not None for each in beside):
                    inline[at] = (task_id, beside, stored)
                result = translate.new_result(task_id, body, token, kept)
            new.append(result)
        except CodeqError as error:
            refused[at] = error
    # If Redis does not answer, nobody knows whether it was carried out: what is stored stays, for another try.
    answers = iter(await services.submit(caller.tenant, caller.subject, new) if new else ())
    items = [refused[at] if at in refused else next(answers) for at in range(len(handed_in))]
    for at, (task_id, beside, stored) in inline.items():
        if isinstance(items[at], CodeqError):
            await offloop.store(artifacts.take_back, stored)
        elif not stored:
            # It was there already; a refused twin of this submission may have taken it back since.
            await offloop.store(artifacts.keep, tid, task_id, beside)
    return items


async def _keep(tid: str, task_id: str, beside: Sequence[artifacts.New]) -> tuple[list[artifacts.Kept], list[str]]:
    if any(each.content is not None for each in beside):
        return await offloop.store(artifacts.keep, tid, task_id, beside)
    return artifacts.keep(tid, task_id, beside)
