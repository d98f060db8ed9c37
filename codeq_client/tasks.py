"""Request and response types. Fields that a newer service adds are ignored."""

from __future__ import annotations

import datetime as dt
from typing import Any

import msgspec
from msgspec import Struct


class NewTask(Struct, kw_only=True, rename="camel", omit_defaults=True):
    """A task to enqueue, with the arguments of `Client.enqueue`."""

    command: str
    payload: Any
    priority: int | None = None
    max_attempts: int | None = None
    webhook: str | None = None
    idempotency_key: str | None = None
    run_at: dt.datetime | None = None
    delay_seconds: float | None = None


class Task(Struct, kw_only=True, rename="camel", frozen=True):
    """A task and its current state."""

    id: str
    command: str
    payload_json: str = msgspec.field(name="payload")
    status: str
    priority: int
    attempts: int
    max_attempts: int
    webhook: str | None = None
    worker_id: str | None = None
    lease_until: dt.datetime | None = None
    lease_token: str | None = None
    error: str | None = None
    progress: Any = None
    trace_parent: str | None = None
    trace_state: str | None = None
    created_at: dt.datetime
    updated_at: dt.datetime
    visible_at: dt.datetime | None = None
    last_known_location: str | None = None

    @property
    def payload(self) -> Any:
        """The decoded payload."""
        return msgspec.json.decode(self.payload_json)


class ResultArtifact(Struct, kw_only=True, rename="camel", frozen=True):
    """A file that belongs to a result."""

    name: str
    url: str
    content_type: str | None = None
    size: int | None = None


class Result(Struct, kw_only=True, rename="camel", frozen=True):
    """A task's result: COMPLETED with `result`, or FAILED or CANCELLED with `error`."""

    task_id: str
    status: str
    result: Any = None
    error: str | None = None
    artifacts: list[ResultArtifact] = []
    worker_id: str = ""
    attempts: int
    completed_at: dt.datetime

    @property
    def is_completed(self) -> bool:
        return self.status == "COMPLETED"
