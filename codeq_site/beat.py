"""The scheduler of Celery beat, which sends a periodic task only if it may have work.

A message costs 8 ms of CPU in beat, the broker and a worker, and a check 0.3 ms. Without work, each periodic task still
runs every IDLE_SECONDS, so that its last run shows that beat and a worker are alive.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from celery.beat import PersistentScheduler, ScheduleEntry
from django.db import connection

from queues.periodic import OUTAGE_ERRORS, work_checks

# Half of the time after which the console reports a periodic task as late (queues/health_checks.py).
IDLE_SECONDS = 15.0
# The longest time that beat waits for a check. Most take less than a millisecond.
CHECK_SECONDS = 0.2

Check = Callable[[], bool]


class Scheduler(PersistentScheduler):
    """Celery's default scheduler, without the messages to periodic tasks that have no work."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._checker = WorkChecker()
        self._sent_at: dict[str, float] = {}
        super().__init__(*args, **kwargs)

    def adjust(self, n: int, drift: float = 0.0) -> float:
        """Return the time until an entry is due, without Celery's default drift.

        With that drift, beat would wake up 10 ms early and then poll a hundred times per second.
        """
        return super().adjust(n, drift)

    def apply_entry(self, entry: ScheduleEntry, producer: Any = None) -> None:
        name, now = str(entry.task), time.monotonic()
        check = work_checks.get(name)
        is_idle_run_due = now - self._sent_at.get(name, float("-inf")) >= IDLE_SECONDS
        if is_idle_run_due or check is None or self._checker.may_have_work(check):
            self._sent_at[name] = now
            super().apply_entry(entry, producer=producer)


class WorkChecker:
    """Runs checks in a thread, so that a server that does not answer cannot stop beat.

    If a check raises an unexpected error, the thread ends with a traceback, and every task counts as having work.
    """

    def __init__(self) -> None:
        self._checks: SimpleQueue[tuple[Check, Future[bool]]] = SimpleQueue()
        self._last: Future[bool] | None = None

    def may_have_work(self, check: Check) -> bool:
        """Return the result of the check.

        Return True if there is none within CHECK_SECONDS, or if a server is down.
        """
        if self._last is None:
            threading.Thread(target=self._run, name="work-checks", daemon=True).start()
        elif not self._last.done():
            return True
        self._last = Future()
        self._checks.put((check, self._last))
        try:
            return self._last.result(CHECK_SECONDS)
        except TimeoutError:
            return True

    def _run(self) -> None:
        while True:
            check, future = self._checks.get()
            try:
                future.set_result(check())
            except OUTAGE_ERRORS:
                # The periodic task logs the outage. The next check connects again.
                connection.close()
                future.set_result(True)
