"""Commands on dead letters: replay, and the undo of a replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from core import errors
from core.redis.script_call import ScriptCall, send_in_parts
from queues.domain import Spec, Task
from queues.engine import replies
from queues.engine.engine import Engine
from queues.engine.options import PART, PART_WITH_REPLY

R = TypeVar("R")


def replay(
    engine: Engine, tid: str, task_ids: Sequence[str], specs: Sequence[Spec | None] = ()
) -> ScriptCall[list[Task | errors.CodeqError]]:
    """Make dead letters ready again, and reset their number of attempts to 0.

    Return the task or the error of each. `specs`, in the order of `task_ids`, replace the tasks' specs; None keeps the
    spec of a task.
    """
    encoded_specs = [replies.encode_spec(spec) if spec else b"" for spec in specs] or [b""] * len(task_ids)

    def decode(reply: Any) -> list[Task | errors.CodeqError]:
        return [replies.decode_error(item[0]) or replies.decode_task(item[1:]) for item in reply]

    return send_in_parts(
        list(zip(task_ids, encoded_specs, strict=True)),
        PART_WITH_REPLY,
        lambda part: _replay(engine, tid, part, "", decode),
    )


def replay_for(
    engine: Engine, tid: str, task_ids: Sequence[str], job: str
) -> ScriptCall[list[errors.CodeqError | None]]:
    """Replay dead letters for a bulk job. Return the error of each task, or None.

    A job replays a task once, so it can repeat a call whose reply was lost.
    """
    return send_in_parts(
        [(task_id, b"") for task_id in task_ids], PART, lambda part: _replay(engine, tid, part, job, _decode_errors)
    )


def undo_replay(
    engine: Engine, tid: str, task_ids: Sequence[str], job: str, *, dead_retention_ms: int
) -> ScriptCall[list[errors.CodeqError | None]]:
    """Turn the tasks that a bulk job replayed into dead letters again.

    Return the error of each task, or None. Conflict is the error of a task that has been claimed since, or that this
    job did not replay.
    """
    tenant, partition = engine.tenant_keys(tid), engine.partition_keys(tid)

    def prepare(part: Sequence[str]) -> ScriptCall[list[errors.CodeqError | None]]:
        return engine.prepare(
            "undo_replay",
            _decode_errors,
            ghosts=tenant.ghosts,
            events=partition.events,
            expiry=tenant.expiry,
            root=partition.root,
            tid=tid,
            job=job,
            dead_retention_ms=dead_retention_ms,
            clock=engine.clock_argument(),
            args=part,
        )

    return send_in_parts(task_ids, PART, prepare)


def _replay(
    engine: Engine,
    tid: str,
    tasks: Sequence[tuple[str, bytes]],
    job: str,
    decode: Callable[[Any], list[R]],
) -> ScriptCall[list[R]]:
    tenant, partition = engine.tenant_keys(tid), engine.partition_keys(tid)
    return engine.prepare(
        "replay",
        decode,
        ghosts=tenant.ghosts,
        events=partition.events,
        expiry=tenant.expiry,
        waiting=partition.waiting,
        woken=partition.woken,
        root=partition.root,
        tid=tid,
        job=job,
        clock=engine.clock_argument(),
        args=[arg for task in tasks for arg in task],
    )


def _decode_errors(reply: Sequence[Any]) -> list[errors.CodeqError | None]:
    return [replies.decode_error(item[0]) for item in reply]
