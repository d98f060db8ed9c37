"""How bulk jobs are carried on: a piece at a time, and on from where they were after any crash.

A piece is chosen and written down before it is sent, and what became of it is written down with the choice of the next
one. So a job that was killed sends its last piece again; the scripts know what this job has already replayed, and each
task is done once and counted once. Any process may carry a job on; the number of the piece tells who was too late.
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
from queues.deadletters.bulk_jobs import DONE, FAILED, SKIPPED, Kind, State, end_if_cancelled
from queues.deadletters.queries import Filter
from queues.models import AuditedResult, BulkItem, BulkJob
from queues.search import pagination
from tenants.cache import tenant_cache
from tenants.domain import TenantSnapshot

log = logging.getLogger(__name__)

# Tasks in one script: Redis answers nobody else for a quarter of a millisecond. And in what is written down at once.
SCRIPT = 25
PIECE = 250
NOTED = 1_000  # items of a job that are kept because they could not be done
TURN_SECONDS = 20.0
IDLE_SECONDS = 0.2
COUNT_MS = 3_000

_read_filter = msgspec.json.Decoder(Filter).decode


def run(may_go_on: Callable[[], bool], *, seconds: float = TURN_SECONDS) -> int:
    """Carry on every job that is under way, a piece of each in turn; how many tasks were dealt with."""
    handled, until = 0, time.monotonic() + seconds
    while time.monotonic() < until and may_go_on():
        jobs = list(BulkJob.objects.filter(ended_at=None).order_by("created_at").values_list("pk", "tenant_id"))
        there = set(reachable_tenants(str(tid) for _, tid in jobs))
        ids = [job_id for job_id, tid in jobs if str(tid) in there]
        if not ids:
            break
        before = handled
        for job_id in ids:
            if not may_go_on():
                return handled
            try:
                handled += step(job_id)
            except (errors.InvalidRequest, DataError, ProgrammingError) as error:
                # Its filter cannot be answered: that must not hold up the others, now and at every tick.
                _fail(job_id, error)
        if handled == before:
            time.sleep(IDLE_SECONDS)  # all of them wait: for their rate, or for what becomes of canaries
    return handled


def step(job_id: UUID) -> int:
    """Send what is chosen, then write down what became of it and choose the next piece; how many were dealt with."""
    job = BulkJob.objects.get(pk=job_id)
    if job.state == State.WATCHING:
        _watch(job)
    if job.state not in (State.RUNNING, State.CANCELLING):
        return 0
    if job.total is None and job.started_at is None:
        total = pagination.count(_which(job), at_most=queries.COUNT_LIMIT, milliseconds=COUNT_MS)
        BulkJob.objects.filter(pk=job.pk).update(total=total)
    answers = _send(job) if job.sending else {}
    with transaction.atomic():
        locked = BulkJob.objects.select_for_update().get(pk=job.pk)
        if locked.piece != job.piece:
            return 0  # somebody else was quicker; it was the same piece, and is counted
        _book(locked, answers)
        end_if_cancelled(locked)
        if locked.state == State.RUNNING:
            _choose(locked)
        locked.save()
    _unmark(job, answers)
    return len(job.sending)


def _fail(job_id: UUID, error: Exception) -> None:
    log.error("bulk job %s cannot go on: %s", job_id, error)
    said = " ".join(str(error).split())[:500]
    unfinished = BulkJob.objects.filter(pk=job_id, ended_at=None)
    unfinished.update(state=State.FAILED, error=said, ended_at=_now())


Answers = dict[UUID, errors.CodeqError | None]


def _send(job: BulkJob) -> Answers:
    """Do it. Asked again, a script says of each task what it said the first time."""
    tenant = _tenant(job)
    answers: Answers = {}
    for at in range(0, len(job.sending), SCRIPT):
        began = time.monotonic()
        ids = job.sending[at : at + SCRIPT]
        names = [str(task_id) for task_id in ids]
        if job.kind == Kind.REPLAY:
            said = services.replay_for(tenant, names, str(job.pk)).run_sync()
        elif job.kind == Kind.RECALL:
            said = services.recall(tenant, names, str(job.recalls_id)).run_sync()
        else:
            said = services.purge_dead(tenant, names).run_sync()
        answers |= zip(ids, said, strict=True)
        # As long as it took, others have Redis to themselves.
        time.sleep(time.monotonic() - began)
    return answers


def _book(job: BulkJob, answers: Answers) -> None:
    """Count what was sent, in the job that is locked."""
    if not answers:
        return
    outcomes = {task_id: _outcome(job, error) for task_id, error in answers.items()}
    done = [task_id for task_id, outcome in outcomes.items() if outcome == DONE]
    wrong = {task_id: error for task_id, error in answers.items() if error and outcomes[task_id] != DONE}
    counts = Counter(outcomes.values())
    job.done += counts[DONE]
    job.skipped += counts[SKIPPED]
    job.failed += counts[FAILED]
    job.piece += 1
    job.sending = []
    is_canary = job.canary > 0 and job.canaries_died is None
    if not job.filter:
        job.items.filter(task_id__in=done).update(outcome=DONE, is_canary=is_canary)
        for task_id, error in wrong.items():
            job.items.filter(task_id=task_id).update(outcome=outcomes[task_id], error=error.code)
        return
    noted = list(wrong) if job.skipped + job.failed <= NOTED else []
    BulkItem.objects.bulk_create(
        BulkItem(
            job=job,
            task_id=task_id,
            outcome=outcomes[task_id],
            error=wrong[task_id].code if task_id in wrong else "",
            is_canary=is_canary and task_id not in wrong,
        )
        for task_id in noted + (done if is_canary else [])
    )


def _choose(job: BulkJob) -> None:
    """Choose what is next, as much as canaries and rate allow; or see that there is nothing left."""
    now = _now()
    job.started_at = job.started_at or now
    room = PIECE
    if job.canary and job.canaries_died is None:
        room = min(room, job.canary - job.done)
        if room <= 0:
            job.state, job.watched_until = State.WATCHING, now + timedelta(seconds=job.canary_seconds)
            return
    if job.rate_per_second:
        room = min(room, _allowance(job, now))
        if room == 0:
            return
    job.sending, is_last = _next(job, room)
    if job.sending:
        job.sent_at = now if not job.rate_per_second else _paid_until(job, now)
    elif is_last:
        job.state, job.ended_at = State.DONE, now
        job.total = job.handled


def _next(job: BulkJob, room: int) -> tuple[list[UUID], bool]:
    """The next tasks; and whether there are none behind."""
    if not job.filter:
        waiting = job.items.filter(outcome="").order_by("id").values_list("task_id", flat=True)
        found = list(waiting[:room])
        return found, not found
    after = None
    if job.after_ended_at is not None and job.after_task_id is not None:
        after = pagination.PageKey(job.after_ended_at, job.after_task_id)
    keys, following = pagination.ascending(_which(job), after, room)
    # The last one found, unless more was looked at than was found.
    last = following or (keys[-1] if keys else None)
    if last is not None:
        job.after_ended_at, job.after_task_id = last
    return [key.task_id for key in keys], not keys and following is None


def _allowance(job: BulkJob, now: datetime) -> int:
    """How many may be sent now: what a second brings at most, and not in crumbs."""
    assert job.rate_per_second
    since = job.sent_at or now - timedelta(seconds=1)
    earned = int(job.rate_per_second * min((now - since).total_seconds(), 1.0) + 1e-6)
    return earned if earned >= min(PIECE, max(1, job.rate_per_second // 20)) else 0


def _paid_until(job: BulkJob, now: datetime) -> datetime:
    """Until when the rate is used up: fractions of a task are not lost."""
    assert job.rate_per_second
    since = max(job.sent_at or now, now - timedelta(seconds=1))
    return since + timedelta(seconds=len(job.sending) / job.rate_per_second)


def _watch(job: BulkJob) -> None:
    """See what became of the canaries: stop as soon as too many have died, go on when their time is over."""
    canaries = list(job.items.filter(is_canary=True).values_list("task_id", flat=True))
    # They died before the job, and were unmarked; what is marked now has died since.
    until_ms = stream.drained_until_ms(engine().partition_of(str(job.tenant_id)))
    died = AuditedResult.objects.filter(pk__in=canaries, is_dead=True, ended_at__gt=job.before).count()
    now = _now()
    assert job.watched_until is not None
    watched = BulkJob.objects.filter(pk=job.pk, state=State.WATCHING)
    if died * 100 > job.canary_percent * len(canaries):
        watched.update(state=State.STOPPED, canaries_died=died, ended_at=now)
    # Deaths that the audit has not heard of yet count too, so it must have heard of all until then.
    elif now >= job.watched_until and until_ms >= job.watched_until.timestamp() * 1000:
        watched.update(state=State.RUNNING, canaries_died=died, sent_at=now)


def _unmark(job: BulkJob, answers: Answers) -> None:
    """What was no dead letter when its turn came, or is gone, the list must not show; of the rest the stream tells."""
    stale = [task_id for task_id, error in answers.items() if error is not None]
    if stale and job.kind != Kind.RECALL:
        rows = AuditedResult.objects.filter(pk__in=stale, tenant_id=job.tenant_id, is_dead=True)
        queries.forget(str(job.tenant_id), dict(rows.values_list("task_id", "position")))


def _which(job: BulkJob) -> pagination.RowFilter:
    asked, were = _read_filter(job.filter), job.kind == Kind.RECALL
    return queries.which([str(job.tenant_id)], asked, until=job.before, were=were)


def _outcome(job: BulkJob, error: errors.CodeqError | None) -> str:
    """Skipped: it lives again, by somebody else's hand. Failed: Redis has let it go, and there is nothing to replay."""
    if error is None:
        return DONE
    if isinstance(error, errors.NotDead) or (job.kind == Kind.RECALL and isinstance(error, errors.Conflict)):
        return SKIPPED
    # Gone is what was to be, and after a crash nobody can tell who did it.
    return DONE if job.kind == Kind.DELETE else FAILED


def _tenant(job: BulkJob) -> TenantSnapshot:
    found = tenant_cache.find_by_tid(str(job.tenant_id))
    # A tenant whose row is gone has limits no more; its dead letters are still where its id says.
    return found or TenantSnapshot(tid=str(job.tenant_id), slug="")


def _now() -> datetime:
    return datetime.now(UTC)
