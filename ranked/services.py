"""Ranked queues: for Django code whose tasks are rows of its own, and that only has to know which one is next.

What is enqueued goes into a table first, within the caller's transaction, and to Redis when that has been committed;
where Redis cannot take it then, or the process dies in between, beat hands it over. So a transaction never fails for
Redis' sake, and one that is rolled back has enqueued nothing. Should an answer of Redis get lost, an entry may be
handed over twice: one that is still in line keeps its place, one that was done by then is done again.
"""

from __future__ import annotations

import logging
import socket
from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import IntEnum
from uuid import UUID, uuid4

import redis.exceptions
from django.db import transaction

from core import errors
from core.conf import conf
from core.redis.connections import reachable_tenants
from queues import validation
from queues.current_engine import engine
from queues.engine.options import CHUNK
from ranked import engine as ranked_engine
from ranked.models import RankedEntry
from tenants.tenant import Tenant

log = logging.getLogger(__name__)

TaskId = str | int | UUID
LOCK_SECONDS = 300
LOCK_LIMIT_SECONDS = 86_400


class Rank(IntEnum):
    """Any whole number from 0 to 100 is a rank; the highest is served first."""

    HIGH = 100
    NORMAL = 50


class RankedQueue:
    """One worker's sight of a ranked queue: locks are its own, by the name it has in `holder`.

    So every thread that works makes one for itself; it costs nothing, and holds no connection. All methods raise
    Unavailable where Redis cannot be asked, but for `enqueue`, which then leaves it to beat.
    """

    def __init__(self, tenant: Tenant, name: str, *, lock_seconds: int = LOCK_SECONDS) -> None:
        validation.check_command(name, "name")
        if not 1 <= lock_seconds <= LOCK_LIMIT_SECONDS:
            raise errors.InvalidRequest(f"lock_seconds: 1 to {LOCK_LIMIT_SECONDS}")
        self.tid, self.name, self.lock_seconds = tenant.tid, name, lock_seconds
        self.holder = f"{socket.gethostname()}:{uuid4()}"

    def enqueue(self, task_id: TaskId, priority: int = Rank.NORMAL) -> None:
        """Put a task in line once the transaction is committed.

        One that is in line keeps its place, or goes to the back of a higher rank; one that is delayed is in line at
        once; one that somebody is at work on is in line for when its lock is given up.
        """
        if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= 100:
            raise errors.InvalidRequest("priority: a whole number from 0 to 100")
        row = RankedEntry.objects.create(
            tenant_id=self.tid, queue=self.name, task_id=_word(task_id), rank=int(priority)
        )
        # A lambda: a robust hook that fails is logged by its __qualname__, which a partial does not have.
        transaction.on_commit(lambda: _hand_over_or_leave(self.tid, self.name, row.pk), robust=True)

    def dequeue(self) -> str | None:
        """Lock the next task and return its id; None where nobody waits.

        Until the lock ends nobody else gets it; then it is in line again, at the back of its rank.
        """
        return ranked_engine.dequeue(
            engine(), self.tid, self.name, self.holder, lock_seconds=self.lock_seconds
        ).run_sync()

    def requeue_with_delay(self, task_id: TaskId, delay: float) -> bool:
        """Give up the lock, and have the task in line again after so many seconds, at its rank.

        False, and nothing changes, where the lock is not this worker's: it is somebody else's task now.
        """
        horizon = conf().queues.max_schedule_ahead_seconds
        if not 0 <= delay <= horizon:
            raise errors.InvalidRequest(f"delay: 0 to {horizon} seconds")
        delay_ms = round(delay * 1000)
        return ranked_engine.requeue(
            engine(), self.tid, self.name, _word(task_id), self.holder, delay_ms=delay_ms
        ).run_sync()

    def release_lock(self, task_id: TaskId) -> bool:
        """The task is done with. False, and nothing changes, where the lock is not this worker's."""
        return ranked_engine.release(engine(), self.tid, self.name, _word(task_id), self.holder).run_sync()

    def renew_lock(self, task_id: TaskId) -> bool:
        """Have the lock last as long again from now. False where it is not this worker's: stop working on it."""
        word = _word(task_id)
        return ranked_engine.renew(
            engine(), self.tid, self.name, word, self.holder, lock_seconds=self.lock_seconds
        ).run_sync()

    def break_lock(self, task_id: TaskId) -> bool:
        """For operators: take a task from whoever holds it, and put it in line again. False where nobody does."""
        return ranked_engine.release(engine(), self.tid, self.name, _word(task_id), "").run_sync()

    def is_locked(self, task_id: TaskId) -> bool:
        """Whether anybody is at work on it."""
        return ranked_engine.locked(engine(), self.tid, self.name, _word(task_id)).run_sync()

    def queue_size(self) -> int:
        """How many tasks nobody is at work on, the delayed among them."""
        return ranked_engine.size(engine(), self.tid, self.name).run_sync()


def sweep(may_go_on: Callable[[], bool]) -> int:
    """Hand over what Redis has not got, the oldest first; how many went. One queue's trouble is no other's."""
    handed_over, after = 0, 0
    while rows := list(RankedEntry.objects.filter(pk__gt=after).order_by("pk")[:CHUNK]):
        after = rows[-1].pk
        by_queue = defaultdict[tuple[str, str], list[int]](list)
        for row in rows:
            by_queue[str(row.tenant_id), row.queue].append(row.pk)
        there = set(reachable_tenants(tid for tid, _ in by_queue))
        for (tid, name), pks in by_queue.items():
            if not may_go_on():
                return handed_over
            if tid not in there:
                continue
            try:
                handed_over += _hand_over(tid, name, pks)
            except redis.exceptions.ResponseError:
                log.exception("ranked queue %s of tenant %s: Redis refuses what is to be enqueued", name, tid)
    return handed_over


def _hand_over(tid: str, name: str, pks: Sequence[int]) -> int:
    """Rows that somebody else is handing over right now are left to them."""
    with transaction.atomic():
        rows = list(RankedEntry.objects.select_for_update(skip_locked=True).filter(pk__in=pks).order_by("pk"))
        if rows:
            ranked_engine.enqueue(engine(), tid, name, [(row.task_id, row.rank) for row in rows]).run_sync()
            RankedEntry.objects.filter(pk__in=[row.pk for row in rows]).delete()
    return len(rows)


def _hand_over_or_leave(tid: str, name: str, pk: int) -> None:
    try:
        _hand_over(tid, name, [pk])
    except errors.Unavailable as error:
        log.warning("ranked queue %s of tenant %s: what was enqueued waits for Redis: %s", name, tid, error.detail)


def _word(task_id: TaskId) -> str:
    word = str(task_id)
    validation.check_command(word, "task_id")
    return word
