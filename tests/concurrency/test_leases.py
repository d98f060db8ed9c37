"""Real clocks, real threads, short leases: at no moment has a task two holders."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial

import pytest
import redis

from codeq_site.devserver.embedded import Valkey
from core import errors
from queues.domain import NewResult, Result, Status, Task
from queues.engine import maintenance_commands, producer_commands, queries, worker_commands
from tests.concurrency.crowd import crowd, outcome
from tests.concurrency.history import Act, History, now_ms, violations
from tests.queues.engine.world import DAY_MS, LONG, TID, World, new

SEEDS = range(300 if LONG else 12)
VERBS = 150


@pytest.fixture
def world(valkey: Valkey) -> Iterator[World]:
    with redis.Redis.from_url(valkey.url) as client:
        yield World(client, partitions=1, backoff="exp_full_jitter", backoff_base_ms=4, backoff_cap_ms=20)


class Player:
    """One of eight unreliable workers on five tasks: a random verb at a time; what is accepted is noted."""

    def __init__(self, name: str, dice: random.Random) -> None:
        self.name, self.dice = name, dice
        self.history = History()
        self.leases: list[Task] = []

    def play(self, world: World) -> History:
        end = time.monotonic() + 30
        verbs = (
            [self.claim] * 6 + [self.heartbeat] * 4 + [self.submit, self.nack, self.abandon, self.repair, self.stall]
        )
        for _ in range(VERBS):
            if time.monotonic() > end:
                break
            self.dice.choice(verbs)(world)
            if self.name == "w0" and self.dice.random() < 0.01:
                self.cancel(world)
        return self.history

    def claim(self, world: World) -> None:
        began, lease_ms = now_ms(), self.dice.choice([5, 15, 40])
        claimed = worker_commands.claim(
            world.engine, TID, ["send"], self.name, lease_ms=lease_ms, limit=self.dice.randint(1, 3)
        ).run_sync()
        for task in claimed.tasks:
            self.leases.append(task)
            self.history.note("claim", task.id, task.lease_token or "", began, from_ms=claimed.now_ms,
                              until_ms=task.lease_until_ms or 0, attempts=task.attempts)  # fmt: skip

    def _held(self) -> Task | None:
        """Mostly the newest; now and then one that was lost long ago."""
        return self.dice.choice(self.leases[-3:] * 5 + self.leases) if self.leases else None

    def heartbeat(self, world: World) -> None:
        began, task = now_ms(), self._held()
        if task:
            token = task.lease_token or ""
            lease = outcome(
                worker_commands.heartbeat(world.engine, TID, task.id, self.name, extend_ms=20, token=token, progress="")
            )
            if not isinstance(lease, Exception):
                self.history.note("heartbeat", task.id, token, began, until_ms=lease.until_ms)

    def submit(self, world: World) -> None:
        began, task = now_ms(), self._held()
        if task and self.dice.random() < 0.2:
            status = self.dice.choice([Status.COMPLETED, Status.FAILED])
            said = f"{self.name} {began}"  # no two answers are the same, so none is a repetition
            result = NewResult(
                task_id=task.id,
                status=status,
                result=said.encode() if status is Status.COMPLETED else None,
                error=None if status is Status.COMPLETED else said,
                lease_token=task.lease_token,
            )
            [answer] = worker_commands.submit(world.engine, TID, self.name, [result], retention_ms=DAY_MS).run_sync()
            if isinstance(answer, Result):
                self.history.note(status.value, task.id, task.lease_token or "", began)

    def nack(self, world: World) -> None:
        self._give_back(world, "NACKED")

    def abandon(self, world: World) -> None:
        self._give_back(world, "ABANDONED")

    def _give_back(self, world: World, how: str) -> None:
        began, task = now_ms(), self._held()
        if task:
            token = task.lease_token or ""
            if how == "NACKED":
                call = worker_commands.nack(
                    world.engine,
                    TID,
                    task.id,
                    self.name,
                    token=token,
                    delay_ms=None,
                    reason="",
                    dead_retention_ms=DAY_MS,
                )
            else:
                call = worker_commands.abandon(
                    world.engine, TID, task.id, self.name, token=token, dead_retention_ms=DAY_MS
                )
            if not isinstance(outcome(call), Exception):
                self.history.note(how, task.id, token, began)

    def cancel(self, world: World) -> None:
        """Only one player does it: a repeated cancellation is answered like the first, and ends nothing."""
        began, task = now_ms(), self._held()
        if task and queries.task(world.engine, TID, task.id).run_sync()[0].status is not Status.CANCELLED:
            answer = outcome(producer_commands.cancel(world.engine, TID, task.id, retention_ms=DAY_MS))
            if not isinstance(answer, Exception):
                self.history.note("CANCELLED", task.id, "", began)

    def repair(self, world: World) -> None:
        maintenance_commands.reap(world.engine, TID, "send").run_sync()
        maintenance_commands.promote(world.engine, TID, "send").run_sync()

    def stall(self, world: World) -> None:
        time.sleep(self.dice.uniform(0, 0.03))


@pytest.mark.real_time
@pytest.mark.timeout(0 if LONG else 300)
@pytest.mark.spec("CLM-7", "Eight workers with random verbs on five tasks: no two live leases, no act of a late holder")
@pytest.mark.parametrize("seed", SEEDS)
def test_eight_unreliable_workers_never_share_a_task(valkey: Valkey, world: World, seed: int) -> None:
    producer_commands.enqueue(
        world.engine, TID, "acme", [new(max_attempts=100_000)] * 5, retention_ms=DAY_MS
    ).run_sync()
    players = [Player(f"w{n}", random.Random(f"{seed} {n}")) for n in range(8)]
    histories = crowd(valkey.url, [player.play for player in players], partitions=1, backoff="exp_full_jitter",
                      backoff_base_ms=4, backoff_cap_ms=20)  # fmt: skip
    found = world.check()
    assert violations(histories, found.events) == []
    assert {"claim", "heartbeat"} < {act.verb for history in histories for act in history.acts}


def test_the_history_would_tell() -> None:
    """The checker is no use if it finds nothing in a history that cannot be."""

    def event(attempt: int, outcome: str, claimed: int, ended: int, status: str = "PENDING") -> dict[str, str]:
        return {
            "attempt": str(attempt),
            "outcome": outcome,
            "status": status,
            "claimed": str(claimed),
            "ended": str(ended),
        }

    def history(*acts: Act) -> History:
        found = History()
        found.acts += acts
        return found

    first = Act("claim", "t", "a", 0, 1, 0, 100)
    assert violations([history(first), history(Act("claim", "t", "b", 49, 51, 50, 150))], {})
    assert violations(
        [
            history(first, Act("heartbeat", "t", "a", 90, 91, 0, 190)),
            history(Act("claim", "t", "b", 99, 101, 100, 200)),
        ],
        {},
    )
    over = Act("claim", "t", "b", 99, 101, 100, 200)
    late = Act("COMPLETED", "t", "a", 110, 111)
    assert violations([history(first, late), history(over)], {"t": [event(1, "COMPLETED", 0, 110, "COMPLETED")]})
    assert violations([history(first)], {"t": [event(1, "NACKED", 0, 50)]})
    assert violations([history(first, late)], {"t": [event(1, "COMPLETED", 0, 110, "COMPLETED")]})
    assert violations([], {"t": [event(1, "EXPIRED", 0, 50), event(2, "EXPIRED", 40, 60)]})
    assert violations([], {"t": [event(1, "COMPLETED", 0, 50, "COMPLETED"), event(2, "FAILED", 60, 70, "FAILED")]})
    fine = Act("NACKED", "t", "a", 40, 45)
    assert not violations([history(first, fine), history(over)], {"t": [event(1, "NACKED", 0, 42)]})


@pytest.mark.real_time
@pytest.mark.spec(
    "CLM-7", "Sixty-four claimers on a thousand tasks with leases of a second: no overlap, and every task is done"
)
def test_sixty_four_claimers_never_overlap(valkey: Valkey, world: World) -> None:
    tasks = 1_000
    producer_commands.enqueue(
        world.engine, TID, "acme", [new(max_attempts=1_000)] * tasks, retention_ms=DAY_MS
    ).run_sync()
    give_up = time.monotonic() + 120

    def work(world: World, name: str) -> History:
        dice, history = random.Random(name), History()
        while time.monotonic() < give_up:
            began = now_ms()
            claimed = worker_commands.claim(world.engine, TID, ["send"], name, lease_ms=1_000, limit=1).run_sync()
            if not claimed.tasks:
                [stats] = queries.stats(world.engine, TID, ["send"]).run_sync()
                if not stats.ready + stats.delayed + stats.in_progress:
                    break
                time.sleep(0.05)
                continue
            [task] = claimed.tasks
            token = task.lease_token or ""
            history.note(
                "claim",
                task.id,
                token,
                began,
                from_ms=claimed.now_ms,
                until_ms=task.lease_until_ms or 0,
                attempts=task.attempts,
            )
            mood = dice.random()
            if mood < 0.03:
                continue  # died over it
            if mood < 0.06:
                time.sleep(dice.uniform(0.9, 1.2))  # about as long as the lease
            began = now_ms()
            result = NewResult(task_id=task.id, status=Status.COMPLETED, result=f'"{name}"'.encode(), lease_token=token)
            [answer] = worker_commands.submit(world.engine, TID, name, [result], retention_ms=DAY_MS).run_sync()
            if isinstance(answer, Result):
                history.note("COMPLETED", task.id, token, began)
            else:
                assert isinstance(answer, errors.LeaseLost | errors.NotLeaseOwner | errors.AlreadyEnded)
        return history

    acts = [partial(work, name=f"w{n}") for n in range(64)]
    histories = crowd(valkey.url, acts, partitions=1, backoff="fixed", backoff_base_ms=10)
    found = world.check()
    assert violations(histories, found.events) == []
    assert [found.status(task_id) for task_id in found.tasks] == ["COMPLETED"] * tasks
    assert sum(entry["outcome"] == "EXPIRED" for entries in found.events.values() for entry in entries) > 10
