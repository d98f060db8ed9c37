"""Ranked queues, for Django code that keeps its tasks in rows of its own.

`enqueue` writes to a table in the caller's transaction. When the transaction commits, the entry moves to Redis. If
Redis is down or the process dies first, the periodic task `sweep` moves it. So a failure of Redis never fails the
transaction, and a transaction that is rolled back enqueues nothing.

If the reply of Redis is lost, the entry is moved again. If it is still ready, it keeps its position. If it was finished
in the meantime, it is served again.
"""

from __future__ import annotations

import logging
import socket
import warnings
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
from tenants.domain import TenantSnapshot

log = logging.getLogger(__name__)

TaskId = str | int | UUID
LOCK_SECONDS = 300
LOCK_LIMIT_SECONDS = 86_400


class Rank(IntEnum):
    """Names for two ranks. Any integer from 0 to 100 is a rank; the highest is served first."""

    HIGH = 100
    NORMAL = 50


class RankedQueue:
    """A ranked queue for the use of one worker. `holder` identifies the worker in its locks.

    Create one object per worker thread; it is cheap and holds no connection. All methods except `enqueue` raise
    Unavailable if Redis does not answer.
    """

    def __init__(self, tenant: TenantSnapshot, name: str, *, lock_seconds: int = LOCK_SECONDS) -> None:
        validation.check_command(name, "name")
        if not 1 <= lock_seconds <= LOCK_LIMIT_SECONDS:
            raise errors.InvalidRequest(f"lock_seconds: 1 to {LOCK_LIMIT_SECONDS}")
        self.tid, self.name, self.lock_seconds = tenant.tid, name, lock_seconds
        self.holder = f"{socket.gethostname()}:{uuid4()}"

    def enqueue(self, task_id: TaskId, priority: int = Rank.NORMAL) -> None:
        """Enqueue a task when the transaction commits.

        A ready task keeps its position, or moves to the back of a higher rank. A delayed task becomes ready at once. A
        locked task is served again when its lock is released.
        """
        if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= 100:
            raise errors.InvalidRequest("priority: an integer from 0 to 100")
        row = RankedEntry.objects.create(
            tenant_id=self.tid, queue=self.name, task_id=_check_task_id(task_id), rank=int(priority)
        )
        # Not a partial: Django logs the __qualname__ of a robust hook that fails, which a partial does not have.
        transaction.on_commit(lambda: _try_to_move_to_redis(self.tid, self.name, row.pk), robust=True)

    def dequeue(self) -> str | None:
        """Lock the next task and return its id, or None if no task is free.

        When the lock expires, the task is ready again, at the back of its rank.
        """
        return ranked_engine.dequeue(
            engine(), self.tid, self.name, self.holder, lock_seconds=self.lock_seconds
        ).run_sync()

    def requeue_with_delay(self, task_id: TaskId, delay: float) -> bool:
        """Release the lock; the task is ready again at its rank after `delay` seconds.

        Return False and change nothing if the lock has expired or another worker has it.
        """
        horizon = conf().queues.max_schedule_ahead_seconds
        if not 0 <= delay <= horizon:
            raise errors.InvalidRequest(f"delay: 0 to {horizon} seconds")
        delay_ms = round(delay * 1000)
        return ranked_engine.requeue(
            engine(), self.tid, self.name, _check_task_id(task_id), self.holder, delay_ms=delay_ms
        ).run_sync()

    def finish(self, task_id: TaskId) -> bool:
        """Remove a finished task and its lock.

        Return False and change nothing if this worker no longer has the lock.
        """
        return ranked_engine.finish(engine(), self.tid, self.name, _check_task_id(task_id), self.holder).run_sync()

    def release_lock(self, task_id: TaskId) -> bool:
        """Do the same as `finish`. This is the former name of `finish`, kept for one release."""
        warnings.warn("RankedQueue.release_lock has a new name: call finish.", DeprecationWarning, stacklevel=2)
        return self.finish(task_id)

    def renew_lock(self, task_id: TaskId) -> bool:
        """Extend the lock by its full length from now.

        Return False if this worker no longer has the lock; it must then stop its work on the task.
        """
        return ranked_engine.renew(
            engine(), self.tid, self.name, _check_task_id(task_id), self.holder, lock_seconds=self.lock_seconds
        ).run_sync()

    def break_lock(self, task_id: TaskId) -> bool:
        """Break the lock of any worker, and make the task ready again. For operators.

        Return False if the task is not locked.
        """
        return ranked_engine.break_lock(engine(), self.tid, self.name, _check_task_id(task_id)).run_sync()

    def is_locked(self, task_id: TaskId) -> bool:
        return ranked_engine.is_locked(engine(), self.tid, self.name, _check_task_id(task_id)).run_sync()

    def queue_size(self) -> int:
        """Return the number of waiting tasks, including delayed ones and without locked ones."""
        return ranked_engine.size(engine(), self.tid, self.name).run_sync()


def has_waiting_entries() -> bool:
    """Whether the table has entries that Redis does not have yet."""
    return RankedEntry.objects.exists()


def sweep(may_continue: Callable[[], bool]) -> int:
    """Move the entries of the table to Redis, oldest first. Return their number.

    `may_continue` is called before each queue. If Redis rejects the entries of a queue, for example because its key has
    another type, the error is logged and the other queues are processed.
    """
    moved, last_pk = 0, 0
    while rows := list(RankedEntry.objects.filter(pk__gt=last_pk).order_by("pk")[:CHUNK]):
        last_pk = rows[-1].pk
        pks_by_queue = defaultdict[tuple[str, str], list[int]](list)
        for row in rows:
            pks_by_queue[str(row.tenant_id), row.queue].append(row.pk)
        reachable = set(reachable_tenants(tid for tid, _ in pks_by_queue))
        for (tid, name), pks in pks_by_queue.items():
            if not may_continue():
                return moved
            if tid not in reachable:
                continue
            try:
                moved += _move_to_redis(tid, name, pks)
            except redis.exceptions.ResponseError:
                log.exception("ranked queue %s of tenant %s: Redis rejects its entries", name, tid)
    return moved


def _move_to_redis(tid: str, name: str, pks: Sequence[int]) -> int:
    """Enqueue rows and delete them. Return their number.

    Rows that another process is moving at the same time are skipped.
    """
    with transaction.atomic():
        rows = list(RankedEntry.objects.select_for_update(skip_locked=True).filter(pk__in=pks).order_by("pk"))
        if rows:
            ranked_engine.enqueue(engine(), tid, name, [(row.task_id, row.rank) for row in rows]).run_sync()
            RankedEntry.objects.filter(pk__in=[row.pk for row in rows]).delete()
    return len(rows)


def _try_to_move_to_redis(tid: str, name: str, pk: int) -> None:
    try:
        _move_to_redis(tid, name, [pk])
    except errors.Unavailable as error:
        log.warning("ranked queue %s of tenant %s: an entry waits for Redis: %s", name, tid, error.detail)


def _check_task_id(task_id: TaskId) -> str:
    """Return the id as text. Raise InvalidRequest if it cannot be part of a Redis key."""
    text = str(task_id)
    validation.check_command(text, "task_id")
    return text
