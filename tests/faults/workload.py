"""A workload of all operations, one script per step, for faults between any two steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from core.redis.script_call import ScriptCall
from queues.domain import NewResult, NewTask, Task, TaskStatus
from queues.engine import (
    admin_commands,
    dead_letter_commands,
    maintenance_commands,
    producer_commands,
    queries,
    worker_commands,
)
from tests.queues.engine.checked_engine import DAY_MS, TID, CheckedEngine, Clock, build_task

OPTIONS: dict[str, Any] = {"backoff": "exponential", "backoff_base_ms": 1_000, "max_attempts": 3}


class Workload:
    """A workload to iterate with `steps()`, which yields the name of each completed step.

    Every call is one script, and its reply is checked.
    """

    def __init__(self, checked: CheckedEngine, clock: Clock, tid: str = TID) -> None:
        self.engine, self.clock, self.tid = checked.engine, clock, tid

    def enqueue(self, *tasks: NewTask) -> list[Task]:
        call = producer_commands.enqueue(self.engine, self.tid, "acme", tasks, retention_ms=DAY_MS)
        assert len(call.commands) == 1
        return [item.task for item in call.run_sync() if not isinstance(item, Exception)]

    def claim(self, limit: int, *commands: str, lease_s: int = 30) -> list[Task]:
        names = list(commands) or ["send"]
        tasks = (
            worker_commands.claim(
                self.engine, self.tid, names, "w1", lease_ms=lease_s * 1000, limit=limit, wait_ms=1000
            )
            .run_sync()
            .tasks
        )
        assert len(tasks) == limit
        return tasks

    def submit(self, *tasks: Task, status: TaskStatus = TaskStatus.COMPLETED) -> None:
        is_success = status is TaskStatus.COMPLETED
        results = [
            NewResult(task_id=task.id, status=status, result=b'{"ok":1}' if is_success else None,
                      error=None if is_success else "boom", lease_token=task.lease_token)
            for task in tasks
        ]  # fmt: skip
        items = worker_commands.submit(self.engine, self.tid, "w1", results, retention_ms=DAY_MS).run_sync()
        assert [item for item in items if isinstance(item, Exception)] == []

    def nack(self, task: Task, delay_ms: int | None = None) -> ScriptCall[Any]:
        return worker_commands.nack(
            self.engine,
            self.tid,
            task.id,
            "w1",
            token=task.lease_token or "",
            delay_ms=delay_ms,
            reason="boom",
            dead_retention_ms=2 * DAY_MS,
        )

    def steps(self) -> Iterator[str]:
        engine, tid = self.engine, self.tid
        first = self.enqueue(*[build_task(payload=f"{n}") for n in range(5)])
        yield "enqueue five"
        self.enqueue(
            build_task(idempotency_key="a"),
            build_task(idempotency_key="b"),
            build_task(idempotency_key="a, later", delay_ms=9_000),
        )
        yield "enqueue with keys"
        self.enqueue(build_task(idempotency_key="a"), build_task())
        yield "enqueue a key again"
        self.enqueue(*[build_task("mail", priority=4, max_attempts=1) for _ in range(4)])
        yield "enqueue for another queue"
        [delayed] = self.enqueue(build_task(delay_ms=60_000))
        yield "enqueue delayed"
        held = self.claim(3)
        assert [task.id for task in held] == [task.id for task in first[:3]]
        yield "claim three"
        worker_commands.heartbeat(
            engine, tid, held[0].id, "w1", extend_ms=90_000, token=held[0].lease_token or "", progress="10"
        ).run_sync()
        yield "heartbeat"
        self.submit(held[0])
        yield "submit"
        self.submit(held[0])
        yield "submit again"
        self.nack(held[1]).run_sync()
        yield "nack"
        worker_commands.abandon(engine, tid, held[2].id, "w1", token="", dead_retention_ms=DAY_MS).run_sync()
        yield "abandon"
        mails = self.claim(3, "send", "mail")
        yield "claim from two queues"
        assert self.nack(mails[0]).run_sync().is_dead
        yield "nack to a dead letter"
        self.submit(mails[1], status=TaskStatus.FAILED)
        yield "submit a failure"
        queries.task(engine, tid, mails[2].id, watch=True).run_sync()
        yield "watch"
        producer_commands.cancel(engine, tid, first[3].id, retention_ms=DAY_MS).run_sync()
        yield "cancel a ready task"
        producer_commands.cancel(engine, tid, delayed.id, retention_ms=DAY_MS).run_sync()
        yield "cancel delayed"
        self.clock.advance(2)
        assert maintenance_commands.promote(engine, tid, "send").run_sync()[0] == 1
        yield "promote"
        self.clock.advance(40)
        assert maintenance_commands.reap(engine, tid, "mail", dead_retention_ms=2 * DAY_MS).run_sync()[:2] == (1, 1)
        yield "reap to a dead letter"
        assert not isinstance(
            dead_letter_commands.replay(engine, tid, [mails[0].id, mails[2].id]).run_sync()[0], Exception
        )
        yield "replay"
        admin_commands.pause(engine, tid, "mail").run_sync()
        yield "pause"
        assert not worker_commands.claim(engine, tid, ["mail"], "w2", lease_ms=1_000, limit=1).run_sync().tasks
        yield "claim from a paused queue"
        admin_commands.resume(engine, tid, "mail").run_sync()
        yield "resume"
        again = self.claim(4, "mail", "send", lease_s=1)
        yield "claim past a removed id"
        producer_commands.cancel(engine, tid, again[0].id, retention_ms=DAY_MS).run_sync()
        yield "cancel a claimed task"
        self.clock.advance(3)
        rest = self.claim(2)
        yield "claim that repairs"
        self.submit(*rest)
        yield "submit two"
        self.clock.advance(120)
        more = self.claim(3, "mail", "send")
        yield "claim from two queues again"
        self.submit(*more)
        yield "submit to two queues"
        self.enqueue(*[build_task("late", priority=9, delay_ms=1_000 * n) for n in range(4)])
        yield "enqueue for a third queue"
        self.clock.advance(DAY_MS / 1000)
        _, expired_ids = maintenance_commands.expired(engine, tid, limit=2).run_sync()
        assert len(expired_ids) == 2
        assert all(maintenance_commands.purge(engine, tid, expired_ids, before_ms=self.clock.now_ms).run_sync())
        yield "clean up"
        assert maintenance_commands.purge(engine, tid, [more[0].id, more[1].id]).run_sync() == [True, True]
        yield "purge"
        while (
            tasks := worker_commands.claim(engine, tid, ["send", "mail", "late"], "w1", lease_ms=9_000, limit=3)
            .run_sync()
            .tasks
        ):
            yield "claim the remaining tasks"
            self.submit(*tasks)
            yield "submit the remaining tasks"
