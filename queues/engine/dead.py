"""What becomes of dead letters: back in line, and taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from codeq_site import errors
from queues.engine import replies
from queues.engine.call import Call
from queues.engine.verbs import Verbs
from queues.task import Spec, Task

R = TypeVar("R")


class DeadLetters(Verbs):
    """Replay and recall."""

    def replay(
        self, tid: str, task_ids: Sequence[str], specs: Sequence[Spec | None] = ()
    ) -> Call[list[Task | errors.CodeqError]]:
        """Bring dead letters back in line, each with a new spec where `specs` has one."""
        blobs = [replies.encode_spec(spec) if spec else b"" for spec in specs] or [b""] * len(task_ids)
        return self._replay(
            tid,
            task_ids,
            blobs,
            "",
            lambda reply: [replies.refusal(line) or replies.shown_task(line[1:]) for line in reply],
        )

    def replay_for(self, tid: str, task_ids: Sequence[str], job: str) -> Call[list[errors.CodeqError | None]]:
        """The same for a job, each task once however often the job asks; what was wrong with each, or None."""
        return self._replay(
            tid, task_ids, [b""] * len(task_ids), job, lambda reply: [replies.refusal(line) for line in reply]
        )

    def recall(
        self, tid: str, task_ids: Sequence[str], job: str, *, dead_retention_ms: int
    ) -> Call[list[errors.CodeqError | None]]:
        """Take back what that job has replayed and nobody has claimed since; what was wrong with each, or None."""
        return self._call(
            "recall",
            lambda reply: [replies.refusal(line) for line in reply],
            ghosts=self._tenant(tid).ghosts,
            events=self._partition(tid).events,
            expiry=self._tenant(tid).expiry,
            root=self._root(tid),
            tid=tid,
            job=job,
            dead_retention_ms=dead_retention_ms,
            clock=self._now(),
            args=task_ids,
        )

    def _replay(
        self, tid: str, task_ids: Sequence[str], blobs: Sequence[bytes], job: str, read: Callable[[Any], list[R]]
    ) -> Call[list[R]]:
        return self._call(
            "replay",
            read,
            ghosts=self._tenant(tid).ghosts,
            events=self._partition(tid).events,
            expiry=self._tenant(tid).expiry,
            waiting=self._partition(tid).waiting,
            woken=self._partition(tid).woken,
            root=self._root(tid),
            tid=tid,
            job=job,
            clock=self._now(),
            args=[word for pair in zip(task_ids, blobs, strict=True) for word in pair],
        )
