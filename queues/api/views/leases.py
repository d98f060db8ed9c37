"""Claims, heartbeats, and tasks that workers return."""

from __future__ import annotations

from django.http import HttpResponse

from core import errors
from core.http.api_view import ApiView, json_response, no_content
from core.http.operation import Operation
from queues import services
from queues.api import conversion
from queues.api.claim_request import claim
from queues.api.schemas import LIMITS
from queues.api.schemas import leases as wire
from queues.api.schemas.tasks import Task
from tenants.domain import Caller
from tenants.permissions import HasScope

LEASE_ERRORS = (errors.TaskNotFound, errors.NotLeaseOwner, errors.LeaseLost, errors.TaskCancelled, errors.AlreadyEnded)
LEASE_HEADERS = {"X-CodeQ-Lease-Token": "The `leaseToken` that the claim returned, if it is not in the body."}
CAN_CLAIM = (HasScope("codeq:claim"),)


class ClaimView(ApiView):
    @Operation(
        "claim",
        tag="Worker",
        summary="Claim a task",
        permission_classes=CAN_CLAIM,
        body=wire.NewClaim,
        is_body_optional=True,
        answers={200: Task, 204: None},
        errors=(errors.TooMany,),
    )
    async def post(self, caller: Caller, body: wire.NewClaim) -> HttpResponse:
        """Claim the ready task of the highest priority.

        In a queue, the task that has been ready longest comes first. Answers 204 if there is no task after
        `waitSeconds`.
        """
        tasks = await claim(self.request, caller, body, 1)
        return json_response(conversion.task(tasks[0], caller.tenant.slug)) if tasks else no_content()


class ClaimBatchView(ApiView):
    @Operation(
        "claim_batch",
        tag="Worker",
        summary="Claim several tasks",
        permission_classes=CAN_CLAIM,
        body=wire.NewClaims,
        is_body_optional=True,
        answers={200: wire.Tasks, 204: None},
        errors=(errors.TooMany,),
    )
    async def post(self, caller: Caller, body: wire.NewClaims) -> HttpResponse:
        """Claim up to `count` ready tasks, each under a lease.

        Answers 204 if there is no task after `waitSeconds`.
        """
        tasks = await claim(self.request, caller, body, int(body.count or LIMITS.claim_batch))
        if not tasks:
            return no_content()
        return json_response(wire.Tasks(tasks=[conversion.task(task, caller.tenant.slug) for task in tasks]))


class HeartbeatView(ApiView):
    @Operation(
        "heartbeat",
        tag="Worker",
        summary="Extend the lease of a task",
        permission_classes=(HasScope("codeq:heartbeat"),),
        allows_suspended=True,
        body=wire.Heartbeat,
        is_body_optional=True,
        answers={200: wire.Extended},
        errors=LEASE_ERRORS,
        headers=LEASE_HEADERS,
    )
    async def post(self, caller: Caller, task_id: str, body: wire.Heartbeat) -> HttpResponse:
        """Set the lease to expire `extendSeconds` from now.

        Answers 409 if the lease has expired or the task was cancelled.
        """
        lease = await services.heartbeat(
            caller.tenant,
            task_id,
            caller.subject,
            extend_seconds=body.extend_seconds,
            token=lease_token(self, body.lease_token),
            progress=conversion.progress(body.progress),
        )
        return json_response(wire.Extended(ok=True, lease_until=conversion.moment(lease.until_ms)))


class AbandonView(ApiView):
    @Operation(
        "abandon",
        tag="Worker",
        summary="Return a task unprocessed",
        permission_classes=(HasScope("codeq:abandon"),),
        allows_suspended=True,
        body=wire.Abandon,
        is_body_optional=True,
        answers={200: wire.Abandoned},
        errors=LEASE_ERRORS,
        headers=LEASE_HEADERS,
    )
    async def post(self, caller: Caller, task_id: str, body: wire.Abandon) -> HttpResponse:
        """Return the task. It is ready at once, behind the other tasks of its priority.

        The attempt counts. A task that is out of attempts becomes a dead letter, or moves to the dead letter queue that
        the policy of its queue names.
        """
        token = lease_token(self, body.lease_token)
        outcome = await services.abandon(caller.tenant, task_id, caller.subject, token=token)
        return json_response(wire.Abandoned(status="dlq" if outcome.is_dead else "requeued"))


class NackView(ApiView):
    @Operation(
        "nack",
        tag="Worker",
        summary="Report a failed attempt",
        permission_classes=(HasScope("codeq:nack"),),
        allows_suspended=True,
        body=wire.Nack,
        is_body_optional=True,
        answers={200: wire.Nacked},
        errors=LEASE_ERRORS,
        headers=LEASE_HEADERS,
    )
    async def post(self, caller: Caller, task_id: str, body: wire.Nack) -> HttpResponse:
        """Report a failed attempt.

        The task is retried after `delaySeconds`, or by default after its backoff. A task that is out of attempts
        becomes a dead letter, or moves to the dead letter queue that the policy of its queue names.
        """
        outcome = await services.nack(
            caller.tenant,
            task_id,
            caller.subject,
            token=lease_token(self, body.lease_token),
            delay_seconds=body.delay_seconds,
            reason=body.reason,
        )
        return json_response(
            wire.Nacked(
                status="dlq" if outcome.is_dead else "requeued",
                delay_seconds=0 if outcome.is_dead else outcome.delay_ms / 1000,
            )
        )


def lease_token(view: ApiView, in_body: str | None) -> str | None:
    """Return the lease token of the body or the header. Raises LeaseLost if they differ."""
    in_header = view.request.header(b"x-codeq-lease-token")
    if in_body is not None and in_header is not None and in_body != in_header:
        raise errors.LeaseLost
    return in_body if in_body is not None else in_header
