"""Results: submitted by workers, read by producers and workers of the tenant."""

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
from queues import artifacts, domain, merging, selectors, services
from queues.api import claim_request, conversion
from queues.api.schemas import LIMITS
from queues.api.schemas import results as wire
from queues.api.views.leases import LEASE_ERRORS, LEASE_HEADERS, lease_token
from queues.audit import audit_reader
from queues.batch import merge_in_order
from tenants.domain import Caller
from tenants.permissions import HasScope, IsProducerOrWorker, commands_for, refuse_new_work


class ResultRequest:
    """A read of a task's result, attempted once or by a long poll."""

    seconds_until_due = None

    def __init__(self, request: ApiRequest, caller: Caller, task_id: str) -> None:
        self._request = request
        self._caller = caller
        self.names = [task_id]
        self.answer: tuple[domain.Task, domain.Result] | None = None

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
            # The task has ended in the meantime, perhaps without a result.
            self.answer = await selectors.result(tenant, task_id)
        return True

    async def undo(self) -> None:
        """Do nothing, because a read changes nothing."""

    async def wait_for_disconnect(self) -> None:
        await self._request.wait_for_disconnect()


class ResultView(ApiView):
    @Operation(
        "get_result",
        tag="Producer",
        summary="Read or wait for a task's result",
        permission_classes=(IsProducerOrWorker,),
        query=wire.ResultQuery,
        answers={200: wire.TaskResult},
        errors=(errors.TaskNotFound, errors.ResultNotFound),
    )
    async def get(self, caller: Caller, task_id: str, query: wire.ResultQuery) -> HttpResponse:
        """Read a result.

        Answers 404 `result_not_found` if there is no result after `waitSeconds`, or if the task ended without a result.
        """
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
        summary="Submit the result of a claimed task",
        permission_classes=(HasScope("codeq:result"),),
        allows_suspended=True,
        body=wire.NewResult,
        answers={200: wire.Result},
        errors=(*LEASE_ERRORS, errors.PayloadTooLarge),
        headers=LEASE_HEADERS,
    )
    async def post(self, caller: Caller, task_id: str, body: wire.NewResult) -> HttpResponse:
        """End a task with its result.

        Submitting the same result again returns the same response. A different result is refused.
        """
        (item,) = await submit(caller, [(task_id, body, lease_token(self, body.lease_token))])
        if isinstance(item, CodeqError):
            raise item
        return json_response(conversion.result(item))


class ResultBatchView(ApiView):
    @Operation(
        "submit_batch",
        tag="Worker",
        summary="Submit several results",
        permission_classes=(HasScope("codeq:result"),),
        allows_suspended=True,
        body=wire.NewResults,
        answers={200: wire.SubmittedResults},
    )
    async def post(self, caller: Caller, body: wire.NewResults) -> HttpResponse:
        """Submit independent results.

        The answers are in the order of the request. A result that was refused has its own error.
        """
        return json_response(wire.SubmittedResults(results=await submit_each(caller, body.results)))


class ExchangeView(ApiView):
    @Operation(
        "exchange",
        tag="Worker",
        summary="Submit results and claim the next tasks",
        permission_classes=(HasScope("codeq:result"), HasScope("codeq:claim")),
        allows_suspended=True,
        body=wire.NewExchange,
        is_body_optional=True,
        answers={200: wire.Exchanged},
        errors=(errors.TooMany,),
    )
    async def post(self, caller: Caller, body: wire.NewExchange) -> HttpResponse:
        """Submit results, then claim tasks.

        A suspended tenant can submit results, but gets no new task. If it submits none, the answer is 403.
        """
        # Checked before a result is stored: a refused claim must not leave half a request done.
        commands_for(caller, body.commands)
        results = await submit_each(caller, body.results) if body.results else []
        if caller.tenant.is_suspended:
            if not results:
                refuse_new_work(caller)
            tasks: Sequence[domain.Task] = ()
        else:
            tasks = await claim_request.claim(self.request, caller, body, int(body.count or LIMITS.batch))
        return json_response(
            wire.Exchanged(results=results, tasks=[conversion.task(task, caller.tenant.slug) for task in tasks])
        )


class ArtifactView(ApiView):
    @Operation(
        "get_artifact",
        tag="Producer",
        summary="Download an artifact",
        permission_classes=(IsProducerOrWorker,),
        answers={200: "application/octet-stream"},
        errors=(errors.TaskNotFound, errors.ResultNotFound, errors.NotFound),
        answer_headers={"Content-Disposition": "The artifact's name."},
    )
    async def get(self, caller: Caller, task_id: str, artifact_id: str) -> HttpResponseBase:
        """Download a file that was submitted with a result."""
        artifact, file = await threadpool.run_storage(artifacts.open_artifact, caller.tenant, task_id, artifact_id)
        response = StreamingHttpResponse(threadpool.read_file(file), content_type="application/octet-stream")
        # The name must not be a path, since a program may save the file under it.
        name = artifact.name.replace("/", "_").replace("\\", "_")
        # A browser must not display the worker's bytes as a page of this host.
        response.headers["Content-Disposition"] = content_disposition_header(True, name) or "attachment"
        response.headers["Content-Security-Policy"] = "sandbox; default-src 'none'"
        response.headers["Content-Length"] = str(artifact.size)
        return response


async def submit_each(caller: Caller, bodies: Sequence[wire.NewResultOf]) -> list[wire.SubmittedItem]:
    """Submit the results of a batch."""
    items = await submit(caller, [(body.task_id, body, body.lease_token) for body in bodies])
    return [conversion.submitted_item(body.task_id, item) for body, item in zip(bodies, items, strict=True)]


async def submit(
    caller: Caller, submissions: Sequence[tuple[str, wire.NewResult, str | None]]
) -> list[domain.Result | CodeqError]:
    """Submit results in one round trip. Returns one answer per submission, in order.

    Inline artifacts are stored first, and deleted again if their result is refused.
    """
    tid = caller.tenant.tid
    new: list[domain.NewResult] = []
    refused: dict[int, CodeqError] = {}
    inline: dict[int, tuple[str, list[artifacts.NewArtifact], list[str]]] = {}
    for position, (task_id, body, token) in enumerate(submissions):
        try:
            new_artifacts = conversion.new_artifacts(body)
            result = conversion.new_result(task_id, body, token)  # a bad result is refused before anything is stored
            if new_artifacts:
                stored, new_paths = await _store(tid, task_id, new_artifacts)
                if any(artifact.content is not None for artifact in new_artifacts):
                    inline[position] = (task_id, new_artifacts, new_paths)
                result = conversion.new_result(task_id, body, token, stored)
            new.append(result)
        except CodeqError as error:
            refused[position] = error
    # If Redis does not answer, the results may have been stored: the artifacts stay for the worker's next try.
    if len(new) == 1:
        answers = [await merging.submit(caller.tenant, caller.subject, new[0])]
    else:
        answers = await services.submit(caller.tenant, caller.subject, new) if new else []
    items = merge_in_order(refused, answers)
    for position, (task_id, new_artifacts, new_paths) in inline.items():
        if isinstance(items[position], CodeqError):
            await threadpool.run_storage(artifacts.discard, new_paths)
        elif not new_paths:
            # Another submission had stored the same files. If it was refused, it has deleted them: store them again.
            await threadpool.run_storage(artifacts.store, tid, task_id, new_artifacts)
    return items


async def _store(
    tid: str, task_id: str, new: Sequence[artifacts.NewArtifact]
) -> tuple[list[artifacts.StoredArtifact], list[str]]:
    if any(artifact.content is not None for artifact in new):
        return await threadpool.run_storage(artifacts.store, tid, task_id, new)
    return artifacts.store(tid, task_id, new)
