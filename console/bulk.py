"""Bulk jobs: tried dry, started with care, watched, cancelled."""

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
from console.actions import Act, recorded
from console.page import Guarded, Page, tenant_of
from core import errors
from queues.deadletters import bulk_jobs
from queues.deadletters.bulk_jobs import Canary
from queues.models import BulkItem, BulkJob
from queues.search import pagination
from tenants import scoping
from tenants.domain import TenantSnapshot
from tenants.scoping import Role

PAGE = 50
ITEMS = 50
VERBS: Final = {"replay": "Replay", "delete": "Delete"}
TITLES: Final = {
    "replay": "Replay of dead letters", "delete": "Deletion of dead letters", "recall": "A replay taken back",
}  # fmt: skip
TONES = {
    "running": "main", "watching": "main", "done": "good", "stopped": "bad", "cancelling": "warn", "cancelled": "warn",
    "failed": "bad",
}  # fmt: skip


WHY = {
    errors.NotDead.code: "It was no dead letter any more when its turn came.",
    errors.TaskNotFound.code: "Redis has let it go: there is nothing left to replay.",
}


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    state: str
    says: str
    tone: str
    total: int | None
    handled: int
    done: int
    skipped: int
    failed: int
    canaries_died: int | None
    per_second: float | None
    seconds: float
    is_over: bool
    error: str
    may_be_undone: bool = False


class NewPage(Page):
    """What a job would be about, before it is one."""

    template_name = "console/bulk_new.html"

    def get_context_data(self, **extra: Any) -> dict[str, Any]:
        asked, kind = meant(self.request)
        assert asked.tenant is not None
        trial = bulk_jobs.dry_run(asked.tenant, asked.filter)
        return super().get_context_data(
            title=f"{VERBS[kind]} all that match",
            tenant=asked.tenant,
            kind=kind,
            verb=VERBS[kind],
            trial=trial,
            criteria=criteria(asked),
            query=asked.query,
            list_url=asked.url("console:dead-list"),
            **extra,
        )

    def get(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        try:
            return super().get(request, *args, **kwargs)
        except errors.InvalidRequest as error:
            messages.error(request, str(error))
            return redirect("console:dead-list")


class StartBulk(Act):
    """Starts what the page before showed. Answers with the job's own page."""

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        # The tenant first: whoever may not act here learns nothing about the rest.
        tenant = tenant_of(request, request.POST.get("tenant", ""), self.least)
        if not (reason := self.reason()):
            return self.leave()
        try:
            asked, kind = meant(request, request.POST)
            with recorded(request, tenant, f"Bulk {kind} of dead letters ({criteria(asked)})", reason):
                job = bulk_jobs.start(
                    tenant,
                    kind,
                    asked.filter,
                    actor=request.user.get_username(),
                    reason=reason,
                    rate_per_second=number(request, "rate"),
                    canary=canary(request),
                )
        except errors.CodeqError as error:
            messages.error(request, f"Nothing was started: {error}")
            return self.leave()
        return redirect(url_of_job(job))


class JobsPage(Page):
    title = "Bulk jobs"
    template_name = "console/bulk_list.html"

    def get_context_data(self, **extra: Any) -> dict[str, Any]:
        jobs = bulk_jobs.list_jobs(scoping.tids_of(self.request.user)).select_related("tenant")
        if before := self.request.GET.get("before"):
            try:
                jobs = jobs.filter(created_at__lt=pagination.in_utc(datetime.fromisoformat(before)))
            except ValueError:
                raise Http404("Not a moment.") from None
        rows = list(jobs[: PAGE + 1])
        older = urlencode({"before": rows[PAGE - 1].created_at.isoformat()}) if len(rows) > PAGE else ""
        return super().get_context_data(
            jobs=[{"job": job, "progress": progress(job), "url": url_of_job(job)} for job in rows[:PAGE]],
            older=older,
            **extra,
        )


class JobPage(Page):
    template_name = "console/bulk_job.html"

    def get_context_data(self, **extra: Any) -> dict[str, Any]:
        job = job_of(self.request)
        tid = str(job.tenant_id)
        may_act = scoping.has_role(self.request.user, tid, Role.OPERATOR)
        return super().get_context_data(
            title=TITLES[job.kind],
            job=job,
            undo_until=bulk_jobs.undo_until(job),
            undone_by=undoing(job).first(),
            tenant=tenant_of(self.request, tid),
            progress=msgspec.to_builtins(watched(job)),
            criteria=_criteria(job),
            items=problems(job),
            fields={"tenant": tid, "id": str(job.pk)},
            may_cancel=may_act and not job.is_over,
            may_undo=may_act and job.kind == BulkJob.Kind.REPLAY,
            **extra,
        )


class JobData(Guarded):
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(msgspec.json.encode(watched(job_of(request))), content_type="application/json")


class CancelBulk(Act):
    back = "console:bulk"

    def act(self, tenant: TenantSnapshot, reason: str) -> str:
        job_id = self.request.POST.get("id", "")
        with recorded(self.request, tenant, f"Cancelled bulk job {job_id}", reason):
            bulk_jobs.cancel([tenant.tid], job_id)
        return "The job is cancelled. What is done stays done."


class RecallBulk(Act):
    """Takes a replay back. Answers with the page of the job that does it."""

    back = "console:bulk"

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        tenant = tenant_of(request, request.POST.get("tenant", ""), self.least)
        if not (reason := self.reason()):
            return self.leave()
        job_id = request.POST.get("id", "")
        try:
            with recorded(request, tenant, f"Took back bulk replay {job_id}", reason):
                job = bulk_jobs.recall([tenant.tid], job_id, actor=request.user.get_username(), reason=reason)
        except errors.CodeqError as error:
            messages.error(request, f"Nothing was done: {error}")
            return self.leave()
        return redirect(url_of_job(job))


def meant(request: HttpRequest, values: Mapping[str, str] | None = None) -> tuple[deadletters.Asked, str]:
    """The dead letters, of one tenant, and what is to be done to them. InvalidRequest where that is not said."""
    values = request.GET if values is None else values
    asked = deadletters.read(request, values)
    kind = values.get("kind", "replay")
    if kind not in VERBS:
        raise errors.InvalidRequest("kind: replay or delete")
    if asked.tenant is None:
        raise errors.InvalidRequest("Choose the tenant first: a job is about the dead letters of one.")
    tenant_of(request, asked.tenant.tid, Role.OPERATOR)
    return asked, kind


def criteria(asked: deadletters.Asked) -> str:
    words = [f"{name} {value}" for name, value in asked.query.items() if name != "tenant"]
    return ", ".join(words) or "all of them"


def _criteria(job: BulkJob) -> str:
    if not job.filter:
        return "named one by one"
    asked: dict[str, Any] = msgspec.json.decode(job.filter)
    return ", ".join(f"{name} {value}" for name, value in asked.items()) or "all of them"


def canary(request: HttpRequest) -> Canary | None:
    count = number(request, "canary")
    if not count:
        return None
    asked = {name: number(request, name) for name in ("percent", "seconds")}
    return Canary(count=count, **{name: value for name, value in asked.items() if value is not None})


def number(request: HttpRequest, name: str) -> int | None:
    text = request.POST.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise errors.InvalidRequest(f"{name}: a whole number")
    return int(text)


def job_of(request: HttpRequest) -> BulkJob:
    return bulk_jobs.find(scoping.tids_of(request.user), request.GET.get("id", ""))


def progress(job: BulkJob) -> Progress:
    until = job.ended_at or datetime.now(UTC)
    seconds = (until - job.started_at).total_seconds() if job.started_at else 0.0
    return Progress(
        state=job.state,
        says=BulkJob.State(job.state).label,
        tone=TONES.get(job.state, ""),
        total=job.total,
        handled=job.handled,
        done=job.done,
        skipped=job.skipped,
        failed=job.failed,
        canaries_died=job.canaries_died,
        per_second=job.handled / seconds if seconds > 1 else None,
        seconds=seconds,
        is_over=job.is_over,
        error=job.error,
    )


def watched(job: BulkJob) -> Progress:
    """With what its own page needs besides: whether there is something to undo."""
    until = bulk_jobs.undo_until(job)
    is_open = until is not None and datetime.now(UTC) < until
    return msgspec.structs.replace(progress(job), may_be_undone=is_open and not undoing(job).exists())


def undoing(job: BulkJob) -> QuerySet[BulkJob]:
    """The job that takes this one back, or has done so: once it has gone through all, nothing is left to be taken."""
    return job.recalled_by.filter(Q(ended_at=None) | Q(state=BulkJob.State.DONE)).order_by("-created_at")


def problems(job: BulkJob) -> list[dict[str, Any]]:
    """The first of those that could not be done, and why in words."""
    items = BulkItem.objects.filter(job=job, outcome__in=(bulk_jobs.SKIPPED, bulk_jobs.FAILED)).order_by("pk")[:ITEMS]
    return [{"task_id": item.task_id, "outcome": item.outcome, "why": _why(job, item.error)} for item in items]


def _why(job: BulkJob, code: str) -> str:
    if job.kind == BulkJob.Kind.RECALL and code == errors.Conflict.code:
        return "A worker has claimed it since, or somebody else has replayed it."
    return WHY.get(code, code)


def url_of_job(job: BulkJob) -> str:
    return f"{reverse('console:bulk-job')}?id={job.pk}"
