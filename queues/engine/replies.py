"""Encode and decode values of several scripts: errors, tasks, specs and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from core import errors
from queues.domain import Location, Spec, StoredResult, Task, TaskStatus

# The first word of a reply if the script rejects the transition.
ERRORS: dict[bytes, type[errors.CodeqError]] = {
    b"NOT_FOUND": errors.TaskNotFound,
    b"NOT_OWNER": errors.NotLeaseOwner,
    b"LEASE_LOST": errors.LeaseLost,
    b"CANCELLED": errors.TaskCancelled,
    b"ENDED": errors.AlreadyEnded,
    b"NOT_DEAD": errors.NotDead,
    b"CONFLICT": errors.Conflict,
}

encode_spec = msgspec.msgpack.Encoder().encode
decode_spec = msgspec.msgpack.Decoder(Spec).decode
encode_answer = msgspec.msgpack.Encoder().encode
decode_answer = msgspec.msgpack.Decoder(StoredResult).decode


def decode_error(word: bytes) -> errors.CodeqError | None:
    """Return the error for the first word of a reply, or None if it reports success."""
    error = ERRORS.get(word)
    return error() if error else None


def raise_for_error(reply: Sequence[Any]) -> Sequence[Any]:
    """Return the reply, or raise the error that its first word stands for."""
    error = decode_error(reply[0])
    if error:
        raise error
    return reply


def decode_task(fields: Sequence[bytes]) -> Task:
    """Decode a task from the fields of `read_task` in lua/lib/task.lua, in their order."""
    (_, spec, status, priority, max_attempts, created, visible, updated, attempts, lease, error, progress, _, ended,
     score, task_id) = fields  # fmt: skip
    state = TaskStatus(status.decode())
    created_ms = int(created)
    claimed_ms, worker = parse_lease(lease)
    return Task(
        id=task_id.decode(),
        spec=decode_spec(spec),
        priority=int(priority),
        max_attempts=int(max_attempts),
        status=state,
        created_ms=created_ms,
        updated_ms=int(ended) if ended else max(int(updated or created), claimed_ms),
        visible_ms=int(visible or created),
        location=_locate(state, is_indexed=bool(score)),
        attempts=int(attempts or 0),
        worker=worker if worker and state is not TaskStatus.PENDING else None,
        lease_until_ms=int(float(score)) if state is TaskStatus.IN_PROGRESS and score else None,
        error=error.decode("utf-8", "replace") or None,
        progress=progress.decode() or None,
    )


def parse_lease(lease: bytes) -> tuple[int, str]:
    """Return the time and the worker of the last claim, from "<claimed ms> <token> <worker>"."""
    claimed, _, rest = lease.decode().partition(" ")
    return int(claimed or 0), rest.partition(" ")[2]


def _locate(status: TaskStatus, *, is_indexed: bool) -> Location:
    """Return the Redis structure that holds a task.

    `is_indexed` is True if the sorted set for its status contains the task.
    """
    if status is TaskStatus.PENDING:
        return Location.DELAYED_ZSET if is_indexed else Location.PENDING_LIST
    if status is TaskStatus.IN_PROGRESS:
        return Location.INPROG_SET
    return Location.DLQ_SET if status is TaskStatus.FAILED and is_indexed else Location.NONE
