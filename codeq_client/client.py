"""HTTP client for producers and workers. It retries lost requests and retryable errors.

Retries are safe. An enqueue carries an idempotency key, the caller's or a generated one, so it creates one task. A
result that arrives twice is stored once. If the response to a claim is lost, its tasks are ready again when their
leases expire.
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
POLL_SECONDS = 30.0  # longest wait for a result in one request; a longer wait takes several requests
ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED"})
BACKOFF_SECONDS = 0.2  # upper bound of the random delay before the first retry; doubles with each retry
MAX_BACKOFF_SECONDS = 30.0  # limit of that bound; after a longer `Retry-After` the error is raised at once


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
    """The calls of producers and workers. Thread-safe; keeps its connections open.

    `token` is a bearer token or a function that returns one. The function is called again when the service rejects the
    token. `max_tries` is the maximum number of times that a request is sent.
    """

    def __init__(
        self,
        base: str,
        token: str | Callable[[], str],
        *,
        timeout_seconds: float = 10.0,
        max_tries: int = 5,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.max_tries = max_tries
        self._timeout_seconds = timeout_seconds
        self._get_token = token if callable(token) else None
        self._token = token if isinstance(token, str) else ""
        self._token_lock = threading.Lock()
        self._http = httpx.Client(base_url=base.rstrip("/") + "/v1/codeq", transport=transport)
        self._extensions: dict[str, Any] = {}

    def close(self) -> None:
        """Close the connections."""
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
        """Enqueue a task. It is stored on disk when this returns."""
        new = NewTask(
            command=command, payload=payload, priority=priority, max_attempts=max_attempts, webhook=webhook,
            idempotency_key=idempotency_key, run_at=run_at, delay_seconds=delay_seconds,
        )  # fmt: skip
        return self._request("POST", "/tasks", _with_key(new), response_type=Task)

    def enqueue_many(self, tasks: Sequence[NewTask]) -> list[Task | errors.CodeqError]:
        """Enqueue tasks independently of each other, a hundred per request.

        Returns the created task or the error of each, in order.
        """
        results: list[Task | errors.CodeqError] = []
        for start in range(0, len(tasks), BATCH):
            body = {"tasks": [_with_key(task) for task in tasks[start : start + BATCH]]}
            items = self._request("POST", "/tasks/batch", body, response_type=_Items).results
            results += [item.task or errors.from_status(item.status, item.error, item.detail) for item in items]
        return results

    def task(self, task_id: str) -> Task:
        """Return a task. Raises NotFound."""
        return self._request("GET", f"/tasks/{quote(task_id, safe='')}", response_type=Task)

    def cancel(self, task_id: str) -> Task:
        """Cancel a task. If a worker runs it, the worker's next heartbeat raises Conflict."""
        return self._request("DELETE", f"/tasks/{quote(task_id, safe='')}", response_type=Task)

    def result(self, task_id: str, *, wait_seconds: float = 0.0) -> Result | None:
        """Return the task's result, or None if the task does not end within `wait_seconds`."""
        deadline = time.monotonic() + wait_seconds
        while True:
            result = self._fetch_result(task_id, min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
            if result:
                return result
            task = self.task(task_id)
            if task.status in ENDED:
                # If the task ended after the wait, the worker's result can be read now. For a cancelled task or a dead
                # letter there is no such result: build one from the task.
                return self._fetch_result(task_id, 0.0) or Result(
                    task_id=task.id, status=task.status, error=task.error, attempts=task.attempts,
                    completed_at=task.updated_at,
                )  # fmt: skip
            if time.monotonic() >= deadline:
                return None

    def _fetch_result(self, task_id: str, wait_seconds: float) -> Result | None:
        path = f"/tasks/{quote(task_id, safe='')}/result?" + urlencode({"waitSeconds": round(wait_seconds, 3)})
        try:
            return self._request("GET", path, response_type=_TaskResult, wait_seconds=wait_seconds).result
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
        """Claim at most `count` tasks; if none is ready, wait at most `wait_seconds` for one."""
        body = {"commands": list(commands), "count": count, "waitSeconds": wait_seconds}
        if lease_seconds is not None:
            body["leaseSeconds"] = lease_seconds
        path = "/tasks/claim/batch"
        return self._request("POST", path, body, response_type=_Tasks, wait_seconds=wait_seconds).tasks

    def heartbeat(self, task: Task, *, extend_seconds: int | None = None, progress: Any = None) -> None:
        """Extend the lease and report progress.

        `progress` is a percentage from 0 to 100 or `{"percent": 40, "note": "…"}`.
        """
        fields = {"extendSeconds": extend_seconds, "progress": progress}
        self._request("POST", f"/tasks/{task.id}/heartbeat", _with_lease(task, fields), response_type=_Extended)

    def complete(self, task: Task, result: dict[str, Any]) -> Result:
        """End the task as completed with a result."""
        return self._end(task, {"status": "COMPLETED", "result": result})

    def fail(self, task: Task, error: str) -> Result:
        """End the task as failed, without further attempts."""
        return self._end(task, {"status": "FAILED", "error": error})

    def nack(self, task: Task, *, reason: str | None = None, delay_seconds: float | None = None) -> None:
        """Report a failed attempt.

        The task is retried after `delay_seconds` or the queue's backoff. After its last attempt, it becomes a dead
        letter.
        """
        fields = {"reason": reason, "delaySeconds": delay_seconds}
        self._request("POST", f"/tasks/{task.id}/nack", _with_lease(task, fields), response_type=dict[str, Any])

    def abandon(self, task: Task) -> None:
        """Return the task to its queue, where it can be claimed again at once.

        The attempt counts: after its last attempt, the task becomes a dead letter instead.
        """
        self._request("POST", f"/tasks/{task.id}/abandon", _with_lease(task, {}), response_type=dict[str, Any])

    def _end(self, task: Task, fields: dict[str, Any]) -> Result:
        return self._request("POST", f"/tasks/{task.id}/result", _with_lease(task, fields), response_type=Result)

    # HTTP

    def _request(
        self, method: str, path: str, body: Any = None, *, response_type: type[T], wait_seconds: float = 0.0
    ) -> T:
        """Send a request, retry it while that may help, and decode the response.

        If `token` is a function, a rejected token is replaced once and the request repeated. The rejected request does
        not count as one of the `max_tries`.
        """
        content = None if body is None else msgspec.json.encode(body)
        backoff, is_token_new, tries = BACKOFF_SECONDS, False, 0
        while True:
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
                problem: errors.CodeqError = errors.Unavailable(0, "no_response", f"{type(error).__name__}: {error}")
            else:
                if response.is_success:
                    return msgspec.json.decode(response.content or b"{}", type=response_type)
                problem = errors.from_response(
                    response.status_code, response.content, response.headers.get("retry-after", "")
                )
                if problem.status == 401 and self._get_token and not is_token_new:
                    is_token_new = True
                    self._renew_token(token)
                    continue
                if problem.status not in errors.RETRYABLE:
                    raise problem
            tries += 1
            if tries >= self.max_tries or problem.retry_after_seconds > MAX_BACKOFF_SECONDS:
                raise problem
            time.sleep(problem.retry_after_seconds + random.uniform(0, backoff))  # noqa: S311 - no secret
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    def _current_token(self) -> str:
        if not self._token:
            self._renew_token("")
        return self._token

    def _renew_token(self, rejected: str) -> None:
        """Replace a rejected token.

        Of several threads with the same rejected token, only the first replaces it.
        """
        with self._token_lock:
            if self._token == rejected and self._get_token:
                self._token = self._get_token()


def _with_key(task: NewTask) -> NewTask:
    """Add an idempotency key if there is none, so that a retry creates no second task."""
    return task if task.idempotency_key else msgspec.structs.replace(task, idempotency_key=str(uuid.uuid4()))


def _with_lease(task: Task, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are not None, with the task's lease token."""
    fields = {name: value for name, value in fields.items() if value is not None}
    return fields | {"leaseToken": task.lease_token} if task.lease_token else fields
