"""A worker: takes tasks as it has room, runs a function for each in a thread, and tells how it ended.

    worker = Worker("http://127.0.0.1:8080", token, slots=4)

    @worker.on("render")
    def render(job: Job) -> dict[str, object]:
        return {"pages": len(job.payload["pages"])}

    worker.run()

What the function returns is the result. `Retry` asks for another attempt, `Fail` ends the task, any other exception is
an attempt that failed. While it runs its lease is kept; when that is lost all the same (cancelled, too long without a
network), `job.is_lost` says so and nothing more is told. SIGTERM and SIGINT let what runs come to its end.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from codeq_client.client import Client
from codeq_client.errors import CodeqError, Conflict, TooMany, Unavailable
from codeq_client.poll import PollClient
from codeq_client.tasks import Task

log = logging.getLogger(__name__)

MOST_AT_ONCE = 10  # tasks in one claim, as the service has it by default
PROGRESS_SECONDS = 1.0  # progress is sent at once, but not more often than this
REASON_CHARACTERS = 2000

Handler = Callable[["Job"], Any]


class Retry(Exception):
    """Raise it for another attempt: after `delay_seconds`, or after the queue's backoff."""

    def __init__(self, reason: str = "", *, delay_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.delay_seconds = delay_seconds


class Fail(Exception):
    """Raise it to end the task as failed, without another attempt."""


class LeaseLost(Exception):
    """The task is not this worker's any more: stop, nobody waits for the result."""


class Job:
    """One attempt at a task."""

    def __init__(self, client: Client, task: Task, lease_seconds: int) -> None:
        self.task = task
        self.payload = task.payload
        self.attempt = task.attempts + 1
        self.is_lost = False
        self._client, self._lease_seconds = client, lease_seconds
        self._progress: dict[str, Any] | None = None
        self._told_at = 0.0

    def progress(self, percent: float, note: str | None = None) -> None:
        """Say how far the work is. Raises LeaseLost when there is no use in going on."""
        self._progress = {"percent": percent} | ({"note": note} if note else {})
        if not self.is_lost and time.monotonic() - self._told_at >= PROGRESS_SECONDS:
            self._keep_lease()
        if self.is_lost:
            raise LeaseLost(self.task.id)

    def _keep_lease(self) -> None:
        self._told_at = time.monotonic()
        try:
            self._client.heartbeat(self.task, extend_seconds=self._lease_seconds, progress=self._progress)
        except (Unavailable, TooMany) as error:
            log.warning("task %s: its lease could not be extended yet: %s", self.task.id, error)
        except CodeqError as error:
            self.is_lost = True
            log.warning("task %s is lost: %s", self.task.id, error)


class Worker:
    _client: Client
    _beats: Client
    _polls: PollClient | None = None

    def __init__(
        self,
        base: str,
        token: str | Callable[[], str],
        *,
        slots: int = 1,
        lease_seconds: int = 60,
        wait_seconds: float = 5.0,
        grace_seconds: float = 30.0,
    ) -> None:
        """`wait_seconds` is how long a claim waits for a task before it is sent again."""
        self._base, self._token = base, token
        self._slots, self._lease_seconds = slots, lease_seconds
        self._wait_seconds, self._grace_seconds = wait_seconds, grace_seconds
        self._handlers: dict[str, Handler] = {}
        self._jobs: dict[str, Job] = {}
        self._changed = threading.Condition()
        self._is_stopping = False  # no Event: a signal may come while this very thread holds the lock of one
        self._over = threading.Event()

    def on(self, command: str) -> Callable[[Handler], Handler]:
        """Have the function below run the tasks of this command. It may be `async def`."""

        def register(handler: Handler) -> Handler:
            self._handlers[command] = handler
            return handler

        return register

    def stop(self) -> None:
        """Take nothing more; `run` returns when what runs has ended. A second time: give back what runs."""
        if self._is_stopping:
            self._grace_seconds = 0.0
        self._is_stopping = True
        if self._polls is not None:
            self._polls.hang_up()

    def run(self) -> None:
        """Work until `stop`, SIGTERM or SIGINT. Raises what the service refuses for good, such as the token."""
        if not self._handlers:
            raise ValueError("This worker has nothing to do: name a function for a command with `@worker.on(command)`.")
        self._is_stopping = False
        self._over.clear()
        self._client = Client(self._base, self._token)
        polls = self._polls = PollClient(self._base, self._token)
        # A lease is kept in time or not at all: what does not get through is sent again at the next beat.
        self._beats = Client(self._base, self._token, tries=1, timeout_seconds=max(1.0, self._lease_seconds / 6))
        beat = threading.Thread(target=self._beat, name="codeq-heartbeat", daemon=True)
        beat.start()
        try:
            with self._stopped_by_signals():
                while not self._is_stopping:
                    self._take(polls)
                self._finish()
        finally:
            self._over.set()
            beat.join()
            polls.close()
            self._client.close()
            self._beats.close()

    def _take(self, polls: PollClient) -> None:
        with self._changed:
            free = self._slots - len(self._jobs)
            if free == 0:
                self._changed.wait(0.5)
                return
        try:
            tasks = polls.claim(
                list(self._handlers),
                count=min(free, MOST_AT_ONCE),
                lease_seconds=self._lease_seconds,
                wait_seconds=self._wait_seconds,
            )
        except (Unavailable, TooMany) as error:
            if self._is_stopping:
                return
            log.warning("no claim now: %s", error)
            self._pause(error.retry_after_seconds or 1.0)
            return
        for task in tasks:
            job = Job(self._beats, task, self._lease_seconds)
            with self._changed:
                self._jobs[task.id] = job
            threading.Thread(target=self._work, args=(job,), name=f"codeq-{task.id}", daemon=True).start()

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._is_stopping and time.monotonic() < until:
            time.sleep(0.1)

    def _work(self, job: Job) -> None:
        try:
            self._tell(job, self._outcome(job))
        except CodeqError as error:
            # Its lease runs out, and the task goes to somebody else.
            log.warning("task %s: how it ended could not be told: %s", job.task.id, error)
        finally:
            with self._changed:
                self._jobs.pop(job.task.id, None)
                self._changed.notify_all()

    def _outcome(self, job: Job) -> Callable[[], object]:
        """Run the function; the call that tells the service of it."""
        task = job.task
        try:
            result = self._handlers[task.command](job)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
            if result is None:
                result = {}
            if not isinstance(result, dict):
                raise TypeError(f"the function for {task.command} returned {type(result).__name__}: not a dict or None")
            msgspec.json.encode(result)
        except Retry as again:
            asked, delay = _text(again) or None, again.delay_seconds
            return lambda: self._client.nack(task, reason=asked, delay_seconds=delay)
        except Fail as over:
            error = _text(over) or "failed"
            return lambda: self._client.fail(task, error)
        except LeaseLost:
            job.is_lost = True
            return lambda: None
        except Exception as raised:
            log.exception("task %s (%s), attempt %d, failed", task.id, task.command, job.attempt)
            reason = f"{type(raised).__name__}: {_text(raised)}"
            return lambda: self._client.nack(task, reason=reason)
        return lambda: self._client.complete(task, result)

    def _tell(self, job: Job, tell: Callable[[], object]) -> None:
        if job.is_lost:
            return
        try:
            tell()
        except (Conflict, Unavailable, TooMany):
            raise
        except CodeqError as refused:
            if refused.status in (401, 403, 404):
                raise
            # The result is too large, say: an attempt that failed, and its reason can be seen.
            self._client.nack(job.task, reason=f"the result was refused: {refused.detail}")

    def _beat(self) -> None:
        while not self._over.wait(self._lease_seconds / 3):
            for job in self._running():
                if not job.is_lost:
                    job._keep_lease()

    def _running(self) -> list[Job]:
        with self._changed:
            return list(self._jobs.values())

    def _finish(self) -> None:
        """Wait for what runs; give back what takes longer than the grace."""
        began = time.monotonic()
        while self._running() and time.monotonic() - began < self._grace_seconds:
            with self._changed:
                self._changed.wait(0.1)
        for job in self._running():
            job.is_lost = True
            try:
                self._client.abandon(job.task)
            except CodeqError as error:
                log.warning("task %s could not be given back: %s", job.task.id, error)

    @contextmanager
    def _stopped_by_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        former = {each: signal.signal(each, lambda *_: self.stop()) for each in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for each, handler in former.items():
                signal.signal(each, handler)


def _text(error: Exception) -> str:
    """What an error says, as the service takes it: no NUL, nothing that is not UTF-8, not a book."""
    return str(error).encode("utf-8", "replace").decode().replace("\0", "\ufffd")[:REASON_CHARACTERS]
