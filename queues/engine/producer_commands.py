"""A producer's verbs: tasks in, and withdrawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b, sha256
from typing import Any

import msgspec
import uuid_utils

from core import errors
from core.redis.script_call import Bound, Command, ScriptCall
from queues.domain import Enqueued, Location, NewTask, Spec, Task, TaskStatus
from queues.engine import keys, replies, script_loader
from queues.engine.base import NOTHING, Engine, retention_line
from queues.engine.options import NO_LIMITS, Limits


def enqueue(
    engine: Engine,
    tid: str,
    tenant: str,
    tasks: Sequence[NewTask],
    *,
    retention_ms: int,
    retentions_ms: Mapping[str, int] = NOTHING,
    max_attempts: Mapping[str, int] = NOTHING,
    limits: Limits = NO_LIMITS,
    depth: int = 0,
) -> ScriptCall[list[Enqueued | errors.CodeqError]]:
    """Store tasks. One script for those that share a command and a priority, all in one round trip."""
    groups: dict[tuple[str, int, int], list[tuple[int, str, Spec, list[Any]]]] = {}
    seen: dict[str, int] = {}
    for position, new in enumerate(tasks):
        task_id = str(uuid_utils.uuid7())
        spec = spec_of(new, tenant)
        repeat, digest, fingerprint = 0, "", ""
        if new.idempotency_key:
            digest, fingerprint = digest_of(new.idempotency_key), fingerprint_of(new)
            # One that comes twice in a batch goes into a later script, which then finds the first one's task.
            repeat = seen[digest] = seen.get(digest, -1) + 1
        args = [
            task_id,
            replies.encode_spec(spec),
            new.max_attempts or max_attempts.get(new.command, engine.options.max_attempts),
            new.delay_ms,
            new.run_at_ms or 0,
            digest,
            fingerprint,
        ]
        groups.setdefault((new.command, new.priority, repeat), []).append((position, task_id, spec, args))
    # Whatever their queues: who came first with a key is stored before the next one asks for it.
    ordered = sorted(groups.items(), key=lambda group: group[0][2])
    script = script_loader.load("enqueue")
    commands: list[Command] = []
    for (command, priority, _), items in ordered:
        common = _common(
            engine.partition_of(tid),
            tid,
            command,
            priority,
            engine.now(),
            retentions_ms.get(command, retention_ms),
            engine.options.horizon_ms,
            limits,
            depth,
        )
        commands.append((script, common + tuple([value for item in items for value in item[3]])))

    def read(answers: list[Any]) -> list[Enqueued | errors.CodeqError]:
        done: list[Enqueued | errors.CodeqError | None] = [None] * len(tasks)
        for ((_, priority, _), items), (now_ms, wait_ms, *lines) in zip(ordered, answers, strict=True):
            for (position, task_id, spec, args), line in zip(items, lines, strict=True):
                if isinstance(line, list):
                    done[position] = known_task(line)
                    continue
                if isinstance(line, bytes):
                    done[position] = _not_stored(engine, line, wait_ms)
                    continue
                done[position] = Enqueued(
                    task=Task(
                        id=task_id,
                        spec=spec,
                        priority=priority,
                        max_attempts=args[2],
                        status=TaskStatus.PENDING,
                        created_ms=now_ms,
                        updated_ms=now_ms,
                        visible_ms=line,
                        location=Location.DELAYED_ZSET if line > now_ms else Location.PENDING_LIST,
                    )
                )
        return [item for item in done if item is not None]

    return ScriptCall(engine.runner, commands, read)


def _not_stored(engine: Engine, word: bytes, wait_ms: int) -> errors.CodeqError:
    if word == b"LIMITED":
        return errors.TooMany(retry_after_seconds=wait_ms / 1000)
    if word == b"FULL":
        return errors.QueueFull(retry_after_seconds=5)
    return errors.InvalidRequest(f"runAt: at most {engine.options.horizon_ms // 1000} seconds from now")


def find_by_idempotency_key(engine: Engine, tid: str, tasks: Sequence[NewTask]) -> ScriptCall[list[Enqueued | None]]:
    """The tasks that these tasks' idempotency keys have made already, without sending the tasks."""
    args = [word for new in tasks for word in (digest_of(new.idempotency_key), fingerprint_of(new))]
    return engine.call(
        "find_by_idempotency_key",
        lambda lines: [known_task(line) if line else None for line in lines],
        due=engine.partition_keys(tid).due,
        root=engine.root(tid),
        tid=tid,
        args=args,
    )


def cancel(
    engine: Engine, tid: str, task_id: str, *, retention_ms: int, retentions_ms: Mapping[str, int] = NOTHING
) -> ScriptCall[Task]:
    root, partition = engine.root(tid), engine.partition_keys(tid)
    return engine.call(
        "cancel",
        lambda reply: replies.shown_task(replies.accepted(reply)[1:]),
        ghosts=keys.of_tenant(root, tid).ghosts,
        events=partition.events,
        expiry=keys.of_tenant(root, tid).expiry,
        root=root,
        tid=tid,
        id=task_id,
        retention_ms=retention_line(retention_ms, retentions_ms),
        clock=engine.now(),
    )


@lru_cache(maxsize=10_000)
def _common(
    partition: int,
    tid: str,
    command: str,
    priority: int,
    clock: int | str,
    idem_ttl_ms: int,
    horizon_ms: int,
    limits: Limits,
    depth: int,
) -> Bound:
    """What every enqueue of a queue and a priority begins with: to bind it anew would be half of an enqueue's cost."""
    shared = keys.of_partition(partition)
    queue = keys.of_queue(shared.root, tid, command)
    return script_loader.load("enqueue").bind(
        ready=queue.ready[priority],
        delayed=queue.delayed,
        due=shared.due,
        queues=keys.of_tenant(shared.root, tid).queues,
        tenants=shared.tenants,
        waiting=shared.waiting,
        woken=shared.woken,
        root=shared.root,
        tid=tid,
        queue=queue.name,
        priority=priority,
        clock=clock,
        idem_ttl_ms=idem_ttl_ms,
        horizon_ms=horizon_ms,
        limits=limits.line(shared.root, tid),
        depth=depth or "",
    )


def spec_of(new: NewTask, tenant: str) -> Spec:
    return Spec(
        command=new.command,
        payload=new.payload,
        tenant=tenant,
        webhook=new.webhook,
        trace_parent=new.trace_parent,
        trace_state=new.trace_state,
    )


def digest_of(key: str | None) -> str:
    return sha256(key.encode()).hexdigest() if key else ""


def fingerprint_of(new: NewTask) -> str:
    """What makes two requests with one idempotency key the same request: all that the producer asked for."""
    asked = (
        new.command,
        new.payload,
        new.priority if new.has_priority else 0,  # the policy's word is not the producer's
        new.max_attempts,
        new.webhook,
        new.run_at_ms,
        new.delay_ms,
    )
    return blake2b(msgspec.msgpack.encode(asked), digest_size=16).hexdigest()


def known_task(line: Sequence[Any]) -> Enqueued:
    return Enqueued(task=replies.shown_task(line[1:]), is_replayed=True, is_mismatch=line[0] == 0)
