"""A worker that claims tasks, runs a handler for each in a thread, and submits the results.

    worker = Worker("http://127.0.0.1:8080", token, slots=4)

    @worker.on("render")
    def render(job: Job) -> dict[str, object]:
        return {"pages": len(job.payload["pages"])}

    worker.run()

The return value is the result. `Retry` asks for another attempt, `Fail` ends the task, and any other exception is a
failed attempt. The worker extends the lease while the handler runs. If the lease is lost anyway, because the task was
cancelled or the network was down for too long, `job.is_lost` is true and the worker submits nothing. On SIGTERM and
SIGINT the worker claims no more tasks and waits at most `grace_seconds` for running handlers.
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

MAX_CLAIM_COUNT = 10  # the default limit of the service
PROGRESS_SECONDS = 1.0  # minimum time between two progress reports
REASON_CHARACTERS = 2000

Handler = Callable[["Job"], Any]


class Retry(Exception):
    """Raise in a handler to retry the task after `delay_seconds`, or after the queue's backoff."""

    def __init__(self, reason: str = "", *, delay_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.delay_seconds = delay_seconds


class Fail(Exception):
    """Raise in a handler to end the task as failed, without another attempt."""


class LeaseLost(Exception):
    """The worker no longer holds the task. Stop the handler: its result would be refused."""


class Job:
    """One attempt at a task, the argument of a handler."""

    def __init__(self, client: Client, task: Task, lease_seconds: int) -> None:
        self.task = task
        self.payload = task.payload
        self.attempt = task.attempts + 1
        self.is_lost = False
        self._client, self._lease_seconds = client, lease_seconds
        self._progress: dict[str, Any] | None = None
        self._reported_at = 0.0

    def progress(self, percent: float, note: str | None = None) -> None:
        """Report progress, at most once a second. Raises LeaseLost if the lease is lost."""
        self._progress = {"percent": percent} | ({"note": note} if note else {})
        if not self.is_lost and time.monotonic() - self._reported_at >= PROGRESS_SECONDS:
            self._extend_lease()
        if self.is_lost:
            raise LeaseLost(self.task.id)

    def _extend_lease(self) -> None:
        self._reported_at = time.monotonic()
        try:
            self._client.heartbeat(self.task, extend_seconds=self._lease_seconds, progress=self._progress)
        except (Unavailable, TooMany) as error:
            log.warning("task %s: could not extend the lease, will retry: %s", self.task.id, error)
        except CodeqError as error:
            self.is_lost = True
            log.warning("task %s: lost the lease: %s", self.task.id, error)


class Worker:
    """Run handlers on tasks, at most `slots` at once, each in a thread.

    `wait_seconds` is how long one claim waits for a task. `grace_seconds` is how long `run` waits for running handlers
    after `stop`, before it gives their tasks back.
    """

    _client: Client
    _heartbeat_client: Client
    _claim_client: PollClient | None = None

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
        self._base, self._token = base, token
        self._slots, self._lease_seconds = slots, lease_seconds
        self._wait_seconds, self._grace_seconds = wait_seconds, grace_seconds
        self._handlers: dict[str, Handler] = {}
        self._jobs: dict[str, Job] = {}
        self._changed = threading.Condition()
        # Not an Event: a signal handler in this thread would deadlock if the thread held the lock of the Event.
        self._is_stopping = False
        self._finished = threading.Event()

    def on(self, command: str) -> Callable[[Handler], Handler]:
        """Register the decorated function, which may be `async def`, as the handler of a queue."""

        def register(handler: Handler) -> Handler:
            self._handlers[command] = handler
            return handler

        return register

    def stop(self) -> None:
        """Claim no more tasks; `run` returns when the handlers end or `grace_seconds` have passed.

        If called again, give the running tasks back at once.
        """
        if self._is_stopping:
            self._grace_seconds = 0.0
        self._is_stopping = True
        if self._claim_client is not None:
            self._claim_client.stop_waiting()

    def run(self) -> None:
        """Work until `stop`, SIGTERM or SIGINT.

        Raises errors that a retry cannot fix, such as a rejected token.
        """
        if not self._handlers:
            raise ValueError("The worker has no handlers. Register one with `@worker.on(command)`.")
        self._is_stopping = False
        self._finished.clear()
        self._client = Client(self._base, self._token)
        claim_client = self._claim_client = PollClient(self._base, self._token)
        # No retries and a short timeout: a late heartbeat is useless, and the next one follows soon.
        timeout_seconds = max(1.0, self._lease_seconds / 6)
        self._heartbeat_client = Client(self._base, self._token, max_tries=1, timeout_seconds=timeout_seconds)
        heartbeats = threading.Thread(target=self._send_heartbeats, name="codeq-heartbeat", daemon=True)
        heartbeats.start()
        try:
            with self._stopped_by_signals():
                while not self._is_stopping:
                    self._claim(claim_client)
                self._wait_for_jobs()
        finally:
            self._finished.set()
            heartbeats.join()
            claim_client.close()
            self._client.close()
            self._heartbeat_client.close()

    def _claim(self, claim_client: PollClient) -> None:
        """Claim tasks for the free slots and start their threads; wait if no slot is free."""
        with self._changed:
            free = self._slots - len(self._jobs)
            if free == 0:
                self._changed.wait(0.5)
                return
        try:
            tasks = claim_client.claim(
                list(self._handlers),
                count=min(free, MAX_CLAIM_COUNT),
                lease_seconds=self._lease_seconds,
                wait_seconds=self._wait_seconds,
            )
        except (Unavailable, TooMany) as error:
            if self._is_stopping:
                return
            log.warning("could not claim, will retry: %s", error)
            self._pause(error.retry_after_seconds or 1.0)
            return
        for task in tasks:
            job = Job(self._heartbeat_client, task, self._lease_seconds)
            with self._changed:
                self._jobs[task.id] = job
            threading.Thread(target=self._work, args=(job,), name=f"codeq-{task.id}", daemon=True).start()

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._is_stopping and time.monotonic() < deadline:
            time.sleep(0.1)

    def _work(self, job: Job) -> None:
        try:
            self._submit(job, self._run_handler(job))
        except CodeqError as error:
            # If the worker still holds the task, its lease expires and another worker claims it.
            log.warning("task %s: could not submit the result: %s", job.task.id, error)
        finally:
            with self._changed:
                self._jobs.pop(job.task.id, None)
                self._changed.notify_all()

    def _run_handler(self, job: Job) -> Callable[[], object]:
        """Run the handler; return the API call that reports its outcome."""
        task = job.task
        try:
            result = self._handlers[task.command](job)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
            if result is None:
                result = {}
            if not isinstance(result, dict):
                raise TypeError(
                    f"the handler of {task.command} must return a dict or None, not {type(result).__name__}"
                )
            msgspec.json.encode(result)
        except Retry as retry:
            retry_reason, delay_seconds = _text(retry) or None, retry.delay_seconds
            return lambda: self._client.nack(task, reason=retry_reason, delay_seconds=delay_seconds)
        except Fail as failure:
            error = _text(failure) or "failed"
            return lambda: self._client.fail(task, error)
        except LeaseLost:
            job.is_lost = True
            return lambda: None
        except Exception as exception:
            log.exception("task %s (%s): attempt %d failed", task.id, task.command, job.attempt)
            reason = f"{type(exception).__name__}: {_text(exception)}"
            return lambda: self._client.nack(task, reason=reason)
        return lambda: self._client.complete(task, result)

    def _submit(self, job: Job, report_outcome: Callable[[], object]) -> None:
        if job.is_lost:
            return
        try:
            report_outcome()
        except (Conflict, Unavailable, TooMany):
            raise
        except CodeqError as error:
            if error.status in (401, 403, 404):
                raise
            # The service refused the result, for example as too large: report a failed attempt with the reason.
            self._client.nack(job.task, reason=f"The result was refused: {error.detail}")

    def _send_heartbeats(self) -> None:
        while not self._finished.wait(self._lease_seconds / 3):
            for job in self._running_jobs():
                if not job.is_lost:
                    job._extend_lease()

    def _running_jobs(self) -> list[Job]:
        with self._changed:
            return list(self._jobs.values())

    def _wait_for_jobs(self) -> None:
        """Wait for running handlers, at most `grace_seconds`; then give their tasks back."""
        started = time.monotonic()
        while self._running_jobs() and time.monotonic() - started < self._grace_seconds:
            with self._changed:
                self._changed.wait(0.1)
        for job in self._running_jobs():
            job.is_lost = True
            try:
                self._client.abandon(job.task)
            except CodeqError as error:
                log.warning("task %s: could not give it back: %s", job.task.id, error)

    @contextmanager
    def _stopped_by_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        former = {number: signal.signal(number, lambda *_: self.stop()) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


def _text(error: Exception) -> str:
    """Return an error's message as the service accepts it: short UTF-8 text without NUL."""
    return str(error).encode("utf-8", "replace").decode().replace("\0", "\ufffd")[:REASON_CHARACTERS]
