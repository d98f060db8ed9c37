"""Between the wire and the nouns: what a request says as what a verb takes, and back."""

from __future__ import annotations

import base64
import datetime as dt
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, Raw

from core import errors
from core.url_check import check_url
from queues import artifacts, json_payloads
from queues import domain as nouns
from queues.api.schemas import LIMITS, leases, results, tasks
from queues.domain import Location, TaskStatus


def new_task(body: tasks.NewTask, trace_parent: str | None = None, trace_state: str | None = None) -> nouns.NewTask:
    if body.webhook is not None:
        check_url(body.webhook)
    return nouns.NewTask(
        command=body.command,
        payload=json_payloads.compact(body.payload, "payload").decode(),
        priority=0 if body.priority is UNSET else int(body.priority),
        is_priority_said=body.priority is not UNSET,
        max_attempts=whole(body.max_attempts),
        webhook=body.webhook,
        idempotency_key=body.idempotency_key,
        run_at_ms=None if body.run_at is None else max(1, round(body.run_at.timestamp() * 1000)),
        delay_ms=0 if body.delay_seconds is None else round(body.delay_seconds * 1000),
        trace_parent=trace_parent,
        trace_state=trace_state,
    )


def whole(number: float | None) -> int | None:
    """A whole number of the wire, which is a float there."""
    return None if number is None else int(number)


def new_result(
    task_id: str, body: results.NewResult, lease_token: str | None, kept: Sequence[artifacts.StoredArtifact] = ()
) -> nouns.NewResult:
    is_absent = bytes(body.result) in (b"", b"null")
    result = None if is_absent else json_payloads.compact(body.result, "result")
    if result is not None and not result.startswith(b"{"):
        raise errors.InvalidRequest("Expected `object` - at `$.result`")
    if body.status == "COMPLETED" and result is None:
        raise errors.InvalidRequest("Object missing required field `result`: a COMPLETED task has one")
    if body.status == "FAILED" and body.error is None:
        raise errors.InvalidRequest("Object missing required field `error`: a FAILED task has one")
    return nouns.NewResult(
        task_id=task_id,
        status=TaskStatus(body.status),
        result=result,
        error=body.error,
        artifacts=msgspec.json.encode(kept) if kept else None,
        lease_token=lease_token,
    )


def new_artifacts(body: results.NewResult) -> list[artifacts.NewArtifact]:
    """Checked and decoded."""
    return [_new_artifact(each) for each in body.artifacts or ()]


def _new_artifact(body: results.NewArtifact) -> artifacts.NewArtifact:
    if (body.url is None) == (body.content_base64 is None):
        raise errors.InvalidRequest("artifacts: each has either `url` or `contentBase64`")
    if body.url is not None:
        _check_address(body.url)
    content = None
    if body.content_base64 is not None:
        try:
            content = base64.b64decode(body.content_base64, validate=True)
        except ValueError as error:
            raise errors.InvalidRequest("artifacts: contentBase64 is not base64") from error
        if len(content) > LIMITS.artifact_bytes:
            raise errors.PayloadTooLarge(f"artifacts: {len(content)} bytes; at most {LIMITS.artifact_bytes} each")
    return artifacts.NewArtifact(name=body.name, url=body.url, content=content, content_type=body.content_type)


def _check_address(url: str) -> None:
    """Refuse what whoever follows the address would stumble over: it is handed out as it is, and never called here."""
    try:
        _ = urlsplit(url).port
    except ValueError as error:
        raise errors.InvalidRequest("artifacts: url is not an address") from error


_read_artifacts = msgspec.json.Decoder(list[results.Artifact]).decode


def moment(ms: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(ms / 1000, dt.UTC)


def task(found: nouns.Task, tenant_id: str) -> tasks.Task:
    spec = found.spec
    is_answered = found.status is TaskStatus.COMPLETED or (
        found.status is TaskStatus.FAILED and found.location is not Location.DLQ_SET
    )
    created_at = moment(found.created_ms)
    return tasks.Task(
        id=found.id,
        command=spec.command,
        payload=spec.payload,
        priority=found.priority,
        status=found.status,
        attempts=found.attempts,
        max_attempts=found.max_attempts,
        webhook=spec.webhook,
        worker_id=found.worker,
        lease_until=None if found.lease_until_ms is None else moment(found.lease_until_ms),
        lease_token=found.lease_token,
        error=found.error,
        progress=None if found.progress is None else Raw(found.progress.encode()),
        result_key=f"/v1/codeq/tasks/{found.id}/result" if is_answered else None,
        tenant_id=tenant_id,
        trace_parent=spec.trace_parent,
        trace_state=spec.trace_state,
        created_at=created_at,
        updated_at=created_at if found.updated_ms == found.created_ms else moment(found.updated_ms),
        visible_at=moment(found.visible_ms) if found.visible_ms > found.created_ms else None,
        last_known_location=found.location,
    )


def result(found: nouns.Result) -> results.Result:
    return results.Result(
        task_id=found.task_id,
        status=found.status,
        result=found.result,
        error=found.error,
        artifacts=None if found.artifacts is None else _read_artifacts(found.artifacts),
        worker_id=found.worker,
        attempts=found.attempts,
        completed_at=moment(found.completed_ms),
    )


def progress(value: float | leases.Progress | None) -> str | None:
    """Progress as it is stored: the compact JSON of a `Progress`."""
    if value is None:
        return None
    known = value if isinstance(value, leases.Progress) else leases.Progress(percent=value)
    return msgspec.json.encode({"percent": known.percent, **({"note": known.note} if known.note else {})}).decode()


def enqueued_item(item: nouns.Enqueued | errors.CodeqError, tenant_id: str) -> tasks.EnqueuedItem:
    if isinstance(item, errors.CodeqError):
        return tasks.EnqueuedItem(error=item.code, status=item.status, detail=item.detail)
    return tasks.EnqueuedItem(
        task=task(item.task, tenant_id), is_replayed=item.is_replayed, is_mismatch=item.is_mismatch
    )


def submitted_item(task_id: str, item: nouns.Result | errors.CodeqError) -> results.SubmittedItem:
    if isinstance(item, errors.CodeqError):
        return results.SubmittedItem(task_id=task_id, error=item.code, status=item.status, detail=item.detail)
    return results.SubmittedItem(task_id=task_id, result=result(item))
