"""Three Bloom filters per process. Each saves a round trip or an upload.

- idempotency: a key that may have been used is looked up first, so that the payload of a duplicate is not sent to Redis
  again. A false positive costs one look-up.
- deleted: a request for a deleted task gets `task not found` without a call to Redis. False positives are rarer than
  1e-12.
- cleanup: a deleted task is not sent to the cleanup script again. A false positive delays a deletion until the next
  pass.

Results are the same without the filters (`CODEQ_QUEUES_BLOOM=0`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TypeVar

from core.conf import conf
from core.errors import CodeqError, TaskNotFound
from core.redis.script_call import ScriptCall
from queues.batch import merge_in_order
from queues.bloom import RotatingFilter
from queues.domain import Enqueued, NewTask

R = TypeVar("R")
MAX_SKIPPED = 10_000


class Filters:
    """The filters of one process. Disabled filters have no capacity, so they contain nothing."""

    def __init__(self, *, is_enabled: bool = True) -> None:
        self.idempotency = RotatingFilter(
            1_000_000 if is_enabled else 0, false_positive_rate=0.01, rotate_seconds=30 * 60
        )
        self.deleted = RotatingFilter(
            2_000_000 if is_enabled else 0, false_positive_rate=1e-12, rotate_seconds=6 * 3600
        )
        self.cleanup = RotatingFilter(2_000_000 if is_enabled else 0, false_positive_rate=0.01, rotate_seconds=6 * 3600)
        self._skipped: set[str] = set()

    def lookup_then_store(
        self,
        tid: str,
        tasks: Sequence[NewTask],
        lookup: Callable[[str, Sequence[NewTask]], ScriptCall[list[Enqueued | None]]],
        store: Callable[[Sequence[NewTask]], ScriptCall[list[Enqueued | CodeqError]]],
    ) -> ScriptCall[list[Enqueued | CodeqError]]:
        """Look up the tasks whose idempotency key may have been used, then store the new tasks."""
        keys = {
            position: f"{tid} {task.idempotency_key}" for position, task in enumerate(tasks) if task.idempotency_key
        }
        if not keys:
            return store(tasks)
        possible_duplicates = [position for position, key in keys.items() if key in self.idempotency]
        for key in keys.values():
            self.idempotency.add(key)
        if not possible_duplicates:
            return store(tasks)

        def store_new(
            existing: list[Enqueued | None],
        ) -> ScriptCall[list[Enqueued | CodeqError]] | list[Enqueued | CodeqError]:
            duplicates: dict[int, Enqueued | CodeqError] = {
                position: task for position, task in zip(possible_duplicates, existing, strict=True) if task is not None
            }
            new = [task for position, task in enumerate(tasks) if position not in duplicates]
            if not new:
                return list(duplicates.values())
            return store(new).and_then(partial(merge_in_order, duplicates))

        return lookup(tid, [tasks[position] for position in possible_duplicates]).and_then(store_new)

    def unless_deleted(self, tid: str, task_id: str, call: Callable[[], ScriptCall[R]]) -> ScriptCall[R]:
        """Return the call, unless this process knows that the task has been deleted.

        Raises TaskNotFound for such a task. If the call raises TaskNotFound, the task is remembered as deleted.
        """
        key = f"{tid} {task_id}"
        if key in self.deleted:
            raise TaskNotFound
        return call().on_error(TaskNotFound, lambda: self.deleted.add(key))

    def is_deleted(self, tid: str, task_id: str) -> bool:
        """Return whether the task has been deleted, as far as this process knows."""
        return f"{tid} {task_id}" in self.deleted

    def skips_cleanup(self, tid: str, task_id: str) -> bool:
        """Return whether this cleanup pass skips the task because it has probably been deleted.

        A task that was skipped is not skipped in the next pass, so a false positive is deleted there. Otherwise false
        positives would accumulate until they filled every pass. Only if more than MAX_SKIPPED tasks were skipped can a
        task be skipped again, because the memory of skipped tasks is then cleared.
        """
        key = f"{tid} {task_id}"
        if key not in self.cleanup:
            return False
        if key in self._skipped:
            self._skipped.discard(key)
            return False
        if len(self._skipped) >= MAX_SKIPPED:
            self._skipped.clear()
        self._skipped.add(key)
        return True

    def remember_deleted(self, tid: str, task_ids: Sequence[str], are_deleted: Sequence[bool]) -> None:
        """Remember the tasks that have been deleted."""
        for task_id, is_deleted in zip(task_ids, are_deleted, strict=True):
            if is_deleted:
                self.deleted.add(f"{tid} {task_id}")
                self.cleanup.add(f"{tid} {task_id}")


@cache
def filters() -> Filters:
    """Return the filters of this process."""
    return Filters(is_enabled=conf().queues.bloom)
