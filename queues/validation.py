"""Checks of names, ids, tokens, payloads and tasks that a request's schema cannot express.

The schemas of `queues.api.schemas` check shape and bounds. These functions check values that arrive in a path or a
token, and values whose limits depend on the tenant or on a queue's policy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from core import errors
from queues.domain import NewTask
from queues.engine.keys import COMMAND
from tenants.domain import TenantSnapshot

TASK_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
IDEMPOTENCY_KEY = re.compile(r"[\x20-\x7e]{1,255}")


def require(condition: bool, message: str) -> None:
    """Raise InvalidRequest with the message unless the condition is true."""
    if not condition:
        raise errors.InvalidRequest(message)


def check_command(command: str, field: str = "command") -> None:
    """Raise InvalidRequest unless the text can name a queue.

    Only such a text may become part of a Redis key.
    """
    require(bool(COMMAND.fullmatch(command)), f"{field}: must be 1 to 128 characters of A-Z a-z 0-9 _ . -")


def is_id(task_id: str) -> bool:
    """Return whether the text is a task id: a UUID in its canonical form."""
    return TASK_ID.fullmatch(task_id) is not None


def check_id(task_id: str) -> str:
    """Return the id. Raise TaskNotFound if the text is not a valid task id."""
    if not is_id(task_id):
        raise errors.TaskNotFound
    return task_id


def is_idempotency_key(text: str) -> bool:
    """Return whether a task can have the text as its idempotency key."""
    return IDEMPOTENCY_KEY.fullmatch(text) is not None


def check_token(tenant: TenantSnapshot, token: str | None) -> None:
    """Raise InvalidRequest if the tenant requires a lease token and there is none."""
    require(
        bool(token) or not tenant.is_lease_token_required,
        "leaseToken: required by this tenant. Send the token that the claim returned",
    )


def check_payload(tenant: TenantSnapshot, payload: str) -> None:
    """Raise InvalidRequest for a lone surrogate, PayloadTooLarge above the tenant's limit."""
    try:
        size = len(payload.encode())
    except UnicodeEncodeError:
        raise errors.InvalidRequest("payload: contains a lone surrogate") from None
    if size > tenant.payload_bytes:
        raise errors.PayloadTooLarge(f"payload: {size} bytes; the limit of this tenant is {tenant.payload_bytes}")


def check_task(tenant: TenantSnapshot, task: NewTask, tiers: Sequence[int] | None) -> None:
    """Check a task against the limits of its tenant and of its queue's policy.

    `tiers` are the allowed priorities, or None if every priority is allowed. Raises InvalidRequest or PayloadTooLarge.
    """
    if tiers is not None:
        require(task.priority in tiers, f"priority: queue {task.command} accepts only {', '.join(map(str, tiers))}")
    check_payload(tenant, task.payload)
