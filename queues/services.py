"""The verbs: check what was asked, then one transition. Every function gives a `ScriptCall`: `await` it, or `.run_sync()` it.

A check that fails raises before anything is sent. Batch verbs answer in order, an error as a value where an item has
one, so that one bad item never costs the others.
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
from queues.current_engine import engine
from queues.domain import Claimed, Enqueued, Lease, NewResult, NewTask, ReleaseOutcome, Result, Spec, Status, Task
from queues.engine import admin_commands, dead_letter_commands, maintenance_commands, producer_commands, worker_commands
from queues.engine.options import CHUNK, CLAIM_QUEUES, NO_LIMITS, Limits
from queues.filters import filters
from tenants.domain import TenantSnapshot

I = TypeVar("I")  # noqa: E741
R = TypeVar("R")
REASON_CHARS = 4096


def enqueue(
    tenant: TenantSnapshot, tasks: Sequence[NewTask], *, by: str = ""
) -> ScriptCall[list[Enqueued | errors.CodeqError]]:
    """Store tasks: on disk when this answers. A repeated idempotency key answers with the task it made before.

    `by` is the fingerprint of the token that asks, where the rate of one token is limited.
    """
    if tenant.is_suspended:
        raise errors.TenantSuspended
    known = policies.of(tenant)
    if known:
        tasks = [_with_priority(task, known) for task in tasks]

    def store(new: Sequence[NewTask]) -> ScriptCall[list[Enqueued | errors.CodeqError]]:
        return producer_commands.enqueue(
            engine(),
            tenant.tid,
            tenant.slug,
            new,
            retention_ms=tenant.retention_ms,
            retentions_ms=policies.retentions_ms(known),
            max_attempts=policies.max_attempts(known),
            limits=_limits("create", tenant.rates.create, by),
            depth=tenant.depth,
        )

    def enqueue_valid(new: Sequence[NewTask]) -> ScriptCall[list[Enqueued | errors.CodeqError]]:
        stored = filters().lookup_then_store(
            tenant.tid, new, partial(producer_commands.find_by_idempotency_key, engine()), store
        )
        return stored.and_then(_without_mismatches) if tenant.is_idempotency_strict else stored

    return _each_valid(tasks, lambda task: validation.check_task(tenant, task, _tiers(task, known)), enqueue_valid)


def claim(
    tenant: TenantSnapshot,
    commands: Sequence[str],
    worker: str,
    *,
    lease_seconds: int | None = None,
    count: int = 1,
    wait_ms: int = 0,
    by: str = "",
    is_counted: bool = True,
) -> ScriptCall[Claimed]:
    """Take the best ready tasks, at most `count`, and open their leases: one look, no waiting.

    `wait_ms` says how long the caller will listen for a wake-up if there is nothing (`queues.long_poll`); when it looks
    again after one, that is not another request (`is_counted`).
    """
    if tenant.is_suspended:
        raise errors.TenantSuspended
    limits = conf().queues
    seconds = limits.lease_seconds if lease_seconds is None else lease_seconds
    validation.require(1 <= seconds <= limits.lease_limit_seconds, f"leaseSeconds: 1 to {limits.lease_limit_seconds}")
    validation.require(1 <= count <= CHUNK, f"count: 1 to {CHUNK}")
    validation.require(1 <= len(commands) <= CLAIM_QUEUES, f"commands: 1 to {CLAIM_QUEUES} in one claim")
    for command in commands:
        validation.check_command(command)
    return worker_commands.claim(
        engine(),
        tenant.tid,
        list(dict.fromkeys(commands)),
        worker,
        lease_ms=seconds * 1000,
        limit=count,
        wait_ms=wait_ms,
        dead_retention_ms=tenant.dead_retention_ms,
        limits=_limits("claim", tenant.rates.claim if is_counted else 0, by),
    )


def admit(tenant: TenantSnapshot, what: str, per_second: float, *, by: str = "") -> ScriptCall[None]:
    """Count a request that is neither an enqueue nor a claim against the tenant's rate; TooMany when it is reached."""
    return admin_commands.admit(engine(), tenant.tid, _limits(what, per_second, by))


def heartbeat(
    tenant: TenantSnapshot,
    task_id: str,
    worker: str,
    *,
    extend_seconds: int | None = None,
    token: str | None = None,
    progress: str | None = None,
) -> ScriptCall[Lease]:
    """Move the deadline of a live lease to `extend_seconds` from now."""
    limits = conf().queues
    seconds = limits.lease_seconds if extend_seconds is None else extend_seconds
    validation.require(1 <= seconds <= limits.lease_limit_seconds, f"extendSeconds: 1 to {limits.lease_limit_seconds}")
    validation.check_id(task_id)
    validation.check_token(tenant, token)
    return filters().unless_deleted(
        tenant.tid,
        task_id,
        lambda: worker_commands.heartbeat(
            engine(), tenant.tid, task_id, worker, extend_ms=seconds * 1000, token=token or "", progress=progress or ""
        ),
    )


def submit(
    tenant: TenantSnapshot, worker: str, results: Sequence[NewResult]
) -> ScriptCall[list[Result | errors.CodeqError]]:
    """End tasks with their results. Sending the same result again is harmless and answers the same."""

    def check(new: NewResult) -> None:
        validation.check_id(new.task_id)
        validation.check_token(tenant, new.lease_token)
        validation.require(new.status in (Status.COMPLETED, Status.FAILED), "status: COMPLETED or FAILED")
        if new.status is Status.COMPLETED:
            validation.require(new.result is not None, "result: a completed task needs one")
        else:
            validation.require(bool(new.error), "error: a failed task needs one")
        size = len(new.result or b"") + len(new.error or "")
        if size > tenant.result_bytes:
            raise errors.PayloadTooLarge(f"result: {size} bytes; this tenant may send {tenant.result_bytes}")
        if filters().is_gone(tenant.tid, new.task_id):
            raise errors.TaskNotFound

    return _each_valid(
        results,
        check,
        lambda valid: worker_commands.submit(
            engine(),
            tenant.tid,
            worker,
            valid,
            retention_ms=tenant.retention_ms,
            retentions_ms=policies.retentions_ms(policies.of(tenant)),
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
) -> ScriptCall[ReleaseOutcome]:
    """Give a task back because it failed: it waits for `delay_seconds`, else its backoff, or is dead."""
    validation.check_id(task_id)
    validation.check_token(tenant, token)
    cap = conf().queues.backoff_cap_seconds
    validation.require(delay_seconds is None or 0 <= delay_seconds < float("inf"), "delaySeconds: 0 or more")
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
) -> ScriptCall[ReleaseOutcome]:
    """Let go of a task: it is back in line at once, and the attempt counts."""
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
    """Withdraw a task that has not ended. Cancelling it again answers the same."""
    validation.check_id(task_id)
    return producer_commands.cancel(
        engine(),
        tenant.tid,
        task_id,
        retention_ms=tenant.retention_ms,
        retentions_ms=policies.retentions_ms(policies.of(tenant)),
    )


def replay(
    tenant: TenantSnapshot, task_ids: Sequence[str], specs: Sequence[Spec | None] = ()
) -> ScriptCall[list[Task | errors.CodeqError]]:
    """Bring dead letters back in line with fresh attempts; `specs` replaces what the producer asked, item by item."""
    replaced = dict(zip(task_ids, specs, strict=True)) if specs else {}
    return _each_valid(
        task_ids,
        validation.check_id,
        lambda valid: dead_letter_commands.replay(
            engine(), tenant.tid, valid, [replaced.get(task_id) for task_id in valid]
        ),
    )


def replay_for(tenant: TenantSnapshot, task_ids: Sequence[str], job: str) -> ScriptCall[list[errors.CodeqError | None]]:
    """Bring dead letters back in line for a job: each once, however often the job asks. What was wrong with each."""
    validation.require(len(task_ids) <= CHUNK, f"at most {CHUNK} tasks at once")
    return dead_letter_commands.replay_for(engine(), tenant.tid, task_ids, job)


def recall(tenant: TenantSnapshot, task_ids: Sequence[str], job: str) -> ScriptCall[list[errors.CodeqError | None]]:
    """Take back what that job has replayed and nobody has claimed since; Conflict for what is on its way."""
    validation.require(len(task_ids) <= CHUNK, f"at most {CHUNK} tasks at once")
    return dead_letter_commands.recall(engine(), tenant.tid, task_ids, job, dead_retention_ms=tenant.dead_retention_ms)


def purge_dead(tenant: TenantSnapshot, task_ids: Sequence[str]) -> ScriptCall[list[errors.CodeqError | None]]:
    """Delete dead letters, and nothing that is none any more. What was wrong with each."""
    validation.require(len(task_ids) <= CHUNK, f"at most {CHUNK} tasks at once")

    def note(wrong: list[errors.CodeqError | None]) -> list[errors.CodeqError | None]:
        filters().note_gone(tenant.tid, task_ids, [error is None for error in wrong])
        return wrong

    return maintenance_commands.purge_dead(engine(), tenant.tid, task_ids).and_then(note)


def purge(tenant: TenantSnapshot, task_ids: Sequence[str]) -> ScriptCall[int]:
    """Delete ended tasks of the tenant, dead letters among them. Live work is left alone; how many went."""
    validation.require(len(task_ids) <= CHUNK, f"at most {CHUNK} tasks at once")
    for task_id in task_ids:
        validation.check_id(task_id)
    return maintenance_commands.purge(engine(), tenant.tid, task_ids).and_then(
        lambda went: _note_gone(tenant.tid, task_ids, went)
    )


def cleanup(
    tid: str,
    *,
    before_ms: int | None = None,
    limit: int = CHUNK,
    held: int = 0,
    may_go: Callable[[list[str]], list[str]] = list,
) -> ScriptCall[int]:
    """Remove tasks whose retention was over before a moment (default and at most: now), `limit` of them.

    `may_go` is asked first which of them may; `held` so many stand in front of them because it said no before.
    """

    def remove(found: tuple[int, list[str]]) -> ScriptCall[int]:
        now_ms, task_ids = found
        new = may_go([task_id for task_id in task_ids if not filters().was_removed(tid, task_id)])[:most]
        moment = now_ms if before_ms is None else min(now_ms, before_ms)
        return maintenance_commands.purge(engine(), tid, new, before_ms=moment).and_then(
            lambda went: _note_gone(tid, new, went)
        )

    most = min(limit, CHUNK)
    return maintenance_commands.expired(engine(), tid, before_ms=before_ms, limit=most + held).and_then(remove)


def _note_gone(tid: str, task_ids: Sequence[str], went: Sequence[bool]) -> int:
    filters().note_gone(tid, task_ids, went)
    return sum(went)


def pause(tenant: TenantSnapshot, command: str) -> ScriptCall[None]:
    """Claims take nothing from the queue any more; enqueues, results and retries go on."""
    validation.check_command(command)
    return admin_commands.pause(engine(), tenant.tid, command)


def resume(tenant: TenantSnapshot, command: str) -> ScriptCall[None]:
    validation.check_command(command)
    return admin_commands.resume(engine(), tenant.tid, command)


def _each_valid(
    items: Sequence[I],
    check: Callable[[I], None],
    send: Callable[[list[I]], ScriptCall[list[R | errors.CodeqError]]],
) -> ScriptCall[list[R | errors.CodeqError]]:
    """Send the items that pass the check; the others' errors stand at their places in the answer."""
    validation.require(len(items) <= CHUNK, f"at most {CHUNK} in one request")
    refused: dict[int, errors.CodeqError] = {}
    valid: list[I] = []
    for position, item in enumerate(items):
        try:
            check(item)
        except errors.CodeqError as error:
            refused[position] = error
        else:
            valid.append(item)

    if not refused and valid:
        return send(valid)

    def merge(answers: list[R | errors.CodeqError]) -> list[R | errors.CodeqError]:
        rest = iter(answers)
        return [refused[at] if at in refused else next(rest) for at in range(len(items))]

    return send(valid).and_then(merge) if valid else ScriptCall(engine().runner, [], lambda _: merge([]))


def _without_mismatches(items: list[Enqueued | errors.CodeqError]) -> list[Enqueued | errors.CodeqError]:
    return [errors.IdempotencyMismatch() if isinstance(item, Enqueued) and item.is_mismatch else item for item in items]


def _with_priority(task: NewTask, known: policies.Policies) -> NewTask:
    """A task that says no priority gets the lowest of its queue's: a policy without 0 must not refuse it."""
    tiers = _tiers(task, known)
    return task if task.is_priority_said or tiers is None else msgspec.structs.replace(task, priority=min(tiers))


def _tiers(task: NewTask, known: policies.Policies) -> Sequence[int] | None:
    policy = known.get(task.command)
    return None if policy is None else policy.priority_tiers


def _limits(what: str, per_second: float, by: str) -> Limits:
    if not per_second:
        return NO_LIMITS
    limits = conf().limits
    return Limits(
        kind=what,
        per_second=per_second,
        burst_seconds=limits.burst_seconds,
        token=by,
        token_percent=limits.token_percent,
    )


__all__ = [
    "abandon", "cancel", "claim", "cleanup", "enqueue", "heartbeat", "nack", "pause", "purge", "purge_dead", "recall",
    "replay", "replay_for", "resume", "submit",
]  # fmt: skip
