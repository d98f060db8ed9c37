"""Run bulk jobs in batches, so that a job continues after a crash.

A batch is stored in the job before it is sent. Its outcome is stored in the same transaction as the next batch, so the
last batch is sent again after a crash. The scripts recognise the tasks that this job has already replayed: each task is
processed once and counted once. Any process may continue a job. If two processes send the same batch, the second one
finds that the number of the batch (`BulkJob.batch_number`) has changed, and discards its outcome.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from uuid import UUID

import msgspec
from django.db import DataError, ProgrammingError, transaction

from core import errors
from core.redis.connections import reachable_tenants
from queues import services
from queues.audit import stream
from queues.current_engine import engine
from queues.deadletters import queries
from queues.deadletters.bulk_jobs import DONE, FAILED, SKIPPED, JobState, Kind, end_if_cancelled
from queues.deadletters.queries import Filter
from queues.models import AuditedResult, BulkItem, BulkJob
from queues.search import pagination
from tenants.cache import tenant_cache
from tenants.domain import TenantSnapshot

log = logging.getLogger(__name__)

SCRIPT_SIZE = 25  # tasks in one script, which blocks Redis for a quarter of a millisecond
BATCH_SIZE = 250  # tasks in one batch
MAX_RECORDED_FAILURES = 1_000  # skipped and failed tasks of a job that get a row
RUN_SECONDS = 20.0
IDLE_SECONDS = 0.2

_decode_filter = msgspec.json.Decoder(Filter).decode


def run(may_continue: Callable[[], bool], *, seconds: float = RUN_SECONDS) -> int:
    """Run all unfinished jobs, one batch of each in turn, and return the number of tasks sent."""
    sent, until = 0, time.monotonic() + seconds
    while time.monotonic() < until and may_continue():
        jobs = list(BulkJob.objects.filter(ended_at=None).order_by("created_at").values_list("pk", "tenant_id"))
        reachable = set(reachable_tenants(str(tid) for _, tid in jobs))
        ids = [job_id for job_id, tid in jobs if str(tid) in reachable]
        if not ids:
            break
        sent_before = sent
        for job_id in ids:
            if not may_continue():
                return sent
            try:
                sent += step(job_id)
            except (errors.InvalidRequest, DataError, ProgrammingError) as error:
                # PostgreSQL cannot evaluate the job's filter, or not in time. An error that leaves this function would
                # stop the other jobs in every run.
                _fail(job_id, error)
        if sent == sent_before:
            time.sleep(IDLE_SECONDS)  # all jobs wait for their rate or watch their canaries
    return sent


def step(job_id: UUID) -> int:
    """Send the stored batch of a job, then store its outcome and the next batch.

    Return the number of tasks sent.
    """
    job = BulkJob.objects.get(pk=job_id)
    if job.state == JobState.WATCHING:
        _watch_canaries(job)
    if job.state not in (JobState.RUNNING, JobState.CANCELLING):
        return 0
    if job.total is None and job.started_at is None:
        total = pagination.count(_to_row_filter(job), at_most=queries.COUNT_LIMIT, milliseconds=queries.COUNT_MS)
        BulkJob.objects.filter(pk=job.pk).update(total=total)
    results = _send(job) if job.sending else {}
    with transaction.atomic():
        locked = BulkJob.objects.select_for_update().get(pk=job.pk)
        if locked.batch_number != job.batch_number:
            return 0  # another process has sent the same batch and has counted it
        _record(locked, results)
        end_if_cancelled(locked)
        if locked.state == JobState.RUNNING:
            _choose_next(locked)
        locked.save()
    _clear_dead_flags(job, results)
    return len(job.sending)


def _fail(job_id: UUID, error: Exception) -> None:
    log.error("bulk job %s failed: %s", job_id, error)
    message = " ".join(str(error).split())[:500]
    unfinished = BulkJob.objects.filter(pk=job_id, ended_at=None)
    unfinished.update(state=JobState.FAILED, error=message, ended_at=_now())


# The error of each task, or None.
Results = dict[UUID, errors.CodeqError | None]


def _send(job: BulkJob) -> Results:
    """Send the batch to Redis. If it is sent again, the results are the same."""
    tenant = _find_tenant(job)
    results: Results = {}
    for start in range(0, len(job.sending), SCRIPT_SIZE):
        started = time.monotonic()
        ids = job.sending[start : start + SCRIPT_SIZE]
        names = [str(task_id) for task_id in ids]
        if job.kind == Kind.REPLAY:
            script_errors = services.replay_for(tenant, names, str(job.pk)).run_sync()
        elif job.kind == Kind.UNDO:
            script_errors = services.undo_replay(tenant, names, str(job.recalls_id)).run_sync()
        else:
            script_errors = services.purge_dead(tenant, names).run_sync()
        results |= zip(ids, script_errors, strict=True)
        # Leave Redis to other clients for as long as this script took.
        time.sleep(time.monotonic() - started)
    return results


def _record(job: BulkJob, results: Results) -> None:
    """Add the outcomes of the batch to the locked job.

    Also store the rows that `bulk_jobs.list_items` returns.
    """
    if not results:
        return
    outcomes = {task_id: _outcome(job, error) for task_id, error in results.items()}
    done = [task_id for task_id, outcome in outcomes.items() if outcome == DONE]
    problems = {task_id: error for task_id, error in results.items() if error and outcomes[task_id] != DONE}
    counts = Counter(outcomes.values())
    job.done += counts[DONE]
    job.skipped += counts[SKIPPED]
    job.failed += counts[FAILED]
    job.batch_number += 1
    job.sending = []
    is_canary = job.canary > 0 and job.canaries_died is None
    if not job.filter:
        job.items.filter(task_id__in=done).update(outcome=DONE, is_canary=is_canary)
        for task_id, error in problems.items():
            job.items.filter(task_id=task_id).update(outcome=outcomes[task_id], error=error.code)
        return
    recorded = list(problems) if job.skipped + job.failed <= MAX_RECORDED_FAILURES else []
    BulkItem.objects.bulk_create(
        BulkItem(
            job=job,
            task_id=task_id,
            outcome=outcomes[task_id],
            error=problems[task_id].code if task_id in problems else "",
            is_canary=is_canary and task_id not in problems,
        )
        for task_id in recorded + (done if is_canary else [])
    )


def _choose_next(job: BulkJob) -> None:
    """Choose the next batch, within the limits of canaries and rate, or end the job."""
    now = _now()
    job.started_at = job.started_at or now
    limit = BATCH_SIZE
    if job.canary and job.canaries_died is None:
        limit = min(limit, job.canary - job.done)
        if limit <= 0:
            job.state, job.watched_until = JobState.WATCHING, now + timedelta(seconds=job.canary_seconds)
            return
    if job.rate_per_second:
        limit = min(limit, _available_by_rate(job, now))
        if limit == 0:
            return
    job.sending, is_complete = _read_next(job, limit)
    if job.sending:
        job.sent_at = now if not job.rate_per_second else _rate_used_until(job, now)
    elif is_complete:
        job.state, job.ended_at = JobState.DONE, now
        job.total = job.handled


def _read_next(job: BulkJob, limit: int) -> tuple[list[UUID], bool]:
    """Return the ids of the next tasks, and whether the job has no more tasks."""
    if not job.filter:
        waiting = job.items.filter(outcome="").order_by("id").values_list("task_id", flat=True)
        ids = list(waiting[:limit])
        return ids, not ids
    after = None
    if job.after_ended_at is not None and job.after_task_id is not None:
        after = pagination.PageKey(job.after_ended_at, job.after_task_id)
    keys, following = pagination.read_keys_ascending(_to_row_filter(job), after, limit)
    # `following` is later than the last key if the page has scanned rows without finding more.
    last = following or (keys[-1] if keys else None)
    if last is not None:
        job.after_ended_at, job.after_task_id = last
    return [key.task_id for key in keys], not keys and following is None


def _available_by_rate(job: BulkJob, now: datetime) -> int:
    """Return the number of tasks that the rate allows now, at most those of one second.

    Return 0 if the batch would be very small.
    """
    assert job.rate_per_second
    since = job.sent_at or now - timedelta(seconds=1)
    available = int(job.rate_per_second * min((now - since).total_seconds(), 1.0) + 1e-6)
    return available if available >= min(BATCH_SIZE, max(1, job.rate_per_second // 20)) else 0


def _rate_used_until(job: BulkJob, now: datetime) -> datetime:
    """Return the time until which the batch uses up the rate.

    The next batch is counted from this time, so fractions of a task are not lost.
    """
    assert job.rate_per_second
    since = max(job.sent_at or now, now - timedelta(seconds=1))
    return since + timedelta(seconds=len(job.sending) / job.rate_per_second)


def _watch_canaries(job: BulkJob) -> None:
    """Count the canaries that are dead letters again, and stop or continue the job.

    The job stops as soon as there are too many of them. It continues when the time to watch has passed.
    """
    canaries = list(job.items.filter(is_canary=True).values_list("task_id", flat=True))
    # Read before the count, so that the count includes everything that ended before this time.
    until_ms = stream.drained_until_ms(engine().partition_of(str(job.tenant_id)))
    # The replay has cleared their dead flags. A canary with the flag has died since.
    died = AuditedResult.objects.filter(pk__in=canaries, is_dead=True, ended_at__gt=job.before).count()
    now = _now()
    assert job.watched_until is not None
    watching = BulkJob.objects.filter(pk=job.pk, state=JobState.WATCHING)
    if died * 100 > job.canary_percent * len(canaries):
        watching.update(state=JobState.STOPPED, canaries_died=died, ended_at=now)
    # The drain may be late: wait until the audit has everything that ended before `watched_until`.
    elif now >= job.watched_until and until_ms >= job.watched_until.timestamp() * 1000:
        watching.update(state=JobState.RUNNING, canaries_died=died, sent_at=now)


def _clear_dead_flags(job: BulkJob, results: Results) -> None:
    """Clear the dead flag of tasks that Redis rejected. The events stream updates the others."""
    stale = [task_id for task_id, error in results.items() if error is not None]
    if stale and job.kind != Kind.UNDO:
        rows = AuditedResult.objects.filter(pk__in=stale, tenant_id=job.tenant_id, is_dead=True)
        queries.clear_dead_flags(str(job.tenant_id), dict(rows.values_list("task_id", "position")))


def _to_row_filter(job: BulkJob) -> pagination.RowFilter:
    """Return the filter for the rows that the job processes.

    An undo includes rows that are no longer dead letters, because it is about replayed tasks.
    """
    return queries.to_row_filter(
        [str(job.tenant_id)],
        _decode_filter(job.filter),
        until=job.before,
        include_no_longer_dead=job.kind == Kind.UNDO,
    )


def _outcome(job: BulkJob, error: errors.CodeqError | None) -> str:
    """Return the outcome of one task.

    SKIPPED: it is not a dead letter any more; for an undo, a worker has claimed it since, or the replay did not
    include it. FAILED: Redis does not have it.
    """
    if error is None:
        return DONE
    if isinstance(error, errors.NotDead) or (job.kind == Kind.UNDO and isinstance(error, errors.Conflict)):
        return SKIPPED
    # A deletion counts a missing task as done. After a crash, this job may have deleted it.
    return DONE if job.kind == Kind.DELETE else FAILED


def _find_tenant(job: BulkJob) -> TenantSnapshot:
    # A deleted tenant has no limits any more, but its keys in Redis depend only on its id.
    return tenant_cache.find_by_tid(str(job.tenant_id)) or TenantSnapshot(tid=str(job.tenant_id), slug="")


def _now() -> datetime:
    return datetime.now(UTC)
