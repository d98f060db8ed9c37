"""What beat does to the queues: what is due moves, what is over goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from codeq_site import errors
from queues.engine import keys
from queues.engine.call import Call
from queues.engine.options import CHUNK
from queues.engine.verbs import Verbs, seed

R = TypeVar("R")


class Repairing(Verbs):
    """Promote, reap and purge, and where they are needed."""

    def promote(self, tid: str, command: str, limit: int = 250) -> Call[tuple[int, int]]:
        """Make due tasks ready: how many moved, and when the queue next has something due (0 = nothing)."""
        root, partition = self._root(tid), self._partition(tid)
        return self._call(
            "promote",
            lambda reply: (int(reply[0]), int(reply[1])),
            due=partition.due,
            waiting=partition.waiting,
            woken=partition.woken,
            root=root,
            queue=keys.of_queue(root, tid, command).name,
            limit=limit,
            clock=self._now(),
        )

    def reap(
        self, tid: str, command: str, limit: int = 250, *, dead_retention_ms: int | None = None
    ) -> Call[tuple[int, int, int]]:
        """Give back tasks whose lease is over: expired, of those dead, and when the queue next has something due."""
        root, partition = self._root(tid), self._partition(tid)
        return self._call(
            "reap",
            lambda reply: (int(reply[0]), int(reply[1]), int(reply[2])),
            due=partition.due,
            waiting=partition.waiting,
            woken=partition.woken,
            events=partition.events,
            expiry=keys.of_tenant(root, tid).expiry,
            root=root,
            queue=keys.of_queue(root, tid, command).name,
            limit=limit,
            seed=seed(),
            default_backoff=self.options.backoff_line,
            dead_retention_ms=dead_retention_ms or self.options.dead_retention_ms,
            clock=self._now(),
        )

    def visits(self, partition: int, limit: int = CHUNK) -> Call[list[tuple[str, str]]]:
        """The queues of a partition in which something is due now: tid and command."""

        def read(reply: list[bytes]) -> list[tuple[str, str]]:
            return [(tid, command) for tid, _, command in (name.decode().partition(":") for name in reply)]

        return self._call("visits", read, due=keys.of_partition(partition).due, limit=limit, clock=self._now())

    def expired(self, tid: str, *, before_ms: int | None = None, limit: int = CHUNK) -> Call[tuple[int, list[str]]]:
        """Redis' now, and the ended tasks whose retention is over."""
        return self._call(
            "expired",
            lambda reply: (int(reply[0]), [task_id.decode() for task_id in reply[1:]]),
            expiry=self._tenant(tid).expiry,
            before_ms="" if before_ms is None else before_ms,
            limit=limit,
            clock=self._now(),
        )

    def purge(self, tid: str, task_ids: Sequence[str], *, before_ms: int | None = None) -> Call[list[bool]]:
        """Remove ended tasks; with `before_ms`, only those whose retention was over by then. Which ones went."""
        return self._purge(tid, task_ids, before_ms, lambda reply: [flag == 1 for flag in reply])

    def purge_dead(self, tid: str, task_ids: Sequence[str]) -> Call[list[errors.CodeqError | None]]:
        """Remove dead letters and nothing else; what was wrong with each, or None."""
        words: dict[int, type[errors.CodeqError]] = {0: errors.NotDead, -1: errors.TaskNotFound}
        return self._purge(
            tid, task_ids, None, lambda reply: [words[flag]() if flag in words else None for flag in reply], only_dead=1
        )

    def _purge(
        self,
        tid: str,
        task_ids: Sequence[str],
        before_ms: int | None,
        read: Callable[[Any], list[R]],
        *,
        only_dead: int = 0,
    ) -> Call[list[R]]:
        return self._call(
            "purge",
            read,
            events=self._partition(tid).events,
            expiry=self._tenant(tid).expiry,
            root=self._root(tid),
            tid=tid,
            before_ms="" if before_ms is None else before_ms,
            only_dead=only_dead,
            clock=self._now(),
            args=task_ids,
        )
