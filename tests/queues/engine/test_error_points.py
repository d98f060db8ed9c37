"""Every script, every point at which it can fail: what it had written by then is taken back, to the last key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import pytest
import redis

from codeq_site.embedded import Valkey
from queues.engine import Call, keys, scripts
from queues.engine.call import Command
from queues.engine.options import Limits
from queues.engine.runner import SyncRunner
from queues.task import NewResult, NewTask, Spec, Status, Task
from tests.queues.conftest import NOON_MS
from tests.queues.engine.world import DAY_MS, TID, Clock, World, dump, lasting, new

HOOK = "local call = redis.call"
FAILING = (
    "local calls = 0 local function call(...) calls = calls + 1 "
    "if calls == {at} then return redis.call('NO-SUCH-COMMAND') end return redis.call(...) end"
)


class FailingRunner(SyncRunner):
    """Sends each script with a `redis.call` that raises at its n-th invocation; `at` None: as it is."""

    at: int | None = None

    def run_now(self, commands: Sequence[Command]) -> list[Any]:
        if self.at is None:
            return super().run_now(commands)
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
        self.engine.task(TID, over[0].id, watch=True).now()
        self.engine.task(TID, over[1].id, watch=True).now()
        self.forget(over[2])
        # Due and not yet due, in several lines.
        due = self.enqueue(*[new(delay_ms=1_000 + n, priority=n % 3) for n in range(6)], new(delay_ms=DAY_MS // 2))
        self.forget(due[0])
        # Ended in every way; one has vanished.
        self.ended = self.enqueue(*[new(idempotency_key=f"ended {n}") for n in range(4)])
        for n, task in enumerate(self.claim(["send"], 4)):
            status = Status.FAILED if n == 1 else Status.COMPLETED
            self.engine.submit(TID, "w1", [answer(task, status)], retention_ms=DAY_MS).now()
        self.forget(self.ended[3])
        self.dead = self.enqueue(*[new(max_attempts=1, idempotency_key=f"dead {n}") for n in range(3)])
        for task in self.claim(["send"], 3):
            self.nack(task).now()
        # Leases that live: the first try, a later one, the last one; the first two are watched.
        self.held = self.enqueue(new(priority=8), new("mail", priority=8), new(priority=8, max_attempts=1))
        held = {task.id: task for task in self.claim(["send", "mail"], 3)}
        for task in self.held[:2]:
            self.nack(held[task.id], delay_ms=0).now()
        held |= {task.id: task for task in self.claim(["send", "mail"], 2)}
        self.held = [held[task.id] for task in self.held]
        for task in self.held[:2]:
            self.engine.task(TID, task.id, watch=True).now()
        # In line, with ghosts before and among them; one ghost is purged already.
        line = self.enqueue(*[new(priority=n) for n in (9, 9, 5, 5, 5, 0)])
        for n in (0, 2, 4):
            self.engine.cancel(TID, line[n].id, retention_ms=DAY_MS).now()
        self.engine.purge(TID, [line[2].id]).now()
        self.line = [line[n] for n in (1, 3, 5)]
        self.engine.task(TID, self.line[0].id, watch=True).now()
        [self.delayed] = self.enqueue(new("mail", delay_ms=DAY_MS // 2))
        # Long polls: one that waits, one that has gone.
        client.zadd(keys.of_partition(0).waiting, {f"{TID}:send": NOON_MS + DAY_MS, f"{TID}:mail": 1})
        client.set(f"{root}idem:{TID}:{'0' * 64}", self.ended[3].id, px=DAY_MS)
        # Something was paid for a moment ago, so there is a bucket to put back.
        self.engine.admit(TID, LIMITS).now()
        self.clock.advance(10)

    def enqueue(self, *asked: NewTask) -> list[Task]:
        items = self.engine.enqueue(TID, "acme", asked, retention_ms=DAY_MS).now()
        return [item.task for item in items if not isinstance(item, Exception)]

    def claim(self, commands: list[str], limit: int, lease_ms: int = 60_000) -> list[Task]:
        tasks = self.engine.claim(TID, commands, "w1", lease_ms=lease_ms, limit=limit).now().tasks
        assert len(tasks) == limit
        return tasks

    def drain(self) -> None:
        while self.engine.claim(TID, ["mail", "send"], "w1", lease_ms=DAY_MS, limit=100).now().tasks:
            pass

    def nack(self, task: Task, delay_ms: int | None = None) -> Call[Any]:
        return self.engine.nack(
            TID, task.id, "w1", token="", delay_ms=delay_ms, reason="boom", dead_retention_ms=DAY_MS
        )

    def abandon(self, task: Task) -> Call[Any]:
        return self.engine.abandon(TID, task.id, "w1", token="", dead_retention_ms=DAY_MS)

    def fail(self, call: Call[Any], at: int) -> str | None:
        """What the script says when its n-th call raises; None if it did not come so far."""
        self.runner.at = at
        try:
            self.runner.run_now(call.commands)
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


def enqueue_known(scene: Scene) -> Call[Any]:
    asked = [new(idempotency_key=key) for key in (None, "fresh", "fresh 2", "ended 0", "dead 0", "dead 0 or not")]
    asked += [new(delay_ms=1), new(delay_ms=DAY_MS // 3, idempotency_key="later"), new(delay_ms=2 * DAY_MS)]
    return scene.engine.enqueue(TID, "acme", asked, retention_ms=DAY_MS)


def enqueue_first(scene: Scene) -> Call[Any]:
    """The first tasks of a queue; one has a key that maps to a task which has vanished."""
    call = scene.engine.enqueue(
        TID,
        "acme",
        [new("first"), new("first", delay_ms=5), new("first", idempotency_key="dangling")],
        retention_ms=DAY_MS,
    )
    [(script, bound)] = call.commands
    digest = keys_of(call)[-2]
    changed = tuple("0" * 64 if word == digest else word for word in bound)
    assert changed != bound
    return Call(call.runner, [(script, changed)], call.read)


def keys_of(call: Call[Any]) -> list[Any]:
    return list(call.commands[0][1])


def claim_all(scene: Scene) -> Call[Any]:
    return scene.engine.claim(TID, ["mail", "send", "never"], "w2", lease_ms=1, limit=12, wait_ms=1_000)


def claim_nothing(scene: Scene) -> Call[Any]:
    scene.drain()
    return scene.engine.claim(TID, ["mail", "send"], "w2", lease_ms=1_000, limit=1, wait_ms=1_000)


def claim_ghosts(scene: Scene) -> Call[Any]:
    scene.drain()
    for task in scene.enqueue(new(priority=3), new(priority=3)):
        scene.engine.cancel(TID, task.id, retention_ms=DAY_MS).now()
    return scene.engine.claim(TID, ["mail", "send"], "w2", lease_ms=1_000, limit=1)


def submit(scene: Scene) -> Call[Any]:
    first, second, third = scene.held
    results = [answer(first, Status.COMPLETED), answer(second, Status.FAILED), answer(third, Status.COMPLETED)]
    results += [answer(first, Status.COMPLETED), answer(first, Status.FAILED), answer(scene.dead[0], Status.FAILED)]
    return scene.engine.submit(TID, "w1", results, retention_ms=DAY_MS)


def purge(scene: Scene) -> Call[Any]:
    ids = [task.id for task in [*scene.ended, *scene.dead[:2], *scene.held, *scene.ended[:1]]]
    return scene.engine.purge(TID, ids)


def purge_over(scene: Scene) -> Call[Any]:
    scene.clock.advance(2 * DAY_MS / 1000)
    return scene.engine.purge(TID, [task.id for task in scene.ended], before_ms=scene.clock.now_ms)


def replay(scene: Scene) -> Call[Any]:
    ids = [task.id for task in [*scene.dead, scene.dead[0], scene.ended[0]]]
    edited = Spec(command="send", payload='{"edited":1}', tenant="acme")
    return scene.engine.replay(TID, ids, [edited, None, None, None, None])


def replay_for(scene: Scene) -> Call[Any]:
    """Once for a job, and now for another one; of one of them, a plain replay would take the job's name off."""
    scene.engine.replay_for(TID, [scene.dead[0].id], "a job").now()
    tasks = scene.engine.claim(TID, ["send"], "w1", lease_ms=60_000, limit=100).now().tasks
    [again] = [task for task in tasks if task.id == scene.dead[0].id]
    scene.nack(again).now()
    return scene.engine.replay_for(TID, [task.id for task in [*scene.dead, scene.dead[1], scene.ended[0]]], "another")


def replay_after_a_job(scene: Scene) -> Call[Any]:
    replay_for(scene)
    return scene.engine.replay(TID, [scene.dead[0].id])


def recall(scene: Scene) -> Call[Any]:
    """Of three, one is claimed, and two are taken back: from a line with others, and from one without."""
    ids = [task.id for task in scene.dead]
    scene.engine.replay_for(TID, ids, "a job").now()
    while ids[0] not in [
        task.id for task in scene.engine.claim(TID, ["send"], "w1", lease_ms=60_000, limit=1).now().tasks
    ]:
        pass
    return scene.engine.recall(TID, [*ids, ids[1], scene.ended[0].id, "nobody"], "a job", dead_retention_ms=DAY_MS)


def replay_what_was_recalled(scene: Scene) -> Call[Any]:
    recall(scene).now()
    return scene.engine.replay(TID, [task.id for task in scene.dead])


def claim_past_what_was_recalled(scene: Scene) -> Call[Any]:
    recall(scene).now()
    return claim_all(scene)


def nack_to_another_queue(scene: Scene) -> Call[Any]:
    scene.engine.policy(TID, "send", line="fixed 0 0 corpses", max_consumers=None, topic="corpses").now()
    return scene.nack(scene.held[2])


def claim_some(scene: Scene) -> Call[Any]:
    """Of queues in which only so many may be in progress."""
    scene.engine.policy(TID, "send", line="", max_consumers=4).now()
    scene.engine.policy(TID, "mail", line="", max_consumers=1).now()
    return claim_all(scene)


def ranked(scene: Scene) -> None:
    """A ranked queue with an entry in every place: due and not, held by a lock that lives and by one that is over."""
    engine = scene.engine
    engine.ranked_enqueue(
        TID, "line", [(name, 50) for name in ("later", "due", "over", "held", "again", "no id!")]
    ).now()
    for delay_ms in (DAY_MS, 1_000):
        task_id = engine.ranked_dequeue(TID, "line", "h:1", lock_seconds=300).now()
        engine.ranked_requeue(TID, "line", str(task_id), "h:1", delay_ms=delay_ms).now()
    assert engine.ranked_dequeue(TID, "line", "h:1", lock_seconds=1).now() == "over"
    assert engine.ranked_dequeue(TID, "line", "h:1", lock_seconds=300).now() == "held"
    assert engine.ranked_dequeue(TID, "line", "h:1", lock_seconds=300).now() == "again"
    engine.ranked_enqueue(TID, "line", [("again", 100), ("last", 0)]).now()
    scene.client.delete(f"{keys.ranked(keys.of_partition(0).root, TID, 'line')}:lock:over")
    scene.clock.advance(1)


def of_ranked(call: Callable[[Scene], Call[Any]]) -> Callable[[Scene], Call[Any]]:
    def act(scene: Scene) -> Call[Any]:
        ranked(scene)
        return call(scene)

    return act


LIMITS = Limits(what="any", per_second=100, burst_seconds=10, token="0a", token_percent=50)

SCENES: dict[str, Callable[[Scene], Call[Any]]] = {
    "enqueue": enqueue_known,
    "enqueue the first of a queue": enqueue_first,
    "enqueue within limits": lambda s: s.engine.enqueue(
        TID, "acme", [new(), new(idempotency_key="fresh")], retention_ms=DAY_MS, limits=LIMITS, depth=100
    ),
    "known": lambda s: s.engine.known(TID, [new(idempotency_key="ended 0"), new(idempotency_key="never")]),
    "claim": claim_all,
    "claim nothing": claim_nothing,
    "claim some": claim_some,
    "claim past ghosts": claim_ghosts,
    "claim within limits": lambda s: s.engine.claim(TID, ["send"], "w2", lease_ms=1_000, limit=1, limits=LIMITS),
    "admit": lambda s: s.engine.admit(TID, LIMITS),
    "heartbeat": lambda s: s.engine.heartbeat(TID, s.held[0].id, "w1", extend_ms=5, token="", progress="50"),
    "submit": submit,
    "nack": lambda s: s.nack(s.held[0]),
    "nack at once": lambda s: s.nack(s.held[1]),
    "nack to death": lambda s: s.nack(s.held[2]),
    "nack to another queue": nack_to_another_queue,
    "abandon": lambda s: s.abandon(s.held[0]),
    "abandon to death": lambda s: s.abandon(s.held[2]),
    "cancel in line": lambda s: s.engine.cancel(TID, s.line[0].id, retention_ms=DAY_MS),
    "cancel the first in line": lambda s: s.engine.cancel(TID, s.line[2].id, retention_ms=DAY_MS),
    "cancel delayed": lambda s: s.engine.cancel(TID, s.delayed.id, retention_ms=DAY_MS),
    "cancel at work": lambda s: s.engine.cancel(TID, s.held[0].id, retention_ms=DAY_MS),
    "promote": lambda s: s.engine.promote(TID, "send"),
    "reap": lambda s: s.engine.reap(TID, "send"),
    "reap at once": lambda s: s.engine.reap(TID, "mail"),
    "replay": replay,
    "replay for a job": replay_for,
    "replay after a job": replay_after_a_job,
    "replay what was recalled": replay_what_was_recalled,
    "recall": recall,
    "claim past what was recalled": claim_past_what_was_recalled,
    "purge": purge,
    "purge the dead": lambda s: s.engine.purge_dead(TID, [task.id for task in [*s.dead, *s.ended]]),
    "purge what is over": purge_over,
    "expired": lambda s: s.engine.expired(TID),
    "visits": lambda s: s.engine.visits(0),
    "policy": lambda s: s.engine.policy(TID, "send", line="fixed 1 1 corpses", max_consumers=3, topic="corpses"),
    "policy of the first queue": lambda s: s.engine.policy("nobody", "send", line="fixed 1 1", max_consumers=3),
    "policy no more": lambda s: s.engine.policy(TID, "mail", line="", max_consumers=None),
    "pause": lambda s: s.engine.pause(TID, "send"),
    "pause the first queue": lambda s: s.engine.pause("nobody", "send"),
    "resume": lambda s: s.engine.resume(TID, "send"),
    "resume the first queue": lambda s: s.engine.resume("nobody", "send"),
    "task": lambda s: s.engine.task(TID, s.held[2].id, watch=True),
    "stats": lambda s: s.engine.stats(TID),
    "peek": lambda s: s.engine.peek(TID, "send", 3),
    "owner": lambda s: s.engine.owner(s.line[0].id),
    "names": lambda s: s.engine.names(TID),
    "scan": lambda s: s.engine.scan(TID, "send", "inprog"),
    "place": lambda s: s.engine.place(TID, s.line[2].id),
    "ranked_enqueue": of_ranked(
        lambda s: s.engine.ranked_enqueue(
            TID, "line", [("new", 50), ("later", 50), ("held", 70), ("again", 50), ("last", 9)]
        )
    ),
    "ranked_dequeue": of_ranked(lambda s: s.engine.ranked_dequeue(TID, "line", "h:2", lock_seconds=300)),
    "ranked_requeue": of_ranked(lambda s: s.engine.ranked_requeue(TID, "line", "held", "h:1", delay_ms=5)),
    "ranked_release": of_ranked(lambda s: s.engine.ranked_release(TID, "line", "held", "h:1")),
    "ranked_release by force": of_ranked(lambda s: s.engine.ranked_release(TID, "line", "held", "")),
    "ranked_renew": of_ranked(lambda s: s.engine.ranked_renew(TID, "line", "held", "h:1", lock_seconds=400)),
    "ranked_size": of_ranked(lambda s: s.engine.ranked_size(TID, "line")),
    "ranked_locked": of_ranked(lambda s: s.engine.ranked_locked(TID, "line", "held")),
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
    assert {name.split()[0] for name in SCENES} == {script.name for script in scripts.everything()}


def test_an_error_of_the_script_is_named_and_the_store_stays_whole(scene: Scene) -> None:
    """A key of the wrong type, as a careless operator would leave one."""
    call = scene.nack(scene.held[0])
    delayed = keys.of_queue(keys.of_partition(0).root, TID, "send").delayed
    scene.client.rename(delayed, "elsewhere")
    scene.client.set(delayed, "not a sorted set")
    before = lasting(dump(scene.client))
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        call.now()
    assert lasting(dump(scene.client)) == before
    scene.client.rename("elsewhere", delayed)
    assert call.now().delay_ms > 0
