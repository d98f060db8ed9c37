"""Commands of producers: enqueue, look up by idempotency key, and cancel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b, sha256
from typing import Any

import msgspec
import uuid_utils

from core import errors
from core.redis.script_call import BoundArguments, ScriptCall, ScriptCommand
from queues.domain import Enqueued, Location, NewTask, Spec, Task, TaskStatus
from queues.engine import keys, replies, script_loader
from queues.engine.arguments import NO_OVERRIDES, encode_retention
from queues.engine.engine import Engine
from queues.engine.options import NO_LIMITS, Limits


def enqueue(
    engine: Engine,
    tid: str,
    tenant: str,
    tasks: Sequence[NewTask],
    *,
    retention_ms: int,
    retentions_ms: Mapping[str, int] = NO_OVERRIDES,
    max_attempts: Mapping[str, int] = NO_OVERRIDES,
    limits: Limits = NO_LIMITS,
    depth: int = 0,
) -> ScriptCall[list[Enqueued | errors.CodeqError]]:
    """Store tasks. Return the task or the error of each, in their order.

    The tasks of a queue and a priority are stored by one script, and all scripts are sent in one round trip.
    `retention_ms` is also how long an idempotency key is kept. `retentions_ms` and `max_attempts` map commands to the
    values that their queues' policies set. `depth` is the limit of the tenant's waiting tasks; 0 means no limit.
    """
    groups: dict[tuple[str, int, int], list[tuple[int, str, Spec, list[Any]]]] = {}
    repeats: dict[str, int] = {}
    for position, new_task in enumerate(tasks):
        task_id = str(uuid_utils.uuid7())
        spec = _build_spec(new_task, tenant)
        repeat, digest, fingerprint = 0, "", ""
        if new_task.idempotency_key:
            digest, fingerprint = digest_key(new_task.idempotency_key), _fingerprint_request(new_task)
            # The second task with a key is sent in a later script, which finds the first task.
            repeat = repeats[digest] = repeats.get(digest, -1) + 1
        args = [
            task_id,
            replies.encode_spec(spec),
            new_task.max_attempts or max_attempts.get(new_task.command, engine.options.max_attempts),
            new_task.delay_ms,
            new_task.run_at_ms or 0,
            digest,
            fingerprint,
        ]
        group = (new_task.command, new_task.priority, repeat)
        groups.setdefault(group, []).append((position, task_id, spec, args))
    # Send the first task with a key before the second one, even to another queue: a key is unique in the tenant.
    ordered_groups = sorted(groups.items(), key=lambda item: item[0][2])
    script = script_loader.load("enqueue")
    scripts: list[ScriptCommand] = []
    for (command, priority, _), members in ordered_groups:
        shared_arguments = _bind_shared_arguments(
            engine.partition_of(tid),
            tid,
            command,
            priority,
            engine.clock_argument(),
            retentions_ms.get(command, retention_ms),
            engine.options.horizon_ms,
            limits,
            depth,
        )
        scripts.append((script, shared_arguments + tuple([arg for _, _, _, args in members for arg in args])))

    def decode(script_replies: list[Any]) -> list[Enqueued | errors.CodeqError]:
        outcomes: list[Enqueued | errors.CodeqError | None] = [None] * len(tasks)
        for ((_, priority, _), members), reply in zip(ordered_groups, script_replies, strict=True):
            now_ms, wait_ms, *items = reply
            for (position, task_id, spec, args), item in zip(members, items, strict=True):
                if isinstance(item, list):
                    outcomes[position] = _decode_existing_task(item)
                elif isinstance(item, bytes):
                    outcomes[position] = _decode_refusal(engine, item, wait_ms)
                else:
                    visible_ms = item
                    outcomes[position] = Enqueued(
                        task=Task(
                            id=task_id,
                            spec=spec,
                            priority=priority,
                            max_attempts=args[2],
                            status=TaskStatus.PENDING,
                            created_ms=now_ms,
                            updated_ms=now_ms,
                            visible_ms=visible_ms,
                            location=Location.DELAYED_ZSET if visible_ms > now_ms else Location.PENDING_LIST,
                        )
                    )
        return [outcome for outcome in outcomes if outcome is not None]

    return ScriptCall(engine.runner, scripts, decode)


def find_by_idempotency_key(engine: Engine, tid: str, tasks: Sequence[NewTask]) -> ScriptCall[list[Enqueued | None]]:
    """Return, for each new task, the existing task with its idempotency key, or None."""
    args = [
        word for new_task in tasks for word in (digest_key(new_task.idempotency_key), _fingerprint_request(new_task))
    ]
    return engine.prepare(
        "find_by_idempotency_key",
        lambda reply: [_decode_existing_task(item) if item else None for item in reply],
        due=engine.partition_keys(tid).due,
        root=engine.root(tid),
        tid=tid,
        args=args,
    )


def cancel(
    engine: Engine, tid: str, task_id: str, *, retention_ms: int, retentions_ms: Mapping[str, int] = NO_OVERRIDES
) -> ScriptCall[Task]:
    """Cancel a task that has not ended, and return it. Raise TaskNotFound or AlreadyEnded.

    Cancelling a cancelled task returns it unchanged.
    """
    tenant, partition = engine.tenant_keys(tid), engine.partition_keys(tid)
    return engine.prepare(
        "cancel",
        lambda reply: replies.decode_task(replies.raise_for_error(reply)[1:]),
        ghosts=tenant.ghosts,
        events=partition.events,
        expiry=tenant.expiry,
        root=partition.root,
        tid=tid,
        id=task_id,
        retention_ms=encode_retention(retention_ms, retentions_ms),
        clock=engine.clock_argument(),
    )


def digest_key(idempotency_key: str | None) -> str:
    """Return the digest of an idempotency key. A Redis key contains no text from users."""
    return sha256(idempotency_key.encode()).hexdigest() if idempotency_key else ""


@lru_cache(maxsize=10_000)
def _bind_shared_arguments(
    partition: int,
    tid: str,
    command: str,
    priority: int,
    clock: int | str,
    idem_ttl_ms: int,
    horizon_ms: int,
    limits: Limits,
    depth: int,
) -> BoundArguments:
    """Return the arguments that all enqueues of a queue and a priority have in common.

    They are cached, because binding them takes half of the time of an enqueue.
    """
    partition_keys = keys.of_partition(partition)
    queue = keys.of_queue(partition_keys.root, tid, command)
    return script_loader.load("enqueue").bind(
        ready=queue.ready[priority],
        delayed=queue.delayed,
        due=partition_keys.due,
        queues=keys.of_tenant(partition_keys.root, tid).queues,
        tenants=partition_keys.tenants,
        waiting=partition_keys.waiting,
        woken=partition_keys.woken,
        root=partition_keys.root,
        tid=tid,
        queue=queue.name,
        priority=priority,
        clock=clock,
        idem_ttl_ms=idem_ttl_ms,
        horizon_ms=horizon_ms,
        limits=limits.encode(partition_keys.root, tid),
        max_depth=depth or "",
    )


def _build_spec(new_task: NewTask, tenant: str) -> Spec:
    return Spec(
        command=new_task.command,
        payload=new_task.payload,
        tenant=tenant,
        webhook=new_task.webhook,
        trace_parent=new_task.trace_parent,
        trace_state=new_task.trace_state,
    )


def _fingerprint_request(new_task: NewTask) -> str:
    """Return a digest of the request, without its idempotency key and trace context.

    Two requests with one idempotency key are identical if their digests are equal.
    """
    fields = (
        new_task.command,
        new_task.payload,
        new_task.priority if new_task.has_priority else 0,  # a default of the policy is not the producer's choice
        new_task.max_attempts,
        new_task.webhook,
        new_task.run_at_ms,
        new_task.delay_ms,
    )
    return blake2b(msgspec.msgpack.encode(fields), digest_size=16).hexdigest()


def _decode_existing_task(item: Sequence[Any]) -> Enqueued:
    """Decode an existing task. Its first field is 1 if the requests are identical, else 0."""
    return Enqueued(task=replies.decode_task(item[1:]), is_repeated=True, is_mismatch=item[0] == 0)


def _decode_refusal(engine: Engine, word: bytes, wait_ms: int) -> errors.CodeqError:
    if word == b"LIMITED":
        return errors.TooMany(retry_after_seconds=wait_ms / 1000)
    if word == b"FULL":
        return errors.QueueFull(retry_after_seconds=5)
    return errors.InvalidRequest(f"runAt: at most {engine.options.horizon_ms // 1000} seconds from now")
