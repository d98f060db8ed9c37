"""The verbs: check what was asked, then one transition. Every function gives a `Call`: `await` it, or `.now()` it.

A check that fails raises before anything is sent. Batch verbs answer in order, an error as a value where an item has
one, so that one bad item never costs the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from codeq_site import errors
from codeq_site.conf import conf
from codeq_site.redis import engine
from queues import policies, rules
from queues.engine import Call
from queues.engine.options import CHUNK, CLAIM_QUEUES, NO_LIMITS, Limits
from queues.filters import filters
from queues.task import (
    Claimed,
    Enqueued,
    Lease,
    NewResult,
    NewTask,
    Result,
    Returned,
    Spec,
    Status,
    Task,
)
from tenants.tenant import Tenant

I = TypeVar("I")  # noqa: E741
R = TypeVar("R")
REASON_CHARS = 4096


def enqueue(tenant: Tenant, tasks: Sequence[NewTask], *, by: str = "") -> Call[list[Enqueued | errors.CodeqError]]:
    """Store tasks: on disk when this answers. A repeated idempotency key answers with the task it made before.

    `by` is the fingerprint of the token that asks, where the rate of one token is limited.
    """
    if tenant.suspended:
        raise errors.TenantSuspended
    known = policies.of(tenant)
    if known:
        tasks = [_with_priority(task, known) for task in tasks]

    def store(new: Sequence[NewTask]) -> Call[list[Enqueued | errors.CodeqError]]:
        return engine().enqueue(
            tenant.tid,
            tenant.slug,
            new,
            retention_ms=tenant.retention_ms,
            retentions_ms=policies.retentions_ms(known),
            max_attempts=policies.max_attempts(known),
            limits=_limits("create", tenant.rates.create, by),
            depth=tenant.depth,
        )

    def enqueue_valid(new: Sequence[NewTask]) -> Call[list[Enqueued | errors.CodeqError]]:
        stored = filters().known_first(tenant.tid, new, engine().known, store)
        return stored.then(_without_mismatches) if tenant.is_idempotency_strict else stored

    return _each_valid(tasks, lambda task: rules.check_task(tenant, task, _tiers(task, known)), enqueue_valid)


def claim(
    tenant: Tenant,
    commands: Sequence[str],
    worker: str,
    *,
    lease_seconds: int | None = None,
    count: int = 1,
    wait_ms: int = 0,
    by: str = "",
    is_counted: bool = True,
) -> Call[Claimed]:
    """Take the best ready tasks, at most `count`, and open their leases: one look, no waiting.

    `wait_ms` says how long the caller will listen for a wake-up if there is nothing (`queues.waiting`); when it looks
    again after one, that is not another request (`is_counted`).
    """
    if tenant.suspended:
        raise errors.TenantSuspended
    limits = conf().queues
    seconds = limits.lease_seconds if lease_seconds is None else lease_seconds
    rules.require(1 <= seconds <= limits.lease_limit_seconds, f"leaseSeconds: 1 to {limits.lease_limit_seconds}")
    rules.require(1 <= count <= CHUNK, f"count: 1 to {CHUNK}")
    rules.require(1 <= len(commands) <= CLAIM_QUEUES, f"commands: 1 to {CLAIM_QUEUES} in one claim")
    for command in commands:
        rules.check_command(command)
    return engine().claim(
        tenant.tid,
        list(dict.fromkeys(commands)),
        worker,
        lease_ms=seconds * 1000,
        limit=count,
        wait_ms=wait_ms,
        dead_retention_ms=tenant.dead_retention_ms,
        limits=_limits("claim", tenant.rates.claim if is_counted else 0, by),
    )


def admit(tenant: Tenant, what: str, per_second: float, *, by: str = "") -> Call[None]:
    """Count a request that is neither an enqueue nor a claim against the tenant's rate; TooMany when it is reached."""
    return engine().admit(tenant.tid, _limits(what, per_second, by))


def heartbeat(
    tenant: Tenant,
    task_id: str,
    worker: str,
    *,
    extend_seconds: int | None = None,
    token: str | None = None,
    progress: str | None = None,
) -> Call[Lease]:
    """Move the deadline of a live lease to `extend_seconds` from now."""
    limits = conf().queues
    seconds = limits.lease_seconds if extend_seconds is None else extend_seconds
    rules.require(1 <= seconds <= limits.lease_limit_seconds, f"extendSeconds: 1 to {limits.lease_limit_seconds}")
    rules.check_id(task_id)
    rules.check_token(tenant, token)
    return filters().gone_is_gone(
        tenant.tid,
        task_id,
        lambda: engine().heartbeat(
            tenant.tid, task_id, worker, extend_ms=seconds * 1000, token=token or "", progress=progress or ""
        ),
    )


def submit(tenant: Tenant, worker: str, results: Sequence[NewResult]) -> Call[list[Result | errors.CodeqError]]:
    """End tasks with their results. Sending the same result again is harmless and answers the same."""

    def check(new: NewResult) -> None:
        rules.check_id(new.task_id)
        rules.check_token(tenant, new.lease_token)
        rules.require(new.status in (Status.COMPLETED, Status.FAILED), "status: COMPLETED or FAILED")
        if new.status is Status.COMPLETED:
            rules.require(new.result is not None, "result: a completed task needs one")
        else:
            rules.require(bool(new.error), "error: a failed task needs one")
        size = len(new.result or b"") + len(new.error or "")
        if size > tenant.result_bytes:
            raise errors.PayloadTooLarge(f"result: {size} bytes; this tenant may send {tenant.result_bytes}")
        if filters().is_gone(tenant.tid, new.task_id):
            raise errors.TaskNotFound

    return _each_valid(
        results,
        check,
        lambda valid: engine().submit(
            tenant.tid,
            worker,
            valid,
            retention_ms=tenant.retention_ms,
            retentions_ms=policies.retentions_ms(policies.of(tenant)),
        ),
    )


def nack(
    tenant: Tenant,
    task_id: str,
    worker: str,
    *,
    token: str | None = None,
    delay_seconds: float | None = None,
    reason: str | None = None,
) -> Call[Returned]:
    """Give a task back because it failed: it waits for `delay_seconds`, else its backoff, or is dead."""
    rules.check_id(task_id)
    rules.check_token(tenant, token)
    cap = conf().queues.backoff_cap_seconds
    rules.require(delay_seconds is None or 0 <= delay_seconds < float("inf"), "delaySeconds: 0 or more")
    delay_ms = None if delay_seconds is None else round(min(delay_seconds, cap) * 1000)
    return filters().gone_is_gone(
        tenant.tid,
        task_id,
        lambda: engine().nack(
            tenant.tid,
            task_id,
            worker,
            token=token or "",
            delay_ms=delay_ms,
            reason=(reason or "")[:REASON_CHARS],
            dead_retention_ms=tenant.dead_retention_ms,
        ),
    )


def abandon(tenant: Tenant, task_id: str, worker: str, *, token: str | None = None) -> Call[Returned]:
    """Let go of a task: it is back in line at once, and the attempt counts."""
    rules.check_id(task_id)
    rules.check_token(tenant, token)
    return filters().gone_is_gone(
        tenant.tid,
        task_id,
        lambda: engine().abandon(
            tenant.tid, task_id, worker, token=token or "", dead_retention_ms=tenant.dead_retention_ms
        ),
    )


def cancel(tenant: Tenant, task_id: str) -> Call[Task]:
    """Withdraw a task that has not ended. Cancelling it again answers the same."""
    rules.check_id(task_id)
    return engine().cancel(
        tenant.tid,
        task_id,
        retention_ms=tenant.retention_ms,
        retentions_ms=policies.retentions_ms(policies.of(tenant)),
    )


def replay(
    tenant: Tenant, task_ids: Sequence[str], specs: Sequence[Spec | None] = ()
) -> Call[list[Task | errors.CodeqError]]:
    """Bring dead letters back in line with fresh attempts; `specs` replaces what the producer asked, item by item."""
    replaced = dict(zip(task_ids, specs, strict=True)) if specs else {}
    return _each_valid(
        task_ids,
        rules.check_id,
        lambda valid: engine().replay(tenant.tid, valid, [replaced.get(task_id) for task_id in valid]),
    )


def replay_for(tenant: Tenant, task_ids: Sequence[str], job: str) -> Call[list[errors.CodeqError | None]]:
    """Bring dead letters back in line for a job: each once, however often the job asks. What was wrong with each."""
    rules.require(len(task_ids) <= CHUNK, f"at most {CHUNK} tasks at once")
    return engine().replay_for(tenant.tid, task_ids, job)


def recall(tenant: Tenant, task_ids: Sequence[str], job: str) -> Call[list[errors.CodeqError | None]]:
    """Take back what that job has replayed and nobody has claimed since; Conflict for what is on its way."""
    rules.require(len(task_ids) <= CHUNK, f"at most {CHUNK} tasks at once")
    return engine().recall(tenant.tid, task_ids, job, dead_retention_ms=tenant.dead_retention_ms)


def purge_dead(tenant: Tenant, task_ids: Sequence[str]) -> Call[list[errors.CodeqError | None]]:
    """Delete dead letters, and nothing that is none any more. What was wrong with each."""
    rules.require(len(task_ids) <= CHUNK, f"at most {CHUNK} tasks at once")

    def note(wrong: list[errors.CodeqError | None]) -> list[errors.CodeqError | None]:
        filters().note_gone(tenant.tid, task_ids, [error is None for error in wrong])
        return wrong

    return engine().purge_dead(tenant.tid, task_ids).then(note)


def purge(tenant: Tenant, task_ids: Sequence[str]) -> Call[int]:
    """Delete ended tasks of the tenant, dead letters among them. Live work is left alone; how many went."""
    rules.require(len(task_ids) <= CHUNK, f"at most {CHUNK} tasks at once")
    for task_id in task_ids:
        rules.check_id(task_id)
    return engine().purge(tenant.tid, task_ids).then(lambda went: _note_gone(tenant.tid, task_ids, went))


def cleanup(
    tid: str,
    *,
    before_ms: int | None = None,
    limit: int = CHUNK,
    held: int = 0,
    may_go: Callable[[list[str]], list[str]] = list,
) -> Call[int]:
    """Remove tasks whose retention was over before a moment (default and at most: now), `limit` of them.

    `may_go` is asked first which of them may; `held` so many stand in front of them because it said no before.
    """

    def remove(found: tuple[int, list[str]]) -> Call[int]:
        now_ms, task_ids = found
        new = may_go([task_id for task_id in task_ids if not filters().was_removed(tid, task_id)])[:most]
        moment = now_ms if before_ms is None else min(now_ms, before_ms)
        return engine().purge(tid, new, before_ms=moment).then(lambda went: _note_gone(tid, new, went))

    most = min(limit, CHUNK)
    return engine().expired(tid, before_ms=before_ms, limit=most + held).follow(remove)


def _note_gone(tid: str, task_ids: Sequence[str], went: Sequence[bool]) -> int:
    filters().note_gone(tid, task_ids, went)
    return sum(went)


def pause(tenant: Tenant, command: str) -> Call[None]:
    """Claims take nothing from the queue any more; enqueues, results and retries go on."""
    rules.check_command(command)
    return engine().pause(tenant.tid, command)


def resume(tenant: Tenant, command: str) -> Call[None]:
    rules.check_command(command)
    return engine().resume(tenant.tid, command)


def _each_valid(
    items: Sequence[I],
    check: Callable[[I], None],
    send: Callable[[list[I]], Call[list[R | errors.CodeqError]]],
) -> Call[list[R | errors.CodeqError]]:
    """Send the items that pass the check; the others' errors stand at their places in the answer."""
    rules.require(len(items) <= CHUNK, f"at most {CHUNK} in one request")
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

    return send(valid).then(merge) if valid else Call(engine().runner, [], lambda _: merge([]))


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
        what=what,
        per_second=per_second,
        burst_seconds=limits.burst_seconds,
        token=by,
        token_percent=limits.token_percent,
    )


__all__ = [
    "abandon", "cancel", "claim", "cleanup", "enqueue", "heartbeat", "nack", "pause", "purge", "purge_dead", "recall",
    "replay", "replay_for", "resume", "submit",
]  # fmt: skip
