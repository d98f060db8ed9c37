"""The page of a task: state, payload, result, attempts and deliveries."""

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

from console.actions import OperatorAction, record_action
from console.page import ConsolePage, ConsoleView, get_tenant
from core import errors
from core.admin.links import queue_url
from queues import artifacts, selectors, services
from queues.deadletters import queries
from queues.diagnosis import explain
from queues.domain import Location, Outcome, StoredResult, Task, TaskStatus
from queues.models import Attempt, AuditedResult
from tenants import scoping
from tenants.domain import TenantSnapshot
from tenants.scoping import Role
from webhooks.models import Delivery

# Status or outcome -> colour of its badge, one of the values of `data-tone` in console.css.
TONES = {
    TaskStatus.COMPLETED: "good", TaskStatus.FAILED: "bad",
    TaskStatus.CANCELLED: "warn", TaskStatus.IN_PROGRESS: "main",
    Outcome.NACKED: "warn", Outcome.ABANDONED: "warn", Outcome.EXPIRED: "bad",
}  # fmt: skip


class DisplayedTask(NamedTuple):
    """The fields of a task that the page shows, from Redis or from the audit."""

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


class TaskPage(ConsolePage):
    template_name = "console/task.html"

    def get_context_data(self, **extra: Any) -> dict[str, Any]:
        tenant = get_tenant(self.request, self.request.GET.get("tenant", ""))
        task_id = self.request.GET.get("id", "")
        task, live_task = find_task(tenant, task_id)
        may_act = scoping.has_role(self.request.user, tenant.tid, Role.OPERATOR)
        return super().get_context_data(
            title=f"Task {task.id}",
            subtitle=tenant.slug,
            tenant=tenant,
            task=task,
            tone=TONES.get(TaskStatus(task.status), ""),
            explanations=explain_status(tenant, live_task),
            attempts=_attempts(tenant, task.id),
            deliveries=list(_deliveries(tenant, task.id)),
            queue_url=queue_url(tenant.tid, task.command),
            fields={"tenant": tenant.tid, "id": task.id},
            may_replay=may_act and task.is_dead and task.is_live,
            may_cancel=may_act and live_task is not None and not live_task.status.is_terminal,
            **extra,
        )


class ArtifactDownload(ConsoleView):
    """An artifact as a download.

    A browser that displayed it here would run a worker's content with the user's session.
    """

    def get(self, request: HttpRequest) -> FileResponse:
        tenant = get_tenant(request, request.GET.get("tenant", ""))
        artifact, content = artifacts.open_artifact(tenant, request.GET.get("id", ""), request.GET.get("artifact", ""))
        # The name becomes part of a header.
        name = "".join(character for character in artifact.name if character.isprintable())[:200] or "artifact"
        return FileResponse(content, as_attachment=True, filename=name, content_type="application/octet-stream")


class CancelTask(OperatorAction):
    def perform(self, tenant: TenantSnapshot, reason: str) -> str:
        task_id = self.request.POST.get("id", "")
        with record_action(self.request, tenant, f"Cancelled task {task_id}", reason):
            services.cancel(tenant, task_id).run_sync()
        return "Task cancelled."


class ReplayTask(OperatorAction):
    """Replay a dead letter, with its own payload or an edited one."""

    def perform(self, tenant: TenantSnapshot, reason: str) -> str:
        task_id, payload = self.request.POST.get("id", ""), self.request.POST.get("payload")
        changed = {task_id: payload} if payload is not None else {}
        action = "Replayed with an edited payload" if changed else "Replayed"
        with record_action(self.request, tenant, f"{action}: task {task_id}", reason):
            raise_first_error(queries.replay(tenant, [task_id], changed))
        return "Task replayed. It is in the queue again."


class DeleteTask(OperatorAction):
    def perform(self, tenant: TenantSnapshot, reason: str) -> str:
        task_id = self.request.POST.get("id", "")
        with record_action(self.request, tenant, f"Deleted dead letter {task_id}", reason):
            raise_first_error(queries.delete(tenant, [task_id]))
        return "Dead letter deleted. The audit keeps its attempts and errors."


def raise_first_error(outcomes: Sequence[object]) -> None:
    """Raise the first error among the outcomes of a batch."""
    for outcome in outcomes:
        if isinstance(outcome, errors.CodeqError):
            raise outcome


def find_task(tenant: TenantSnapshot, task_id: str) -> tuple[DisplayedTask, Task | None]:
    """Return the task from Redis, else from the audit.

    The second value is the live task. It is None if the task is in the audit only.
    """
    try:
        task, result = selectors.task_with_result(tenant, task_id).run_sync()
    except errors.TaskNotFound:
        return _from_audit(tenant, task_id), None
    return _from_redis(tenant, task, result or StoredResult()), task


def explain_status(tenant: TenantSnapshot, live_task: Task | None) -> list[str]:
    """Return sentences that explain why the task waits, where it runs, or how it ended."""
    if live_task is None:
        return ["The task has ended and is no longer in Redis. This page shows its copy in the audit."]
    try:
        return explain(tenant, live_task, selectors.queue_position(tenant, live_task.id).run_sync())
    except errors.TaskNotFound:
        return ["The task was removed while the page loaded."]


def format_json(text: str) -> str:
    """Indent JSON without changing a digit of its numbers. Return other text unchanged."""
    try:
        return msgspec.json.format(text, indent=2)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return text


def _from_redis(tenant: TenantSnapshot, task: Task, result: StoredResult) -> DisplayedTask:
    return DisplayedTask(
        id=task.id,
        command=task.spec.command,
        status=task.status,
        priority=task.priority,
        attempts=task.attempts,
        max_attempts=task.max_attempts,
        created_at=_from_ms(task.created_ms),
        ended_at=_from_ms(task.updated_ms) if task.status.is_terminal else None,
        error=result.error or task.error or "",
        payload=format_json(task.spec.payload),
        result=format_json((result.result or b"").decode("utf-8", "backslashreplace")),
        artifacts=_artifacts(tenant.tid, task.id, result.artifacts or b""),
        webhook=task.spec.webhook or "",
        worker=task.worker or "",
        progress=task.progress or "",
        is_live=True,
        is_dead=task.location is Location.DLQ_SET,
    )


def _from_audit(tenant: TenantSnapshot, task_id: str) -> DisplayedTask:
    row = AuditedResult.objects.filter(pk=_parse_id(task_id), tenant_id=tenant.tid).first()
    if row is None:
        raise Http404("No such task.")
    return DisplayedTask(
        id=str(row.pk),
        command=row.command,
        status=row.status,
        priority=row.priority,
        attempts=row.attempts,
        max_attempts=row.max_attempts,
        created_at=row.created_at,
        ended_at=row.ended_at,
        error=row.error,
        payload=format_json(row.payload),
        result=format_json(row.result),
        artifacts=_artifacts(tenant.tid, str(row.pk), row.artifacts),
        webhook=row.webhook,
        worker=row.worker,
        progress="",
        is_live=False,
        is_dead=row.is_dead,
    )


def _attempts(tenant: TenantSnapshot, task_id: str) -> list[dict[str, Any]]:
    rows = Attempt.objects.filter(task_id=_parse_id(task_id), tenant_id=tenant.tid).order_by("number")
    return [
        {
            "row": row,
            "tone": TONES.get(Outcome(row.outcome), TONES.get(TaskStatus(row.status), "")),
            "waited": _seconds_between(row.visible_at, row.claimed_at),
            "ran": _seconds_between(row.claimed_at, row.ended_at),
        }
        for row in rows[:200]
    ]


def _deliveries(tenant: TenantSnapshot, task_id: str) -> QuerySet[Delivery]:
    return Delivery.objects.filter(task_id=_parse_id(task_id), tenant_id=tenant.tid).order_by("created_at")[:50]


def _artifacts(tid: str, task_id: str, raw: bytes | str) -> list[dict[str, Any]]:
    """Return the artifacts of a result, each with its link.

    A worker chose the URL, which may be `javascript:`. Only stored artifacts and HTTP URLs get a link.
    """
    try:
        rows = msgspec.json.decode(raw or b"[]", type=list[dict[str, Any]])
    except msgspec.MsgspecError:
        return []
    return [{**row, "link": _link(tid, task_id, str(row.get("url", "")))} for row in rows]


def _link(tid: str, task_id: str, url: str) -> str:
    if url.startswith(("http://", "https://")):
        return url
    prefix, _, artifact = url.rpartition("/artifacts/")
    if prefix.endswith(task_id) and artifacts.ARTIFACT_ID.fullmatch(artifact):
        return f"{reverse('console:task-artifact')}?{urlencode({'tenant': tid, 'id': task_id, 'artifact': artifact})}"
    return ""


def _seconds_between(start: datetime | None, end: datetime | None) -> float | None:
    return max(0.0, (end - start).total_seconds()) if start and end else None


def _from_ms(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def _parse_id(task_id: str) -> uuid.UUID:
    try:
        return uuid.UUID(task_id)
    except ValueError:
        raise Http404("No such task.") from None
