"""Every script, every point at which it can fail: what it had written by then is taken back, to the last key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import pytest
import redis

from codeq_site.devserver.embedded import Valkey
from core.redis.runners import SyncRunner
from core.redis.script_call import Command, ScriptCall
from queues.domain import NewResult, NewTask, Spec, Status, Task
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
from tests.fixtures.queues import NOON_MS
from tests.queues.engine.world import DAY_MS, TID, Clock, World, dump, lasting, new

HOOK = "local call = redis.call"
FAILING = (
    "local calls = 0 local function call(...) calls = calls + 1 "
    "if calls == {at} then return redis.call('NO-SUCH-COMMAND') end return redis.call(...) end"
)


class FailingRunner(SyncRunner):
    """Sends each script with a `redis.call` that raises at its n-th invocation; `at` None: as it is."""

    at: int | None = None

    def run_sync(self, commands: Sequence[Command]) -> list[Any]:
        if self.at is None:
            return super().run_sync(commands)
        assert len(commands) == 1
        script, bound = commands[0]
        assert script.source.count(HOOK) == 1
        source = script.source.replace(HOOK, FAILING.format(at=self.at))
        return [self.client.execute_command("EVAL", source, *bound[1:])]


class Scene:
    """A tenant in the middle of everything, so that a script finds all that it can do."""

    def __init__(self, client: redis.Redis) -> None:
        self.client, self.clock = client, Clock()
        self.runner = FailingRunner(client)
        self.world = World(client, clock=self.clock, runner=self.runner, partitions=1, backoff="exp_equal_jitter",
                           horizon_ms=DAY_MS)  # fmt: skip
        self.engine = self.world.engine
        root = keys.of_partition(0).root
        client.hset(keys.of_tenant(root, TID).policies, "mail", "fixed 0 0")

        # Leases that will be over: one to die of it, one watched; and in `mail`, one that is back in line at once.
        self.enqueue(*[new(max_attempts=most) for most in (1, 2, 2)], new("mail"), new("mail", max_attempts=1))
        over = self.claim(["send", "mail"], 5, lease_ms=1_000)
        queries.task(self.engine, TID, over[0].id, watch=True).run_sync()
        queries.task(self.engine, TID, over[1].id, watch=True).run_sync()
        self.forget(over[2])
        # Due and not yet due, in several lines.
        due = self.enqueue(*[new(delay_ms=1_000 + n, priority=n % 3) for n in range(6)], new(delay_ms=DAY_MS // 2))
        self.forget(due[0])
        # Ended in every way; one has vanished.
        self.ended = self.enqueue(*[new(idempotency_key=f"ended {n}") for n in range(4)])
        for n, task in enumerate(self.claim(["send"], 4)):
            status = Status.FAILED if n == 1 else Status.COMPLETED
            worker_commands.submit(self.engine, TID, "w1", [answer(task, status)], retention_ms=DAY_MS).run_sync()
        self.forget(self.ended[3])
        self.dead = self.enqueue(*[new(max_attempts=1, idempotency_key=f"dead {n}") for n in range(3)])
        for task in self.claim(["send"], 3):
            self.nack(task).run_sync()
        # Leases that live: the first try, a later one, the last one; the first two are watched.
        self.held = self.enqueue(new(priority=8), new("mail", priority=8), new(priority=8, max_attempts=1))
        held = {task.id: task for task in self.claim(["send", "mail"], 3)}
        for task in self.held[:2]:
            self.nack(held[task.id], delay_ms=0).run_sync()
        held |= {task.id: task for task in self.claim(["send", "mail"], 2)}
        self.held = [held[task.id] for task in self.held]
        for task in self.held[:2]:
            queries.task(self.engine, TID, task.id, watch=True).run_sync()
        # In line, with ghosts before and among them; one ghost is purged already.
        line = self.enqueue(*[new(priority=n) for n in (9, 9, 5, 5, 5, 0)])
        for n in (0, 2, 4):
            producer_commands.cancel(self.engine, TID, line[n].id, retention_ms=DAY_MS).run_sync()
        maintenance_commands.purge(self.engine, TID, [line[2].id]).run_sync()
        self.line = [line[n] for n in (1, 3, 5)]
        queries.task(self.engine, TID, self.line[0].id, watch=True).run_sync()
        [self.delayed] = self.enqueue(new("mail", delay_ms=DAY_MS // 2))
        # Long polls: one that waits, one that has gone.
        client.zadd(keys.of_partition(0).waiting, {f"{TID}:send": NOON_MS + DAY_MS, f"{TID}:mail": 1})
        client.set(f"{root}idem:{TID}:{'0' * 64}", self.ended[3].id, px=DAY_MS)
        # Something was paid for a moment ago, so there is a bucket to put back.
        admin_commands.admit(self.engine, TID, LIMITS).run_sync()
        self.clock.advance(10)

    def enqueue(self, *asked: NewTask) -> list[Task]:
        items = producer_commands.enqueue(self.engine, TID, "acme", asked, retention_ms=DAY_MS).run_sync()
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
        """What the script says when its n-th call raises; None if it did not come so far."""
        self.runner.at = at
        try:
            self.runner.run_sync(call.commands)
        except redis.ResponseError as error:
            return str(error)
        return None

    def forget(self, task: Task) -> None:
        """Somebody deletes the record and leaves the indexes as they are."""
        assert self.client.delete(keys.task(keys.of_partition(0).root, task.id))


def answer(task: Task, status: Status) -> NewResult:
    is_good = status is Status.COMPLETED
    return NewResult(
        task_id=task.id, status=status, result=b"{}" if is_good else None, error=None if is_good else "boom"
    )


def enqueue_known(scene: Scene) -> ScriptCall[Any]:
    asked = [new(idempotency_key=key) for key in (None, "fresh", "fresh 2", "ended 0", "dead 0", "dead 0 or not")]
    asked += [new(delay_ms=1), new(delay_ms=DAY_MS // 3, idempotency_key="later"), new(delay_ms=2 * DAY_MS)]
    return producer_commands.enqueue(scene.engine, TID, "acme", asked, retention_ms=DAY_MS)


def enqueue_first(scene: Scene) -> ScriptCall[Any]:
    """The first tasks of a queue; one has a key that maps to a task which has vanished."""
    call = producer_commands.enqueue(
        scene.engine,
        TID,
        "acme",
        [new("first"), new("first", delay_ms=5), new("first", idempotency_key="dangling")],
        retention_ms=DAY_MS,
    )
    [(script, bound)] = call.commands
    digest = keys_of(call)[-2]
    changed = tuple("0" * 64 if word == digest else word for word in bound)
    assert changed != bound
    return ScriptCall(call.runner, [(script, changed)], call.read)


def keys_of(call: ScriptCall[Any]) -> list[Any]:
    return list(call.commands[0][1])


def claim_all(scene: Scene) -> ScriptCall[Any]:
    return worker_commands.claim(
        scene.engine, TID, ["mail", "send", "never"], "w2", lease_ms=1, limit=12, wait_ms=1_000
    )


def claim_nothing(scene: Scene) -> ScriptCall[Any]:
    scene.drain()
    return worker_commands.claim(scene.engine, TID, ["mail", "send"], "w2", lease_ms=1_000, limit=1, wait_ms=1_000)


def claim_ghosts(scene: Scene) -> ScriptCall[Any]:
    scene.drain()
    for task in scene.enqueue(new(priority=3), new(priority=3)):
        producer_commands.cancel(scene.engine, TID, task.id, retention_ms=DAY_MS).run_sync()
    return worker_commands.claim(scene.engine, TID, ["mail", "send"], "w2", lease_ms=1_000, limit=1)


def submit(scene: Scene) -> ScriptCall[Any]:
    first, second, third = scene.held
    results = [answer(first, Status.COMPLETED), answer(second, Status.FAILED), answer(third, Status.COMPLETED)]
    results += [answer(first, Status.COMPLETED), answer(first, Status.FAILED), answer(scene.dead[0], Status.FAILED)]
    return worker_commands.submit(scene.engine, TID, "w1", results, retention_ms=DAY_MS)


def purge(scene: Scene) -> ScriptCall[Any]:
    ids = [task.id for task in [*scene.ended, *scene.dead[:2], *scene.held, *scene.ended[:1]]]
    return maintenance_commands.purge(scene.engine, TID, ids)


def purge_over(scene: Scene) -> ScriptCall[Any]:
    scene.clock.advance(2 * DAY_MS / 1000)
    return maintenance_commands.purge(
        scene.engine, TID, [task.id for task in scene.ended], before_ms=scene.clock.now_ms
    )


def replay(scene: Scene) -> ScriptCall[Any]:
    ids = [task.id for task in [*scene.dead, scene.dead[0], scene.ended[0]]]
    edited = Spec(command="send", payload='{"edited":1}', tenant="acme")
    return dead_letter_commands.replay(scene.engine, TID, ids, [edited, None, None, None, None])


def replay_for(scene: Scene) -> ScriptCall[Any]:
    """Once for a job, and now for another one; of one of them, a plain replay would take the job's name off."""
    dead_letter_commands.replay_for(scene.engine, TID, [scene.dead[0].id], "a job").run_sync()
    tasks = worker_commands.claim(scene.engine, TID, ["send"], "w1", lease_ms=60_000, limit=100).run_sync().tasks
    [again] = [task for task in tasks if task.id == scene.dead[0].id]
    scene.nack(again).run_sync()
    return dead_letter_commands.replay_for(
        scene.engine, TID, [task.id for task in [*scene.dead, scene.dead[1], scene.ended[0]]], "another"
    )


def replay_after_a_job(scene: Scene) -> ScriptCall[Any]:
    replay_for(scene)
    return dead_letter_commands.replay(scene.engine, TID, [scene.dead[0].id])


def recall(scene: Scene) -> ScriptCall[Any]:
    """Of three, one is claimed, and two are taken back: from a line with others, and from one without."""
    ids = [task.id for task in scene.dead]
    dead_letter_commands.replay_for(scene.engine, TID, ids, "a job").run_sync()
    while ids[0] not in [
        task.id
        for task in worker_commands.claim(scene.engine, TID, ["send"], "w1", lease_ms=60_000, limit=1).run_sync().tasks
    ]:
        pass
    return dead_letter_commands.recall(
        scene.engine, TID, [*ids, ids[1], scene.ended[0].id, "nobody"], "a job", dead_retention_ms=DAY_MS
    )


def replay_what_was_recalled(scene: Scene) -> ScriptCall[Any]:
    recall(scene).run_sync()
    return dead_letter_commands.replay(scene.engine, TID, [task.id for task in scene.dead])


def claim_past_what_was_recalled(scene: Scene) -> ScriptCall[Any]:
    recall(scene).run_sync()
    return claim_all(scene)


def nack_to_another_queue(scene: Scene) -> ScriptCall[Any]:
    admin_commands.policy(
        scene.engine, TID, "send", line="fixed 0 0 corpses", max_consumers=None, topic="corpses"
    ).run_sync()
    return scene.nack(scene.held[2])


def claim_some(scene: Scene) -> ScriptCall[Any]:
    """Of queues in which only so many may be in progress."""
    admin_commands.policy(scene.engine, TID, "send", line="", max_consumers=4).run_sync()
    admin_commands.policy(scene.engine, TID, "mail", line="", max_consumers=1).run_sync()
    return claim_all(scene)


def ranked(scene: Scene) -> None:
    """A ranked queue with an entry in every place: due and not, held by a lock that lives and by one that is over."""
    engine = scene.engine
    ranked_engine.enqueue(
        engine, TID, "line", [(name, 50) for name in ("later", "due", "over", "held", "again", "no id!")]
    ).run_sync()
    for delay_ms in (DAY_MS, 1_000):
        task_id = ranked_engine.dequeue(engine, TID, "line", "h:1", lock_seconds=300).run_sync()
        ranked_engine.requeue(engine, TID, "line", str(task_id), "h:1", delay_ms=delay_ms).run_sync()
    assert ranked_engine.dequeue(engine, TID, "line", "h:1", lock_seconds=1).run_sync() == "over"
    assert ranked_engine.dequeue(engine, TID, "line", "h:1", lock_seconds=300).run_sync() == "held"
    assert ranked_engine.dequeue(engine, TID, "line", "h:1", lock_seconds=300).run_sync() == "again"
    ranked_engine.enqueue(engine, TID, "line", [("again", 100), ("last", 0)]).run_sync()
    scene.client.delete(f"{keys.ranked(keys.of_partition(0).root, TID, 'line')}:lock:over")
    scene.clock.advance(1)


def of_ranked(call: Callable[[Scene], ScriptCall[Any]]) -> Callable[[Scene], ScriptCall[Any]]:
    def act(scene: Scene) -> ScriptCall[Any]:
        ranked(scene)
        return call(scene)

    return act


LIMITS = Limits(what="any", per_second=100, burst_seconds=10, token="0a", token_percent=50)

SCENES: dict[str, Callable[[Scene], ScriptCall[Any]]] = {
    "enqueue": enqueue_known,
    "enqueue the first of a queue": enqueue_first,
    "enqueue within limits": lambda s: producer_commands.enqueue(
        s.engine, TID, "acme", [new(), new(idempotency_key="fresh")], retention_ms=DAY_MS, limits=LIMITS, depth=100
    ),
    "known": lambda s: producer_commands.known(
        s.engine, TID, [new(idempotency_key="ended 0"), new(idempotency_key="never")]
    ),
    "claim": claim_all,
    "claim nothing": claim_nothing,
    "claim some": claim_some,
    "claim past ghosts": claim_ghosts,
    "claim within limits": lambda s: worker_commands.claim(
        s.engine, TID, ["send"], "w2", lease_ms=1_000, limit=1, limits=LIMITS
    ),
    "admit": lambda s: admin_commands.admit(s.engine, TID, LIMITS),
    "heartbeat": lambda s: worker_commands.heartbeat(
        s.engine, TID, s.held[0].id, "w1", extend_ms=5, token="", progress="50"
    ),
    "submit": submit,
    "nack": lambda s: s.nack(s.held[0]),
    "nack at once": lambda s: s.nack(s.held[1]),
    "nack to death": lambda s: s.nack(s.held[2]),
    "nack to another queue": nack_to_another_queue,
    "abandon": lambda s: s.abandon(s.held[0]),
    "abandon to death": lambda s: s.abandon(s.held[2]),
    "cancel in line": lambda s: producer_commands.cancel(s.engine, TID, s.line[0].id, retention_ms=DAY_MS),
    "cancel the first in line": lambda s: producer_commands.cancel(s.engine, TID, s.line[2].id, retention_ms=DAY_MS),
    "cancel delayed": lambda s: producer_commands.cancel(s.engine, TID, s.delayed.id, retention_ms=DAY_MS),
    "cancel at work": lambda s: producer_commands.cancel(s.engine, TID, s.held[0].id, retention_ms=DAY_MS),
    "promote": lambda s: maintenance_commands.promote(s.engine, TID, "send"),
    "reap": lambda s: maintenance_commands.reap(s.engine, TID, "send"),
    "reap at once": lambda s: maintenance_commands.reap(s.engine, TID, "mail"),
    "replay": replay,
    "replay for a job": replay_for,
    "replay after a job": replay_after_a_job,
    "replay what was recalled": replay_what_was_recalled,
    "recall": recall,
    "claim past what was recalled": claim_past_what_was_recalled,
    "purge": purge,
    "purge the dead": lambda s: maintenance_commands.purge_dead(
        s.engine, TID, [task.id for task in [*s.dead, *s.ended]]
    ),
    "purge what is over": purge_over,
    "expired": lambda s: maintenance_commands.expired(s.engine, TID),
    "visits": lambda s: maintenance_commands.visits(s.engine, 0),
    "policy": lambda s: admin_commands.policy(
        s.engine, TID, "send", line="fixed 1 1 corpses", max_consumers=3, topic="corpses"
    ),
    "policy of the first queue": lambda s: admin_commands.policy(
        s.engine, "nobody", "send", line="fixed 1 1", max_consumers=3
    ),
    "policy no more": lambda s: admin_commands.policy(s.engine, TID, "mail", line="", max_consumers=None),
    "pause": lambda s: admin_commands.pause(s.engine, TID, "send"),
    "pause the first queue": lambda s: admin_commands.pause(s.engine, "nobody", "send"),
    "resume": lambda s: admin_commands.resume(s.engine, TID, "send"),
    "resume the first queue": lambda s: admin_commands.resume(s.engine, "nobody", "send"),
    "task": lambda s: queries.task(s.engine, TID, s.held[2].id, watch=True),
    "stats": lambda s: queries.stats(s.engine, TID),
    "peek": lambda s: queries.peek(s.engine, TID, "send", 3),
    "owner": lambda s: queries.owner(s.engine, s.line[0].id),
    "names": lambda s: queries.names(s.engine, TID),
    "scan": lambda s: queries.scan(s.engine, TID, "send", "inprog"),
    "place": lambda s: queries.place(s.engine, TID, s.line[2].id),
    "ranked_enqueue": of_ranked(
        lambda s: ranked_engine.enqueue(
            s.engine, TID, "line", [("new", 50), ("later", 50), ("held", 70), ("again", 50), ("last", 9)]
        )
    ),
    "ranked_dequeue": of_ranked(lambda s: ranked_engine.dequeue(s.engine, TID, "line", "h:2", lock_seconds=300)),
    "ranked_requeue": of_ranked(lambda s: ranked_engine.requeue(s.engine, TID, "line", "held", "h:1", delay_ms=5)),
    "ranked_release": of_ranked(lambda s: ranked_engine.release(s.engine, TID, "line", "held", "h:1")),
    "ranked_release by force": of_ranked(lambda s: ranked_engine.release(s.engine, TID, "line", "held", "")),
    "ranked_renew": of_ranked(lambda s: ranked_engine.renew(s.engine, TID, "line", "held", "h:1", lock_seconds=400)),
    "ranked_size": of_ranked(lambda s: ranked_engine.size(s.engine, TID, "line")),
    "ranked_locked": of_ranked(lambda s: ranked_engine.locked(s.engine, TID, "line", "held")),
}
# Those that read, and a resume of what was not paused.
CHANGE_NOTHING = {
    "known",
    "expired",
    "visits",
    "stats",
    "names",
    "peek",
    "place",
    "owner",
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
def test_a_script_that_fails_anywhere_changes_nothing(scene: Scene, name: str) -> None:
    call = SCENES[name](scene)
    before = lasting(dump(scene.client))
    for at in count(1):
        problem = scene.fail(call, at)
        if problem is None:
            break  # the script has no n-th call: it ran to its end
        assert "NO-SUCH-COMMAND" in problem or "nknown" in problem  # not an error of its own
        assert lasting(dump(scene.client)) == before, f"at call {at}"
        _assert_idempotency_keys_still_end(scene.client)
    assert at > 1
    assert (lasting(dump(scene.client)) == before) == (name in CHANGE_NOTHING)


def _assert_idempotency_keys_still_end(client: redis.Redis) -> None:
    assert all(client.pttl(key) > 0 for key in client.scan_iter("*}:idem:*"))


def test_every_script_has_a_scene() -> None:
    assert {name.split()[0] for name in SCENES} == {script.name for script in script_loader.everything()}


def test_an_error_of_the_script_is_named_and_the_store_stays_whole(scene: Scene) -> None:
    """A key of the wrong type, as a careless operator would leave one."""
    call = scene.nack(scene.held[0])
    delayed = keys.of_queue(keys.of_partition(0).root, TID, "send").delayed
    scene.client.rename(delayed, "elsewhere")
    scene.client.set(delayed, "not a sorted set")
    before = lasting(dump(scene.client))
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        call.run_sync()
    assert lasting(dump(scene.client)) == before
    scene.client.rename("elsewhere", delayed)
    assert call.run_sync().delay_ms > 0
