"""Beat's jobs: one run of each at a time, an outage is one log line, and the last run is on record for
operators.

The lock is an economy, not a guarantee: a process that is frozen past it may wake up and run beside the
next one. So every job's effects are safe on their own (unique rows, reservations, atomic scripts), and the
lock only keeps two runs from doing the same work.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

import redis.exceptions
from celery import shared_task
from django.apps import apps
from django.db import InterfaceError, OperationalError, connection
from django.db.models import F
from redis.lock import Lock

from codeq_site.errors import CodeqError
from codeq_site.redis import client, partitions
from queues.engine.keys import lock

log = logging.getLogger(__name__)

# What a server that is down, or coming back, makes of a run. Anything else is a bug and goes to Celery as
# it is.
OUTAGE = (redis.exceptions.RedisError, OperationalError, InterfaceError, CodeqError)
BUSY = "another run has the turn"


class Turn:
    """The right to run a job now. Ask `renew()` before each further piece of work; stop when it says no."""

    def __init__(self, held: Lock, seconds: float) -> None:
        self._held = held
        self._seconds = seconds
        self._renewed = time.monotonic()

    def renew(self) -> bool:
        if time.monotonic() - self._renewed < self._seconds / 4:
            return True
        try:
            self._held.extend(self._seconds, replace_ttl=True)
        except redis.exceptions.LockError:
            return False
        self._renewed = time.monotonic()
        return True

    def pass_on(self) -> None:
        """Let the next run begin, though this one still has something to finish."""
        try:
            self._held.release()
        except redis.exceptions.LockError:
            log.debug("the turn had passed already")


def take_turn(name: str, seconds: float) -> Turn | None:
    # In the first partition that is there: no job stops because one primary of a cluster is away. Should two processes
    # differ about which that is, both run.
    there = partitions()
    held = Lock(client(), lock(name, there[0] if there else 0), timeout=seconds, blocking=False, thread_local=False)
    return Turn(held, seconds) if held.acquire() else None


def job(name: str, *, turn_seconds: float = 10.0) -> Callable[[Callable[[Turn], str]], Callable[[], str]]:
    """Make a Celery task of a function that works while it has the turn, and says what it did."""

    def decorate(run: Callable[[Turn], str]) -> Callable[[], str]:
        def task() -> str:
            started = datetime.now(UTC)
            try:
                turn = take_turn(name, turn_seconds)
                if turn is None:
                    return BUSY
                try:
                    outcome = run(turn)
                finally:
                    turn.pass_on()
            except OUTAGE as error:
                log.warning("%s: ends early: %s", name, _one_line(error))
                _record(name, started, "", error)
                return "ended early"
            _record(name, started, outcome, None)
            return outcome

        task.__name__, task.__doc__, task.__module__ = run.__name__, run.__doc__, run.__module__
        registered: Callable[[], str] = shared_task(name=name)(task)
        return registered

    return decorate


def _record(name: str, started: datetime, outcome: str, error: Exception | None) -> None:
    from codeq_site.celery import SCHEDULE

    rows = apps.get_model("queues", "BeatJob").objects
    label, every = next(((label, every) for label, (task, every) in SCHEDULE.items() if task == name), (name, 0.0))
    ended = datetime.now(UTC)
    last = {
        "task": name,
        "every_seconds": every,
        "started_at": started,
        "ended_at": ended,
        "outcome": outcome,
    }
    counts = {"runs": F("runs") + 1}
    if error is not None:
        counts["failures"] = F("failures") + 1
        last |= {"failed_at": ended, "error": _one_line(error)}
    try:
        if not rows.filter(name=label).update(**last, **counts):
            rows.get_or_create(name=label, defaults={**last, "runs": 1, "failures": int(error is not None)})
    except (OperationalError, InterfaceError):
        connection.close()  # PostgreSQL is what is down: the run stands, only its record is missing


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
