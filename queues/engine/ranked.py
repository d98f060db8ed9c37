"""Ranked queues: one sorted set each, of ids whose tasks are elsewhere (in the caller's own database)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from queues.engine import keys
from queues.engine.call import Call
from queues.engine.options import CHUNK
from queues.engine.verbs import Verbs

log = logging.getLogger(__name__)


class Ranked(Verbs):
    """Enqueue, dequeue, requeue, release and renew; size and lock."""

    def ranked_enqueue(self, tid: str, name: str, entries: Sequence[tuple[str, int]]) -> Call[list[bool]]:
        """Put ids in line, each with its rank: whether it came, or moved up; False = it was there already."""
        return self._call(
            "ranked_enqueue",
            lambda reply: [flag == 1 for flag in reply],
            line=self._line(tid, name),
            clock=self._now(),
            args=[word for entry in entries for word in entry],
        )

    def ranked_dequeue(self, tid: str, name: str, holder: str, *, lock_seconds: int, skip: int = 0) -> Call[str | None]:
        """Lock the first entry that nobody holds, and return its id; None where there is none."""

        def read(reply: Sequence[Any]) -> str | Call[str | None] | None:
            word, found, dropped = reply
            if dropped:
                log.error("ranked queue %s of tenant %s: %d entries were no ids, and are dropped", name, tid, dropped)
            if word == b"MORE":
                return self.ranked_dequeue(tid, name, holder, lock_seconds=lock_seconds, skip=int(found))
            return found.decode() if word == b"TAKEN" else None

        return self._call(
            "ranked_dequeue",
            list,
            line=self._line(tid, name),
            holder=holder,
            lock_seconds=lock_seconds,
            skip=skip,
            limit=CHUNK,
            clock=self._now(),
        ).follow(read)

    def ranked_requeue(self, tid: str, name: str, task_id: str, holder: str, *, delay_ms: int) -> Call[bool]:
        """Give an entry back, to be in line again after a delay. False: the lock is not this holder's."""
        return self._held("ranked_requeue", tid, name, id=task_id, holder=holder, delay_ms=delay_ms)

    def ranked_release(self, tid: str, name: str, task_id: str, holder: str) -> Call[bool]:
        """The entry is done with. Without a holder: whoever has the lock loses it, and the entry is in line again."""
        return self._held("ranked_release", tid, name, id=task_id, holder=holder)

    def ranked_renew(self, tid: str, name: str, task_id: str, holder: str, *, lock_seconds: int) -> Call[bool]:
        """Have the lock end so many seconds from now. False: it is not this holder's."""
        return self._held("ranked_renew", tid, name, id=task_id, holder=holder, lock_seconds=lock_seconds)

    def ranked_size(self, tid: str, name: str) -> Call[int]:
        """How many entries nobody holds, the delayed among them."""
        return self._call("ranked_size", int, line=self._line(tid, name), clock=self._now())

    def ranked_locked(self, tid: str, name: str, task_id: str) -> Call[bool]:
        return self._call("ranked_locked", bool, line=self._line(tid, name), id=task_id)

    def _held(self, verb: str, tid: str, name: str, **named: Any) -> Call[bool]:
        return self._call(verb, bool, line=self._line(tid, name), clock=self._now(), **named)

    def _line(self, tid: str, name: str) -> str:
        return keys.ranked(self._root(tid), tid, name)
