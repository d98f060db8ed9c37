"""The transitions of tasks. Each validates its arguments and returns a `ScriptCall`.

`await` the call, or run it with `run_sync()`. A failed check raises before anything is sent. Batch functions return one
value per item, in order; the value of an item that failed is its error. The API's schemas have already checked shape
and bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from core import errors
from core.conf import conf
from core.redis.script_call import ScriptCall
from queues import policies, validation
from queues.batch import convert_each, merge_in_order
from queues.current_engine import engine
from queues.domain import Claimed, Enqueued, Lease, NewResult, NewTask, Result, ReturnOutcome, Spec, Task
from queues.engine import admin_commands, dead_letter_commands, maintenance_commands, producer_commands, worker_commands
from queues.engine.options import CHUNK, NO_LIMITS, Limits
from queues.filters import filters
from tenants.domain import TenantSnapshot

R = TypeVar("R")
T = TypeVar("T")
# The reason of a nack is truncated to this length.
REASON_CHARS = 4096


def enqueue(
    tenant: TenantSnapshot, tasks: Sequence[NewTask], *, token_fingerprint: str = ""
) -> ScriptCall[list[Enqueued | errors.CodeqError]]:
    """Store tasks.

    They are on disk when the call returns, unless `queues.durability` is `relaxed`.

    A repeated idempotency key returns the task that was created with it, or IdempotencyMismatch if the request differs
    and the tenant is strict about it. `token_fingerprint` identifies the caller's token for the rate limit per token.
    """
    if tenant.is_suspended:
        raise errors.TenantSuspended
    queue_policies = policies.for_tenant(tenant)

    def validate(task: NewTask) -> NewTask:
        policy = queue_policies.get(task.command)
        tiers = None if policy is None else policy.priority_tiers
        if tiers is not None and not task.has_priority:
            # The lowest tier: a policy without priority 0 accepts a task that names no priority.
            task = msgspec.structs.replace(task, priority=min(tiers))
        validation.check_task(tenant, task, tiers)
        return task

    def store(new: Sequence[NewTask]) -> ScriptCall[list[Enqueued | errors.CodeqError]]:
        return producer_commands.enqueue(
            engine(),
            tenant.tid,
            tenant.slug,
            new,
            retention_ms=tenant.retention_ms,
            retentions_ms=policies.retentions_ms(queue_policies),
            max_attempts=policies.max_attempts(queue_policies),
            limits=_limits("create", tenant.rates.create, token_fingerprint),
            depth=tenant.depth,
        )

    def enqueue_valid(new: Sequence[NewTask]) -> ScriptCall[list[Enqueued | errors.CodeqError]]:
        stored = filters().lookup_then_store(
            tenant.tid, new, partial(producer_commands.find_by_idempotency_key, engine()), store
        )
        return stored.and_then(_without_mismatches) if tenant.is_idempotency_strict else stored

    return _send_valid(tasks, validate, enqueue_valid)


def claim(
    tenant: TenantSnapshot,
    commands: Sequence[str],
    worker: str,
    *,
    lease_seconds: float | None = None,
    count: int = 1,
    wait_ms: int = 0,
    token_fingerprint: str = "",
    is_counted: bool = True,
    further_workers: Sequence[str] = (),
) -> ScriptCall[Claimed]:
    """Claim at most `count` ready tasks, the highest priority first. Does not wait.

    With `further_workers`, claim one task for each worker instead: task n is leased to worker n, beginning with
    `worker`.

    `wait_ms` is how long the caller will wait for a wake-up if there is no task (`queues.long_poll`). An attempt after
    a wake-up belongs to the same request, so the rate limit does not count it (`is_counted`).
    """
    if tenant.is_suspended:
        raise errors.TenantSuspended
    seconds = conf().queues.lease_seconds if lease_seconds is None else lease_seconds
    is_limited = is_counted and tenant.rates.claim > 0
    return worker_commands.claim(
        engine(),
        tenant.tid,
        commands,
        worker,
        lease_ms=int(seconds * 1000),
        limit=len(further_workers) + 1 if further_workers else count,
        wait_ms=wait_ms,
        dead_retention_ms=tenant.dead_retention_ms,
        limits=_limits("claim", tenant.rates.claim, token_fingerprint) if is_limited else NO_LIMITS,
        further_workers=further_workers,
    )


def admit(tenant: TenantSnapshot, kind: str, per_second: float, *, token_fingerprint: str = "") -> ScriptCall[None]:
    """Count a request against a rate limit of the tenant. Raises TooMany above the limit.

    `enqueue` and `claim` count their own requests.
    """
    return admin_commands.admit(engine(), tenant.tid, _limits(kind, per_second, token_fingerprint))


def heartbeat(
    tenant: TenantSnapshot,
    task_id: str,
    worker: str,
    *,
    extend_seconds: float | None = None,
    token: str | None = None,
    progress: str | None = None,
) -> ScriptCall[Lease]:
    """Extend a lease to `extend_seconds` from now. Stores `progress` with the task, if given.

    Raises LeaseLost if the lease has expired.
    """
    seconds = conf().queues.lease_seconds if extend_seconds is None else extend_seconds
    validation.check_id(task_id)
    validation.check_token(tenant, token)
    return filters().unless_deleted(
        tenant.tid,
        task_id,
        lambda: worker_commands.heartbeat(
            engine(),
            tenant.tid,
            task_id,
            worker,
            extend_ms=int(seconds * 1000),
            token=token or "",
            progress=progress or "",
        ),
    )


def submit(
    tenant: TenantSnapshot, worker: str | None, results: Sequence[NewResult]
) -> ScriptCall[list[Result | errors.CodeqError]]:
    """End tasks with their results. If `worker` is None, each result names its own.

    Submitting the same result again changes nothing and returns the stored result.
    """

    def validate(new: NewResult) -> NewResult:
        validation.check_id(new.task_id)
        validation.check_token(tenant, new.lease_token)
        size = len(new.result or b"") + len(new.error or "")
        if size > tenant.result_bytes:
            raise errors.PayloadTooLarge(f"result: {size} bytes; the limit of this tenant is {tenant.result_bytes}")
        if filters().is_deleted(tenant.tid, new.task_id):
            raise errors.TaskNotFound
        return new

    return _send_valid(
        results,
        validate,
        lambda valid: worker_commands.submit(
            engine(),
            tenant.tid,
            worker,
            valid,
            retention_ms=tenant.retention_ms,
            retentions_ms=policies.retentions_ms(policies.for_tenant(tenant)),
        ),
    )


def nack(
    tenant: TenantSnapshot,
    task_id: str,
    worker: str,
    *,
    token: str | None = None,
    delay_seconds: float | None = None,
    reason: str | None = None,
) -> ScriptCall[ReturnOutcome]:
    """Return a task to its queue after a failed attempt.

    The task is retried after `delay_seconds`, by default after its backoff. It becomes a dead letter if it is out of
    attempts.
    """
    validation.check_id(task_id)
    validation.check_token(tenant, token)
    cap = conf().queues.backoff_cap_seconds
    delay_ms = None if delay_seconds is None else round(min(delay_seconds, cap) * 1000)
    return filters().unless_deleted(
        tenant.tid,
        task_id,
        lambda: worker_commands.nack(
            engine(),
            tenant.tid,
            task_id,
            worker,
            token=token or "",
            delay_ms=delay_ms,
            reason=(reason or "")[:REASON_CHARS],
            dead_retention_ms=tenant.dead_retention_ms,
        ),
    )


def abandon(
    tenant: TenantSnapshot, task_id: str, worker: str, *, token: str | None = None
) -> ScriptCall[ReturnOutcome]:
    """Return a task unprocessed. The attempt counts as failed.

    The task is ready again at once, or becomes a dead letter if it is out of attempts.
    """
    validation.check_id(task_id)
    validation.check_token(tenant, token)
    return filters().unless_deleted(
        tenant.tid,
        task_id,
        lambda: worker_commands.abandon(
            engine(), tenant.tid, task_id, worker, token=token or "", dead_retention_ms=tenant.dead_retention_ms
        ),
    )


def cancel(tenant: TenantSnapshot, task_id: str) -> ScriptCall[Task]:
    """Cancel a task that has not ended.

    Cancelling it again changes nothing and returns the task.
    """
    validation.check_id(task_id)
    return producer_commands.cancel(
        engine(),
        tenant.tid,
        task_id,
        retention_ms=tenant.retention_ms,
        retentions_ms=policies.retentions_ms(policies.for_tenant(tenant)),
    )


def replay(
    tenant: TenantSnapshot, task_ids: Sequence[str], specs: Sequence[Spec | None] = ()
) -> ScriptCall[list[Task | errors.CodeqError]]:
    """Replay dead letters.

    Each gets all its attempts again. `specs`, in the order of `task_ids`, replace the tasks' specs; None keeps a spec.
    """
    validation.require(len(task_ids) <= CHUNK, f"at most {CHUNK} tasks at once")
    replaced = dict(zip(task_ids, specs, strict=True)) if specs else {}
    return _send_valid(
        task_ids,
        validation.check_id,
        lambda valid: dead_letter_commands.replay(
            engine(), tenant.tid, valid, [replaced.get(task_id) for task_id in valid]
        ),
    )


def replay_for(tenant: TenantSnapshot, task_ids: Sequence[str], job: str) -> ScriptCall[list[errors.CodeqError | None]]:
    """Replay dead letters for a bulk job, each of them once even if the job repeats the call.

    Returns the error of each task, or None.
    """
    validation.require(len(task_ids) <= CHUNK, f"at most {CHUNK} tasks at once")
    return dead_letter_commands.replay_for(engine(), tenant.tid, task_ids, job)


def undo_replay(
    tenant: TenantSnapshot, task_ids: Sequence[str], job: str
) -> ScriptCall[list[errors.CodeqError | None]]:
    """Turn tasks that a bulk job replayed back into dead letters.

    Returns the error of each task, or None. The error is Conflict if a worker has claimed the task since, or if this
    job did not replay it.
    """
    validation.require(len(task_ids) <= CHUNK, f"at most {CHUNK} tasks at once")
    return dead_letter_commands.undo_replay(
        engine(), tenant.tid, task_ids, job, dead_retention_ms=tenant.dead_retention_ms
    )


def purge_dead(tenant: TenantSnapshot, task_ids: Sequence[str]) -> ScriptCall[list[errors.CodeqError | None]]:
    """Delete the tasks that are still dead letters.

    Returns the error of each task, or None.
    """
    validation.require(len(task_ids) <= CHUNK, f"at most {CHUNK} tasks at once")

    def remember(outcomes: list[errors.CodeqError | None]) -> list[errors.CodeqError | None]:
        filters().remember_deleted(tenant.tid, task_ids, [error is None for error in outcomes])
        return outcomes

    return maintenance_commands.purge_dead(engine(), tenant.tid, task_ids).and_then(remember)


def purge(tenant: TenantSnapshot, task_ids: Sequence[str]) -> ScriptCall[int]:
    """Delete the tasks that have ended, including dead letters.

    Returns the number of deleted tasks.
    """
    validation.require(len(task_ids) <= CHUNK, f"at most {CHUNK} tasks at once")
    for task_id in task_ids:
        validation.check_id(task_id)
    return maintenance_commands.purge(engine(), tenant.tid, task_ids).and_then(
        lambda are_deleted: _count_deleted(tenant.tid, task_ids, are_deleted)
    )


def cleanup(
    tid: str,
    *,
    before_ms: int | None = None,
    limit: int = CHUNK,
    postponed: int = 0,
    select: Callable[[list[str]], list[str]] = list,
) -> ScriptCall[int]:
    """Delete at most `limit` tasks whose retention ended before `before_ms`, by default now.

    Returns the number of deleted tasks. `select` receives task ids and returns those that may be deleted now.
    `postponed` is the number of tasks that `select` left out in earlier calls. Redis lists these first again, so the
    call reads `postponed` more ids.
    """
    limit = min(limit, CHUNK)

    def delete(expired: tuple[int, list[str]]) -> ScriptCall[int]:
        now_ms, task_ids = expired
        selected = select([task_id for task_id in task_ids if not filters().skips_cleanup(tid, task_id)])[:limit]
        ended_before_ms = now_ms if before_ms is None else min(now_ms, before_ms)
        return maintenance_commands.purge(engine(), tid, selected, before_ms=ended_before_ms).and_then(
            lambda are_deleted: _count_deleted(tid, selected, are_deleted)
        )

    return maintenance_commands.expired(engine(), tid, before_ms=before_ms, limit=limit + postponed).and_then(delete)


def _count_deleted(tid: str, task_ids: Sequence[str], are_deleted: Sequence[bool]) -> int:
    filters().remember_deleted(tid, task_ids, are_deleted)
    return sum(are_deleted)


def pause(tenant: TenantSnapshot, command: str) -> ScriptCall[None]:
    """Pause a queue: claims get no task from it. Enqueues, results and retries continue."""
    validation.check_command(command)
    return admin_commands.pause(engine(), tenant.tid, command)


def resume(tenant: TenantSnapshot, command: str) -> ScriptCall[None]:
    """Resume a paused queue, and wake the claims that wait for it."""
    validation.check_command(command)
    return admin_commands.resume(engine(), tenant.tid, command)


def _send_valid(
    items: Sequence[T],
    validate: Callable[[T], T],
    send: Callable[[list[T]], ScriptCall[list[R | errors.CodeqError]]],
) -> ScriptCall[list[R | errors.CodeqError]]:
    """Send the valid items. The answer has the errors of the others at their positions."""
    valid, refused = convert_each(items, validate)
    if not valid:
        return ScriptCall(engine().runner, [], lambda _: list(refused.values()))
    call = send(valid)
    return call.and_then(partial(merge_in_order, refused)) if refused else call


def _without_mismatches(items: list[Enqueued | errors.CodeqError]) -> list[Enqueued | errors.CodeqError]:
    return [errors.IdempotencyMismatch() if isinstance(item, Enqueued) and item.is_mismatch else item for item in items]


def _limits(kind: str, per_second: float, token_fingerprint: str) -> Limits:
    if not per_second:
        return NO_LIMITS
    limits = conf().limits
    return Limits(
        kind=kind,
        per_second=per_second,
        burst_seconds=limits.burst_seconds,
        token=token_fingerprint,
        token_percent=limits.token_percent,
    )


__all__ = [
    "abandon", "admit", "cancel", "claim", "cleanup", "enqueue", "heartbeat", "nack", "pause", "purge", "purge_dead",
    "replay", "replay_for", "resume", "submit", "undo_replay",
]  # fmt: skip
