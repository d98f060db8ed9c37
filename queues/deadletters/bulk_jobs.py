"""Bulk jobs: what operators have done to many dead letters at once. `queues.deadletters.bulk_runner` carries them on."""

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
from queues.deadletters.queries import DeadLetter, Filter, Tids
from queues.models import BulkItem, BulkJob
from tenants.domain import TenantSnapshot

Kind, State = BulkJob.Kind, BulkJob.State
IDS = 10_000  # that a job may be given one by one
JOBS = 20  # that one tenant may have under way
CANARIES = 1_000
UNDO = timedelta(days=1)  # after its end a replay can be taken back for so long
SAMPLE = 10

DONE, SKIPPED, FAILED = "done", "skipped", "failed"


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """So many first; the rest only if no more than `percent` of them have died again after `seconds`."""

    count: int
    percent: int = 10
    seconds: int = 60


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a job would be about. `count` is None if counting would take too long."""

    count: int | None
    sample: list[DeadLetter]


def dry_run(tenant: TenantSnapshot, asked: Filter) -> DryRun:
    """How many dead letters a filter means now, and some of them. Nothing is changed."""
    return DryRun(
        count=queries.count([tenant.tid], asked),
        sample=queries.page([tenant.tid], asked, limit=SAMPLE).letters,
    )


def start(
    tenant: TenantSnapshot,
    kind: str,
    which: Filter | Sequence[str],
    *,
    actor: str,
    reason: str = "",
    rate_per_second: int | None = None,
    canary: Canary | None = None,
) -> BulkJob:
    """Have all dead letters that a filter means now, or those of these ids, replayed or deleted; beat does it.

    What dies after this moment is not part of it. InvalidRequest for a filter or ids that cannot be; TooMany when the
    tenant has enough under way.
    """
    canary = canary or Canary(count=0)
    if rate_per_second is not None and rate_per_second < 1:
        raise errors.InvalidRequest("ratePerSecond: 1 or more")
    if not 0 <= canary.count <= CANARIES or not 0 <= canary.percent <= 100 or not 0 <= canary.seconds <= 86_400:
        raise errors.InvalidRequest(f"canary: count 0 to {CANARIES}, percent 0 to 100, seconds 0 to 86400")
    if canary.count and kind != Kind.REPLAY:
        raise errors.InvalidRequest("canary: only a replay has them")
    ids: list[UUID] = []
    if isinstance(which, Filter):
        queries.which([tenant.tid], which)  # says what is wrong with it
    else:
        ids = _ids(which)
    job = BulkJob(
        id=UUID(str(uuid_utils.uuid7())),
        tenant_id=tenant.tid,
        kind=Kind(kind),
        filter=msgspec.json.encode(which).decode() if isinstance(which, Filter) else "",
        actor=actor,
        reason=reason,
        rate_per_second=rate_per_second,
        canary=canary.count,
        canary_percent=canary.percent,
        canary_seconds=canary.seconds,
        total=None if isinstance(which, Filter) else len(ids),
        before=_redis_now(tenant),
        created_at=_now(),
    )
    with transaction.atomic():
        if under_way([tenant.tid]).count() >= JOBS:
            raise errors.TooMany(f"There are {JOBS} bulk jobs under way.", retry_after_seconds=60)
        job.save(force_insert=True)
        BulkItem.objects.bulk_create([BulkItem(job=job, task_id=task_id) for task_id in ids], batch_size=1000)
    return job


def recall(tids: Tids, job_id: str, *, actor: str, reason: str = "") -> BulkJob:
    """Take back a replay that is over: what nobody has claimed since is a dead letter again. A job of its own.

    Conflict for what is no replay, is still under way, or has been over for too long; asked again, the job that is
    doing it already.
    """
    replayed = find(tids, job_id)
    until = undo_until(replayed)
    if until is None:
        raise errors.Conflict("Only a replay that is over, and has replayed something, can be taken back.")
    with transaction.atomic():
        replayed = BulkJob.objects.select_for_update().get(pk=replayed.pk)
        known = replayed.recalled_by.filter(ended_at=None).first()
        if known is not None:
            return known
        if _now() > until:
            raise errors.Conflict(f"It has been over for longer than {UNDO.total_seconds() / 3600:.0f} hours.")
        job = BulkJob.objects.create(
            id=UUID(str(uuid_utils.uuid7())),
            tenant_id=replayed.tenant_id,
            kind=Kind.RECALL,
            filter=replayed.filter,
            recalls=replayed,
            actor=actor,
            reason=reason,
            before=replayed.before,
            created_at=_now(),
        )
        if not job.filter:
            done = replayed.items.filter(outcome=DONE).order_by("id").values_list("task_id", flat=True)
            BulkItem.objects.bulk_create([BulkItem(job=job, task_id=task_id) for task_id in done], batch_size=1000)
            job.total = len(done)
            job.save(update_fields=["total"])
    return job


def undo_until(job: BulkJob) -> datetime | None:
    """Until when a job can be taken back; None if it is no replay, is still under way, or has replayed nothing."""
    if job.kind != Kind.REPLAY or job.ended_at is None or not job.done:
        return None
    return job.ended_at + UNDO


def find(tids: Tids, job_id: str) -> BulkJob:
    """A job of these tenants. NotFound for any other."""
    try:
        job = of(tids).filter(pk=UUID(job_id)).first()
    except ValueError:
        job = None
    if job is None:
        raise errors.NotFound("There is no such bulk job.")
    return job


def of(tids: Tids) -> QuerySet[BulkJob]:
    """The jobs of these tenants, the newest first."""
    jobs = BulkJob.objects.order_by("-created_at")
    return jobs if tids is None else jobs.filter(tenant_id__in=list(tids))


def under_way(tids: Tids) -> QuerySet[BulkJob]:
    return of(tids).filter(ended_at=None)


def items(job: BulkJob, *, outcome: str | None = None) -> QuerySet[BulkItem]:
    """What is noted of single tasks: those asked for by id, canaries, and the first that could not be done."""
    noted = job.items.order_by("id")
    return noted if outcome is None else noted.filter(outcome=outcome)


def cancel(tids: Tids, job_id: str) -> BulkJob:
    """Choose no more of a job. What is done stays done, and a piece that may be on its way is still accounted for."""
    job = find(tids, job_id)
    with transaction.atomic():
        job = BulkJob.objects.select_for_update().get(pk=job.pk)
        if job.ended_at is None:
            job.state = State.CANCELLING
            end_if_cancelled(job)
            job.save()
    return job


def end_if_cancelled(job: BulkJob) -> None:
    """Once nothing of it is on its way any more."""
    if job.state == State.CANCELLING and not job.sending:
        job.state, job.ended_at = State.CANCELLED, _now()


def _ids(named: Sequence[str]) -> list[UUID]:
    if not 1 <= len(named) <= IDS:
        raise errors.InvalidRequest(f"ids: 1 to {IDS}")
    try:
        return list(dict.fromkeys(UUID(task_id) for task_id in named))
    except ValueError:
        raise errors.InvalidRequest("ids: not a task's id") from None


def _now() -> datetime:
    return datetime.now(UTC)


def _redis_now(tenant: TenantSnapshot) -> datetime:
    """The clock that says when a task of theirs died."""
    seconds, micros = partition_primary(engine().partition_of(tenant.tid)).time()
    return datetime.fromtimestamp(int(seconds), UTC) + timedelta(microseconds=int(micros))
