"""A script that fails at any of its commands leaves every key as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import msgspec
import pytest
import redis

from codeq_site.devserver.embedded import Valkey
from core.redis.runners import SyncRunner
from core.redis.script_call import ScriptCall, ScriptCommand
from queues.domain import NewResult, NewTask, Spec, Task, TaskStatus
from queues.engine import (
    admin_commands,
    dead_letter_commands,
    keys,
    maintenance_commands,
    producer_commands,
    queries,
    script_loader,
    worker_commands,
)
from queues.engine.options import Limits
from ranked import engine as ranked_engine
from tests.fixtures.queues import START_MS
from tests.queues.engine.checked_engine import DAY_MS, TID, CheckedEngine, Clock, build_task, dump, without_hints

HOOK = "local call = redis.call"
FAILING = (
    "local calls = 0 local function call(...) calls = calls + 1 "
    "if calls == {at} then return redis.call('NO-SUCH-COMMAND') end return redis.call(...) end"
)


class FailingRunner(SyncRunner):
    """A runner whose scripts fail at their n-th `redis.call`, unless `at` is None."""

    at: int | None = None

    def run_sync(self, commands: Sequence[ScriptCommand]) -> list[Any]:
        if self.at is None:
            return super().run_sync(commands)
        assert len(commands) == 1
        script, bound = commands[0]
        assert script.source.count(HOOK) == 1
        source = script.source.replace(HOOK, FAILING.format(at=self.at))
        return [self.client.execute_command("EVAL", source, *bound[1:])]


class Scene:
    """A tenant with tasks in every state, so that scripts run all their branches."""

    def __init__(self, client: redis.Redis) -> None:
        self.client, self.clock = client, Clock()
        self.runner = FailingRunner(client)
        self.checked = CheckedEngine(
            client, clock=self.clock, runner=self.runner, partitions=1, backoff="exp_equal_jitter", horizon_ms=DAY_MS
        )
        self.engine = self.checked.engine
        root = keys.of_partition(0).root
        client.hset(keys.of_tenant(root, TID).policies, "mail", "fixed 0 0")

        # Leases that will expire. The first and the last task will be dead, and the fourth, of `mail`, will be ready at
        # once. The first two are awaited. The record of the third is missing.
        self.enqueue(
            *[build_task(max_attempts=max_attempts) for max_attempts in (1, 2, 2)],
            build_task("mail"),
            build_task("mail", max_attempts=1),
        )
        expiring = self.claim(["send", "mail"], 5, lease_ms=1_000)
        queries.task(self.engine, TID, expiring[0].id, watch=True).run_sync()
        queries.task(self.engine, TID, expiring[1].id, watch=True).run_sync()
        self.delete_record(expiring[2])
        # Delayed tasks of several priorities, due and not yet due.
        due = self.enqueue(
            *[build_task(delay_ms=1_000 + n, priority=n % 3) for n in range(6)], build_task(delay_ms=DAY_MS // 2)
        )
        self.delete_record(due[0])
        # Ended tasks; the record of one is missing.
        self.ended = self.enqueue(*[build_task(idempotency_key=f"ended {n}") for n in range(4)])
        for n, task in enumerate(self.claim(["send"], 4)):
            status = TaskStatus.FAILED if n == 1 else TaskStatus.COMPLETED
            worker_commands.submit(self.engine, TID, "w1", [build_result(task, status)], retention_ms=DAY_MS).run_sync()
        self.delete_record(self.ended[3])
        self.dead = self.enqueue(*[build_task(max_attempts=1, idempotency_key=f"dead {n}") for n in range(3)])
        for task in self.claim(["send"], 3):
            self.nack(task).run_sync()
        # Valid leases: two of second attempts, and one of a task's only attempt. The first two tasks are awaited.
        self.held = self.enqueue(
            build_task(priority=8), build_task("mail", priority=8), build_task(priority=8, max_attempts=1)
        )
        held = {task.id: task for task in self.claim(["send", "mail"], 3)}
        for task in self.held[:2]:
            self.nack(held[task.id], delay_ms=0).run_sync()
        held |= {task.id: task for task in self.claim(["send", "mail"], 2)}
        self.held = [held[task.id] for task in self.held]
        for task in self.held[:2]:
            queries.task(self.engine, TID, task.id, watch=True).run_sync()
        # Ready tasks, with ghosts before and among them. The task of one ghost is purged.
        ready = self.enqueue(*[build_task(priority=n) for n in (9, 9, 5, 5, 5, 0)])
        for n in (0, 2, 4):
            producer_commands.cancel(self.engine, TID, ready[n].id, retention_ms=DAY_MS).run_sync()
        maintenance_commands.purge(self.engine, TID, [ready[2].id]).run_sync()
        self.ready = [ready[n] for n in (1, 3, 5)]
        queries.task(self.engine, TID, self.ready[0].id, watch=True).run_sync()
        [self.delayed] = self.enqueue(build_task("mail", delay_ms=DAY_MS // 2))
        # Long polls: a waiting one, and one that has timed out.
        client.zadd(keys.of_partition(0).waiting, {f"{TID}:send": START_MS + DAY_MS, f"{TID}:mail": 1})
        client.set(f"{root}idem:{TID}:{'0' * 64}", self.ended[3].id, px=DAY_MS)
        # A request was admitted a moment ago, so there is a bucket to restore.
        admin_commands.admit(self.engine, TID, LIMITS).run_sync()
        # The bucket's keys expire after a second of real time, which a slow test would exceed.
        for token in ("", LIMITS.token):
            assert client.pexpire(keys.rate_limit(root, TID, LIMITS.kind, token), DAY_MS)
        self.clock.advance(10)

    def enqueue(self, *tasks: NewTask) -> list[Task]:
        items = producer_commands.enqueue(self.engine, TID, "acme", tasks, retention_ms=DAY_MS).run_sync()
        return [item.task for item in items if not isinstance(item, Exception)]

    def claim(self, commands: list[str], limit: int, lease_ms: int = 60_000) -> list[Task]:
        tasks = worker_commands.claim(self.engine, TID, commands, "w1", lease_ms=lease_ms, limit=limit).run_sync().tasks
        assert len(tasks) == limit
        return tasks

    def drain(self) -> None:
        while (
            worker_commands.claim(self.engine, TID, ["mail", "send"], "w1", lease_ms=DAY_MS, limit=100).run_sync().tasks
        ):
            pass

    def nack(self, task: Task, delay_ms: int | None = None) -> ScriptCall[Any]:
        return worker_commands.nack(
            self.engine, TID, task.id, "w1", token="", delay_ms=delay_ms, reason="boom", dead_retention_ms=DAY_MS
        )

    def abandon(self, task: Task) -> ScriptCall[Any]:
        return worker_commands.abandon(self.engine, TID, task.id, "w1", token="", dead_retention_ms=DAY_MS)

    def fail(self, call: ScriptCall[Any], at: int) -> str | None:
        """Return the error of a script whose n-th call fails, or None if it makes fewer calls."""
        self.runner.at = at
        try:
            self.runner.run_sync(call.commands)
        except redis.ResponseError as error:
            return str(error)
        return None

    def delete_record(self, task: Task) -> None:
        """Delete the record of a task and leave its index entries."""
        assert self.client.delete(keys.task(keys.of_partition(0).root, task.id))


def build_result(task: Task, status: TaskStatus) -> NewResult:
    is_good = status is TaskStatus.COMPLETED
    return NewResult(
        task_id=task.id, status=status, result=b"{}" if is_good else None, error=None if is_good else "boom"
    )


def enqueue_with_known_keys(scene: Scene) -> ScriptCall[Any]:
    tasks = [
        build_task(idempotency_key=key) for key in (None, "fresh", "fresh 2", "ended 0", "dead 0", "dead 0 or not")
    ]
    tasks += [
        build_task(delay_ms=1),
        build_task(delay_ms=DAY_MS // 3, idempotency_key="later"),
        build_task(delay_ms=2 * DAY_MS),
    ]
    return producer_commands.enqueue(scene.engine, TID, "acme", tasks, retention_ms=DAY_MS)


def enqueue_first(scene: Scene) -> ScriptCall[Any]:
    """Enqueue the first tasks of a queue, one with the idempotency key of a missing task."""
    call = producer_commands.enqueue(
        scene.engine,
        TID,
        "acme",
        [build_task("first"), build_task("first", delay_ms=5), build_task("first", idempotency_key="dangling")],
        retention_ms=DAY_MS,
    )
    [(script, bound)] = call.commands
    digest = bound[-2]
    changed = tuple("0" * 64 if word == digest else word for word in bound)
    assert changed != bound
    return ScriptCall(call.runner, [(script, changed)], call.read)


def claim_all(scene: Scene) -> ScriptCall[Any]:
    return worker_commands.claim(
        scene.engine, TID, ["mail", "send", "never"], "w2", lease_ms=1, limit=12, wait_ms=1_000
    )


def claim_for_several_workers(scene: Scene) -> ScriptCall[Any]:
    """Claim for more workers than there are tasks, with a limit of tasks in progress."""
    admin_commands.set_policy(scene.engine, TID, "mail", policy="", max_consumers=2).run_sync()
    return worker_commands.claim(
        scene.engine,
        TID,
        ["mail", "send"],
        "w2",
        lease_ms=1,
        limit=30,
        wait_ms=1_000,
        further_workers=[f"w{n}" for n in range(3, 32)],
    )


def claim_nothing(scene: Scene) -> ScriptCall[Any]:
    scene.drain()
    return worker_commands.claim(scene.engine, TID, ["mail", "send"], "w2", lease_ms=1_000, limit=1, wait_ms=1_000)


def claim_ghosts(scene: Scene) -> ScriptCall[Any]:
    scene.drain()
    for task in scene.enqueue(build_task(priority=3), build_task(priority=3)):
        producer_commands.cancel(scene.engine, TID, task.id, retention_ms=DAY_MS).run_sync()
    return worker_commands.claim(scene.engine, TID, ["mail", "send"], "w2", lease_ms=1_000, limit=1)


def submit(scene: Scene) -> ScriptCall[Any]:
    first, second, third = scene.held
    results = [
        build_result(first, TaskStatus.COMPLETED),
        build_result(second, TaskStatus.FAILED),
        build_result(third, TaskStatus.COMPLETED),
    ]
    results += [
        build_result(first, TaskStatus.COMPLETED),
        build_result(first, TaskStatus.FAILED),
        build_result(scene.dead[0], TaskStatus.FAILED),
    ]
    return worker_commands.submit(scene.engine, TID, "w1", results, retention_ms=DAY_MS)


def submit_for_several_workers(scene: Scene) -> ScriptCall[Any]:
    first, second, third = scene.held
    results = [
        msgspec.structs.replace(build_result(task, status), worker=worker)
        for task, status, worker in (
            (first, TaskStatus.COMPLETED, "w1"),
            (first, TaskStatus.FAILED, "w2"),
            (second, TaskStatus.FAILED, "w1"),
            (third, TaskStatus.COMPLETED, "w2"),
        )
    ]
    return worker_commands.submit(scene.engine, TID, None, results, retention_ms=DAY_MS)


def purge(scene: Scene) -> ScriptCall[Any]:
    ids = [task.id for task in [*scene.ended, *scene.dead[:2], *scene.held, *scene.ended[:1]]]
    return maintenance_commands.purge(scene.engine, TID, ids)


def purge_expired(scene: Scene) -> ScriptCall[Any]:
    scene.clock.advance(2 * DAY_MS / 1000)
    return maintenance_commands.purge(
        scene.engine, TID, [task.id for task in scene.ended], before_ms=scene.clock.now_ms
    )


def replay(scene: Scene) -> ScriptCall[Any]:
    ids = [task.id for task in [*scene.dead, scene.dead[0], scene.ended[0]]]
    edited = Spec(command="send", payload='{"edited":1}', tenant="acme")
    return dead_letter_commands.replay(scene.engine, TID, ids, [edited, None, None, None, None])


def replay_for(scene: Scene) -> ScriptCall[Any]:
    """Replay dead letters for a bulk job; one was replayed before for another job."""
    dead_letter_commands.replay_for(scene.engine, TID, [scene.dead[0].id], "a job").run_sync()
    tasks = worker_commands.claim(scene.engine, TID, ["send"], "w1", lease_ms=60_000, limit=100).run_sync().tasks
    [again] = [task for task in tasks if task.id == scene.dead[0].id]
    scene.nack(again).run_sync()
    return dead_letter_commands.replay_for(
        scene.engine, TID, [task.id for task in [*scene.dead, scene.dead[1], scene.ended[0]]], "another"
    )


def replay_after_a_bulk_job(scene: Scene) -> ScriptCall[Any]:
    replay_for(scene)
    return dead_letter_commands.replay(scene.engine, TID, [scene.dead[0].id])


def undo_replay(scene: Scene) -> ScriptCall[Any]:
    """Undo the replay of three tasks; one of them has been claimed since."""
    ids = [task.id for task in scene.dead]
    dead_letter_commands.replay_for(scene.engine, TID, ids, "a job").run_sync()
    while ids[0] not in [
        task.id
        for task in worker_commands.claim(scene.engine, TID, ["send"], "w1", lease_ms=60_000, limit=1).run_sync().tasks
    ]:
        pass
    return dead_letter_commands.undo_replay(
        scene.engine, TID, [*ids, ids[1], scene.ended[0].id, "unknown"], "a job", dead_retention_ms=DAY_MS
    )


def replay_after_an_undo(scene: Scene) -> ScriptCall[Any]:
    undo_replay(scene).run_sync()
    return dead_letter_commands.replay(scene.engine, TID, [task.id for task in scene.dead])


def claim_after_an_undo(scene: Scene) -> ScriptCall[Any]:
    undo_replay(scene).run_sync()
    return claim_all(scene)


def nack_to_another_queue(scene: Scene) -> ScriptCall[Any]:
    admin_commands.set_policy(
        scene.engine, TID, "send", policy="fixed 0 0 dead-letters", max_consumers=None, dead_letter_queue="dead-letters"
    ).run_sync()
    return scene.nack(scene.held[2])


def claim_with_consumer_limits(scene: Scene) -> ScriptCall[Any]:
    """Claim from queues with a limit of tasks in progress."""
    admin_commands.set_policy(scene.engine, TID, "send", policy="", max_consumers=4).run_sync()
    admin_commands.set_policy(scene.engine, TID, "mail", policy="", max_consumers=1).run_sync()
    return claim_all(scene)


def add_ranked_queue(scene: Scene) -> None:
    """Create a ranked queue with entries in every state, and with valid and expired locks."""
    engine = scene.engine
    ranked_engine.enqueue(
        engine, TID, "reviews", [(name, 50) for name in ("later", "due", "over", "held", "again", "no id!")]
    ).run_sync()
    for delay_ms in (DAY_MS, 1_000):
        task_id = ranked_engine.dequeue(engine, TID, "reviews", "h:1", lock_seconds=300).run_sync()
        ranked_engine.requeue(engine, TID, "reviews", str(task_id), "h:1", delay_ms=delay_ms).run_sync()
    assert ranked_engine.dequeue(engine, TID, "reviews", "h:1", lock_seconds=1).run_sync() == "over"
    assert ranked_engine.dequeue(engine, TID, "reviews", "h:1", lock_seconds=300).run_sync() == "held"
    assert ranked_engine.dequeue(engine, TID, "reviews", "h:1", lock_seconds=300).run_sync() == "again"
    ranked_engine.enqueue(engine, TID, "reviews", [("again", 100), ("last", 0)]).run_sync()
    scene.client.delete(f"{keys.ranked(keys.of_partition(0).root, TID, 'reviews')}:lock:over")
    scene.clock.advance(1)


def with_ranked_queue(call: Callable[[Scene], ScriptCall[Any]]) -> Callable[[Scene], ScriptCall[Any]]:
    def act(scene: Scene) -> ScriptCall[Any]:
        add_ranked_queue(scene)
        return call(scene)

    return act


LIMITS = Limits(kind="any", per_second=100, burst_seconds=10, token="0a", token_percent=50)

SCENES: dict[str, Callable[[Scene], ScriptCall[Any]]] = {
    "enqueue": enqueue_with_known_keys,
    "enqueue the first of a queue": enqueue_first,
    "enqueue within limits": lambda s: producer_commands.enqueue(
        s.engine,
        TID,
        "acme",
        [build_task(), build_task(idempotency_key="fresh")],
        retention_ms=DAY_MS,
        limits=LIMITS,
        depth=100,
    ),
    "find_by_idempotency_key": lambda s: producer_commands.find_by_idempotency_key(
        s.engine, TID, [build_task(idempotency_key="ended 0"), build_task(idempotency_key="never")]
    ),
    "claim": claim_all,
    "claim for several workers": claim_for_several_workers,
    "claim nothing": claim_nothing,
    "claim with consumer limits": claim_with_consumer_limits,
    "claim past ghosts": claim_ghosts,
    "claim within limits": lambda s: worker_commands.claim(
        s.engine, TID, ["send"], "w2", lease_ms=1_000, limit=1, limits=LIMITS
    ),
    "admit": lambda s: admin_commands.admit(s.engine, TID, LIMITS),
    "heartbeat": lambda s: worker_commands.heartbeat(
        s.engine, TID, s.held[0].id, "w1", extend_ms=5, token="", progress="50"
    ),
    "submit": submit,
    "submit for several workers": submit_for_several_workers,
    "nack": lambda s: s.nack(s.held[0]),
    "nack at once": lambda s: s.nack(s.held[1]),
    "nack to a dead letter": lambda s: s.nack(s.held[2]),
    "nack to another queue": nack_to_another_queue,
    "abandon": lambda s: s.abandon(s.held[0]),
    "abandon to a dead letter": lambda s: s.abandon(s.held[2]),
    "cancel ready": lambda s: producer_commands.cancel(s.engine, TID, s.ready[0].id, retention_ms=DAY_MS),
    "cancel ready, not awaited": lambda s: producer_commands.cancel(s.engine, TID, s.ready[2].id, retention_ms=DAY_MS),
    "cancel delayed": lambda s: producer_commands.cancel(s.engine, TID, s.delayed.id, retention_ms=DAY_MS),
    "cancel in progress": lambda s: producer_commands.cancel(s.engine, TID, s.held[0].id, retention_ms=DAY_MS),
    "promote": lambda s: maintenance_commands.promote(s.engine, TID, "send"),
    "reap": lambda s: maintenance_commands.reap(s.engine, TID, "send"),
    "reap at once": lambda s: maintenance_commands.reap(s.engine, TID, "mail"),
    "replay": replay,
    "replay for a bulk job": replay_for,
    "replay after a bulk job": replay_after_a_bulk_job,
    "replay after an undo": replay_after_an_undo,
    "undo_replay": undo_replay,
    "claim after an undo": claim_after_an_undo,
    "purge": purge,
    "purge the dead": lambda s: maintenance_commands.purge_dead(
        s.engine, TID, [task.id for task in [*s.dead, *s.ended]]
    ),
    "purge expired": purge_expired,
    "expired": lambda s: maintenance_commands.expired(s.engine, TID),
    "due_queues": lambda s: maintenance_commands.due_queues(s.engine, 0),
    "set_policy": lambda s: admin_commands.set_policy(
        s.engine, TID, "send", policy="fixed 1 1 dead-letters", max_consumers=3, dead_letter_queue="dead-letters"
    ),
    "set_policy of the first queue": lambda s: admin_commands.set_policy(
        s.engine, "new0003", "send", policy="fixed 1 1", max_consumers=3
    ),
    "set_policy back to the default": lambda s: admin_commands.set_policy(
        s.engine, TID, "mail", policy="", max_consumers=None
    ),
    "pause": lambda s: admin_commands.pause(s.engine, TID, "send"),
    "pause the first queue": lambda s: admin_commands.pause(s.engine, "new0003", "send"),
    "resume": lambda s: admin_commands.resume(s.engine, TID, "send"),
    "resume the first queue": lambda s: admin_commands.resume(s.engine, "new0003", "send"),
    "read_task": lambda s: queries.task(s.engine, TID, s.held[2].id, watch=True),
    "stats": lambda s: queries.stats(s.engine, TID),
    "peek": lambda s: queries.peek(s.engine, TID, "send", 3),
    "find_tenant": lambda s: queries.find_tenant(s.engine, s.ready[0].id),
    "list_queues": lambda s: queries.list_queues(s.engine, TID),
    "read_blobs": lambda s: queries.blobs(s.engine, 0, [s.ready[0].id, s.held[2].id]),
    "scan": lambda s: queries.scan(s.engine, TID, "send", "inprog"),
    "queue_position": lambda s: queries.queue_position(s.engine, TID, s.ready[2].id),
    "ranked_enqueue": with_ranked_queue(
        lambda s: ranked_engine.enqueue(
            s.engine, TID, "reviews", [("new", 50), ("later", 50), ("held", 70), ("again", 50), ("last", 9)]
        )
    ),
    "ranked_dequeue": with_ranked_queue(
        lambda s: ranked_engine.dequeue(s.engine, TID, "reviews", "h:2", lock_seconds=300)
    ),
    "ranked_requeue": with_ranked_queue(
        lambda s: ranked_engine.requeue(s.engine, TID, "reviews", "held", "h:1", delay_ms=5)
    ),
    "ranked_finish": with_ranked_queue(lambda s: ranked_engine.finish(s.engine, TID, "reviews", "held", "h:1")),
    "ranked_break_lock": with_ranked_queue(lambda s: ranked_engine.break_lock(s.engine, TID, "reviews", "held")),
    "ranked_renew": with_ranked_queue(
        lambda s: ranked_engine.renew(s.engine, TID, "reviews", "held", "h:1", lock_seconds=400)
    ),
    "ranked_size": with_ranked_queue(lambda s: ranked_engine.size(s.engine, TID, "reviews")),
    "ranked_locked": with_ranked_queue(lambda s: ranked_engine.is_locked(s.engine, TID, "reviews", "held")),
}
# Scripts that only read, a claim that finds no task, and a resume of a queue that is not paused.
CHANGE_NOTHING = {
    "find_by_idempotency_key",
    "expired",
    "due_queues",
    "stats",
    "list_queues",
    "read_blobs",
    "peek",
    "queue_position",
    "find_tenant",
    "scan",
    "resume",
    "claim nothing",
    "ranked_size",
    "ranked_locked",
}


@pytest.fixture
def scene(valkey: Valkey) -> Iterator[Scene]:
    with redis.Redis.from_url(valkey.url) as client:
        yield Scene(client)


@pytest.mark.spec("QUE-5", "A script that fails at any of its commands leaves every key as it was")
@pytest.mark.parametrize("name", SCENES)
def test_failing_script_changes_nothing(scene: Scene, name: str) -> None:
    call = SCENES[name](scene)
    before = without_hints(dump(scene.client))
    for at in count(1):
        problem = scene.fail(call, at)
        if problem is None:
            break  # the script makes fewer calls and succeeded
        assert "NO-SUCH-COMMAND" in problem or "unknown" in problem.lower()  # not another error
        assert without_hints(dump(scene.client)) == before, f"at call {at}"
        _assert_idempotency_keys_still_expire(scene.client)
    assert at > 1
    assert (without_hints(dump(scene.client)) == before) == (name in CHANGE_NOTHING)


def _assert_idempotency_keys_still_expire(client: redis.Redis) -> None:
    assert all(client.pttl(key) > 0 for key in client.scan_iter("*}:idem:*"))


def test_every_script_has_a_scene() -> None:
    assert {name.split()[0] for name in SCENES} == {script.name for script in script_loader.load_all()}


def test_error_of_a_script_is_reported_and_rolled_back(scene: Scene) -> None:
    """A key has the wrong type, for example after a mistake of an operator."""
    call = scene.nack(scene.held[0])
    delayed = keys.of_queue(keys.of_partition(0).root, TID, "send").delayed
    scene.client.rename(delayed, "elsewhere")
    scene.client.set(delayed, "not a sorted set")
    before = without_hints(dump(scene.client))
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        call.run_sync()
    assert without_hints(dump(scene.client)) == before
    scene.client.rename("elsewhere", delayed)
    assert call.run_sync().delay_ms > 0
