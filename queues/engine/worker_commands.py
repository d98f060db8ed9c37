"""Commands of workers: claim, heartbeat, submit, nack and abandon."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import msgspec

from core import errors
from core.redis.script_call import ScriptCall
from queues.domain import Claimed, Lease, Location, NewResult, Result, ReturnOutcome, StoredResult, Task, TaskStatus
from queues.engine import keys, replies, script_loader
from queues.engine.arguments import NO_OVERRIDES, encode_retention, random_seed
from queues.engine.engine import Engine
from queues.engine.options import NO_LIMITS, Limits

# The reply of a claim has CLAIM_VALUES values about the claim, then TASK_VALUES for each task.
CLAIM_VALUES, TASK_VALUES = 6, 8


def claim(
    engine: Engine,
    tid: str,
    commands: Sequence[str],
    worker: str,
    *,
    lease_ms: int,
    limit: int,
    wait_ms: int = 0,
    dead_retention_ms: int | None = None,
    limits: Limits = NO_LIMITS,
    repair_limit: int | None = None,
    further_workers: Sequence[str] = (),
) -> ScriptCall[Claimed]:
    """Lease up to `limit` ready tasks of at most CLAIM_QUEUES queues.

    With `further_workers`, task n of the answer is leased to worker n, beginning with `worker`, and `limit` is the
    number of workers. Each has a lease token of its own.

    Raise TooMany if a rate limit is reached. The claim first makes due tasks ready and ends attempts with an expired
    lease, at most `repair_limit` of each. If it finds no task, the next task that becomes ready in these queues within
    `wait_ms` is announced on the wake channel, so that the caller can wait for it.
    """
    partition = engine.partition_keys(tid)
    root, tenant = partition.root, keys.of_tenant(partition.root, tid)
    lease_token = secrets.token_hex(16)
    leases: Iterable[tuple[str, str]] = repeat((worker, lease_token))
    if further_workers:
        leases = [(worker, lease_token), *((further, secrets.token_hex(16)) for further in further_workers)]
    script = script_loader.load("claim")
    bound = script.bind(
        due=partition.due,
        queues=tenant.queues,
        ghosts=tenant.ghosts,
        waiting=partition.waiting,
        woken=partition.woken,
        events=partition.events,
        expiry=tenant.expiry,
        root=root,
        tid=tid,
        worker="" if further_workers else worker,
        token="" if further_workers else lease_token,
        lease_ms=lease_ms,
        limit=limit,
        repair_limit=engine.options.repair_limit if repair_limit is None else repair_limit,
        wait_ms=wait_ms,
        seed=random_seed(),
        default_backoff=engine.options.default_backoff,
        dead_retention_ms=dead_retention_ms or engine.options.dead_retention_ms,
        clock=engine.clock_argument(),
        limits=limits.encode(root, tid),
        keys=keys.ready_lists_in_claim_order(root, tid, tuple(commands)),
        args=[*commands, *(f"{token} {holder}" for holder, token in leases)] if further_workers else commands,
    )

    def decode(script_replies: list[Any]) -> Claimed | ScriptCall[Claimed]:
        reply = script_replies[0]
        if reply[0] == b"LIMITED":
            raise errors.TooMany(retry_after_seconds=reply[1] / 1000)
        now_ms, _, next_due_ms, expired, dead, has_more = reply[:CLAIM_VALUES]
        tasks = _decode_claimed_tasks(reply, leases)
        if has_more:  # the claim read many ids of ended tasks before a worker had a task, and there may be more ids
            next_worker, *further = [worker, *further_workers][len(tasks) :]
            next_claim = claim(
                engine,
                tid,
                commands,
                next_worker,
                lease_ms=lease_ms,
                limit=limit - len(tasks),
                wait_ms=wait_ms,
                dead_retention_ms=dead_retention_ms,
                repair_limit=0,  # the first claim has already done the repairs
                further_workers=further,
            )
            return next_claim.and_then(
                lambda claimed: msgspec.structs.replace(
                    claimed,
                    tasks=tasks + claimed.tasks,
                    expired=claimed.expired + expired,
                    dead=claimed.dead + dead,
                )
            )
        return Claimed(
            tasks=tasks,
            now_ms=now_ms,
            next_due_ms=int(next_due_ms) or None,
            expired=expired,
            dead=dead,
        )

    return ScriptCall(engine.runner, [(script, bound)], decode)


def heartbeat(
    engine: Engine, tid: str, task_id: str, worker: str, *, extend_ms: int, token: str, progress: str
) -> ScriptCall[Lease]:
    """Extend a lease to `extend_ms` from now.

    Raise an error if the worker does not hold the lease, or if it has expired.
    """
    return engine.prepare(
        "heartbeat",
        lambda reply: Lease(task_id=task_id, until_ms=replies.raise_for_error(reply)[1]),
        due=engine.partition_keys(tid).due,
        root=engine.root(tid),
        tid=tid,
        id=task_id,
        worker=worker,
        token=token,
        extend_ms=extend_ms,
        progress=progress,
        clock=engine.clock_argument(),
    )


def submit(
    engine: Engine,
    tid: str,
    worker: str | None,
    results: Sequence[NewResult],
    *,
    retention_ms: int,
    retentions_ms: Mapping[str, int] = NO_OVERRIDES,
) -> ScriptCall[list[Result | errors.CodeqError]]:
    """Store the results of leased tasks. If `worker` is None, each result names its own.

    Return the result or the error of each task, in the order of `results`. Submitting the same result again returns the
    stored one. `retentions_ms` maps commands to the retentions that their queues' policies set.
    """
    args: list[Any] = []
    for new in results:
        answer = replies.encode_answer(StoredResult(result=new.result, error=new.error, artifacts=new.artifacts))
        args += (new.task_id, new.status.value, new.lease_token or "", answer, new.error or "")
        if worker is None:
            args.append(new.worker)

    def decode(reply: list[Any]) -> list[Result | errors.CodeqError]:
        items = zip(results, reply[1::3], reply[2::3], reply[3::3], strict=True)
        return [
            replies.decode_error(word) or _build_result(new, worker or new.worker or "", completed_ms, attempts)
            for new, word, completed_ms, attempts in items
        ]

    return engine.prepare(
        "submit",
        decode,
        events=engine.partition_keys(tid).events,
        expiry=engine.tenant_keys(tid).expiry,
        root=engine.root(tid),
        tid=tid,
        worker=worker or "",
        retention_ms=encode_retention(retention_ms, retentions_ms),
        clock=engine.clock_argument(),
        args=args,
    )


def nack(
    engine: Engine,
    tid: str,
    task_id: str,
    worker: str,
    *,
    token: str,
    delay_ms: int | None,
    reason: str,
    dead_retention_ms: int,
) -> ScriptCall[ReturnOutcome]:
    """End an attempt as failed.

    The task is retried after `delay_ms`, or after its backoff if that is None. Without attempts left, it is dead,
    or ready in the dead letter queue that its queue's policy sets.
    """
    return engine.prepare(
        "nack",
        _decode_return,
        **_release_arguments(engine, tid),
        id=task_id,
        worker=worker,
        token=token,
        delay_ms="" if delay_ms is None else delay_ms,
        reason=reason,
        seed=random_seed(),
        dead_retention_ms=dead_retention_ms,
    )


def abandon(
    engine: Engine, tid: str, task_id: str, worker: str, *, token: str, dead_retention_ms: int
) -> ScriptCall[ReturnOutcome]:
    """End an attempt without a result.

    The task is ready again at once. Without attempts left, it ends as after `nack`.
    """
    return engine.prepare(
        "abandon",
        _decode_return,
        **_release_arguments(engine, tid),
        id=task_id,
        worker=worker,
        token=token,
        dead_retention_ms=dead_retention_ms,
    )


def _release_arguments(engine: Engine, tid: str) -> dict[str, Any]:
    """Return the arguments that the scripts of nack and abandon share."""
    partition = engine.partition_keys(tid)
    return {
        "due": partition.due,
        "waiting": partition.waiting,
        "woken": partition.woken,
        "events": partition.events,
        "expiry": engine.tenant_keys(tid).expiry,
        "root": partition.root,
        "tid": tid,
        "default_backoff": engine.options.default_backoff,
        "clock": engine.clock_argument(),
    }


def _decode_claimed_tasks(reply: Sequence[Any], leases: Iterable[tuple[str, str]]) -> list[Task]:
    """Return the tasks of a claim. `leases` has the worker and the lease token of each."""
    now_ms, deadline_ms = reply[0], reply[1]
    tasks = []
    for start, (worker, lease_token) in zip(range(CLAIM_VALUES, len(reply), TASK_VALUES), leases, strict=False):
        task_id, spec, priority, max_attempts, attempts, created, visible, error = reply[start : start + TASK_VALUES]
        tasks.append(
            Task(
                id=task_id.decode(),
                spec=replies.decode_spec(spec),
                priority=int(priority),
                max_attempts=int(max_attempts),
                status=TaskStatus.IN_PROGRESS,
                created_ms=int(created),
                updated_ms=now_ms,
                visible_ms=int(visible),
                location=Location.INPROG_SET,
                attempts=int(attempts),
                worker=worker,
                lease_token=lease_token,
                lease_until_ms=deadline_ms,
                error=error.decode("utf-8", "replace") or None,
            )
        )
    return tasks


def _decode_return(reply: Sequence[Any]) -> ReturnOutcome:
    status, delay_ms = replies.raise_for_error(reply)
    return ReturnOutcome(is_dead=status == b"FAILED", delay_ms=int(delay_ms))


def _build_result(new: NewResult, worker: str, completed_ms: Any, attempts: Any) -> Result:
    return Result(
        task_id=new.task_id,
        status=new.status,
        worker=worker,
        completed_ms=int(completed_ms),
        attempts=int(attempts),
        result=msgspec.Raw(new.result) if new.result is not None else None,
        error=new.error,
        artifacts=msgspec.Raw(new.artifacts) if new.artifacts is not None else None,
    )
