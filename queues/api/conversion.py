"""Conversion between the API's schemas and the values of `queues.domain`."""

from __future__ import annotations

import base64
import datetime as dt
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, Raw

from core import errors
from core.url_check import check_url
from queues import artifacts, domain, json_payloads
from queues.api.schemas import LIMITS, leases, results, tasks
from queues.domain import Location, TaskStatus


def new_task(body: tasks.NewTask, trace_parent: str | None = None, trace_state: str | None = None) -> domain.NewTask:
    """Return the task to enqueue.

    Raises InvalidRequest for a payload or webhook that cannot be accepted.
    """
    if body.webhook is not None:
        check_url(body.webhook)
    return domain.NewTask(
        command=body.command,
        payload=json_payloads.compact(body.payload, "payload").decode(),
        priority=0 if body.priority is UNSET else int(body.priority),
        has_priority=body.priority is not UNSET,
        max_attempts=to_int(body.max_attempts),
        webhook=body.webhook,
        idempotency_key=body.idempotency_key,
        run_at_ms=None if body.run_at is None else max(1, round(body.run_at.timestamp() * 1000)),
        delay_ms=0 if body.delay_seconds is None else round(body.delay_seconds * 1000),
        trace_parent=trace_parent,
        trace_state=trace_state,
    )


def to_int(number: float | None) -> int | None:
    """Return a whole number of a body, which the schemas decode as a float."""
    return None if number is None else int(number)


def new_result(
    task_id: str, body: results.NewResult, lease_token: str | None, stored: Sequence[artifacts.StoredArtifact] = ()
) -> domain.NewResult:
    """Return the result to store.

    Raises InvalidRequest if it lacks the field that its status requires.
    """
    is_absent = bytes(body.result) in (b"", b"null")
    result = None if is_absent else json_payloads.compact(body.result, "result")
    if result is not None and not result.startswith(b"{"):
        raise errors.InvalidRequest("Expected `object` - at `$.result`")
    if body.status == "COMPLETED" and result is None:
        raise errors.InvalidRequest("Object missing required field `result`, which status COMPLETED requires")
    if body.status == "FAILED" and body.error is None:
        raise errors.InvalidRequest("Object missing required field `error`, which status FAILED requires")
    return domain.NewResult(
        task_id=task_id,
        status=TaskStatus(body.status),
        result=result,
        error=body.error,
        artifacts=msgspec.json.encode(stored) if stored else None,
        lease_token=lease_token,
    )


def new_artifacts(body: results.NewResult) -> list[artifacts.NewArtifact]:
    """Return the artifacts to store.

    Raises InvalidRequest or PayloadTooLarge for one that cannot be accepted.
    """
    return [_new_artifact(artifact) for artifact in body.artifacts or ()]


def _new_artifact(body: results.NewArtifact) -> artifacts.NewArtifact:
    if (body.url is None) == (body.content_base64 is None):
        raise errors.InvalidRequest("artifacts: each needs either `url` or `contentBase64`, not both")
    if body.url is not None:
        _check_artifact_url(body.url)
    content = None
    if body.content_base64 is not None:
        try:
            content = base64.b64decode(body.content_base64, validate=True)
        except ValueError as error:
            raise errors.InvalidRequest("artifacts: `contentBase64` is not valid base64") from error
        if len(content) > LIMITS.artifact_bytes:
            raise errors.PayloadTooLarge(
                f"artifacts: {len(content)} bytes; the limit of each is {LIMITS.artifact_bytes}"
            )
    return artifacts.NewArtifact(name=body.name, url=body.url, content=content, content_type=body.content_type)


def _check_artifact_url(url: str) -> None:
    """Raise InvalidRequest for a URL that clients cannot parse.

    codeQ returns the URL unchanged and never requests it.
    """
    try:
        _ = urlsplit(url).port
    except ValueError as error:
        raise errors.InvalidRequest("artifacts: `url` is not a valid URL") from error


_decode_artifacts = msgspec.json.Decoder(list[results.Artifact]).decode


def moment(ms: int) -> dt.datetime:
    """Return a Unix time in milliseconds as a datetime."""
    return dt.datetime.fromtimestamp(ms / 1000, dt.UTC)


def task(task: domain.Task, tenant_id: str) -> tasks.Task:
    """Return a task as the API shows it."""
    spec = task.spec
    has_result = task.status is TaskStatus.COMPLETED or (
        task.status is TaskStatus.FAILED and task.location is not Location.DLQ_SET
    )
    created_at = moment(task.created_ms)
    return tasks.Task(
        id=task.id,
        command=spec.command,
        payload=spec.payload,
        priority=task.priority,
        status=task.status,
        attempts=task.attempts,
        max_attempts=task.max_attempts,
        webhook=spec.webhook,
        worker_id=task.worker,
        lease_until=None if task.lease_until_ms is None else moment(task.lease_until_ms),
        lease_token=task.lease_token,
        error=task.error,
        progress=None if task.progress is None else Raw(task.progress.encode()),
        result_key=f"/v1/codeq/tasks/{task.id}/result" if has_result else None,
        tenant_id=tenant_id,
        trace_parent=spec.trace_parent,
        trace_state=spec.trace_state,
        created_at=created_at,
        updated_at=created_at if task.updated_ms == task.created_ms else moment(task.updated_ms),
        visible_at=moment(task.visible_ms) if task.visible_ms > task.created_ms else None,
        last_known_location=task.location,
    )


def result(result: domain.Result) -> results.Result:
    """Return a result as the API shows it."""
    return results.Result(
        task_id=result.task_id,
        status=result.status,
        result=result.result,
        error=result.error,
        artifacts=None if result.artifacts is None else _decode_artifacts(result.artifacts),
        worker_id=result.worker,
        attempts=result.attempts,
        completed_at=moment(result.completed_ms),
    )


def progress(value: float | leases.Progress | None) -> str | None:
    """Return progress as it is stored: the compact JSON of a `Progress`."""
    if value is None:
        return None
    progress = value if isinstance(value, leases.Progress) else leases.Progress(percent=value)
    note = {"note": progress.note} if progress.note else {}
    return msgspec.json.encode({"percent": progress.percent, **note}).decode()


def enqueued_item(item: domain.Enqueued | errors.CodeqError, tenant_id: str) -> tasks.EnqueuedItem:
    """Return the answer for one task of a batch."""
    if isinstance(item, errors.CodeqError):
        return tasks.EnqueuedItem(error=item.code, status=item.status, detail=item.detail)
    return tasks.EnqueuedItem(
        task=task(item.task, tenant_id), is_replayed=item.is_repeated, is_mismatch=item.is_mismatch
    )


def submitted_item(task_id: str, item: domain.Result | errors.CodeqError) -> results.SubmittedItem:
    """Return the answer for one result of a batch."""
    if isinstance(item, errors.CodeqError):
        return results.SubmittedItem(task_id=task_id, error=item.code, status=item.status, detail=item.detail)
    return results.SubmittedItem(task_id=task_id, result=result(item))
