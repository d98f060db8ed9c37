"""What this process remembers, so that it need not ask: three Bloom filters, each saving a round trip or an upload.

- idempotency: a key that may be known is looked up first, so a duplicate does not send its payload again.
- ghost: a task known to be gone is answered `task not found` without asking.
- cleanup: what was removed already is not sent again.

Answers are the same with and without them (`CODEQ_QUEUES_BLOOM=0`): a false positive of the first costs a look-up;
of the second it is rarer than 1e-12; of the third it puts a removal off to the next pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

from core.conf import conf
from core.errors import CodeqError, TaskNotFound
from core.redis.script_call import ScriptCall
from queues.bloom import RotatingFilter
from queues.domain import Enqueued, NewTask

R = TypeVar("R")
LEFT_OUT_AT_MOST = 10_000


class Filters:
    def __init__(self) -> None:
        self.idempotency = RotatingFilter(1_000_000, 0.01, 30 * 60)
        self.ghost = RotatingFilter(2_000_000, 1e-12, 6 * 3600)
        self.cleanup = RotatingFilter(2_000_000, 0.01, 6 * 3600)
        self._left_out: set[str] = set()

    def lookup_then_store(
        self,
        tid: str,
        tasks: Sequence[NewTask],
        known: Callable[[str, Sequence[NewTask]], ScriptCall[list[Enqueued | None]]],
        store: Callable[[Sequence[NewTask]], ScriptCall[list[Enqueued | CodeqError]]],
    ) -> ScriptCall[list[Enqueued | CodeqError]]:
        """Look up the tasks whose idempotency key may have been used, and store the others."""
        keys = {at: f"{tid} {task.idempotency_key}" for at, task in enumerate(tasks) if task.idempotency_key}
        if not keys:
            return store(tasks)
        maybe = [at for at, key in keys.items() if key in self.idempotency]
        for key in keys.values():
            self.idempotency.add(key)
        if not maybe:
            return store(tasks)

        def store_rest(
            found: list[Enqueued | None],
        ) -> ScriptCall[list[Enqueued | CodeqError]] | list[Enqueued | CodeqError]:
            answers: dict[int, Enqueued | CodeqError | None] = dict(zip(maybe, found, strict=True))
            rest = [at for at in range(len(tasks)) if answers.get(at) is None]

            def merge(stored: list[Enqueued | CodeqError]) -> list[Enqueued | CodeqError]:
                answers.update(zip(rest, stored, strict=True))
                return [item for at in range(len(tasks)) if (item := answers[at])]

            return store([tasks[at] for at in rest]).and_then(merge) if rest else merge([])

        look_up = known(tid, [tasks[at] for at in maybe])
        return look_up.and_then(store_rest)

    def unless_deleted(self, tid: str, task_id: str, call: Callable[[], ScriptCall[R]]) -> ScriptCall[R]:
        """The call, unless the task is known to be gone; if the call finds that it is, that is remembered."""
        key = f"{tid} {task_id}"
        if key in self.ghost:
            raise TaskNotFound
        return call().on_error(TaskNotFound, lambda: self.ghost.add(key))

    def is_gone(self, tid: str, task_id: str) -> bool:
        return f"{tid} {task_id}" in self.ghost

    def was_removed(self, tid: str, task_id: str) -> bool:
        """Whether to leave the id out of this pass. The same id is never left out of two passes in a row, so a false
        positive waits for one pass, and cannot fill the front of the line."""
        key = f"{tid} {task_id}"
        if key not in self.cleanup:
            return False
        if key in self._left_out:
            self._left_out.discard(key)
            return False
        if len(self._left_out) >= LEFT_OUT_AT_MOST:
            self._left_out.clear()
        self._left_out.add(key)
        return True

    def note_gone(self, tid: str, task_ids: Sequence[str], went: Sequence[bool]) -> None:
        for task_id, is_gone in zip(task_ids, went, strict=True):
            if is_gone:
                self.ghost.add(f"{tid} {task_id}")
                self.cleanup.add(f"{tid} {task_id}")


class NoFilters(Filters):
    """Remembers nothing: every question is asked."""

    def __init__(self) -> None:
        pass

    def lookup_then_store(
        self,
        tid: str,
        tasks: Sequence[NewTask],
        known: Callable[[str, Sequence[NewTask]], ScriptCall[list[Enqueued | None]]],
        store: Callable[[Sequence[NewTask]], ScriptCall[list[Enqueued | CodeqError]]],
    ) -> ScriptCall[list[Enqueued | CodeqError]]:
        return store(tasks)

    def unless_deleted(self, tid: str, task_id: str, call: Callable[[], ScriptCall[R]]) -> ScriptCall[R]:
        return call()

    def is_gone(self, tid: str, task_id: str) -> bool:
        return False

    def was_removed(self, tid: str, task_id: str) -> bool:
        return False

    def note_gone(self, tid: str, task_ids: Sequence[str], went: Sequence[bool]) -> None:
        pass


@cache
def filters() -> Filters:
    return Filters() if conf().queues.bloom else NoFilters()
