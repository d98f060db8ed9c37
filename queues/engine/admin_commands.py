"""Commands on queues: pause, resume, policies and rate limits."""

from __future__ import annotations

from core import errors
from core.redis.script_call import ScriptCall
from queues.engine import keys
from queues.engine.engine import Engine
from queues.engine.options import Limits


def pause(engine: Engine, tid: str, command: str) -> ScriptCall[None]:
    """Stop claims from a queue. Enqueues and results are still accepted."""
    return engine.prepare(
        "pause",
        _decode_nothing,
        queues=engine.tenant_keys(tid).queues,
        tenants=engine.partition_keys(tid).tenants,
        tid=tid,
        command=command,
    )


def resume(engine: Engine, tid: str, command: str) -> ScriptCall[None]:
    """Allow claims from a queue again, and wake the long polls that wait for it."""
    partition = engine.partition_keys(tid)
    return engine.prepare(
        "resume",
        _decode_nothing,
        queues=engine.tenant_keys(tid).queues,
        tenants=partition.tenants,
        waiting=partition.waiting,
        woken=partition.woken,
        root=partition.root,
        tid=tid,
        queue=keys.of_queue(partition.root, tid, command).name,
        command=command,
        clock=engine.clock_argument(),
    )


def set_policy(
    engine: Engine, tid: str, command: str, *, policy: str, max_consumers: int | None, dead_letter_queue: str = ""
) -> ScriptCall[None]:
    """Store the part of a queue's policy that the scripts need.

    `policy` is "<backoff> <base ms> <cap ms> <dead letter queue>"; if it is empty, the options of the engine apply.
    `max_consumers` is the limit of tasks in progress; None means no limit. The queue `dead_letter_queue`
    is created if it does not exist.
    """
    return engine.prepare(
        "set_policy",
        _decode_nothing,
        queues=engine.tenant_keys(tid).queues,
        policies=engine.tenant_keys(tid).policies,
        tenants=engine.partition_keys(tid).tenants,
        tid=tid,
        command=command,
        policy=policy,
        max_consumers="" if max_consumers is None else max_consumers,
        dead_letter_queue=dead_letter_queue,
    )


def admit(engine: Engine, tid: str, limits: Limits) -> ScriptCall[None]:
    """Charge one request to its rate limits. Raise TooMany if a limit is reached.

    Enqueues and claims do not need this: their own scripts charge the requests.
    """
    partition = engine.partition_keys(tid)
    return engine.prepare(
        "admit",
        _raise_for_wait,
        due=partition.due,
        limits=limits.encode(partition.root, tid),
        clock=engine.clock_argument(),
    )


def _decode_nothing(_: int) -> None:
    pass


def _raise_for_wait(wait_ms: int) -> None:
    if wait_ms:
        raise errors.TooMany(retry_after_seconds=wait_ms / 1000)
