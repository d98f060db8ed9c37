"""The three Bloom filters in use: they save calls and do not change results for clients."""

from __future__ import annotations

import random
import re
from typing import Any

import msgspec
import pytest
import redis

from core import errors
from core.redis.connections import client
from queues import selectors, services
from queues.current_engine import engine
from queues.domain import NewResult, NewTask, TaskStatus
from queues.filters import Filters
from tenants.domain import TenantSnapshot
from tests.fixtures.queues import Clock
from tests.queues.engine.checked_engine import check_consistency

TENANTS = [
    TenantSnapshot(tid="acme0001", slug="acme", retention_ms=60_000, dead_retention_ms=90_000),
    TenantSnapshot(
        tid="zeta0002", slug="zeta", retention_ms=60_000, dead_retention_ms=90_000, is_idempotency_strict=True
    ),
]
ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
TOKEN = re.compile(r'"[0-9a-f]{32}"')


def use(filters: Filters, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (services, selectors):
        monkeypatch.setattr(module, "filters", lambda: filters)


class RandomCalls:
    """A random sequence of calls, which depends only on the seed.

    Ids and tokens differ between two runs. In the recorded answers, a number replaces each of them.
    """

    def __init__(self, seed: int, clock: Clock) -> None:
        self.rng, self.clock = random.Random(seed), clock
        self.ids: list[str] = []
        self.held: list[tuple[TenantSnapshot, str, str]] = []
        self.answers: list[str] = []

    def run(self, steps: int) -> list[str]:
        verbs = [self.enqueue] * 5 + [self.claim] * 5 + [self.submit, self.nack, self.heartbeat, self.abandon] * 2
        verbs += [self.read] * 4 + [
            self.cancel,
            self.purge,
            self.cleanup,
            self.cleanup,
            self.replay,
            self.sleep,
            self.list_queues,
        ]
        for _ in range(steps):
            verb = self.rng.choice(verbs)
            try:
                answer = verb(self.rng.choice(TENANTS))
            except errors.CodeqError as error:
                answer = (type(error).__name__, error.detail)
            self.answers.append(
                self._normalise(f"{verb.__name__} {msgspec.json.encode(answer, enc_hook=repr).decode()}")
            )
        return self.answers

    def _normalise(self, text: str) -> str:
        """Return the answer with each id replaced by its number, in the order of appearance."""
        for task_id in ID.findall(text):
            if task_id not in self.ids:
                self.ids.append(task_id)
            text = text.replace(task_id, f"task {self.ids.index(task_id)}")
        return TOKEN.sub('"token"', text)

    def _id(self) -> str:
        return self.rng.choice(self.ids) if self.ids else "01890000-0000-7000-8000-000000000000"

    def enqueue(self, tenant: TenantSnapshot) -> Any:
        new = [
            NewTask(
                command="send",
                payload=self.rng.choice(["{}", "[]"]),
                max_attempts=self.rng.choice([1, 3]),
                idempotency_key=self.rng.choice([None, "a", "b", "c", "d"]),
                delay_ms=self.rng.choice([0, 0, 500]),
            )
            for _ in range(self.rng.randint(1, 3))
        ]
        return services.enqueue(tenant, new).run_sync()

    def claim(self, tenant: TenantSnapshot) -> Any:
        claimed = services.claim(tenant, ["send"], "w1", lease_seconds=5, count=2).run_sync()
        self.held += [(tenant, task.id, task.lease_token or "") for task in claimed.tasks]
        return claimed.tasks, claimed.expired, claimed.dead

    def _held(self, tenant: TenantSnapshot) -> tuple[TenantSnapshot, str, str]:
        return self.rng.choice(self.held) if self.held else (tenant, self._id(), "x")

    def submit(self, tenant: TenantSnapshot) -> Any:
        tenant, task_id, token = self._held(tenant)
        new = NewResult(task_id=task_id, status=TaskStatus.COMPLETED, result=b"1", lease_token=token)
        return services.submit(tenant, "w1", [new, new]).run_sync()

    def nack(self, tenant: TenantSnapshot) -> Any:
        tenant, task_id, token = self._held(tenant)
        return services.nack(tenant, task_id, "w1", token=token, delay_seconds=1).run_sync()

    def heartbeat(self, tenant: TenantSnapshot) -> Any:
        tenant, task_id, token = self._held(tenant)
        return services.heartbeat(tenant, task_id, "w1", extend_seconds=5, token=token).run_sync()

    def abandon(self, tenant: TenantSnapshot) -> Any:
        tenant, task_id, token = self._held(tenant)
        return services.abandon(tenant, task_id, "w1", token=token).run_sync()

    def read(self, tenant: TenantSnapshot) -> Any:
        read = self.rng.choice([selectors.task, selectors.result])
        return read(tenant, self._id()).run_sync()

    def cancel(self, tenant: TenantSnapshot) -> Any:
        return services.cancel(tenant, self._id()).run_sync()

    def purge(self, tenant: TenantSnapshot) -> Any:
        return services.purge(tenant, [self._id(), self._id()]).run_sync()

    def cleanup(self, tenant: TenantSnapshot) -> Any:
        return services.cleanup(tenant.tid, limit=5).run_sync()

    def replay(self, tenant: TenantSnapshot) -> Any:
        return services.replay(tenant, [self._id(), self._id()]).run_sync()

    def sleep(self, tenant: TenantSnapshot) -> Any:
        self.clock.advance(self.rng.choice([0.1, 1, 6, 30, 100]))

    def list_queues(self, tenant: TenantSnapshot) -> Any:
        return selectors.queues(tenant).run_sync()


@pytest.mark.spec("BLM-1", "Answers are the same with the filters and without them")
@pytest.mark.parametrize("seed", range(8))
def test_filters_do_not_change_any_answer(clock: Clock, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    options = msgspec.structs.replace(engine().options, backoff="fixed")  # random jitter would make the two runs differ
    monkeypatch.setattr(engine(), "options", options)
    began = clock.now_ms
    runs = []
    for filters in (Filters(), Filters(is_enabled=False)):
        client().flushall()
        clock.now_ms = began
        use(filters, monkeypatch)
        runs.append(RandomCalls(seed, clock).run(600))
        check_consistency(client(), engine())
    for with_filters, without in zip(*runs, strict=True):
        assert with_filters == without
    all_answers = " ".join(runs[0])
    for word in ('"is_repeated":true', "TaskNotFound", "AlreadyEnded", "LeaseLost", "IdempotencyMismatch"):
        assert word in all_answers


def calls(store: redis.Redis) -> int:
    return int(store.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0))


@pytest.mark.spec("BLM-2", "A task that is known to be removed is answered without a call to Redis")
def test_missing_task_is_not_read_again(clock: Clock, store: redis.Redis, tenant: TenantSnapshot) -> None:
    gone = "01890000-0000-7000-8000-000000000000"
    with pytest.raises(errors.TaskNotFound):
        selectors.task(tenant, gone).run_sync()
    store.config_resetstat()
    new = NewResult(task_id=gone, status=TaskStatus.COMPLETED, result=b"1")
    for call in (
        lambda: selectors.task(tenant, gone),
        lambda: selectors.result(tenant, gone),
        lambda: services.heartbeat(tenant, gone, "w1"),
        lambda: services.nack(tenant, gone, "w1"),
        lambda: services.abandon(tenant, gone, "w1"),
    ):
        with pytest.raises(errors.TaskNotFound):
            call().run_sync()
    assert isinstance(services.submit(tenant, "w1", [new]).run_sync()[0], errors.TaskNotFound)
    assert calls(store) == 0


@pytest.mark.spec("BLM-2", "A task that another tenant looked up is not remembered as missing for its owner")
def test_task_is_not_missing_for_its_owner_after_another_tenants_read(
    clock: Clock, tenant: TenantSnapshot, other_tenant: TenantSnapshot
) -> None:
    [made] = services.enqueue(tenant, [NewTask(command="send", payload="{}")]).run_sync()
    assert not isinstance(made, Exception)
    with pytest.raises(errors.TaskNotFound):
        selectors.task(other_tenant, made.task.id).run_sync()
    assert selectors.task(tenant, made.task.id).run_sync().id == made.task.id


@pytest.mark.spec("BLM-1", "A duplicate does not send its payload again")
def test_a_duplicate_does_not_send_its_payload(clock: Clock, store: redis.Redis, tenant: TenantSnapshot) -> None:
    new = NewTask(command="send", payload='"' + "x" * 100_000 + '"', idempotency_key="once")
    [first] = services.enqueue(tenant, [new]).run_sync()
    received = store.info("stats")["total_net_input_bytes"]
    [again] = services.enqueue(tenant, [new]).run_sync()
    assert not isinstance(first, Exception)
    assert not isinstance(again, Exception)
    assert (again.task.id, again.is_repeated, again.is_mismatch) == (first.task.id, True, False)
    assert store.info("stats")["total_net_input_bytes"] - received < 2_000


@pytest.mark.spec("BLM-3", "A removed task is not sent again")
def test_removed_task_is_left_out_of_the_next_pass() -> None:
    filters = Filters()
    filters.remember_deleted("acme0001", ["a", "b"], [True, False])
    assert filters.skips_cleanup("acme0001", "a")
    assert not filters.skips_cleanup("acme0001", "b")
    assert not filters.skips_cleanup("zeta0002", "a")
