"""A worker's verbs: claim, and what ends a claim."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from core import errors
from core.redis.script_call import ScriptCall
from queues.domain import Answer, Claimed, Lease, NewResult, ReleaseOutcome, Result
from queues.engine import keys, replies, script_loader
from queues.engine.base import NOTHING, Engine, retention_line, seed
from queues.engine.options import NO_LIMITS, Limits


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
) -> ScriptCall[Claimed]:
    """Take up to `limit` tasks of at most CLAIM_QUEUES queues. `wait_ms`: the caller will wait for a wake-up."""
    partition = engine.partition_keys(tid)
    root, tenant = partition.root, keys.of_tenant(partition.root, tid)
    token = secrets.token_hex(16)
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
        worker=worker,
        token=token,
        lease_ms=lease_ms,
        limit=limit,
        repair_limit=engine.options.repair_limit if repair_limit is None else repair_limit,
        wait_ms=wait_ms,
        seed=seed(),
        default_backoff=engine.options.backoff_line,
        dead_retention_ms=dead_retention_ms or engine.options.dead_retention_ms,
        clock=engine.now(),
        limits=limits.line(root, tid),
        keys=keys.in_claim_order(root, tid, tuple(commands)),
        args=commands,
    )

    def read(answers: list[Any]) -> Claimed | ScriptCall[Claimed]:
        reply = answers[0]
        if reply[0] == b"LIMITED":
            raise errors.TooMany(retry_after_seconds=reply[1] / 1000)
        expired, dead = reply[3], reply[4]
        if reply[5]:  # only ghosts so far: walk on
            again = claim(
                engine,
                tid,
                commands,
                worker,
                lease_ms=lease_ms,
                limit=limit,
                wait_ms=wait_ms,
                dead_retention_ms=dead_retention_ms,
                repair_limit=0,  # this claim has repaired what one claim may
            )
            return again.and_then(
                lambda claimed: msgspec.structs.replace(
                    claimed, expired=claimed.expired + expired, dead=claimed.dead + dead
                )
            )
        return Claimed(
            tasks=replies.claimed_tasks(reply, worker, token),
            now_ms=reply[0],
            next_due_ms=int(reply[2]) or None,
            expired=expired,
            dead=dead,
        )

    return ScriptCall(engine.runner, [(script, bound)], read)


def heartbeat(
    engine: Engine, tid: str, task_id: str, worker: str, *, extend_ms: int, token: str, progress: str
) -> ScriptCall[Lease]:
    return engine.call(
        "heartbeat",
        lambda reply: Lease(task_id=task_id, until_ms=replies.accepted(reply)[1]),
        due=engine.partition_keys(tid).due,
        root=engine.root(tid),
        tid=tid,
        id=task_id,
        worker=worker,
        token=token,
        extend_ms=extend_ms,
        progress=progress,
        clock=engine.now(),
    )


def submit(
    engine: Engine,
    tid: str,
    worker: str,
    results: Sequence[NewResult],
    *,
    retention_ms: int,
    retentions_ms: Mapping[str, int] = NOTHING,
) -> ScriptCall[list[Result | errors.CodeqError]]:
    """Hand in results; the same answer again gets the same result back."""
    args: list[Any] = []
    for new in results:
        answer = Answer(result=new.result, error=new.error, artifacts=new.artifacts)
        blob = replies.encode_answer(answer)
        args += (new.task_id, new.status.value, new.lease_token or "", blob, new.error or "")

    def read(reply: list[Any]) -> list[Result | errors.CodeqError]:
        lines = zip(reply[1::3], reply[2::3], reply[3::3], strict=True)
        return [replies.refusal(line) or result_of(new, worker, line) for new, line in zip(results, lines, strict=True)]

    return engine.call(
        "submit",
        read,
        events=engine.partition_keys(tid).events,
        expiry=engine.tenant_keys(tid).expiry,
        root=engine.root(tid),
        tid=tid,
        worker=worker,
        retention_ms=retention_line(retention_ms, retentions_ms),
        clock=engine.now(),
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
) -> ScriptCall[ReleaseOutcome]:
    return engine.call(
        "nack",
        returned,
        **engine.release_keys(tid),
        id=task_id,
        worker=worker,
        token=token,
        delay_ms="" if delay_ms is None else delay_ms,
        reason=reason,
        seed=seed(),
        default_backoff=engine.options.backoff_line,
        dead_retention_ms=dead_retention_ms,
    )


def abandon(
    engine: Engine, tid: str, task_id: str, worker: str, *, token: str, dead_retention_ms: int
) -> ScriptCall[ReleaseOutcome]:
    return engine.call(
        "abandon",
        returned,
        **engine.release_keys(tid),
        id=task_id,
        worker=worker,
        token=token,
        default_backoff=engine.options.backoff_line,
        dead_retention_ms=dead_retention_ms,
    )


def returned(reply: Sequence[Any]) -> ReleaseOutcome:
    status, delay_ms = replies.accepted(reply)
    return ReleaseOutcome(is_dead=status == b"FAILED", delay_ms=int(delay_ms))


def result_of(new: NewResult, worker: str, line: Sequence[Any]) -> Result:
    return Result(
        task_id=new.task_id,
        status=new.status,
        worker=worker,
        completed_ms=int(line[1]),
        attempts=int(line[2]),
        result=msgspec.Raw(new.result) if new.result is not None else None,
        error=new.error,
        artifacts=msgspec.Raw(new.artifacts) if new.artifacts is not None else None,
    )
