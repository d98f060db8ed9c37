"""Ranked queues: one sorted set each, of ids whose tasks are elsewhere (in the caller's own database)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.redis.script_call import ScriptCall
from queues.engine import keys, script_loader
from queues.engine.base import Engine
from queues.engine.options import CHUNK

log = logging.getLogger(__name__)
script_loader.DIRECTORIES.append(Path(__file__).parent / "lua")


def enqueue(engine: Engine, tid: str, name: str, entries: Sequence[tuple[str, int]]) -> ScriptCall[list[bool]]:
    """Put ids in line, each with its rank: whether it came, or moved up; False = it was there already."""
    return engine.call(
        "ranked_enqueue",
        lambda reply: [flag == 1 for flag in reply],
        line=_line(engine, tid, name),
        clock=engine.now(),
        args=[word for entry in entries for word in entry],
    )


def dequeue(
    engine: Engine, tid: str, name: str, holder: str, *, lock_seconds: int, skip: int = 0
) -> ScriptCall[str | None]:
    """Lock the first entry that nobody holds, and return its id; None where there is none."""

    def read(reply: Sequence[Any]) -> str | ScriptCall[str | None] | None:
        word, found, dropped = reply
        if dropped:
            log.error("ranked queue %s of tenant %s: %d entries were no ids, and are dropped", name, tid, dropped)
        if word == b"MORE":
            return dequeue(engine, tid, name, holder, lock_seconds=lock_seconds, skip=int(found))
        return found.decode() if word == b"TAKEN" else None

    return engine.call(
        "ranked_dequeue",
        list,
        line=_line(engine, tid, name),
        holder=holder,
        lock_seconds=lock_seconds,
        skip=skip,
        limit=CHUNK,
        clock=engine.now(),
    ).and_then(read)


def requeue(engine: Engine, tid: str, name: str, task_id: str, holder: str, *, delay_ms: int) -> ScriptCall[bool]:
    """Give an entry back, to be in line again after a delay. False: the lock is not this holder's."""
    return _held(engine, "ranked_requeue", tid, name, id=task_id, holder=holder, delay_ms=delay_ms)


def release(engine: Engine, tid: str, name: str, task_id: str, holder: str) -> ScriptCall[bool]:
    """The entry is done with. Without a holder: whoever has the lock loses it, and the entry is in line again."""
    return _held(engine, "ranked_release", tid, name, id=task_id, holder=holder)


def renew(engine: Engine, tid: str, name: str, task_id: str, holder: str, *, lock_seconds: int) -> ScriptCall[bool]:
    """Have the lock end so many seconds from now. False: it is not this holder's."""
    return _held(engine, "ranked_renew", tid, name, id=task_id, holder=holder, lock_seconds=lock_seconds)


def size(engine: Engine, tid: str, name: str) -> ScriptCall[int]:
    """How many entries nobody holds, the delayed among them."""
    return engine.call("ranked_size", int, line=_line(engine, tid, name), clock=engine.now())


def locked(engine: Engine, tid: str, name: str, task_id: str) -> ScriptCall[bool]:
    return engine.call("ranked_locked", bool, line=_line(engine, tid, name), id=task_id)


def _held(engine: Engine, verb: str, tid: str, name: str, **named: Any) -> ScriptCall[bool]:
    return engine.call(verb, bool, line=_line(engine, tid, name), clock=engine.now(), **named)


def _line(engine: Engine, tid: str, name: str) -> str:
    return keys.ranked(engine.root(tid), tid, name)
