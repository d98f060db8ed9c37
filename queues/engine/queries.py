"""Queries on tasks and queues.

They change nothing, with one exception: `task` can request the announcement of a task's end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from core import errors
from core.redis.script_call import ScriptCall
from queues.domain import QueueEntry, QueuePeek, QueuePosition, QueueStats, StoredResult, Task
from queues.engine import keys, replies, script_loader
from queues.engine.engine import Engine
from queues.engine.options import CHUNK

# The data of tasks that one script reads. Reading a mebibyte occupies Redis for less than a millisecond.
BLOB_BYTES = 2**20


def task(
    engine: Engine, tid: str, task_id: str, *, watch: bool = False
) -> ScriptCall[tuple[Task, StoredResult | None]]:
    """Return a task and its answer. Raise TaskNotFound.

    With `watch`, the end of the task is announced on the wake channel.
    """

    def decode(reply: list[Any]) -> tuple[Task, StoredResult | None]:
        if not reply:
            raise errors.TaskNotFound
        return replies.decode_task(reply[0]), replies.decode_answer(reply[1]) if reply[1] else None

    return engine.prepare(
        "read_task",
        decode,
        due=engine.partition_keys(tid).due,
        root=engine.root(tid),
        tid=tid,
        id=task_id,
        with_answer=1,
        watch=int(watch),
    )


def tasks(engine: Engine, tid: str, task_ids: Sequence[str]) -> ScriptCall[list[Task | None]]:
    """Return tasks in one round trip, and None for ids that are not tasks of this tenant."""
    script, due, root = script_loader.load("read_task"), engine.partition_keys(tid).due, engine.root(tid)
    return ScriptCall(
        engine.runner,
        [
            (script, script.bind(due=due, root=root, tid=tid, id=task_id, with_answer=0, watch=0))
            for task_id in task_ids
        ],
        lambda script_replies: [replies.decode_task(reply[0]) if reply else None for reply in script_replies],
    )


def queue_position(engine: Engine, tid: str, task_id: str) -> ScriptCall[QueuePosition]:
    """Return the position of a task in its queue, and the queue's state. Raise TaskNotFound."""

    def decode(reply: list[Any]) -> QueuePosition:
        if not reply:
            raise errors.TaskNotFound
        command, now_ms, state, in_progress, higher, ahead, awaited_until_ms = reply
        state_name, _, max_consumers = state.partition(b" ")
        return QueuePosition(
            command=command.decode(),
            now_ms=now_ms,
            is_paused=state_name == b"paused",
            is_busy=bool(max_consumers) and in_progress >= int(max_consumers),
            in_progress=in_progress,
            higher=higher,
            ahead=None if ahead < 0 else ahead,
            is_awaited=float(awaited_until_ms) > now_ms,
        )

    tenant, partition = engine.tenant_keys(tid), engine.partition_keys(tid)
    return engine.prepare(
        "queue_position",
        decode,
        queues=tenant.queues,
        ghosts=tenant.ghosts,
        waiting=partition.waiting,
        root=partition.root,
        tid=tid,
        id=task_id,
        clock=engine.clock_argument(),
    )


def blobs(
    engine: Engine, partition: int, task_ids: Sequence[str | bytes]
) -> ScriptCall[list[tuple[bytes | None, bytes | None, bytes | None]]]:
    """Return the spec, the maximum of attempts and the answer of each task.

    They are bytes as Redis stores them, or None. A script reads about BLOB_BYTES at most. If the tasks have more, the
    rest takes further round trips.
    """
    partition_keys = keys.of_partition(partition)

    def decode(reply: list[Any]) -> Any:
        read = list(zip(reply[::3], reply[1::3], reply[2::3], strict=True))
        if len(read) == len(task_ids):
            return read
        return blobs(engine, partition, task_ids[len(read) :]).and_then(lambda others: read + others)

    return engine.prepare(
        "read_blobs",
        list,
        events=partition_keys.events,
        root=partition_keys.root,
        max_bytes=BLOB_BYTES,
        args=task_ids,
    ).and_then(decode)


def find_tenant(engine: Engine, task_id: str, partitions: Iterable[int] | None = None) -> ScriptCall[str | None]:
    """Return the tid of the tenant that has a live task, or None.

    The tenant's partition is unknown, so this reads all partitions, or the given ones, in one round trip.
    """
    script = script_loader.load("find_tenant")
    commands = []
    for partition in range(engine.options.partitions) if partitions is None else partitions:
        partition_keys = keys.of_partition(partition)
        commands.append((script, script.bind(due=partition_keys.due, root=partition_keys.root, id=task_id)))
    return ScriptCall(
        engine.runner,
        commands,
        lambda queues: next((queue.decode().partition(":")[0] for queue in queues if queue), None),
    )


def stats(engine: Engine, tid: str, commands: Sequence[str] = ()) -> ScriptCall[list[QueueStats]]:
    """Return the number of tasks by state in the named queues, or in all queues of the tenant."""

    def decode(reply: list[Any]) -> list[QueueStats]:
        return [
            QueueStats(
                command=command.decode(),
                ready=sum(map(int, ready)),
                delayed=delayed,
                in_progress=in_progress,
                dlq=dlq,
                is_paused=state.startswith(b"paused"),
                oldest_ready_ms=int(oldest_ready_ms) or None,
                ready_by_priority=[int(count) for count in ready],
            )
            for command, state, delayed, in_progress, dlq, oldest_ready_ms, *ready in reply
        ]

    tenant = engine.tenant_keys(tid)
    return engine.prepare(
        "stats", decode, queues=tenant.queues, ghosts=tenant.ghosts, root=engine.root(tid), tid=tid, args=commands
    )


def list_queues(engine: Engine, tid: str) -> ScriptCall[list[str]]:
    """Return the names of the tenant's queues, sorted.

    It takes a round trip for about every CHUNK queues.
    """
    return _list_queues(engine, tid, b"0").and_then(lambda names: sorted(name.decode() for name in names))


def _list_queues(engine: Engine, tid: str, cursor: bytes) -> ScriptCall[set[bytes]]:
    def decode(reply: tuple[bytes, list[bytes]]) -> set[bytes] | ScriptCall[set[bytes]]:
        following, names_and_states = reply
        names = set(names_and_states[::2])
        return names if following == b"0" else _list_queues(engine, tid, following).and_then(names.union)

    queues = engine.tenant_keys(tid).queues
    return engine.prepare("list_queues", tuple, queues=queues, tid=tid, cursor=cursor, limit=CHUNK).and_then(decode)


def peek(engine: Engine, tid: str, command: str, limit: int) -> ScriptCall[QueuePeek]:
    """Return the next ready, in-progress and delayed tasks of a queue, at most `limit` of each."""

    def decode(reply: Sequence[Any]) -> QueuePeek:
        ready, in_progress, delayed = ([_decode_queue_entry(fields) for fields in entries] for entries in reply)
        return QueuePeek(ready=ready, in_progress=in_progress, delayed=delayed)

    tenant = engine.tenant_keys(tid)
    return engine.prepare(
        "peek",
        decode,
        queues=tenant.queues,
        ghosts=tenant.ghosts,
        root=engine.root(tid),
        tid=tid,
        command=command,
        limit=limit,
    )


def _decode_queue_entry(fields: Sequence[bytes]) -> QueueEntry:
    task_id, score, priority, attempts, max_attempts, created, visible, lease, progress, status = fields
    claimed_ms, worker = replies.parse_lease(lease)
    is_leased = status == b"IN_PROGRESS"
    return QueueEntry(
        id=task_id.decode(),
        priority=int(priority),
        attempts=int(attempts or 0),
        max_attempts=int(max_attempts),
        created_ms=int(created),
        visible_ms=int(visible or created),
        due_ms=int(float(score)) if score else None,
        worker=worker if is_leased else None,
        claimed_ms=claimed_ms if is_leased else None,
        progress=progress.decode("utf-8", "replace") or None,
    )


def scan(
    engine: Engine,
    tid: str,
    command: str,
    index: str,
    last_position: str = "0",
    last_id: str = "",
    *,
    limit: int = CHUNK,
) -> ScriptCall[list[tuple[str, str, str]]]:
    """Return a page of one index of a queue: `ready:<0..9>`, `delayed` or `inprog`.

    Each entry is a task's id, its position, and the worker of its last claim if it is in progress. The page begins
    after the last entry of the previous page, which has `last_position` and `last_id`.
    """

    def decode(reply: list[list[bytes]]) -> list[tuple[str, str, str]]:
        return [
            (task_id.decode(), position.decode(), replies.parse_lease(lease)[1]) for task_id, position, lease in reply
        ]

    return engine.prepare(
        "scan",
        decode,
        queues=engine.tenant_keys(tid).queues,
        root=engine.root(tid),
        tid=tid,
        command=command,
        index=index,
        last_position=last_position,
        last_id=last_id,
        limit=limit,
    )
