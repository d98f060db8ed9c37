"""Decoding of the scripts' replies into values and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from core import errors
from queues.domain import Location, QueueEntry, QueuePeek, Spec, StoredResult, Task, TaskStatus

REFUSALS: dict[bytes, type[errors.CodeqError]] = {
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


def refusal(reply: Sequence[Any]) -> errors.CodeqError | None:
    """Return the error for the first word of a reply, or None."""
    error = REFUSALS.get(reply[0])
    return error() if error else None


def accepted(reply: Sequence[Any]) -> Sequence[Any]:
    """Return the reply. Raise the error if its first word is a refusal."""
    error = refusal(reply)
    if error:
        raise error
    return reply


def shown_task(fields: Sequence[bytes]) -> Task:
    """Decode a task from the fields of `read_task` in lua/lib/task.lua, in their order."""
    (_, spec, status, priority, max_attempts, created, visible, updated, attempts, lease, error, progress, _, ended,
     score, task_id) = fields  # fmt: skip
    state = TaskStatus(status.decode())
    created_ms = int(created)
    claimed_ms, worker = lease_parts(lease)
    return Task(
        id=task_id.decode(),
        spec=decode_spec(spec),
        priority=int(priority),
        max_attempts=int(max_attempts),
        status=state,
        created_ms=created_ms,
        updated_ms=int(ended) if ended else max(int(updated or created), claimed_ms),
        visible_ms=int(visible or created),
        location=_location(state, bool(score)),
        attempts=int(attempts or 0),
        worker=worker if worker and state is not TaskStatus.PENDING else None,
        lease_until_ms=int(float(score)) if state is TaskStatus.IN_PROGRESS and score else None,
        error=error.decode("utf-8", "replace") or None,
        progress=progress.decode() or None,
    )


def lease_parts(lease: bytes) -> tuple[int, str]:
    """Return the time and the worker of the last claim, from "<claimed ms> <token> <worker>"."""
    claimed, _, rest = lease.decode().partition(" ")
    return int(claimed or 0), rest.partition(" ")[2]


def _location(status: TaskStatus, is_indexed: bool) -> Location:
    if status is TaskStatus.PENDING:
        return Location.DELAYED_ZSET if is_indexed else Location.PENDING_LIST
    if status is TaskStatus.IN_PROGRESS:
        return Location.INPROG_SET
    return Location.DLQ_SET if status is TaskStatus.FAILED and is_indexed else Location.NONE


def claimed_tasks(reply: Sequence[Any], worker: str, token: str) -> list[Task]:
    """Decode the tasks of a claim's reply: six values about the claim, then eight per task."""
    now_ms, deadline_ms = reply[0], reply[1]
    tasks = []
    for at in range(6, len(reply), 8):
        task_id, spec, priority, max_attempts, attempts, created, visible, error = reply[at : at + 8]
        tasks.append(
            Task(
                id=task_id.decode(),
                spec=decode_spec(spec),
                priority=int(priority),
                max_attempts=int(max_attempts),
                status=TaskStatus.IN_PROGRESS,
                created_ms=int(created),
                updated_ms=now_ms,
                visible_ms=int(visible),
                location=Location.INPROG_SET,
                attempts=int(attempts),
                worker=worker,
                lease_token=token,
                lease_until_ms=deadline_ms,
                error=error.decode("utf-8", "replace") or None,
            )
        )
    return tasks


def peeked(reply: Sequence[Any]) -> QueuePeek:
    """Decode the reply of `peek`."""
    ready, in_progress, delayed = ([_standing(fields) for fields in entries] for entries in reply)
    return QueuePeek(ready=ready, in_progress=in_progress, delayed=delayed)


def _standing(fields: Sequence[bytes]) -> QueueEntry:
    task_id, score, priority, attempts, max_attempts, created, visible, lease, progress, status = fields
    claimed_ms, worker = lease_parts(lease)
    is_held = status == b"IN_PROGRESS"
    return QueueEntry(
        id=task_id.decode(),
        priority=int(priority),
        attempts=int(attempts or 0),
        max_attempts=int(max_attempts),
        created_ms=int(created),
        visible_ms=int(visible or created),
        moment_ms=int(float(score)) if score else None,
        worker=worker if is_held else None,
        claimed_ms=claimed_ms if is_held else None,
        progress=progress.decode("utf-8", "replace") or None,
    )
