"""Callbacks about ended tasks: encode their bodies and create their deliveries."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from core import pg_copy, url_check
from queues.audit.events import AuditRecord, storable_text
from webhooks.models import Delivery, Endpoint

# A delivery's id is derived from its event, so that reading the event again yields the same id.
NAMESPACE = uuid.UUID("6b0f7d8e-2f5c-5a86-9d1b-0c5de9a7c0de")

COLUMNS = {
    "id": "uuid", "tenant_id": "text", "task_id": "uuid", "command": "text", "url": "text", "address": "text",
    "host": "text", "body": "text", "trace_parent": "text", "trace_state": "text", "status": "text", "tries": "int4",
    "attempts": "int4", "due_at": "timestamptz", "last_error": "text", "created_at": "timestamptz",
    "ended_at": "timestamptz",
}  # fmt: skip


class Callback(msgspec.Struct, rename="camel"):
    """JSON body of a callback."""

    task_id: str
    event_type: str
    status: str
    result: msgspec.Raw | None
    error: str
    artifacts: msgspec.Raw
    completed_at: str
    attempts: int
    delivery_id: str


def create_deliveries(ended: Sequence[AuditRecord]) -> None:
    """Create a delivery for each ended task that has a webhook. Idempotent for the same event.

    The audit calls this in the transaction that stores the tasks.
    """
    rows = [_row(item) for item in ended if item.spec and item.spec.webhook]
    if not rows:
        return
    disabled = _find_disabled({(row["tenant_id"], row["address"]) for row in rows})
    for row in rows:
        if (row["tenant_id"], row["address"]) in disabled:
            row |= {"status": Delivery.Status.HELD.value, "ended_at": row["created_at"]}
    values = [[row[column] for column in COLUMNS] for row in rows]
    pg_copy.copy_rows("webhooks_delivery", COLUMNS, values, "ON CONFLICT (id) DO NOTHING")


def _row(item: AuditRecord) -> dict[str, Any]:
    event, spec = item.event, item.spec
    assert spec is not None
    assert spec.webhook is not None
    ended_at = datetime.fromtimestamp(event.ended_ms / 1000, UTC)
    delivery_id = uuid.uuid5(NAMESPACE, f"{event.task_id}/{event.partition}/{event.stream_id}")
    row: dict[str, Any] = {
        "id": delivery_id, "tenant_id": event.tid, "task_id": event.task_id, "command": event.command,
        "url": storable_text(spec.webhook), "address": "", "host": "",
        "body": storable_text(encode_callback(item, delivery_id)),
        "trace_parent": storable_text(spec.trace_parent or ""), "trace_state": storable_text(spec.trace_state or ""),
        "status": Delivery.Status.PENDING.value, "tries": 0, "attempts": 0, "due_at": ended_at, "last_error": "",
        "created_at": ended_at, "ended_at": None,
    }  # fmt: skip
    try:
        target = url_check.parse(spec.webhook)
    except url_check.AddressRefused as error:
        # The URL check at enqueue refuses such a URL, unless the settings have changed since. Record the delivery as
        # given up; nothing is sent.
        return row | {"status": Delivery.Status.GIVEN_UP.value, "last_error": f"refused: {error}", "ended_at": ended_at}
    return row | {"address": target.endpoint_url, "host": target.host_and_port}


def encode_callback(item: AuditRecord, delivery_id: uuid.UUID) -> bytes:
    """Encode the body of the callback about an ended task."""
    event = item.event
    ended_at = datetime.fromtimestamp(event.ended_ms / 1000, UTC)
    return msgspec.json.encode(
        Callback(
            task_id=str(event.task_id),
            event_type=event.command,
            status=event.status,
            result=_raw_json(item.answer.result),
            error=item.error,
            artifacts=_raw_json(item.answer.artifacts) or msgspec.Raw(b"[]"),
            completed_at=ended_at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            attempts=event.attempts,
            delivery_id=str(delivery_id),
        )
    )


def _raw_json(value: bytes | None) -> msgspec.Raw | None:
    """Return a worker's JSON unchanged, or as a JSON string if it is invalid.

    Invalid JSON, for example from an older release, must not make the whole body invalid.
    """
    if value is None:
        return None
    try:
        # Not msgspec: it rejects an escaped lone surrogate, which JSON allows.
        json.loads(value)
    except (ValueError, RecursionError):
        return msgspec.Raw(msgspec.json.encode(storable_text(value)))
    return msgspec.Raw(value)


def _find_disabled(endpoints: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return (tid, address) pairs of disabled endpoints.

    All disabled endpoints among the given pairs are included. Others of the same tenants may be, too.
    """
    tids, urls = zip(*endpoints, strict=True)
    rows = Endpoint.objects.filter(tenant_id__in=set(tids), address__in=set(urls), is_enabled=False)
    return set(rows.values_list("tenant_id", "address"))
