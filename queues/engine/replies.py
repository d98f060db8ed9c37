"""Turns what scripts answer into values, and their words into errors: the one place where either is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from core import errors
from queues.domain import Answer, Location, QueueEntry, QueuePeek, Spec, Status, Task

# The fields that lua/lib/task.lua shows, then a score of the index the task is in, then its id.
SHOWN = 14

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
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def refusal(reply: Sequence[Any]) -> errors.CodeqError | None:
    """The error that the first word of a reply stands for, or None."""
    found = REFUSALS.get(reply[0])
    return found() if found else None


def accepted(reply: Sequence[Any]) -> Sequence[Any]:
    """The reply, unless its first word is a refusal."""
    error = refusal(reply)
    if error:
        raise error
    return reply


def shown_task(fields: Sequence[bytes]) -> Task:
    """A task from the fields `shown(id)` answers."""
    (_, spec, status, priority, most, created, visible, updated, attempts, lease, problem, progress, _, ended,
     score, task_id) = fields  # fmt: skip
    state = Status(status.decode())
    created_ms = int(created)
    claimed_ms, worker = lease_parts(lease)
    return Task(
        id=task_id.decode(),
        spec=decode_spec(spec),
        priority=int(priority),
        max_attempts=int(most),
        status=state,
        created_ms=created_ms,
        updated_ms=int(ended) if ended else max(int(updated or created), claimed_ms),
        visible_ms=int(visible or created),
        location=_location(state, bool(score)),
        attempts=int(attempts or 0),
        worker=worker if worker and state is not Status.PENDING else None,
        lease_until_ms=int(float(score)) if state is Status.IN_PROGRESS and score else None,
        error=problem.decode("utf-8", "replace") or None,
        progress=progress.decode() or None,
    )


def lease_parts(lease: bytes) -> tuple[int, str]:
    """When the last lease was opened, and whose it is or was: "<claimed ms> <token> <worker>"."""
    claimed, _, rest = lease.decode().partition(" ")
    return int(claimed or 0), rest.partition(" ")[2]


def _location(status: Status, is_indexed: bool) -> Location:
    if status is Status.PENDING:
        return Location.DELAYED_ZSET if is_indexed else Location.PENDING_LIST
    if status is Status.IN_PROGRESS:
        return Location.INPROG_SET
    return Location.DLQ_SET if status is Status.FAILED and is_indexed else Location.NONE


def claimed_tasks(reply: Sequence[Any], worker: str, token: str) -> list[Task]:
    """The tasks of a claim's reply: eight values each, behind six about the claim."""
    now_ms, deadline_ms = reply[0], reply[1]
    tasks = []
    for at in range(6, len(reply), 8):
        task_id, spec, priority, most, attempts, created, visible, problem = reply[at : at + 8]
        tasks.append(
            Task(
                id=task_id.decode(),
                spec=decode_spec(spec),
                priority=int(priority),
                max_attempts=int(most),
                status=Status.IN_PROGRESS,
                created_ms=int(created),
                updated_ms=now_ms,
                visible_ms=int(visible),
                location=Location.INPROG_SET,
                attempts=int(attempts),
                worker=worker,
                lease_token=token,
                lease_until_ms=deadline_ms,
                error=problem.decode("utf-8", "replace") or None,
            )
        )
    return tasks


def peeked(reply: Sequence[Any]) -> QueuePeek:
    in_line, in_progress, delayed = ([_standing(line) for line in lines] for lines in reply)
    return QueuePeek(in_line=in_line, in_progress=in_progress, delayed=delayed)


def _standing(line: Sequence[bytes]) -> QueueEntry:
    task_id, score, priority, attempts, most, created, visible, lease, progress, status = line
    claimed_ms, worker = lease_parts(lease)
    is_held = status == b"IN_PROGRESS"
    return QueueEntry(
        id=task_id.decode(),
        priority=int(priority),
        attempts=int(attempts or 0),
        max_attempts=int(most),
        created_ms=int(created),
        visible_ms=int(visible or created),
        moment_ms=int(float(score)) if score else None,
        worker=worker if is_held else None,
        claimed_ms=claimed_ms if is_held else None,
        progress=progress.decode("utf-8", "replace") or None,
    )
