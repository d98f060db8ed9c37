"""Dead letters, and the bulk jobs that replay them."""

from __future__ import annotations

import datetime as dt

import msgspec
from django.http import HttpResponse

from core import errors, threadpool
from core.http.api_view import ApiView, json_response
from core.http.operation import Operation
from queues import validation
from queues.api import conversion
from queues.api.schemas import deadletters as wire
from queues.deadletters import bulk_jobs, queries
from queues.models import BulkJob
from tenants.domain import Caller
from tenants.permissions import IsAdmin


class DeadLettersView(ApiView):
    @Operation(
        "list_dead_letters",
        tag="Admin",
        summary="List a queue's dead letters",
        permission_classes=(IsAdmin,),
        rate="admin",
        query=wire.DeadLettersQuery,
        answers={200: wire.DeadLetters},
    )
    async def get(self, caller: Caller, command: str, query: wire.DeadLettersQuery) -> HttpResponse:
        """List dead letters, the newest first.

        The list is read from the audit, which is about a second behind.
        """
        filter = queries.Filter(
            command=command, error=query.error, text=query.text, died_before=_died_before(query.older_than)
        )
        page = await threadpool.run_db(
            queries.page, [caller.tenant.tid], filter, cursor=query.cursor, limit=query.limit
        )
        return json_response(
            wire.DeadLetters(dead_letters=[_dead_letter(letter) for letter in page.letters], cursor=page.cursor)
        )


class ReplayView(ApiView):
    @Operation(
        "replay",
        tag="Admin",
        summary="Replay dead letters",
        permission_classes=(IsAdmin,),
        rate="admin",
        body=wire.NewReplay,
        is_body_optional=True,
        answers={200: wire.DryRun, 202: wire.BulkJob},
        errors=(errors.TooMany,),
        answer_headers={"Location": "Path of the bulk job."},
    )
    async def post(self, caller: Caller, command: str, body: wire.NewReplay) -> HttpResponse:
        """Start a bulk job that replays dead letters. Each gets all its attempts again.

        With `dryRun`, no job is started: the response has the number of dead letters and a sample of them.
        """
        validation.check_command(command)
        tenant = caller.tenant
        if body.ids is not None and body.filter is not None:
            raise errors.InvalidRequest("ids, filter: give only one of them")
        filter = body.filter or queries.Filter()
        if filter.command not in (None, command):
            raise errors.InvalidRequest("filter.command: must be the queue of the path, or absent")
        filter = msgspec.structs.replace(
            filter,
            command=command,
            deliveries_from=conversion.to_int(filter.deliveries_from),
            deliveries_to=conversion.to_int(filter.deliveries_to),
        )
        if body.dry_run:
            if body.ids is not None:
                return json_response(wire.DryRun(count=len(set(body.ids)), sample=[]))
            dry_run = await threadpool.run_db(bulk_jobs.dry_run, tenant, filter)
            sample = [_dead_letter(letter) for letter in dry_run.sample]
            return json_response(wire.DryRun(count=dry_run.count, sample=sample))
        job = await threadpool.run_db(
            bulk_jobs.start,
            tenant,
            bulk_jobs.Kind.REPLAY,
            filter if body.ids is None else body.ids,
            actor=caller.subject,
            reason=body.reason,
            rate_per_second=conversion.to_int(body.rate_per_second),
        )
        response = json_response(_bulk_job(job), 202)
        response.headers["Location"] = f"/v1/codeq/admin/bulk/{job.id}"
        return response


class BulkView(ApiView):
    @Operation(
        "get_bulk_job",
        tag="Admin",
        summary="Read a bulk job",
        permission_classes=(IsAdmin,),
        rate="admin",
        answers={200: wire.BulkJob},
        errors=(errors.NotFound,),
    )
    async def get(self, caller: Caller, job_id: str) -> HttpResponse:
        """Read the progress of a bulk job."""
        return json_response(_bulk_job(await threadpool.run_db(bulk_jobs.find, [caller.tenant.tid], job_id)))

    @Operation(
        "cancel_bulk_job",
        tag="Admin",
        summary="Cancel a bulk job",
        permission_classes=(IsAdmin,),
        rate="admin",
        answers={200: wire.BulkJob},
        errors=(errors.NotFound,),
    )
    async def delete(self, caller: Caller, job_id: str) -> HttpResponse:
        """Cancel a bulk job. Tasks that it has already replayed stay replayed."""
        return json_response(_bulk_job(await threadpool.run_db(bulk_jobs.cancel, [caller.tenant.tid], job_id)))


def _died_before(older_than: float | dt.datetime | None) -> dt.datetime | None:
    if isinstance(older_than, (int, float)):
        return dt.datetime.now(dt.UTC) - dt.timedelta(seconds=older_than)
    return older_than


def _dead_letter(letter: queries.DeadLetter) -> wire.DeadLetter:
    return wire.DeadLetter(
        id=letter.id,
        command=letter.command,
        priority=letter.priority,
        error=letter.error,
        failure=letter.failure,
        deliveries=letter.deliveries,
        attempts=letter.attempts,
        max_attempts=letter.max_attempts,
        worker_id=letter.worker,
        payload_start=letter.payload_start,
        created_at=letter.created_at,
        died_at=letter.died_at,
    )


def _bulk_job(row: BulkJob) -> wire.BulkJob:
    return wire.BulkJob(
        id=row.id,
        kind=row.kind,
        state=row.state,
        total=row.total,
        done=row.done,
        skipped=row.skipped,
        failed=row.failed,
        error=row.error or None,
        rate_per_second=row.rate_per_second,
        reason=row.reason,
        created_at=row.created_at,
        started_at=row.started_at,
        ended_at=row.ended_at,
    )
