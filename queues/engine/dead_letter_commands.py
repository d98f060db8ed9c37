"""What becomes of dead letters: back in line, and taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from core import errors
from core.redis.script_call import ScriptCall
from queues.domain import Spec, Task
from queues.engine import replies
from queues.engine.base import Engine

R = TypeVar("R")


def replay(
    engine: Engine, tid: str, task_ids: Sequence[str], specs: Sequence[Spec | None] = ()
) -> ScriptCall[list[Task | errors.CodeqError]]:
    """Bring dead letters back in line, each with a new spec where `specs` has one."""
    blobs = [replies.encode_spec(spec) if spec else b"" for spec in specs] or [b""] * len(task_ids)
    return _replay(
        engine,
        tid,
        task_ids,
        blobs,
        "",
        lambda reply: [replies.refusal(line) or replies.shown_task(line[1:]) for line in reply],
    )


def replay_for(
    engine: Engine, tid: str, task_ids: Sequence[str], job: str
) -> ScriptCall[list[errors.CodeqError | None]]:
    """The same for a job, each task once however often the job asks; what was wrong with each, or None."""
    return _replay(
        engine, tid, task_ids, [b""] * len(task_ids), job, lambda reply: [replies.refusal(line) for line in reply]
    )


def recall(
    engine: Engine, tid: str, task_ids: Sequence[str], job: str, *, dead_retention_ms: int
) -> ScriptCall[list[errors.CodeqError | None]]:
    """Take back what that job has replayed and nobody has claimed since; what was wrong with each, or None."""
    return engine.call(
        "recall",
        lambda reply: [replies.refusal(line) for line in reply],
        ghosts=engine.tenant_keys(tid).ghosts,
        events=engine.partition_keys(tid).events,
        expiry=engine.tenant_keys(tid).expiry,
        root=engine.root(tid),
        tid=tid,
        job=job,
        dead_retention_ms=dead_retention_ms,
        clock=engine.now(),
        args=task_ids,
    )


def _replay(
    engine: Engine, tid: str, task_ids: Sequence[str], blobs: Sequence[bytes], job: str, read: Callable[[Any], list[R]]
) -> ScriptCall[list[R]]:
    return engine.call(
        "replay",
        read,
        ghosts=engine.tenant_keys(tid).ghosts,
        events=engine.partition_keys(tid).events,
        expiry=engine.tenant_keys(tid).expiry,
        waiting=engine.partition_keys(tid).waiting,
        woken=engine.partition_keys(tid).woken,
        root=engine.root(tid),
        tid=tid,
        job=job,
        clock=engine.now(),
        args=[word for pair in zip(task_ids, blobs, strict=True) for word in pair],
    )
