"""Requests that arrive together share one call, with an answer for each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import pytest
import redis

from core import errors
from queues import merging, selectors, services
from queues.current_engine import engine
from queues.domain import Claimed, Enqueued, NewResult, NewTask, Result, TaskStatus
from queues.engine import admin_commands
from queues.merging import MAX_CHARACTERS, MAX_REQUESTS
from tenants.domain import Rates
from tests.fixtures.queues import Clock, Queue

R = TypeVar("R")
# The name of each script that was sent, and its number of arguments.
Scripts = list[tuple[str, int]]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Scripts:
    scripts: Scripts = []
    run = engine().runner.run

    async def record(commands: Sequence[Any]) -> list[Any]:
        scripts.extend((script.name, len(bound)) for script, bound in commands)
        return await run(commands)

    monkeypatch.setattr(engine().runner, "run", record)
    return scripts


def names(scripts: Scripts) -> list[str]:
    return [name for name, _ in scripts]


def build_task(number: int, **options: Any) -> NewTask:
    return NewTask(**{"command": "send", "payload": f"{number}", **options})


def build_result(task_id: str, **options: Any) -> NewResult:
    return NewResult(**{"task_id": task_id, "status": TaskStatus.COMPLETED, "result": b"{}", **options})


def read_payload(answer: Enqueued | errors.CodeqError) -> str:
    assert isinstance(answer, Enqueued)
    return answer.task.spec.payload


def read_claimed(claimed: Claimed) -> tuple[str | None, str] | None:
    """Return the worker and the payload of a claimed task, or None."""
    if not claimed.tasks:
        return None
    [task] = claimed.tasks
    return task.worker, task.spec.payload


async def send_together(requests: Sequence[Awaitable[R]]) -> list[R]:
    return await asyncio.gather(*requests)


async def claim_together(queue: Queue, workers: Sequence[str], **options: Any) -> list[Claimed]:
    return await send_together([merging.claim(queue.tenant, [queue.command], worker, **options) for worker in workers])


class TestEnqueue:
    async def test_requests_of_one_loop_iteration_share_a_script(self, queue: Queue, scripts: Scripts) -> None:
        answers = await send_together([merging.enqueue(queue.tenant, build_task(number)) for number in range(30)])
        assert [read_payload(answer) for answer in answers] == [str(number) for number in range(30)]
        assert names(scripts) == ["enqueue"]
        assert queue.claim_payloads() == [str(number) for number in range(30)]

    async def test_each_request_has_its_own_error(self, queue: Queue, scripts: Scripts) -> None:
        tasks = [build_task(number) for number in range(5)]
        tasks[2] = build_task(2, delay_ms=10**13)
        answers = await send_together([merging.enqueue(queue.tenant, task) for task in tasks])
        assert [isinstance(answer, errors.CodeqError) for answer in answers] == [False, False, True, False, False]
        assert names(scripts) == ["enqueue"]
        assert queue.claim_payloads() == ["0", "1", "3", "4"]

    async def test_a_repeated_key_creates_one_task(self, queue: Queue) -> None:
        answers = await send_together(
            [merging.enqueue(queue.tenant, build_task(1, idempotency_key="key")) for _ in range(5)]
        )
        enqueued = [answer for answer in answers if isinstance(answer, Enqueued)]
        assert len({answer.task.id for answer in enqueued}) == 1
        assert [answer.is_repeated for answer in enqueued] == [False, True, True, True, True]

    @pytest.mark.parametrize("limits", [{"rates": Rates(create=1000)}, {"depth": 1000}], ids=["rate", "depth"])
    async def test_requests_of_a_limited_tenant_are_sent_alone(
        self, queue: Queue, scripts: Scripts, limits: dict[str, Any]
    ) -> None:
        tenant = msgspec.structs.replace(queue.tenant, **limits)
        await send_together([merging.enqueue(tenant, build_task(number)) for number in range(4)])
        assert names(scripts) == ["enqueue"] * 4

    async def test_large_tasks_are_sent_alone(self, queue: Queue, scripts: Scripts) -> None:
        payloads = ["1", "x" * (MAX_CHARACTERS + 1), "x" * MAX_CHARACTERS]
        answers = await send_together(
            [merging.enqueue(queue.tenant, build_task(0, payload=payload)) for payload in payloads]
        )
        assert [read_payload(answer) for answer in answers] == payloads
        assert names(scripts) == ["enqueue"] * 2


class TestSubmit:
    @pytest.mark.parametrize("workers", [["w1"], ["w1", "w2", "w3"]], ids=["one worker", "several workers"])
    async def test_results_of_one_loop_iteration_share_a_script(
        self, queue: Queue, scripts: Scripts, workers: list[str]
    ) -> None:
        queue.enqueue_many(6)
        tasks = [queue.claim(workers[number % len(workers)]) for number in range(6)]
        answers = await send_together(
            [
                merging.submit(queue.tenant, str(task.worker), build_result(task.id, result=b"[%d]" % number))
                for number, task in enumerate(tasks)
            ]
        )
        assert names(scripts) == ["submit"]
        for number, (task, answer) in enumerate(zip(tasks, answers, strict=True)):
            assert isinstance(answer, Result)
            assert (answer.task_id, answer.worker) == (task.id, task.worker)
            _, stored = selectors.result(queue.tenant, task.id).run_sync()
            assert (bytes(stored.result or b""), stored.worker) == (b"[%d]" % number, task.worker)
        assert {event["worker"] for event in queue.read_events()} == set(workers)

    @pytest.mark.spec("CLM-7", "In a merged call, a worker without the lease is refused, and the holder is not")
    async def test_each_worker_is_checked_against_its_own_lease(
        self, queue: Queue, clock: Clock, scripts: Scripts
    ) -> None:
        queue.enqueue_many(4)
        stale = queue.claim("w1", lease_seconds=1)
        clock.advance(1)
        held, foreign, wrong_token = [queue.claim("w1") for _ in range(3)]
        answers = await send_together(
            [
                merging.submit(queue.tenant, "w1", build_result(stale.id, lease_token=stale.lease_token)),
                merging.submit(queue.tenant, "w1", build_result(held.id, lease_token=held.lease_token)),
                merging.submit(queue.tenant, "w2", build_result(foreign.id, lease_token=foreign.lease_token)),
                merging.submit(queue.tenant, "w1", build_result(wrong_token.id, lease_token=held.lease_token)),
                merging.submit(queue.tenant, "w1", build_result("no id")),
                merging.submit(queue.tenant, "w1", build_result(held.id, result=b"[]")),
            ]
        )
        assert [type(answer) for answer in answers] == [
            errors.LeaseLost,
            Result,
            errors.NotLeaseOwner,
            errors.LeaseLost,
            errors.TaskNotFound,
            errors.AlreadyEnded,
        ]
        assert names(scripts) == ["submit"]

    async def test_a_repeated_result_returns_the_stored_one(self, queue: Queue) -> None:
        queue.enqueue_many(2)
        task, other = queue.claim("w1"), queue.claim("w2")
        for _ in range(2):
            answers = await send_together(
                [
                    merging.submit(queue.tenant, "w1", build_result(task.id)),
                    merging.submit(queue.tenant, "w2", build_result(other.id)),
                    merging.submit(queue.tenant, "w1", build_result(task.id)),
                ]
            )
            assert [isinstance(answer, Result) for answer in answers] == [True] * 3
        assert len(queue.read_events()) == 2

    async def test_large_results_are_sent_alone(self, queue: Queue, scripts: Scripts) -> None:
        queue.enqueue_many(3)
        tasks = [queue.claim() for _ in range(3)]
        results = [
            build_result(tasks[0].id),
            build_result(tasks[1].id, result=b'"%s"' % (b"x" * MAX_CHARACTERS)),
            build_result(tasks[2].id, status=TaskStatus.FAILED, result=None, error="x" * MAX_CHARACTERS),
        ]
        await send_together([merging.submit(queue.tenant, "w1", result) for result in results])
        assert names(scripts) == ["submit"] * 2


class TestClaim:
    @pytest.mark.spec("CLM-1", "Claims that arrive together open a lease each, in the order of arrival")
    async def test_claims_of_one_loop_iteration_share_a_script(self, queue: Queue, scripts: Scripts) -> None:
        queue.enqueue_many(5)
        claims = await claim_together(queue, ["w1", "w2", "w1", "w3"])
        assert names(scripts) == ["claim"]
        assert [read_claimed(claimed) for claimed in claims] == [("w1", "0"), ("w2", "1"), ("w1", "2"), ("w3", "3")]
        tasks = [claimed.tasks[0] for claimed in claims]
        assert len({task.lease_token for task in tasks}) == 4
        for task in tasks:
            assert selectors.task(queue.tenant, task.id).run_sync().worker == task.worker
            assert isinstance(queue.complete(task, str(task.worker), lease_token=task.lease_token), Result)

    async def test_workers_without_a_task_get_none(self, queue: Queue, clock: Clock) -> None:
        queue.enqueue_many(2)
        queue.enqueue(delay_ms=90_000)
        claims = await claim_together(queue, ["w1", "w2", "w3", "w4"], lease_seconds=60)
        assert [read_claimed(claimed) for claimed in claims] == [("w1", "0"), ("w2", "1"), None, None]
        # The leases of the other workers expire before the delayed task is due.
        assert claims[2].next_due_ms == clock.now_ms + 60_000

    @pytest.mark.parametrize(
        "others",
        [{"commands": ["send", "mail"]}, {"commands": ["mail", "send"]}, {"lease_seconds": 5}, {"wait_ms": 1000}],
        ids=["queues", "order of queues", "lease", "wait"],
    )
    async def test_different_claims_are_not_merged(
        self, queue: Queue, scripts: Scripts, others: dict[str, Any]
    ) -> None:
        claim = {"commands": ["send"] if others != {"commands": ["mail", "send"]} else ["send", "mail"], "worker": "w1"}
        await send_together([merging.claim(queue.tenant, **{**claim, **more}) for more in ({}, others, {}, others)])
        assert names(scripts) == ["claim"] * 2

    async def test_batches_and_claims_of_a_limited_tenant_are_sent_alone(self, queue: Queue, scripts: Scripts) -> None:
        await claim_together(queue, ["w1"] * 2, count=2)
        limited = Queue(msgspec.structs.replace(queue.tenant, rates=Rates(claim=1000)))
        await claim_together(limited, ["w1"] * 2)
        assert names(scripts) == ["claim"] * 4

    async def test_the_longest_wait_is_announced(self, queue: Queue, store: redis.Redis, clock: Clock) -> None:
        queue.enqueue()
        queue.claim()
        await send_together(
            [merging.claim(queue.tenant, ["send"], "w1", wait_ms=wait_ms) for wait_ms in (1_000, 30_000, 5_000)]
        )
        partition = engine().partition_keys(queue.tenant.tid)
        assert store.zscore(partition.waiting, f"{queue.tenant.tid}:send") == clock.now_ms + 30_000

    @pytest.mark.spec("CLM-5", "A merged claim continues after many ghosts until each worker has a task")
    async def test_ghosts_are_skipped_for_every_worker(self, queue: Queue, scripts: Scripts) -> None:
        for number in range(3):
            for task in queue.enqueue_many(300):
                services.cancel(queue.tenant, task.id).run_sync()
            queue.enqueue(f"live {number}")
        claims = await claim_together(queue, ["w1", "w2", "w3", "w4"])
        assert [read_claimed(claimed) for claimed in claims] == [
            ("w1", "live 0"),
            ("w2", "live 1"),
            ("w3", "live 2"),
            None,
        ]
        assert set(names(scripts)) == {"claim"}
        assert len(scripts) == 5  # 900 ghosts, 200 by each script

    @pytest.mark.spec("QUE-2", "Merged claims get the tasks that separate claims would get")
    @pytest.mark.parametrize("is_merged", [False, True])
    async def test_merged_claims_get_the_same_tasks_as_separate_ones(self, queue: Queue, is_merged: bool) -> None:
        commands = ["free", "limited", "paused", "full"]
        for command in commands:
            for priority in (0, 5, 5, 9):
                queue.enqueue(f"{command} {priority}", command=command, priority=priority)
        for command, limit in (("limited", 2), ("full", 1)):
            admin_commands.set_policy(engine(), queue.tenant.tid, command, policy="", max_consumers=limit).run_sync()
        services.pause(queue.tenant, "paused").run_sync()
        queue.claim(commands=["full"])
        workers = [f"w{number}" for number in range(8)]
        if is_merged:
            claims = await send_together([merging.claim(queue.tenant, commands, worker) for worker in workers])
        else:
            claims = [await services.claim(queue.tenant, commands, worker) for worker in workers]
        assert [read_claimed(claimed) for claimed in claims] == [
            ("w0", "free 9"),
            ("w1", "limited 9"),
            ("w2", "free 5"),
            ("w3", "free 5"),
            ("w4", "limited 5"),
            ("w5", "free 0"),
            None,
            None,
        ]
        # Two queues have as many tasks in progress as they may have: look again soon.
        assert [claimed.next_due_ms for claimed in claims[6:]] == [claims[0].now_ms + 500] * 2


SendRequest = Callable[[Queue, int], Awaitable[Any]]


def enqueue_number(queue: Queue, number: int) -> Awaitable[Any]:
    return merging.enqueue(queue.tenant, build_task(number))


def submit_number(queue: Queue, number: int) -> Awaitable[Any]:
    task = queue.claim(f"w{number}")
    return merging.submit(queue.tenant, f"w{number}", build_result(task.id))


def claim_number(queue: Queue, number: int) -> Awaitable[Any]:
    return merging.claim(queue.tenant, ["send"], f"w{number}")


# Functions that send the request with a number, for which a ready task exists.
REQUESTS: dict[str, SendRequest] = {"enqueue": enqueue_number, "submit": submit_number, "claim": claim_number}
every_request = pytest.mark.parametrize("name", REQUESTS)


@every_request
class TestEveryRequest:
    @pytest.fixture(autouse=True)
    def _ready_tasks(self, queue: Queue, other_queue: Queue) -> None:
        queue.enqueue_many(MAX_REQUESTS + 20)
        other_queue.enqueue_many(20)

    async def test_a_merged_call_is_bounded(self, queue: Queue, scripts: Scripts, name: str) -> None:
        answers = await send_together([REQUESTS[name](queue, number) for number in range(MAX_REQUESTS + 20)])
        assert not [answer for answer in answers if isinstance(answer, errors.CodeqError)]
        assert names(scripts) == [name] * 2

    @pytest.mark.spec("TEN-3", "Requests of several tenants that arrive together are sent by separate scripts")
    async def test_tenants_are_not_mixed(self, queue: Queue, other_queue: Queue, scripts: Scripts, name: str) -> None:
        queues = [queue, other_queue]
        answers = await send_together([REQUESTS[name](queues[number % 2], number) for number in range(20)])
        assert not [answer for answer in answers if isinstance(answer, errors.CodeqError)]
        assert names(scripts) == [name] * 2

    async def test_requests_before_and_after_a_change_of_the_tenant_are_not_mixed(
        self, queue: Queue, scripts: Scripts, name: str
    ) -> None:
        changed = Queue(msgspec.structs.replace(queue.tenant, retention_ms=1))
        await send_together([REQUESTS[name]([queue, changed][number % 2], number) for number in range(6)])
        assert names(scripts) == [name] * 2

    async def test_a_request_that_arrives_alone_is_sent_as_without_merging(
        self, queue: Queue, scripts: Scripts, name: str
    ) -> None:
        for number in range(3):
            await REQUESTS[name](queue, number)
        merged, scripts[:] = list(scripts), []
        task = queue.claim()
        plain: dict[str, Callable[[], Awaitable[Any]]] = {
            "enqueue": lambda: services.enqueue(queue.tenant, [build_task(1)]),
            "submit": lambda: services.submit(queue.tenant, "w1", [build_result(task.id)]),
            "claim": lambda: services.claim(queue.tenant, ["send"], "w1"),
        }
        await plain[name]()
        assert merged == scripts * 3
        assert merged == [(name, {"enqueue": 25, "submit": 14, "claim": 33}[name])] * 3

    async def test_an_outage_fails_every_request(
        self, queue: Queue, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        requests = [REQUESTS[name](queue, number) for number in range(5)]

        async def refuse(_: object) -> None:
            raise errors.Unavailable(retry_after_seconds=1)

        monkeypatch.setattr(engine().runner, "run", refuse)
        answers = await asyncio.gather(*requests, return_exceptions=True)
        assert [type(answer) for answer in answers] == [errors.Unavailable] * 5

    @pytest.mark.parametrize("cancelled", [0, 3], ids=["first", "later"])
    @pytest.mark.parametrize("iterations", [1, 2, 3])
    async def test_a_cancelled_request_does_not_affect_the_others(
        self, queue: Queue, cancelled: int, iterations: int, name: str
    ) -> None:
        requests = [asyncio.ensure_future(REQUESTS[name](queue, number)) for number in range(6)]
        for _ in range(iterations):
            await asyncio.sleep(0)
        requests[cancelled].cancel()
        answers = await asyncio.gather(*requests, return_exceptions=True)
        assert isinstance(answers.pop(cancelled), asyncio.CancelledError)
        assert [type(answer) for answer in answers] == [
            {"enqueue": Enqueued, "submit": Result, "claim": Claimed}[name]
        ] * 5

    async def test_a_request_cancelled_before_the_call_is_not_sent(
        self, queue: Queue, store: redis.Redis, name: str
    ) -> None:
        before = selectors.queue_stats(queue.tenant, "send").run_sync()
        requests = [asyncio.ensure_future(REQUESTS[name](queue, number)) for number in range(6)]
        if name == "submit":
            before = selectors.queue_stats(queue.tenant, "send").run_sync()
        await asyncio.sleep(0)
        for request in (requests[0], requests[3]):
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        after = selectors.queue_stats(queue.tenant, "send").run_sync()
        changes = (after.ready - before.ready, after.in_progress - before.in_progress)
        assert changes == {"enqueue": (4, 0), "submit": (0, -4), "claim": (-4, 4)}[name]


@pytest.fixture(autouse=True)
def _no_open_requests() -> Iterator[None]:
    yield
    for merger in (merging._enqueues, merging._submits, merging._claims):
        assert not merger._followers
