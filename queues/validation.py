"""The rules that whatever is asked for has to keep: names, ids, tasks. What breaks one never becomes part of a key."""

from __future__ import annotations

import re
from collections.abc import Sequence

from core import errors
from core.conf import conf
from queues.domain import NewTask
from queues.engine.keys import COMMAND, PRIORITIES
from tenants.domain import TenantSnapshot

# Unix milliseconds that a date can still be written for: the year 9999 ends there.
LATEST_MS = 253_402_300_799_000
TASK_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
IDEMPOTENCY_KEY = re.compile(r"[\x20-\x7e]{1,255}")


def require(holds: bool, otherwise: str) -> None:
    """InvalidRequest, unless it holds."""
    if not holds:
        raise errors.InvalidRequest(otherwise)


def check_command(command: str, what: str = "command") -> None:
    require(bool(COMMAND.fullmatch(command)), f"{what}: 1 to 128 of A-Z a-z 0-9 _ . -")


def is_id(task_id: str) -> bool:
    """Only the canonical form of a UUID is an id: anything else names nothing."""
    return TASK_ID.fullmatch(task_id) is not None


def check_id(task_id: str) -> None:
    if not is_id(task_id):
        raise errors.TaskNotFound


def is_idempotency_key(text: str) -> bool:
    return IDEMPOTENCY_KEY.fullmatch(text) is not None


def check_token(tenant: TenantSnapshot, token: str | None) -> None:
    require(bool(token) or not tenant.is_lease_token_required, "leaseToken: this tenant requires it")


def check_payload(tenant: TenantSnapshot, payload: str) -> None:
    """InvalidRequest for what is no text, PayloadTooLarge for what is longer than the tenant may send."""
    try:
        size = len(payload.encode())
    except UnicodeEncodeError:
        raise errors.InvalidRequest("payload: a lone surrogate is not text") from None
    if size > tenant.payload_bytes:
        raise errors.PayloadTooLarge(f"payload: {size} bytes; this tenant may send {tenant.payload_bytes}")


def check_task(tenant: TenantSnapshot, task: NewTask, tiers: Sequence[int] | None) -> None:
    """`tiers`: the priorities that the queue's policy knows, if it names any."""
    limits = conf().queues
    check_command(task.command)
    require(task.priority in PRIORITIES, "priority: 0 to 9, higher first")
    if tiers is not None:
        require(task.priority in tiers, f"priority: {task.command} knows {', '.join(map(str, tiers))}")
    attempts = task.max_attempts
    require(
        attempts is None or 1 <= attempts <= limits.max_attempts_limit,
        f"maxAttempts: 1 to {limits.max_attempts_limit}",
    )
    require(task.delay_ms >= 0, "delaySeconds: 0 or more")
    require(task.run_at_ms is None or 0 < task.run_at_ms <= LATEST_MS, "runAt: not a moment in time")
    key = task.idempotency_key
    require(key is None or is_idempotency_key(key), "idempotencyKey: 1 to 255 printable characters")
    check_payload(tenant, task.payload)
