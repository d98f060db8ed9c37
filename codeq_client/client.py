"""A client that tries again: what did not get through, and what the service asks to be sent later.

Trying again is safe. A task is enqueued under an idempotency key, its own or one that is made here, so it is not made
twice; a result that arrives twice is taken once; a claim whose answer was lost comes back when its lease is over.
"""

from __future__ import annotations

import datetime as dt
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import httpx
import msgspec

from codeq_client import errors
from codeq_client.tasks import NewTask, Result, Task

T = TypeVar("T")
BATCH = 100  # tasks in one request
POLL_SECONDS = 30.0  # the longest wait in one request; a longer one is several
ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED"})
PAUSE_SECONDS = 0.2  # before the second try; doubles, and a random part of it is waited
LONGEST_PAUSE_SECONDS = 30.0  # who is told to wait longer is told no


class _Tasks(msgspec.Struct):
    tasks: list[Task] = []


class _Extended(msgspec.Struct, rename="camel"):
    lease_until: dt.datetime


class _TaskResult(msgspec.Struct):
    result: Result


class _Item(msgspec.Struct):
    task: Task | None = None
    error: str = ""
    status: int = 0
    detail: str = ""


class _Items(msgspec.Struct):
    results: list[_Item]


class Client:
    """Producers' and workers' calls. One for all threads; it keeps its connections.

    `token` may be a function that gives one: it is asked again when the service refuses the last.
    """

    def __init__(
        self,
        base: str,
        token: str | Callable[[], str],
        *,
        timeout_seconds: float = 10.0,
        tries: int = 5,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.tries = tries
        self._timeout_seconds = timeout_seconds
        self._ask_token = token if callable(token) else None
        self._token = token if isinstance(token, str) else ""
        self._token_lock = threading.Lock()
        self._http = httpx.Client(base_url=base.rstrip("/") + "/v1/codeq", transport=transport)
        self._extensions: dict[str, Any] = {}

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # Producers

    def enqueue(
        self,
        command: str,
        payload: Any,
        *,
        priority: int | None = None,
        max_attempts: int | None = None,
        webhook: str | None = None,
        idempotency_key: str | None = None,
        run_at: dt.datetime | None = None,
        delay_seconds: float | None = None,
    ) -> Task:
        """Put a task in; it is on disk when this returns."""
        new = NewTask(
            command=command, payload=payload, priority=priority, max_attempts=max_attempts, webhook=webhook,
            idempotency_key=idempotency_key, run_at=run_at, delay_seconds=delay_seconds,
        )  # fmt: skip
        return self._ask("POST", "/tasks", _with_key(new), answer=Task)

    def enqueue_many(self, tasks: Sequence[NewTask]) -> list[Task | errors.CodeqError]:
        """Put tasks in, a hundred in a request, each for itself: a task or why there is none, in their order."""
        made: list[Task | errors.CodeqError] = []
        for at in range(0, len(tasks), BATCH):
            body = {"tasks": [_with_key(task) for task in tasks[at : at + BATCH]]}
            items = self._ask("POST", "/tasks/batch", body, answer=_Items).results
            made += [each.task or errors.of_status(each.status, each.error, each.detail) for each in items]
        return made

    def task(self, task_id: str) -> Task:
        return self._ask("GET", f"/tasks/{quote(task_id, safe='')}", answer=Task)

    def cancel(self, task_id: str) -> Task:
        """End a task that waits; one that runs is told at its next heartbeat."""
        return self._ask("DELETE", f"/tasks/{quote(task_id, safe='')}", answer=Task)

    def result(self, task_id: str, *, wait_seconds: float = 0.0) -> Result | None:
        """How the task ended, whichever way; None if it has not, after at most so long."""
        until = time.monotonic() + wait_seconds
        while True:
            answer = self._answer(task_id, min(POLL_SECONDS, max(0.0, until - time.monotonic())))
            if answer:
                return answer
            task = self.task(task_id)
            if task.status in ENDED:
                # Just now; or without an answer of a worker, as the cancelled and the dead have none.
                return self._answer(task_id, 0.0) or Result(
                    task_id=task.id, status=task.status, error=task.error, attempts=task.attempts,
                    completed_at=task.updated_at,
                )  # fmt: skip
            if time.monotonic() >= until:
                return None

    def _answer(self, task_id: str, wait_seconds: float) -> Result | None:
        path = f"/tasks/{quote(task_id, safe='')}/result?" + urlencode({"waitSeconds": round(wait_seconds, 3)})
        try:
            return self._ask("GET", path, answer=_TaskResult, wait_seconds=wait_seconds).result
        except errors.NotFound as error:
            if error.code != "result_not_found":
                raise
            return None

    # Workers

    def claim(
        self,
        commands: Sequence[str] = (),
        *,
        count: int = 1,
        lease_seconds: int | None = None,
        wait_seconds: float = 0.0,
    ) -> list[Task]:
        """Take tasks under a lease, at most `count`; wait for the first if there is none."""
        body = {"commands": list(commands), "count": count, "waitSeconds": wait_seconds}
        if lease_seconds is not None:
            body["leaseSeconds"] = lease_seconds
        found = self._ask("POST", "/tasks/claim/batch", body, answer=_Tasks, wait_seconds=wait_seconds)
        return found.tasks

    def heartbeat(self, task: Task, *, extend_seconds: int | None = None, progress: Any = None) -> None:
        """Keep the lease; `progress` is 0..100, or `{"percent": 40, "note": "…"}`."""
        said = {"extendSeconds": extend_seconds, "progress": progress}
        self._ask("POST", f"/tasks/{task.id}/heartbeat", _of_lease(task, said), answer=_Extended)

    def complete(self, task: Task, result: dict[str, Any]) -> Result:
        return self._end(task, {"status": "COMPLETED", "result": result})

    def fail(self, task: Task, error: str) -> Result:
        """End the task as failed, with no further attempt."""
        return self._end(task, {"status": "FAILED", "error": error})

    def nack(self, task: Task, *, reason: str | None = None, delay_seconds: float | None = None) -> None:
        """This attempt failed: another one after the backoff, or after `delay_seconds`."""
        said = {"reason": reason, "delaySeconds": delay_seconds}
        self._ask("POST", f"/tasks/{task.id}/nack", _of_lease(task, said), answer=dict[str, Any])

    def abandon(self, task: Task) -> None:
        """Give the task back, to be taken at once by whoever comes next."""
        self._ask("POST", f"/tasks/{task.id}/abandon", _of_lease(task, {}), answer=dict[str, Any])

    def _end(self, task: Task, said: dict[str, Any]) -> Result:
        return self._ask("POST", f"/tasks/{task.id}/result", _of_lease(task, said), answer=Result)

    # The wire

    def _ask(self, method: str, path: str, body: Any = None, *, answer: type[T], wait_seconds: float = 0.0) -> T:
        content = None if body is None else msgspec.json.encode(body)
        pause, is_token_new, tries = PAUSE_SECONDS, False, 0
        while True:
            tries += 1
            token = self._current_token()
            try:
                response = self._http.request(
                    method,
                    path,
                    content=content,
                    headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
                    timeout=self._timeout_seconds + wait_seconds,
                    extensions=self._extensions,
                )
            except httpx.TransportError as error:
                problem: errors.CodeqError = errors.Unavailable(0, "no_answer", f"{type(error).__name__}: {error}")
            else:
                if response.is_success:
                    return msgspec.json.decode(response.content or b"{}", type=answer)
                problem = errors.of_answer(
                    response.status_code, response.content, response.headers.get("retry-after", "")
                )
                if problem.status == 401 and self._ask_token and not is_token_new:
                    is_token_new = True
                    self._renew_token(token)
                    continue
                if problem.status not in errors.PASSING:
                    raise problem
            if tries >= self.tries or problem.retry_after_seconds > LONGEST_PAUSE_SECONDS:
                raise problem
            time.sleep(problem.retry_after_seconds + random.uniform(0, pause))  # noqa: S311 - no secret
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _current_token(self) -> str:
        if not self._token:
            self._renew_token("")
        return self._token

    def _renew_token(self, refused: str) -> None:
        """Ask for another token, once, whatever the number of threads that were refused with the last one."""
        with self._token_lock:
            if self._token == refused and self._ask_token:
                self._token = self._ask_token()


def _with_key(task: NewTask) -> NewTask:
    return task if task.idempotency_key else msgspec.structs.replace(task, idempotency_key=str(uuid.uuid4()))


def _of_lease(task: Task, said: dict[str, Any]) -> dict[str, Any]:
    """What is said of a task, with the proof that it is this lease; what is None is not said."""
    said = {name: value for name, value in said.items() if value is not None}
    return said | {"leaseToken": task.lease_token} if task.lease_token else said
