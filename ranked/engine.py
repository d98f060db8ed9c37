"""Scripts of ranked queues.

A ranked queue is one sorted set of ids. The tasks are rows of the caller's own database.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.redis.script_call import ScriptCall
from queues.engine import keys, script_loader
from queues.engine.engine import Engine
from queues.engine.options import CHUNK

log = logging.getLogger(__name__)
script_loader.DIRECTORIES.append(Path(__file__).parent / "lua")


def enqueue(engine: Engine, tid: str, name: str, entries: Sequence[tuple[str, int]]) -> ScriptCall[list[bool]]:
    """Add entries, each an id and its rank. Return False for each that kept its position.

    That is an entry that was ready already, at this rank or a higher one.
    """
    return engine.prepare(
        "ranked_enqueue",
        lambda reply: [outcome == 1 for outcome in reply],
        queue=_queue_key(engine, tid, name),
        clock=engine.clock_argument(),
        args=[arg for entry in entries for arg in entry],
    )


def dequeue(
    engine: Engine, tid: str, name: str, holder: str, *, lock_seconds: int, skip: int = 0
) -> ScriptCall[str | None]:
    """Lock the first ready entry that is not locked, and return its id.

    Return None if no entry is free.

    `skip` is the number of ready entries that are known to be locked. A call searches CHUNK entries; if all of them are
    locked, the next call continues behind them.
    """

    def decode(reply: Sequence[Any]) -> str | ScriptCall[str | None] | None:
        word, value, dropped = reply
        if dropped:
            log.error("ranked queue %s of tenant %s: dropped %d entries that are not valid ids", name, tid, dropped)
        if word == b"MORE":
            return dequeue(engine, tid, name, holder, lock_seconds=lock_seconds, skip=int(value))
        return value.decode() if word == b"TAKEN" else None

    return engine.prepare(
        "ranked_dequeue",
        list,
        queue=_queue_key(engine, tid, name),
        holder=holder,
        lock_seconds=lock_seconds,
        skip=skip,
        limit=CHUNK,
        clock=engine.clock_argument(),
    ).and_then(decode)


def requeue(engine: Engine, tid: str, name: str, task_id: str, holder: str, *, delay_ms: int) -> ScriptCall[bool]:
    """Release a lock; the entry is ready again after the delay.

    Return False if the holder does not have the lock.
    """
    return _prepare_for_holder(engine, "ranked_requeue", tid, name, id=task_id, holder=holder, delay_ms=delay_ms)


def finish(engine: Engine, tid: str, name: str, task_id: str, holder: str) -> ScriptCall[bool]:
    """Remove a finished entry and its lock. Return False if the holder does not have the lock."""
    return engine.prepare("ranked_finish", bool, queue=_queue_key(engine, tid, name), id=task_id, holder=holder)


def break_lock(engine: Engine, tid: str, name: str, task_id: str) -> ScriptCall[bool]:
    """Remove the lock of any holder, and make the entry ready again.

    Return False if it is not locked.
    """
    queue, clock = _queue_key(engine, tid, name), engine.clock_argument()
    return engine.prepare("ranked_break_lock", bool, queue=queue, id=task_id, clock=clock)


def renew(engine: Engine, tid: str, name: str, task_id: str, holder: str, *, lock_seconds: int) -> ScriptCall[bool]:
    """Extend a lock to `lock_seconds` from now.

    Return False if the holder does not have the lock.
    """
    return _prepare_for_holder(engine, "ranked_renew", tid, name, id=task_id, holder=holder, lock_seconds=lock_seconds)


def size(engine: Engine, tid: str, name: str) -> ScriptCall[int]:
    """Return the number of ready and delayed entries."""
    return engine.prepare("ranked_size", int, queue=_queue_key(engine, tid, name), clock=engine.clock_argument())


def is_locked(engine: Engine, tid: str, name: str, task_id: str) -> ScriptCall[bool]:
    return engine.prepare("ranked_locked", bool, queue=_queue_key(engine, tid, name), id=task_id)


def _prepare_for_holder(engine: Engine, script_name: str, tid: str, name: str, **arguments: Any) -> ScriptCall[bool]:
    """Return the call of a script that returns 1 if the holder has the lock, and 0 otherwise."""
    queue, clock = _queue_key(engine, tid, name), engine.clock_argument()
    return engine.prepare(script_name, bool, queue=queue, clock=clock, **arguments)


def _queue_key(engine: Engine, tid: str, name: str) -> str:
    return keys.ranked(engine.root(tid), tid, name)
