"""The decorator of periodic tasks: each run takes a lock, and the last run is recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime

import redis.exceptions
from celery import shared_task
from django.conf import settings
from django.db import InterfaceError, OperationalError, connection
from django.db.models import F

from core.errors import CodeqError
from core.periodic_lock import PeriodicTaskLock
from queues.models import PeriodicTaskRun

log = logging.getLogger(__name__)

# The errors of a server that is down or restarting. Any other error is a bug and goes to Celery unchanged.
OUTAGE_ERRORS = (redis.exceptions.RedisError, OperationalError, InterfaceError, CodeqError)
SKIPPED = "skipped: another run holds the lock"
# Name of the Celery task -> whether it may have work. Beat sends tasks without a check whenever they are due.
work_checks: dict[str, Callable[[], bool]] = {}


def periodic_task(
    name: str, *, lock_seconds: float = 10.0, has_work: Callable[[], bool] | None = None
) -> Callable[[Callable[[PeriodicTaskLock], str]], Callable[[], str]]:
    """Register a function as a Celery task that runs under a lock.

    The function receives the lock and returns a summary of its work. An outage of a server is logged in one line.
    Celery beat calls `has_work` before it sends the task, and omits the run if the check returns False. It still sends
    the task every IDLE_SECONDS (`codeq_site/beat.py`).
    """
    if has_work is not None:
        work_checks[name] = has_work

    def decorate(function: Callable[[PeriodicTaskLock], str]) -> Callable[[], str]:
        def task() -> str:
            started_at = datetime.now(UTC)
            try:
                lock = PeriodicTaskLock.acquire(name, lock_seconds)
                if lock is None:
                    return SKIPPED
                try:
                    outcome = function(lock)
                finally:
                    lock.release()
            except OUTAGE_ERRORS as error:
                log.warning("%s: ended early: %s", name, _one_line(error))
                _record_run(name, started_at, "", error)
                return "ended early"
            _record_run(name, started_at, outcome, None)
            return outcome

        task.__name__, task.__doc__, task.__module__ = function.__name__, function.__doc__, function.__module__
        registered: Callable[[], str] = shared_task(name=name)(task)
        return registered

    return decorate


def _record_run(task_name: str, started_at: datetime, outcome: str, error: Exception | None) -> None:
    label, every_seconds = next(
        ((label, seconds) for label, (name, seconds) in settings.PERIODIC_TASKS.items() if name == task_name),
        (task_name, 0.0),
    )
    ended_at = datetime.now(UTC)
    fields = {
        "task": task_name,
        "every_seconds": every_seconds,
        "started_at": started_at,
        "ended_at": ended_at,
        "outcome": outcome,
    }
    counts = {"runs": F("runs") + 1}
    if error is not None:
        counts["failures"] = F("failures") + 1
        fields |= {"failed_at": ended_at, "error": _one_line(error)}
    rows = PeriodicTaskRun.objects
    try:
        if not rows.filter(name=label).update(**fields, **counts):
            rows.get_or_create(name=label, defaults={**fields, "runs": 1, "failures": int(error is not None)})
    except (OperationalError, InterfaceError):
        # PostgreSQL is down. The run itself is not affected; only its record is missing.
        connection.close()


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
