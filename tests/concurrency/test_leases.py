"""Short leases with real clocks and threads: a task never has two lease holders."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial

import pytest
import redis

from codeq_site.devserver.embedded import Valkey
from core import errors
from queues.domain import NewResult, Result, Task, TaskStatus
from queues.engine import maintenance_commands, producer_commands, queries, worker_commands
from tests.concurrency.history import History, RecordedCall, find_violations, now_ms
from tests.concurrency.threads import result_or_error, run_together
from tests.queues.engine.checked_engine import DAY_MS, LONG, TID, CheckedEngine, build_task

SEEDS = range(300 if LONG else 12)
CALLS = 150


@pytest.fixture
def checked(valkey: Valkey) -> Iterator[CheckedEngine]:
    with redis.Redis.from_url(valkey.url) as client:
        yield CheckedEngine(client, partitions=1, backoff="exp_full_jitter", backoff_base_ms=4, backoff_cap_ms=20)


class UnreliableWorker:
    """A worker that makes random calls, and records the successful ones."""

    def __init__(self, name: str, dice: random.Random) -> None:
        self.name, self.dice = name, dice
        self.history = History()
        self.leases: list[Task] = []

    def run(self, checked: CheckedEngine) -> History:
        deadline = time.monotonic() + 30
        operations = (
            [self.claim] * 6 + [self.heartbeat] * 4 + [self.submit, self.nack, self.abandon, self.repair, self.stall]
        )
        for _ in range(CALLS):
            if time.monotonic() > deadline:
                break
            self.dice.choice(operations)(checked)
            if self.name == "w0" and self.dice.random() < 0.01:
                self.cancel(checked)
        return self.history

    def claim(self, checked: CheckedEngine) -> None:
        began, lease_ms = now_ms(), self.dice.choice([5, 15, 40])
        claimed = worker_commands.claim(
            checked.engine, TID, ["send"], self.name, lease_ms=lease_ms, limit=self.dice.randint(1, 3)
        ).run_sync()
        for task in claimed.tasks:
            self.leases.append(task)
            self.history.record("claim", task.id, task.lease_token or "", began, from_ms=claimed.now_ms,
                              until_ms=task.lease_until_ms or 0, attempts=task.attempts)  # fmt: skip

    def _choose_task(self) -> Task | None:
        """Choose mostly a recent task, and sometimes one whose lease expired long ago."""
        return self.dice.choice(self.leases[-3:] * 5 + self.leases) if self.leases else None

    def heartbeat(self, checked: CheckedEngine) -> None:
        began, task = now_ms(), self._choose_task()
        if task:
            token = task.lease_token or ""
            lease = result_or_error(
                worker_commands.heartbeat(
                    checked.engine, TID, task.id, self.name, extend_ms=20, token=token, progress=""
                )
            )
            if not isinstance(lease, Exception):
                self.history.record("heartbeat", task.id, token, began, until_ms=lease.until_ms)

    def submit(self, checked: CheckedEngine) -> None:
        began, task = now_ms(), self._choose_task()
        if task and self.dice.random() < 0.2:
            status = self.dice.choice([TaskStatus.COMPLETED, TaskStatus.FAILED])
            text = f"{self.name} {began}"  # unique, so that no result counts as a repetition
            result = NewResult(
                task_id=task.id,
                status=status,
                result=text.encode() if status is TaskStatus.COMPLETED else None,
                error=None if status is TaskStatus.COMPLETED else text,
                lease_token=task.lease_token,
            )
            [item] = worker_commands.submit(checked.engine, TID, self.name, [result], retention_ms=DAY_MS).run_sync()
            if isinstance(item, Result):
                self.history.record(status.value, task.id, task.lease_token or "", began)

    def nack(self, checked: CheckedEngine) -> None:
        self._release(checked, "NACKED")

    def abandon(self, checked: CheckedEngine) -> None:
        self._release(checked, "ABANDONED")

    def _release(self, checked: CheckedEngine, outcome_name: str) -> None:
        began, task = now_ms(), self._choose_task()
        if task:
            token = task.lease_token or ""
            if outcome_name == "NACKED":
                call = worker_commands.nack(
                    checked.engine,
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
                    checked.engine, TID, task.id, self.name, token=token, dead_retention_ms=DAY_MS
                )
            if not isinstance(result_or_error(call), Exception):
                self.history.record(outcome_name, task.id, token, began)

    def cancel(self, checked: CheckedEngine) -> None:
        """Cancel a task.

        Only one worker does this, because a repeated cancellation succeeds without an effect.
        """
        began, task = now_ms(), self._choose_task()
        if task and queries.task(checked.engine, TID, task.id).run_sync()[0].status is not TaskStatus.CANCELLED:
            result = result_or_error(producer_commands.cancel(checked.engine, TID, task.id, retention_ms=DAY_MS))
            if not isinstance(result, Exception):
                self.history.record("CANCELLED", task.id, "", began)

    def repair(self, checked: CheckedEngine) -> None:
        maintenance_commands.reap(checked.engine, TID, "send").run_sync()
        maintenance_commands.promote(checked.engine, TID, "send").run_sync()

    def stall(self, checked: CheckedEngine) -> None:
        time.sleep(self.dice.uniform(0, 0.03))


@pytest.mark.real_time
@pytest.mark.timeout(0 if LONG else 300)
@pytest.mark.spec(
    "CLM-7", "Eight workers with random calls on five tasks: no overlapping leases, no call accepted after its lease"
)
@pytest.mark.parametrize("seed", SEEDS)
def test_eight_unreliable_workers_never_hold_leases_of_one_task_together(
    valkey: Valkey, checked: CheckedEngine, seed: int
) -> None:
    producer_commands.enqueue(
        checked.engine, TID, "acme", [build_task(max_attempts=100_000)] * 5, retention_ms=DAY_MS
    ).run_sync()
    workers = [UnreliableWorker(f"w{n}", random.Random(f"{seed} {n}")) for n in range(8)]
    histories = run_together(valkey.url, [worker.run for worker in workers], partitions=1, backoff="exp_full_jitter",
                      backoff_base_ms=4, backoff_cap_ms=20)  # fmt: skip
    snapshot = checked.check()
    assert find_violations(histories, snapshot.events) == []
    assert {"claim", "heartbeat"} < {call.operation for history in histories for call in history.calls}


def test_history_check_detects_violations() -> None:
    """Check that violations are found in impossible histories."""

    def build_event(attempt: int, outcome: str, claimed: int, ended: int, status: str = "PENDING") -> dict[str, str]:
        return {
            "attempt": str(attempt),
            "outcome": outcome,
            "status": status,
            "claimed": str(claimed),
            "ended": str(ended),
        }

    def build_history(*calls: RecordedCall) -> History:
        history = History()
        history.calls += calls
        return history

    first = RecordedCall("claim", "t", "a", 0, 1, 0, 100)
    assert find_violations([build_history(first), build_history(RecordedCall("claim", "t", "b", 49, 51, 50, 150))], {})
    assert find_violations(
        [
            build_history(first, RecordedCall("heartbeat", "t", "a", 90, 91, 0, 190)),
            build_history(RecordedCall("claim", "t", "b", 99, 101, 100, 200)),
        ],
        {},
    )
    next_lease = RecordedCall("claim", "t", "b", 99, 101, 100, 200)
    late = RecordedCall("COMPLETED", "t", "a", 110, 111)
    assert find_violations(
        [build_history(first, late), build_history(next_lease)],
        {"t": [build_event(1, "COMPLETED", 0, 110, "COMPLETED")]},
    )
    assert find_violations([build_history(first)], {"t": [build_event(1, "NACKED", 0, 50)]})
    assert find_violations([build_history(first, late)], {"t": [build_event(1, "COMPLETED", 0, 110, "COMPLETED")]})
    assert find_violations([], {"t": [build_event(1, "EXPIRED", 0, 50), build_event(2, "EXPIRED", 40, 60)]})
    assert find_violations(
        [], {"t": [build_event(1, "COMPLETED", 0, 50, "COMPLETED"), build_event(2, "FAILED", 60, 70, "FAILED")]}
    )
    valid = RecordedCall("NACKED", "t", "a", 40, 45)
    assert not find_violations(
        [build_history(first, valid), build_history(next_lease)], {"t": [build_event(1, "NACKED", 0, 42)]}
    )


@pytest.mark.real_time
@pytest.mark.spec(
    "CLM-7", "Sixty-four workers on a thousand tasks with leases of a second: no overlap, and every task is completed"
)
def test_leases_of_sixty_four_workers_never_overlap(valkey: Valkey, checked: CheckedEngine) -> None:
    task_count = 1_000
    producer_commands.enqueue(
        checked.engine, TID, "acme", [build_task(max_attempts=1_000)] * task_count, retention_ms=DAY_MS
    ).run_sync()
    deadline = time.monotonic() + 120

    def work(checked: CheckedEngine, name: str) -> History:
        dice, history = random.Random(name), History()
        while time.monotonic() < deadline:
            began = now_ms()
            claimed = worker_commands.claim(checked.engine, TID, ["send"], name, lease_ms=1_000, limit=1).run_sync()
            if not claimed.tasks:
                [stats] = queries.stats(checked.engine, TID, ["send"]).run_sync()
                if not stats.ready + stats.delayed + stats.in_progress:
                    break
                time.sleep(0.05)
                continue
            [task] = claimed.tasks
            token = task.lease_token or ""
            history.record(
                "claim",
                task.id,
                token,
                began,
                from_ms=claimed.now_ms,
                until_ms=task.lease_until_ms or 0,
                attempts=task.attempts,
            )
            chance = dice.random()
            if chance < 0.03:
                continue  # the worker is lost
            if chance < 0.06:
                time.sleep(dice.uniform(0.9, 1.2))  # about as long as the lease
            began = now_ms()
            result = NewResult(
                task_id=task.id, status=TaskStatus.COMPLETED, result=f'"{name}"'.encode(), lease_token=token
            )
            [item] = worker_commands.submit(checked.engine, TID, name, [result], retention_ms=DAY_MS).run_sync()
            if isinstance(item, Result):
                history.record("COMPLETED", task.id, token, began)
            else:
                assert isinstance(item, errors.LeaseLost | errors.NotLeaseOwner | errors.AlreadyEnded)
        return history

    actions = [partial(work, name=f"w{n}") for n in range(64)]
    histories = run_together(valkey.url, actions, partitions=1, backoff="fixed", backoff_base_ms=10)
    snapshot = checked.check()
    assert find_violations(histories, snapshot.events) == []
    assert [snapshot.status(task_id) for task_id in snapshot.tasks] == ["COMPLETED"] * task_count
    assert sum(entry["outcome"] == "EXPIRED" for entries in snapshot.events.values() for entry in entries) > 10
