"""Tasks that Redis has let go, as the audit remembers them."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from msgspec import Raw

from core import errors
from queues.domain import Location, Result, Spec, Status, Task
from queues.models import AuditedResult
from tenants.domain import TenantSnapshot


def audited_task(tenant: TenantSnapshot, task_id: str) -> Task:
    """TaskNotFound for what was never audited, and for what is another tenant's."""
    return task_of(_row(tenant, task_id), tenant)


def audited_result(tenant: TenantSnapshot, task_id: str) -> tuple[Task, Result]:
    """With what its worker said. ResultNotFound for a task that ended without a word."""
    row = _row(tenant, task_id)
    if row.outcome not in (Status.COMPLETED, Status.FAILED):
        raise errors.ResultNotFound
    return task_of(row, tenant), Result(
        task_id=str(row.pk),
        status=Status(row.status),
        worker=row.worker,
        completed_ms=_ms(row.ended_at),
        attempts=row.attempts,
        result=Raw(row.result.encode()) if row.result else None,
        error=row.error or None if row.status == Status.FAILED else None,
        artifacts=Raw(row.artifacts.encode()) if row.artifacts else None,
    )


def task_of(row: AuditedResult, tenant: TenantSnapshot) -> Task:
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
        status=Status(row.status),
        created_ms=_ms(row.created_at),
        updated_ms=_ms(row.ended_at),
        visible_ms=_ms(row.created_at),
        location=Location.DLQ_SET if row.is_dead else Location.NONE,
        attempts=row.attempts,
        worker=row.worker or None,
        error=row.error or None,
    )


def _row(tenant: TenantSnapshot, task_id: str) -> AuditedResult:
    try:
        row = AuditedResult.objects.filter(pk=UUID(task_id), tenant_id=tenant.tid).first()
    except ValueError:
        row = None
    if row is None or str(row.pk) != task_id:
        raise errors.TaskNotFound
    return row


def _ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)
