"""Bulk jobs: operators replay or delete many dead letters at once, or undo a replay.

This module starts, reads and cancels the jobs. `queues.deadletters.bulk_runner` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

import msgspec
import uuid_utils
from django.db import transaction
from django.db.models import QuerySet

from core import errors
from core.redis.connections import partition_primary
from queues.current_engine import engine
from queues.deadletters import queries
from queues.deadletters.queries import DeadLetter, Filter, TenantIds
from queues.models import BulkItem, BulkJob
from tenants.domain import TenantSnapshot

Kind, JobState = BulkJob.Kind, BulkJob.State
MAX_IDS = 10_000  # task ids in one job
MAX_JOBS = 20  # unfinished jobs of one tenant
MAX_CANARIES = 1_000
UNDO_PERIOD = timedelta(days=1)  # for this time after its end, a replay can be undone
SAMPLE_SIZE = 10

DONE, SKIPPED, FAILED = "done", "skipped", "failed"


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """Replay `count` tasks first, and the others only if few of the first ones fail.

    The job continues if at most `percent` of the first tasks are dead letters again after `seconds`.
    """

    count: int
    percent: int = 10
    seconds: int = 60


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """The dead letters that a job would process. `count` is None if counting takes too long."""

    count: int | None
    sample: list[DeadLetter]


def dry_run(tenant: TenantSnapshot, letter_filter: Filter) -> DryRun:
    """Return the number of dead letters that match now, and some of them. Changes nothing."""
    return DryRun(
        count=queries.count([tenant.tid], letter_filter),
        sample=queries.page([tenant.tid], letter_filter, limit=SAMPLE_SIZE).letters,
    )


def start(
    tenant: TenantSnapshot,
    kind: str,
    selection: Filter | Sequence[str],
    *,
    actor: str,
    reason: str = "",
    rate_per_second: int | None = None,
    canary: Canary | None = None,
) -> BulkJob:
    """Start a job that replays or deletes dead letters, and return it. A periodic task runs it.

    `selection` is a filter or a list of task ids. Tasks that become dead letters after the start are not included.
    Raises InvalidRequest if an argument is not valid, and TooMany if the tenant has MAX_JOBS unfinished jobs.
    """
    canary = canary or Canary(count=0)
    if rate_per_second is not None and rate_per_second < 1:
        raise errors.InvalidRequest("ratePerSecond: must be at least 1")
    if not 0 <= canary.count <= MAX_CANARIES or not 0 <= canary.percent <= 100 or not 0 <= canary.seconds <= 86_400:
        raise errors.InvalidRequest(f"canary: count must be 0 to {MAX_CANARIES}, percent 0 to 100, seconds 0 to 86400")
    if canary.count and kind != Kind.REPLAY:
        raise errors.InvalidRequest("canary: only allowed for a replay")
    ids: list[UUID] = []
    if isinstance(selection, Filter):
        queries.to_row_filter([tenant.tid], selection)  # raises InvalidRequest if the filter is not valid
    else:
        ids = _parse_ids(selection)
    job = BulkJob(
        id=UUID(str(uuid_utils.uuid7())),
        tenant_id=tenant.tid,
        kind=Kind(kind),
        filter=msgspec.json.encode(selection).decode() if isinstance(selection, Filter) else "",
        actor=actor,
        reason=reason,
        rate_per_second=rate_per_second,
        canary=canary.count,
        canary_percent=canary.percent,
        canary_seconds=canary.seconds,
        total=None if isinstance(selection, Filter) else len(ids),
        before=_redis_now(tenant),
        created_at=_now(),
    )
    with transaction.atomic():
        if list_unfinished([tenant.tid]).count() >= MAX_JOBS:
            raise errors.TooMany(
                f"The tenant already has {MAX_JOBS} unfinished bulk jobs. Wait until one ends.", retry_after_seconds=60
            )
        job.save(force_insert=True)
        BulkItem.objects.bulk_create([BulkItem(job=job, task_id=task_id) for task_id in ids], batch_size=1000)
    return job


def undo_replay(tids: TenantIds, job_id: str, *, actor: str, reason: str = "") -> BulkJob:
    """Start a job that reverses an ended replay, and return it.

    Replayed tasks that no worker has claimed since become dead letters again. If such a job of the replay is already
    running, it is returned instead. Raises Conflict if the job is not a replay, has not ended, has replayed no task,
    or ended more than UNDO_PERIOD ago.
    """
    replay = find(tids, job_id)
    until = get_undo_deadline(replay)
    if until is None:
        raise errors.Conflict("Only a replay that has ended and has replayed at least one task can be undone.")
    with transaction.atomic():
        replay = BulkJob.objects.select_for_update().get(pk=replay.pk)
        running_undo = replay.undo_jobs.filter(ended_at=None).first()
        if running_undo is not None:
            return running_undo
        if _now() > until:
            hours = UNDO_PERIOD.total_seconds() / 3600
            raise errors.Conflict(f"The replay cannot be undone: it ended more than {hours:.0f} hours ago.")
        job = BulkJob.objects.create(
            id=UUID(str(uuid_utils.uuid7())),
            tenant_id=replay.tenant_id,
            kind=Kind.UNDO,
            filter=replay.filter,
            recalls=replay,
            actor=actor,
            reason=reason,
            before=replay.before,
            created_at=_now(),
        )
        if not job.filter:
            done = replay.items.filter(outcome=DONE).order_by("id").values_list("task_id", flat=True)
            BulkItem.objects.bulk_create([BulkItem(job=job, task_id=task_id) for task_id in done], batch_size=1000)
            job.total = len(done)
            job.save(update_fields=["total"])
    return job


def get_undo_deadline(job: BulkJob) -> datetime | None:
    """Return the time until which a replay can be undone.

    Return None if it is not a replay, has not ended, or has replayed no task.
    """
    if job.kind != Kind.REPLAY or job.ended_at is None or not job.done:
        return None
    return job.ended_at + UNDO_PERIOD


def find(tids: TenantIds, job_id: str) -> BulkJob:
    """Return a job of these tenants. Raises NotFound if they have no such job."""
    try:
        job = list_jobs(tids).filter(pk=UUID(job_id)).first()
    except ValueError:
        job = None
    if job is None:
        raise errors.NotFound("No such bulk job.")
    return job


def list_jobs(tids: TenantIds) -> QuerySet[BulkJob]:
    """Return the jobs of these tenants, the newest first."""
    jobs = BulkJob.objects.order_by("-created_at")
    return jobs if tids is None else jobs.filter(tenant_id__in=list(tids))


def list_unfinished(tids: TenantIds) -> QuerySet[BulkJob]:
    return list_jobs(tids).filter(ended_at=None)


def list_items(job: BulkJob, *, outcome: str | None = None) -> QuerySet[BulkItem]:
    """Return the tasks of a job that have a row of their own.

    These are the tasks selected by id, the canaries, and the first tasks that were skipped or failed.
    """
    items = job.items.order_by("id")
    return items if outcome is None else items.filter(outcome=outcome)


def cancel(tids: TenantIds, job_id: str) -> BulkJob:
    """Cancel a job, and return it.

    Completed changes are kept. A batch that is already being sent is still counted.
    """
    job = find(tids, job_id)
    with transaction.atomic():
        job = BulkJob.objects.select_for_update().get(pk=job.pk)
        if job.ended_at is None:
            job.state = JobState.CANCELLING
            end_if_cancelled(job)
            job.save()
    return job


def end_if_cancelled(job: BulkJob) -> None:
    """End a cancelled job, unless a batch is being sent."""
    if job.state == JobState.CANCELLING and not job.sending:
        job.state, job.ended_at = JobState.CANCELLED, _now()


def _parse_ids(task_ids: Sequence[str]) -> list[UUID]:
    """Return the ids in their order, without duplicates."""
    if not 1 <= len(task_ids) <= MAX_IDS:
        raise errors.InvalidRequest(f"ids: must be 1 to {MAX_IDS} ids")
    try:
        return list(dict.fromkeys(UUID(task_id) for task_id in task_ids))
    except ValueError:
        raise errors.InvalidRequest("ids: each must be the id of a task") from None


def _now() -> datetime:
    return datetime.now(UTC)


def _redis_now(tenant: TenantSnapshot) -> datetime:
    """Return the time of the tenant's Redis. Its clock also sets the times at which tasks end."""
    seconds, micros = partition_primary(engine().partition_of(tenant.tid)).time()
    return datetime.fromtimestamp(int(seconds), UTC) + timedelta(microseconds=int(micros))
