"""What an endpoint is told of a task that ended, and the delivery that is opened for it with the audit."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from core import pg_copy, url_check
from queues.audit.events import Ended, text
from webhooks.models import Delivery, Endpoint

# Deliveries of one task's endings have ids of their own, the same whenever the ending is read again.
NAMESPACE = uuid.UUID("6b0f7d8e-2f5c-5a86-9d1b-0c5de9a7c0de")

COLUMNS = {
    "id": "uuid", "tenant_id": "text", "task_id": "uuid", "command": "text", "url": "text", "address": "text",
    "host": "text", "body": "text", "trace_parent": "text", "trace_state": "text", "status": "text", "tries": "int4",
    "attempts": "int4", "due_at": "timestamptz", "last_error": "text", "created_at": "timestamptz",
    "ended_at": "timestamptz",
}  # fmt: skip


class Callback(msgspec.Struct, rename="camel"):
    """What an endpoint is told."""

    task_id: str
    event_type: str
    status: str
    result: msgspec.Raw | None
    error: str
    artifacts: msgspec.Raw
    completed_at: str
    attempts: int
    delivery_id: str


def open_deliveries(ended: Sequence[Ended]) -> None:
    """A delivery for every task among these that has a webhook. The same ending again opens nothing new."""
    rows = [_row(item) for item in ended if item.spec and item.spec.webhook]
    if not rows:
        return
    held = _disabled({(row["tenant_id"], row["address"]) for row in rows})
    for row in rows:
        if (row["tenant_id"], row["address"]) in held:
            row |= {"status": Delivery.Status.HELD.value, "ended_at": row["created_at"]}
    values = [[row[column] for column in COLUMNS] for row in rows]
    pg_copy.copy_rows("webhooks_delivery", COLUMNS, values, "ON CONFLICT (id) DO NOTHING")


def _row(item: Ended) -> dict[str, Any]:
    event, spec = item.event, item.spec
    assert spec is not None
    assert spec.webhook is not None
    moment = datetime.fromtimestamp(event.ended_ms / 1000, UTC)
    delivery_id = uuid.uuid5(NAMESPACE, f"{event.task_id}/{event.partition}/{event.stream_id}")
    row: dict[str, Any] = {
        "id": delivery_id, "tenant_id": event.tid, "task_id": event.task_id, "command": event.command,
        "url": text(spec.webhook), "address": "", "host": "", "body": text(callback(item, delivery_id)),
        "trace_parent": text(spec.trace_parent or ""), "trace_state": text(spec.trace_state or ""),
        "status": Delivery.Status.PENDING.value, "tries": 0, "attempts": 0, "due_at": moment, "last_error": "",
        "created_at": moment, "ended_at": None,
    }  # fmt: skip
    try:
        target = url_check.parse(spec.webhook)
    except url_check.Refused as error:
        # Was refused at the door, or should have been: it is on record, and nothing is ever sent.
        return row | {"status": Delivery.Status.GIVEN_UP.value, "last_error": f"refused: {error}", "ended_at": moment}
    return row | {"address": target.endpoint, "host": target.place}


def callback(item: Ended, delivery_id: uuid.UUID) -> bytes:
    event = item.event
    moment = datetime.fromtimestamp(event.ended_ms / 1000, UTC)
    return msgspec.json.encode(
        Callback(
            task_id=str(event.task_id),
            event_type=event.command,
            status=event.status,
            result=_raw(item.answer.result),
            error=item.error,
            artifacts=_raw(item.answer.artifacts) or msgspec.Raw(b"[]"),
            completed_at=moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            attempts=event.attempts,
            delivery_id=str(delivery_id),
        )
    )


def _raw(value: bytes | None) -> msgspec.Raw | None:
    """A worker's JSON as it came; what is none (an older release, an accident) as a string, so that the rest is."""
    if value is None:
        return None
    try:
        # Not msgspec: it takes an escaped lone surrogate, which JSON allows, for the end of the text.
        json.loads(value)
    except (ValueError, RecursionError):
        return msgspec.Raw(msgspec.json.encode(text(value)))
    return msgspec.Raw(value)


def _disabled(endpoints: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    tids, addresses = zip(*endpoints, strict=True)
    rows = Endpoint.objects.filter(tenant_id__in=set(tids), address__in=set(addresses), is_enabled=False)
    return set(rows.values_list("tenant_id", "address"))
