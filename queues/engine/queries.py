"""What can be known of tasks and queues; nothing here changes anything but who is told of an end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from core import errors
from core.redis.script_call import ScriptCall
from queues.domain import QueuePeek, QueuePosition, QueueStats, StoredResult, Task
from queues.engine import keys, replies, script_loader
from queues.engine.base import Engine
from queues.engine.options import CHUNK


def task(
    engine: Engine, tid: str, task_id: str, *, watch: bool = False
) -> ScriptCall[tuple[Task, StoredResult | None]]:
    """One task and its answer. `watch`: the end of the task is to be announced on the wake channel."""

    def read(reply: list[Any]) -> tuple[Task, StoredResult | None]:
        if not reply:
            raise errors.TaskNotFound
        return replies.shown_task(reply[0]), replies.decode_answer(reply[1]) if reply[1] else None

    return engine.call(
        "read_task",
        read,
        due=engine.partition_keys(tid).due,
        root=engine.root(tid),
        tid=tid,
        id=task_id,
        with_answer=1,
        watch=int(watch),
    )


def tasks(engine: Engine, tid: str, task_ids: Sequence[str]) -> ScriptCall[list[Task | None]]:
    """Tasks in one round trip; None for what is gone, or another tenant's."""
    script, due, root = script_loader.load("read_task"), engine.partition_keys(tid).due, engine.root(tid)
    return ScriptCall(
        engine.runner,
        [
            (script, script.bind(due=due, root=root, tid=tid, id=task_id, with_answer=0, watch=0))
            for task_id in task_ids
        ],
        lambda answers: [replies.shown_task(reply[0]) if reply else None for reply in answers],
    )


def queue_position(engine: Engine, tid: str, task_id: str) -> ScriptCall[QueuePosition]:
    """Where a task stands in its queue, and in what state that is."""

    def read(reply: list[Any]) -> QueuePosition:
        if not reply:
            raise errors.TaskNotFound
        now_ms, state, busy, higher, ahead, awaited_until = reply
        word, _, most = state.partition(b" ")
        return QueuePosition(
            now_ms=now_ms,
            is_paused=word == b"paused",
            is_busy=bool(most) and busy >= int(most),
            in_progress=busy,
            higher=higher,
            ahead=None if ahead < 0 else ahead,
            is_awaited=float(awaited_until) > now_ms,
        )

    of = engine.tenant_keys(tid)
    return engine.call(
        "queue_position", read, queues=of.queues, ghosts=of.ghosts, waiting=engine.partition_keys(tid).waiting,
        root=engine.root(tid), tid=tid, id=task_id, clock=engine.now(),
    )  # fmt: skip


def find_tenant(engine: Engine, task_id: str, among: Iterable[int] | None = None) -> ScriptCall[str | None]:
    """The tid of the tenant whose live task this is; every partition is asked, or some, in one round trip."""
    script = script_loader.load("find_tenant")
    commands = []
    for partition in range(engine.options.partitions) if among is None else among:
        of = keys.of_partition(partition)
        commands.append((script, script.bind(due=of.due, root=of.root, id=task_id)))
    return ScriptCall(
        engine.runner,
        commands,
        lambda queues: next((queue.decode().partition(":")[0] for queue in queues if queue), None),
    )


def stats(engine: Engine, tid: str, commands: Sequence[str] = ()) -> ScriptCall[list[QueueStats]]:
    """What the named queues hold, or all queues of the tenant."""
    root = engine.root(tid)

    def read(reply: list[Any]) -> list[QueueStats]:
        return [
            QueueStats(
                command=command.decode(),
                ready=sum(map(int, ready)),
                delayed=delayed,
                in_progress=inprog,
                dlq=dlq,
                is_paused=state.startswith(b"paused"),
                oldest_ready_ms=int(oldest) or None,
                ready_by_priority=[int(count) for count in ready],
            )
            for command, state, delayed, inprog, dlq, oldest, *ready in reply
        ]

    of = keys.of_tenant(root, tid)
    return engine.call("stats", read, queues=of.queues, ghosts=of.ghosts, root=root, tid=tid, args=commands)


def list_queues(engine: Engine, tid: str) -> ScriptCall[list[str]]:
    """The tenant's queues, by name."""
    return engine.call(
        "list_queues",
        lambda reply: sorted(name.decode() for name in reply),
        queues=engine.tenant_keys(tid).queues,
        tid=tid,
    )


def peek(engine: Engine, tid: str, command: str, limit: int) -> ScriptCall[QueuePeek]:
    """The next tasks of a queue, those in progress and those delayed: at most `limit` of each."""
    of = engine.tenant_keys(tid)
    return engine.call(
        "peek", replies.peeked, queues=of.queues, ghosts=of.ghosts, root=engine.root(tid), tid=tid,
        command=command, limit=limit,
    )  # fmt: skip


def scan(
    engine: Engine, tid: str, command: str, place: str, at: str = "0", after: str = "", *, limit: int = CHUNK
) -> ScriptCall[list[tuple[str, str, str]]]:
    """Ids in one index of a queue (`ready:<0..9>`, `delayed`, `inprog`) behind the one seen last: each with where
    it stands, and the worker that has it in progress."""

    def read(reply: list[list[bytes]]) -> list[tuple[str, str, str]]:
        return [(task_id.decode(), at.decode(), replies.lease_parts(lease)[1]) for task_id, at, lease in reply]

    return engine.call(
        "scan", read, queues=engine.tenant_keys(tid).queues, root=engine.root(tid), tid=tid, command=command, place=place,
        at=at, after=after, limit=limit,
    )  # fmt: skip
