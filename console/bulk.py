"""The pages of bulk jobs: dry run, start, progress, cancellation and undo."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlencode

import msgspec
from django.contrib import messages
from django.db.models import Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from console import deadletters
from console.actions import OperatorAction, record_action
from console.page import ConsolePage, ConsoleView, get_tenant
from core import errors
from queues.deadletters import bulk_jobs
from queues.deadletters.bulk_jobs import Canary
from queues.models import BulkItem, BulkJob
from queues.search import pagination
from tenants import scoping
from tenants.domain import TenantSnapshot
from tenants.scoping import Role

PAGE_SIZE = 50
MAX_LISTED_ITEMS = 50
VERBS: Final = {"replay": "Replay", "delete": "Delete"}
TITLES: Final = {
    "replay": "Replay of dead letters", "delete": "Deletion of dead letters", "recall": "Undo of a replay",
}  # fmt: skip
# State -> colour of its badge, one of the values of `data-tone` in console.css.
TONES = {
    "running": "main", "watching": "main", "done": "good", "stopped": "bad", "cancelling": "warn", "cancelled": "warn",
    "failed": "bad",
}  # fmt: skip

# Error code -> the text on a job's page.
ERROR_TEXTS = {
    errors.NotDead.code: "The task was no longer a dead letter when the job reached it.",
    errors.TaskNotFound.code: "The task is no longer in Redis.",
}


class JobProgress(msgspec.Struct, frozen=True, kw_only=True):
    state: str
    state_label: str
    tone: str
    total: int | None
    processed: int
    done: int
    skipped: int
    failed: int
    failed_canaries: int | None
    per_second: float | None
    seconds: float
    is_over: bool
    error: str
    can_undo: bool = False


class NewJobPage(ConsolePage):
    """The dry run of a bulk job and the form that starts it."""

    template_name = "console/bulk_new.html"

    def get_context_data(self, **extra: Any) -> dict[str, Any]:
        query, kind = parse_job(self.request)
        assert query.tenant is not None
        return super().get_context_data(
            title=f"{VERBS[kind]} all matching dead letters",
            tenant=query.tenant,
            kind=kind,
            verb=VERBS[kind],
            dry_run=bulk_jobs.dry_run(query.tenant, query.filter),
            filter_text=_describe_query(query),
            query=query.parameters,
            list_url=query.url("console:dead-list"),
            **extra,
        )

    def get(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        try:
            return super().get(request, *args, **kwargs)
        except errors.InvalidRequest as error:
            messages.error(request, str(error))
            return redirect("console:dead-list")


class StartBulkJob(OperatorAction):
    """Start a bulk job and redirect to its page."""

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        # The role is checked first, so that a user without it learns nothing from later errors.
        tenant = get_tenant(request, request.POST.get("tenant", ""), self.required_role)
        if not (reason := self.read_reason()):
            return self.redirect_back()
        try:
            query, kind = parse_job(request, request.POST)
            with record_action(request, tenant, f"Bulk {kind} of dead letters ({_describe_query(query)})", reason):
                job = bulk_jobs.start(
                    tenant,
                    kind,
                    query.filter,
                    actor=request.user.get_username(),
                    reason=reason,
                    rate_per_second=_parse_integer(request, "rate", "Maximum rate"),
                    canary=_parse_canary(request),
                )
        except errors.CodeqError as error:
            messages.error(request, f"The bulk job was not started: {error}")
            return self.redirect_back()
        return redirect(job_url(job))


class JobListPage(ConsolePage):
    title = "Bulk jobs"
    template_name = "console/bulk_list.html"

    def get_context_data(self, **extra: Any) -> dict[str, Any]:
        jobs = bulk_jobs.list_jobs(scoping.tids_of(self.request.user)).select_related("tenant")
        if before := self.request.GET.get("before"):
            try:
                jobs = jobs.filter(created_at__lt=pagination.in_utc(datetime.fromisoformat(before)))
            except ValueError:
                raise Http404("before: not a timestamp.") from None
        rows = list(jobs[: PAGE_SIZE + 1])
        older = urlencode({"before": rows[PAGE_SIZE - 1].created_at.isoformat()}) if len(rows) > PAGE_SIZE else ""
        return super().get_context_data(
            jobs=[{"job": job, "progress": build_progress(job), "url": job_url(job)} for job in rows[:PAGE_SIZE]],
            older=older,
            **extra,
        )


class JobPage(ConsolePage):
    template_name = "console/bulk_job.html"

    def get_context_data(self, **extra: Any) -> dict[str, Any]:
        job = find_job(self.request)
        tid = str(job.tenant_id)
        may_act = scoping.has_role(self.request.user, tid, Role.OPERATOR)
        return super().get_context_data(
            title=TITLES[job.kind],
            job=job,
            undo_until=bulk_jobs.get_undo_deadline(job),
            undone_by=find_undo_jobs(job).first(),
            tenant=get_tenant(self.request, tid),
            progress=msgspec.to_builtins(build_page_progress(job)),
            filter_text=_describe_filter(job),
            items=list_problems(job),
            fields={"tenant": tid, "id": str(job.pk)},
            may_cancel=may_act and not job.is_over,
            may_undo=may_act and job.kind == BulkJob.Kind.REPLAY,
            **extra,
        )


class JobData(ConsoleView):
    """The progress of a bulk job as JSON."""

    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(
            msgspec.json.encode(build_page_progress(find_job(request))), content_type="application/json"
        )


class CancelBulkJob(OperatorAction):
    next_page = "console:bulk"

    def perform(self, tenant: TenantSnapshot, reason: str) -> str:
        job_id = self.request.POST.get("id", "")
        with record_action(self.request, tenant, f"Cancelled bulk job {job_id}", reason):
            bulk_jobs.cancel([tenant.tid], job_id)
        return "Bulk job cancelled. Tasks already processed are not reverted."


class UndoReplay(OperatorAction):
    """Start the bulk job that undoes a replay, and redirect to its page."""

    next_page = "console:bulk"

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        tenant = get_tenant(request, request.POST.get("tenant", ""), self.required_role)
        if not (reason := self.read_reason()):
            return self.redirect_back()
        job_id = request.POST.get("id", "")
        try:
            with record_action(request, tenant, f"Undid bulk replay {job_id}", reason):
                job = bulk_jobs.undo_replay([tenant.tid], job_id, actor=request.user.get_username(), reason=reason)
        except errors.CodeqError as error:
            messages.error(request, f"Nothing was changed: {error}")
            return self.redirect_back()
        return redirect(job_url(job))


def parse_job(request: HttpRequest, values: Mapping[str, str] | None = None) -> tuple[deadletters.DeadLetterQuery, str]:
    """Return the filter and the kind of a new bulk job, or raise InvalidRequest."""
    values = request.GET if values is None else values
    query = deadletters.parse_query(request, values)
    kind = values.get("kind", "replay")
    if kind not in VERBS:
        raise errors.InvalidRequest("kind must be replay or delete.")
    if query.tenant is None:
        raise errors.InvalidRequest("Select a tenant first. A bulk job covers the dead letters of one tenant.")
    get_tenant(request, query.tenant.tid, Role.OPERATOR)
    return query, kind


def _describe_query(query: deadletters.DeadLetterQuery) -> str:
    fields = {name: value for name, value in query.parameters.items() if name != "tenant"}
    if age := deadletters.AGES.get(fields.get("age", "")):
        fields["age"] = age[0]
    return _describe_fields(fields)


def _describe_filter(job: BulkJob) -> str:
    if not job.filter:
        return "a list of ids"
    return _describe_fields(msgspec.json.decode(job.filter, type=dict[str, Any]))


def _describe_fields(fields: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{deadletters.FIELD_NAMES.get(name, name)} {value}" for name, value in fields.items())
        or "all dead letters"
    )


def _parse_canary(request: HttpRequest) -> Canary | None:
    count = _parse_integer(request, "canary", "Number of canaries")
    if not count:
        return None
    options = {
        "percent": _parse_integer(request, "percent", "Maximum failed canaries"),
        "seconds": _parse_integer(request, "seconds", "Observation time"),
    }
    return Canary(count=count, **{name: value for name, value in options.items() if value is not None})


def _parse_integer(request: HttpRequest, name: str, label: str) -> int | None:
    text = request.POST.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise errors.InvalidRequest(f"{label}: {text[:20]!r} is not a whole number.")
    return int(text)


def find_job(request: HttpRequest) -> BulkJob:
    return bulk_jobs.find(scoping.tids_of(request.user), request.GET.get("id", ""))


def build_progress(job: BulkJob) -> JobProgress:
    until = job.ended_at or datetime.now(UTC)
    seconds = (until - job.started_at).total_seconds() if job.started_at else 0.0
    return JobProgress(
        state=job.state,
        state_label=BulkJob.State(job.state).label,
        tone=TONES.get(job.state, ""),
        total=job.total,
        processed=job.handled,
        done=job.done,
        skipped=job.skipped,
        failed=job.failed,
        failed_canaries=job.canaries_died,
        per_second=job.handled / seconds if seconds > 1 else None,
        seconds=seconds,
        is_over=job.is_over,
        error=job.error,
    )


def build_page_progress(job: BulkJob) -> JobProgress:
    """Return the job's progress with `can_undo`, which only the page of the job shows."""
    until = bulk_jobs.get_undo_deadline(job)
    is_in_time = until is not None and datetime.now(UTC) < until
    return msgspec.structs.replace(build_progress(job), can_undo=is_in_time and not find_undo_jobs(job).exists())


def find_undo_jobs(job: BulkJob) -> QuerySet[BulkJob]:
    """Return the jobs that undo this replay and are running or complete.

    A job that was cancelled or has failed is left out: the rest of the replay can still be undone.
    """
    return job.undo_jobs.filter(Q(ended_at=None) | Q(state=BulkJob.State.DONE)).order_by("-created_at")


def list_problems(job: BulkJob) -> list[dict[str, Any]]:
    """Return the first tasks that the job skipped or that failed, each with the reason."""
    items = BulkItem.objects.filter(job=job, outcome__in=(bulk_jobs.SKIPPED, bulk_jobs.FAILED)).order_by("pk")[
        :MAX_LISTED_ITEMS
    ]
    return [
        {"task_id": item.task_id, "outcome": item.outcome, "reason": _error_text(job, item.error)} for item in items
    ]


def _error_text(job: BulkJob, code: str) -> str:
    if job.kind == BulkJob.Kind.UNDO and code == errors.Conflict.code:
        return "A worker has claimed the task since, or another operator has replayed it."
    return ERROR_TEXTS.get(code, code)


def job_url(job: BulkJob) -> str:
    return f"{reverse('console:bulk-job')}?id={job.pk}"
