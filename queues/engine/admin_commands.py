"""What holds in a queue: whether claims get anything from it, how, and how often somebody may ask."""

from __future__ import annotations

from core import errors
from core.redis.script_call import ScriptCall
from queues.engine import keys
from queues.engine.base import Engine
from queues.engine.options import Limits


def pause(engine: Engine, tid: str, command: str) -> ScriptCall[None]:
    return engine.call(
        "pause",
        lambda _: None,
        queues=engine.tenant_keys(tid).queues,
        tenants=engine.partition_keys(tid).tenants,
        tid=tid,
        command=command,
    )


def resume(engine: Engine, tid: str, command: str) -> ScriptCall[None]:
    root, partition = engine.root(tid), engine.partition_keys(tid)
    return engine.call(
        "resume",
        lambda _: None,
        queues=keys.of_tenant(root, tid).queues,
        tenants=partition.tenants,
        waiting=partition.waiting,
        woken=partition.woken,
        root=root,
        tid=tid,
        queue=keys.of_queue(root, tid, command).name,
        command=command,
        clock=engine.now(),
    )


def set_policy(
    engine: Engine, tid: str, command: str, *, line: str, max_consumers: int | None, topic: str = ""
) -> ScriptCall[None]:
    """What the scripts must know of a queue's policy; an empty line and no number is what holds everywhere."""
    return engine.call(
        "set_policy",
        lambda _: None,
        queues=engine.tenant_keys(tid).queues,
        policies=engine.tenant_keys(tid).policies,
        tenants=engine.partition_keys(tid).tenants,
        tid=tid,
        command=command,
        line=line,
        most="" if max_consumers is None else max_consumers,
        topic=topic,
    )


def admit(engine: Engine, tid: str, limits: Limits) -> ScriptCall[None]:
    """Count one request of a kind that no other script counts. TooMany when the limit is reached."""

    def read(wait_ms: int) -> None:
        if wait_ms:
            raise errors.TooMany(retry_after_seconds=wait_ms / 1000)

    root = engine.root(tid)
    return engine.call(
        "admit", read, due=engine.partition_keys(tid).due, limits=limits.line(root, tid), clock=engine.now()
    )
