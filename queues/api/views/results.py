"""Results: handed in by workers, read by anybody of the tenant."""

from __future__ import annotations

from collections.abc import Sequence

from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.utils.http import content_disposition_header

from core import errors, threadpool
from core.errors import CodeqError
from core.http.api_view import ApiView, json_response
from core.http.handler import ApiRequest
from core.http.operation import Operation
from queues import artifacts, selectors, services
from queues import domain as nouns
from queues.api import claim_request, conversion
from queues.api.schemas import LIMITS
from queues.api.schemas import results as wire
from queues.api.views.leases import HOLDER, LEASE, lease_token
from queues.audit import audit_reader
from tenants.domain import Caller
from tenants.permissions import HasScope, IsEither, commands_for, refuse_new_work


class ResultRequest:
    """A read of a task's result, as a long poll attempts it."""

    seconds_until_due = None

    def __init__(self, request: ApiRequest, caller: Caller, task_id: str) -> None:
        self._request = request
        self._caller = caller
        self.names = [task_id]
        self.answer: tuple[nouns.Task, nouns.Result] | None = None

    async def attempt(self, wait_ms: int) -> bool:
        tenant, (task_id,) = self._caller.tenant, self.names
        try:
            self.answer = await selectors.result(tenant, task_id, watch=wait_ms > 0)
        except errors.TaskNotFound:
            self.answer = await threadpool.run_db(audit_reader.audited_result, tenant, task_id)
        except errors.ResultNotFound:
            if wait_ms <= 0:
                return False
            task = await selectors.task(tenant, task_id)
            if not task.status.is_terminal:
                return False
            # The task has ended since, perhaps without a result.
            self.answer = await selectors.result(tenant, task_id)
        return True

    async def undo(self) -> None:
        """A read has nothing to give back."""

    async def disconnected(self) -> None:
        await self._request.disconnected()


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
        result_request = ResultRequest(self.request, caller, task_id)
        if query.wait_seconds:
            await claim_request.wait_for(result_request, query.wait_seconds)
        else:
            await result_request.attempt(0)
        if result_request.answer is None:
            raise errors.ResultNotFound
        task, result = result_request.answer
        return json_response(
            wire.TaskResult(task=conversion.task(task, caller.tenant.slug), result=conversion.result(result))
        )

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
        return json_response(conversion.result(item))


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
        return json_response(wire.SubmittedResults(results=await submit_each(caller, body.results)))


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
        if caller.tenant.is_suspended:
            if not results:
                refuse_new_work(caller)
            tasks: Sequence[nouns.Task] = ()
        else:
            tasks = await claim_request.claim(self.request, caller, body, int(body.count or LIMITS.claim_batch))
        return json_response(
            wire.Exchanged(results=results, tasks=[conversion.task(task, caller.tenant.slug) for task in tasks])
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
        kept, file = await threadpool.run_storage(artifacts.open_artifact, caller.tenant, task_id, artifact_id)
        response = StreamingHttpResponse(threadpool.read_file(file), content_type="application/octet-stream")
        # Never shown by a browser: a worker's bytes must not become a page of this host.
        # And the name, by which a program may save them, is not a path of its machine.
        name = kept.name.replace("/", "_").replace("\\", "_")
        response.headers["Content-Disposition"] = content_disposition_header(True, name) or "attachment"
        response.headers["Content-Security-Policy"] = "sandbox; default-src 'none'"
        response.headers["Content-Length"] = str(kept.size)
        return response


async def submit_each(caller: Caller, bodies: Sequence[wire.NewResultOf]) -> list[wire.SubmittedItem]:
    items = await submit(caller, [(body.task_id, body, body.lease_token) for body in bodies])
    return [conversion.submitted_item(body.task_id, item) for body, item in zip(bodies, items, strict=True)]


async def submit(
    caller: Caller, handed_in: Sequence[tuple[str, wire.NewResult, str | None]]
) -> list[nouns.Result | CodeqError]:
    """Results in one round trip, what is inline beside them stored before, and removed where one is refused."""
    tid = caller.tenant.tid
    new: list[nouns.NewResult] = []
    refused: dict[int, CodeqError] = {}
    inline: dict[int, tuple[str, list[artifacts.NewArtifact], list[str]]] = {}
    for at, (task_id, body, token) in enumerate(handed_in):
        try:
            beside = conversion.new_artifacts(body)
            result = conversion.new_result(task_id, body, token)  # says what is wrong before anything is stored
            if beside:
                kept, stored = await _keep(tid, task_id, beside)
                if any(each.content is not None for each in beside):
                    inline[at] = (task_id, beside, stored)
                result = conversion.new_result(task_id, body, token, kept)
            new.append(result)
        except CodeqError as error:
            refused[at] = error
    # If Redis does not answer, nobody knows whether it was carried out: what is stored stays, for another try.
    answers = iter(await services.submit(caller.tenant, caller.subject, new) if new else ())
    items = [refused[at] if at in refused else next(answers) for at in range(len(handed_in))]
    for at, (task_id, beside, stored) in inline.items():
        if isinstance(items[at], CodeqError):
            await threadpool.run_storage(artifacts.take_back, stored)
        elif not stored:
            # It was there already; a refused twin of this submission may have taken it back since.
            await threadpool.run_storage(artifacts.keep, tid, task_id, beside)
    return items


async def _keep(
    tid: str, task_id: str, beside: Sequence[artifacts.NewArtifact]
) -> tuple[list[artifacts.StoredArtifact], list[str]]:
    if any(each.content is not None for each in beside):
        return await threadpool.run_storage(artifacts.keep, tid, task_id, beside)
    return artifacts.keep(tid, task_id, beside)
