"""Three Bloom filters, with which a process saves round trips and uploads to Redis.

- `idempotency`: keys that were used. Such a key is looked up first, so a duplicate does not send its payload again.
- `ghost`: tasks that do not exist any more. A request for one fails with `task not found` without a round trip.
- `cleanup`: tasks that a cleanup has removed. Their ids are not sent again.

Answers are the same with and without the filters (`CODEQ_QUEUES_BLOOM=0`). A false positive of `idempotency` costs a
lookup, one of `cleanup` delays a removal until the next pass, and one of `ghost` has a probability of 1e-12.
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
MAX_LEFT_OUT = 10_000


class Filters:
    """The three filters. Disabled filters have no capacity, so they contain nothing."""

    def __init__(self, *, is_enabled: bool = True) -> None:
        self.idempotency = RotatingFilter(1_000_000 if is_enabled else 0, 0.01, 30 * 60)
        self.ghost = RotatingFilter(2_000_000 if is_enabled else 0, 1e-12, 6 * 3600)
        self.cleanup = RotatingFilter(2_000_000 if is_enabled else 0, 0.01, 6 * 3600)
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
        maybe_known = [at for at, key in keys.items() if key in self.idempotency]
        for key in keys.values():
            self.idempotency.add(key)
        if not maybe_known:
            return store(tasks)

        def store_rest(
            existing: list[Enqueued | None],
        ) -> ScriptCall[list[Enqueued | CodeqError]] | list[Enqueued | CodeqError]:
            answers = {at: item for at, item in zip(maybe_known, existing, strict=True) if item is not None}
            rest = [at for at in range(len(tasks)) if at not in answers]

            def merge(stored: list[Enqueued | CodeqError]) -> list[Enqueued | CodeqError]:
                in_order = answers | dict(zip(rest, stored, strict=True))
                return [in_order[at] for at in range(len(tasks))]

            return store([tasks[at] for at in rest]).and_then(merge) if rest else merge([])

        return known(tid, [tasks[at] for at in maybe_known]).and_then(store_rest)

    def unless_deleted(self, tid: str, task_id: str, call: Callable[[], ScriptCall[R]]) -> ScriptCall[R]:
        """Return the call, and add the task to `ghost` if the call fails with TaskNotFound.

        Raises TaskNotFound if the task is in `ghost` already.
        """
        key = f"{tid} {task_id}"
        if key in self.ghost:
            raise TaskNotFound
        return call().on_error(TaskNotFound, lambda: self.ghost.add(key))

    def is_gone(self, tid: str, task_id: str) -> bool:
        """Whether the task is in `ghost`."""
        return f"{tid} {task_id}" in self.ghost

    def was_removed(self, tid: str, task_id: str) -> bool:
        """Whether a cleanup leaves this task out, because an earlier one has removed it.

        A task is never left out of two passes in a row. A false positive is therefore removed one pass later, and false
        positives cannot fill the front of the expired tasks.
        """
        key = f"{tid} {task_id}"
        if key not in self.cleanup:
            return False
        if key in self._left_out:
            self._left_out.discard(key)
            return False
        if len(self._left_out) >= MAX_LEFT_OUT:
            self._left_out.clear()
        self._left_out.add(key)
        return True

    def note_gone(self, tid: str, task_ids: Sequence[str], went: Sequence[bool]) -> None:
        """Add the tasks that were deleted, for which `went` is true, to `ghost` and `cleanup`."""
        for task_id, is_gone in zip(task_ids, went, strict=True):
            if is_gone:
                self.ghost.add(f"{tid} {task_id}")
                self.cleanup.add(f"{tid} {task_id}")


@cache
def filters() -> Filters:
    """Return the filters of this process."""
    return Filters(is_enabled=conf().queues.bloom)
