"""The routes of dead letters: found, and brought back in line by a bulk job."""

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
        may=(IsAdmin,),
        rate="admin",
        query=wire.DeadLettersQuery,
        answers={200: wire.DeadLetters},
    )
    async def get(self, caller: Caller, command: str, query: wire.DeadLettersQuery) -> HttpResponse:
        """The newest first; a second behind, as they come from the audit."""
        asked = queries.Filter(
            command=command, error=query.error, text=query.text, died_before=_died_before(query.older_than)
        )
        page = await threadpool.run_db(queries.page, [caller.tenant.tid], asked, cursor=query.cursor, limit=query.limit)
        return json_response(
            wire.DeadLetters(dead_letters=[_dead_letter(each) for each in page.letters], cursor=page.cursor)
        )


class ReplayView(ApiView):
    @Operation(
        "replay",
        tag="Admin",
        summary="Bring dead letters back in line",
        may=(IsAdmin,),
        rate="admin",
        body=wire.NewReplay,
        is_body_optional=True,
        answers={200: wire.DryRun, 202: wire.BulkJob},
        errors=(errors.TooMany,),
        answer_headers={"Location": "Where the job's progress is."},
    )
    async def post(self, caller: Caller, command: str, body: wire.NewReplay) -> HttpResponse:
        """A bulk job: each comes back once, with all its attempts. With `dryRun` nothing is changed."""
        validation.check_command(command)
        tenant = caller.tenant
        if body.ids is not None and body.filter is not None:
            raise errors.InvalidRequest("ids, filter: one of them")
        asked = body.filter or queries.Filter()
        if asked.command not in (None, command):
            raise errors.InvalidRequest("filter.command: the path says another")
        asked = msgspec.structs.replace(
            asked,
            command=command,
            deliveries_from=conversion.whole(asked.deliveries_from),
            deliveries_to=conversion.whole(asked.deliveries_to),
        )
        if body.dry_run:
            if body.ids is not None:
                return json_response(wire.DryRun(count=len(set(body.ids)), sample=[]))
            found = await threadpool.run_db(bulk_jobs.dry_run, tenant, asked)
            sample = [_dead_letter(each) for each in found.sample]
            return json_response(wire.DryRun(count=found.count, sample=sample))
        job = await threadpool.run_db(
            bulk_jobs.start,
            tenant,
            bulk_jobs.Kind.REPLAY,
            asked if body.ids is None else body.ids,
            actor=caller.subject,
            reason=body.reason,
            rate_per_second=conversion.whole(body.rate_per_second),
        )
        response = json_response(_bulk_job(job), 202)
        response.headers["Location"] = f"/v1/codeq/admin/bulk/{job.id}"
        return response


class BulkView(ApiView):
    @Operation(
        "get_bulk_job",
        tag="Admin",
        summary="Watch a bulk job",
        may=(IsAdmin,),
        rate="admin",
        answers={200: wire.BulkJob},
        errors=(errors.NotFound,),
    )
    async def get(self, caller: Caller, job_id: str) -> HttpResponse:
        """How far it is."""
        return json_response(_bulk_job(await threadpool.run_db(bulk_jobs.find, [caller.tenant.tid], job_id)))

    @Operation(
        "cancel_bulk_job",
        tag="Admin",
        summary="Stop a bulk job",
        may=(IsAdmin,),
        rate="admin",
        answers={200: wire.BulkJob},
        errors=(errors.NotFound,),
    )
    async def delete(self, caller: Caller, job_id: str) -> HttpResponse:
        """What is done stays done."""
        return json_response(_bulk_job(await threadpool.run_db(bulk_jobs.cancel, [caller.tenant.tid], job_id)))


def _died_before(older_than: float | dt.datetime | None) -> dt.datetime | None:
    if isinstance(older_than, (int, float)):
        return dt.datetime.now(dt.UTC) - dt.timedelta(seconds=older_than)
    return older_than


def _dead_letter(found: queries.DeadLetter) -> wire.DeadLetter:
    return wire.DeadLetter(
        id=found.id,
        command=found.command,
        priority=found.priority,
        error=found.error,
        failure=found.failure,
        deliveries=found.deliveries,
        attempts=found.attempts,
        max_attempts=found.max_attempts,
        worker_id=found.worker,
        payload_start=found.payload_start,
        created_at=found.created_at,
        died_at=found.died_at,
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
