"""One task, live or from the audit: what was asked, what came of it, and why it is not running."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec
from django.db.models import QuerySet
from django.http import FileResponse, Http404, HttpRequest
from django.urls import reverse

from console.actions import Act, recorded
from console.page import Guarded, Page, tenant_of
from core import errors
from core.admin.links import queue_url
from queues import artifacts, selectors, services
from queues.deadletters import queries
from queues.diagnosis import why
from queues.domain import Answer, Location, Outcome, Status, Task
from queues.models import Attempt, AuditedResult
from tenants import scoping
from tenants.domain import TenantSnapshot
from tenants.scoping import Role
from webhooks.models import Delivery

TONES = {
    Status.COMPLETED: "good", Status.FAILED: "bad", Status.CANCELLED: "warn", Status.IN_PROGRESS: "main",
    Outcome.NACKED: "warn", Outcome.ABANDONED: "warn", Outcome.EXPIRED: "bad",
}  # fmt: skip


class Shown(NamedTuple):
    """A task for people, wherever it was found."""

    id: str
    command: str
    status: str
    priority: int
    attempts: int
    max_attempts: int
    created_at: datetime
    ended_at: datetime | None
    error: str
    payload: str
    result: str
    artifacts: list[dict[str, Any]]
    webhook: str
    worker: str
    progress: str
    is_live: bool
    is_dead: bool


class TaskPage(Page):
    template_name = "console/task.html"

    def get_context_data(self, **extra: Any) -> dict[str, Any]:
        tenant = tenant_of(self.request, self.request.GET.get("tenant", ""))
        task_id = self.request.GET.get("id", "")
        task, live = find(tenant, task_id)
        may_act = scoping.has_role(self.request.user, tenant.tid, Role.OPERATOR)
        return super().get_context_data(
            title=f"Task {task.id}",
            subtitle=tenant.slug,
            tenant=tenant,
            task=task,
            tone=TONES.get(Status(task.status), ""),
            reasons=reasons(tenant, live),
            attempts=_attempts(tenant, task.id),
            deliveries=list(_deliveries(tenant, task.id)),
            queue_url=queue_url(tenant.tid, task.command),
            fields={"tenant": tenant.tid, "id": task.id},
            may_replay=may_act and task.is_dead and task.is_live,
            may_cancel=may_act and live is not None and not live.status.is_terminal,
            **extra,
        )


class Artifact(Guarded):
    """What a worker handed in, to be saved: a browser must not show here what somebody else wrote."""

    def get(self, request: HttpRequest) -> FileResponse:
        tenant = tenant_of(request, request.GET.get("tenant", ""))
        kept, content = artifacts.open_artifact(tenant, request.GET.get("id", ""), request.GET.get("artifact", ""))
        # The name goes into a header.
        name = "".join(each for each in kept.name if each.isprintable())[:200] or "artifact"
        return FileResponse(content, as_attachment=True, filename=name, content_type="application/octet-stream")


class CancelTask(Act):
    def act(self, tenant: TenantSnapshot, reason: str) -> str:
        task_id = self.request.POST.get("id", "")
        with recorded(self.request, tenant, f"Cancelled task {task_id}", reason):
            services.cancel(tenant, task_id).run_sync()
        return "The task is cancelled."


class ReplayTask(Act):
    """Bring one dead letter back in line, perhaps with another payload."""

    def act(self, tenant: TenantSnapshot, reason: str) -> str:
        task_id, payload = self.request.POST.get("id", ""), self.request.POST.get("payload")
        changed = {task_id: payload} if payload is not None else {}
        what = "Replayed with another payload" if changed else "Replayed"
        with recorded(self.request, tenant, f"{what}: task {task_id}", reason):
            raise_first(queries.replay(tenant, [task_id], changed))
        return "The task is in line again."


class DeleteTask(Act):
    def act(self, tenant: TenantSnapshot, reason: str) -> str:
        task_id = self.request.POST.get("id", "")
        with recorded(self.request, tenant, f"Deleted dead letter {task_id}", reason):
            raise_first(queries.delete(tenant, [task_id]))
        return "The dead letter is deleted. What it died of stays in the audit."


def raise_first(answers: Sequence[object]) -> None:
    """Of one task's answer: what was wrong is the act's error."""
    for answer in answers:
        if isinstance(answer, errors.CodeqError):
            raise answer


def find(tenant: TenantSnapshot, task_id: str) -> tuple[Shown, Task | None]:
    """The task as it is in Redis, else as the audit remembers it."""
    try:
        task, answer = selectors.answered(tenant, task_id).run_sync()
    except errors.TaskNotFound:
        return _from_audit(tenant, task_id), None
    return _from_redis(tenant, task, answer or Answer()), task


def reasons(tenant: TenantSnapshot, live: Task | None) -> list[str]:
    if live is None:
        return ["It has ended, and Redis has let it go: this is what the audit remembers."]
    try:
        return why(tenant, live, selectors.place(tenant, live.id).run_sync())
    except errors.TaskNotFound:
        return ["It went while we looked."]


def readable(text: str) -> str:
    """JSON with its lines broken, numbers as they came; anything else as it is."""
    try:
        return msgspec.json.format(text, indent=2)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return text


def _from_redis(tenant: TenantSnapshot, task: Task, answer: Answer) -> Shown:
    return Shown(
        id=task.id,
        command=task.spec.command,
        status=task.status,
        priority=task.priority,
        attempts=task.attempts,
        max_attempts=task.max_attempts,
        created_at=_time(task.created_ms),
        ended_at=_time(task.updated_ms) if task.status.is_terminal else None,
        error=answer.error or task.error or "",
        payload=readable(task.spec.payload),
        result=readable((answer.result or b"").decode("utf-8", "backslashreplace")),
        artifacts=_artifacts(tenant.tid, task.id, answer.artifacts or b""),
        webhook=task.spec.webhook or "",
        worker=task.worker or "",
        progress=task.progress or "",
        is_live=True,
        is_dead=task.location is Location.DLQ_SET,
    )


def _from_audit(tenant: TenantSnapshot, task_id: str) -> Shown:
    row = AuditedResult.objects.filter(pk=_uuid(task_id), tenant_id=tenant.tid).first()
    if row is None:
        raise Http404("No such task.")
    return Shown(
        id=str(row.pk),
        command=row.command,
        status=row.status,
        priority=row.priority,
        attempts=row.attempts,
        max_attempts=row.max_attempts,
        created_at=row.created_at,
        ended_at=row.ended_at,
        error=row.error,
        payload=readable(row.payload),
        result=readable(row.result),
        artifacts=_artifacts(tenant.tid, str(row.pk), row.artifacts),
        webhook=row.webhook,
        worker=row.worker,
        progress="",
        is_live=False,
        is_dead=row.is_dead,
    )


def _attempts(tenant: TenantSnapshot, task_id: str) -> list[dict[str, Any]]:
    rows = Attempt.objects.filter(task_id=_uuid(task_id), tenant_id=tenant.tid).order_by("number")
    return [
        {
            "row": row,
            "tone": TONES.get(Outcome(row.outcome), TONES.get(Status(row.status), "")),
            "waited": _seconds(row.visible_at, row.claimed_at),
            "ran": _seconds(row.claimed_at, row.ended_at),
        }
        for row in rows[:200]
    ]


def _deliveries(tenant: TenantSnapshot, task_id: str) -> QuerySet[Delivery]:
    return Delivery.objects.filter(task_id=_uuid(task_id), tenant_id=tenant.tid).order_by("created_at")[:50]


def _artifacts(tid: str, task_id: str, raw: bytes | str) -> list[dict[str, Any]]:
    """What a worker named. A link leads to what is stored here, or out to where a browser may go: it could have
    written `javascript:`."""
    try:
        found = msgspec.json.decode(raw or b"[]", type=list[dict[str, Any]])
    except msgspec.MsgspecError:
        return []
    return [{**each, "link": _link(tid, task_id, str(each.get("url", "")))} for each in found]


def _link(tid: str, task_id: str, address: str) -> str:
    if address.startswith(("http://", "https://")):
        return address
    before, _, artifact = address.rpartition("/artifacts/")
    if before.endswith(task_id) and artifacts.ID.fullmatch(artifact):
        return f"{reverse('console:task-artifact')}?{urlencode({'tenant': tid, 'id': task_id, 'artifact': artifact})}"
    return ""


def _seconds(start: datetime | None, end: datetime | None) -> float | None:
    return max(0.0, (end - start).total_seconds()) if start and end else None


def _time(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def _uuid(task_id: str) -> uuid.UUID:
    try:
        return uuid.UUID(task_id)
    except ValueError:
        raise Http404("No such task.") from None
