"""Read ended tasks and their results from the audit, which keeps them longer than Redis."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from msgspec import Raw

from core import errors
from queues.domain import Location, Result, Spec, Task, TaskStatus
from queues.models import AuditedResult
from tenants.domain import TenantSnapshot


def audited_task(tenant: TenantSnapshot, task_id: str) -> Task:
    """Return an ended task. Raises TaskNotFound if the audit has no such task of this tenant."""
    return to_task(_find_row(tenant, task_id), tenant)


def audited_result(tenant: TenantSnapshot, task_id: str) -> tuple[Task, Result]:
    """Return an ended task with its result.

    Raises TaskNotFound like `audited_task`, and ResultNotFound if no worker has reported a result.
    """
    row = _find_row(tenant, task_id)
    if row.outcome not in (TaskStatus.COMPLETED, TaskStatus.FAILED):
        raise errors.ResultNotFound
    return to_task(row, tenant), Result(
        task_id=str(row.pk),
        status=TaskStatus(row.status),
        worker=row.worker,
        completed_ms=_ms(row.ended_at),
        attempts=row.attempts,
        result=Raw(row.result.encode()) if row.result else None,
        error=row.error or None if row.status == TaskStatus.FAILED else None,
        artifacts=Raw(row.artifacts.encode()) if row.artifacts else None,
    )


def to_task(row: AuditedResult, tenant: TenantSnapshot) -> Task:
    """Convert a row of the audit to a task."""
    return Task(
        id=str(row.pk),
        spec=Spec(
            command=row.command,
            payload=row.payload,
            tenant=tenant.slug,
            webhook=row.webhook or None,
            trace_parent=row.trace_parent or None,
            trace_state=row.trace_state or None,
        ),
        priority=row.priority,
        max_attempts=row.max_attempts,
        status=TaskStatus(row.status),
        created_ms=_ms(row.created_at),
        updated_ms=_ms(row.ended_at),
        visible_ms=_ms(row.created_at),
        location=Location.DLQ_SET if row.is_dead else Location.NONE,
        attempts=row.attempts,
        worker=row.worker or None,
        error=row.error or None,
    )


def _find_row(tenant: TenantSnapshot, task_id: str) -> AuditedResult:
    try:
        row = AuditedResult.objects.filter(pk=UUID(task_id), tenant_id=tenant.tid).first()
    except ValueError:
        row = None
    if row is None or str(row.pk) != task_id:
        raise errors.TaskNotFound
    return row


def _ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)
