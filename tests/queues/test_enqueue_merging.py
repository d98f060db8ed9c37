"""Enqueue requests that arrive together share one call, with an outcome for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest
import redis

from core import errors
from core.redis.script_call import ScriptCall
from queues import enqueue_merging, services
from queues.domain import Enqueued, NewTask
from queues.enqueue_merging import MAX_TASKS, EnqueueMerger, Outcome
from tenants.domain import Rates, TenantSnapshot
from tests.fixtures.queues import Queue

Calls = list[tuple[str, int]]


@pytest.fixture
def merger() -> EnqueueMerger:
    return EnqueueMerger()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls of the service: the tenant and the number of tasks of each."""
    calls: Calls = []
    enqueue = services.enqueue

    def record(
        tenant: TenantSnapshot, tasks: list[NewTask], *, token_fingerprint: str = ""
    ) -> ScriptCall[list[Outcome]]:
        calls.append((tenant.slug, len(tasks)))
        return enqueue(tenant, tasks, token_fingerprint=token_fingerprint)

    monkeypatch.setattr(enqueue_merging.services, "enqueue", record)
    return calls


def build_task(number: int, **options: object) -> NewTask:
    return NewTask(**{"command": "send", "payload": f"{number}", **options})  # type: ignore[arg-type]


def read_payload(outcome: Outcome) -> str:
    assert isinstance(outcome, Enqueued)
    return outcome.task.spec.payload


async def test_requests_of_one_loop_iteration_share_a_call(merger: EnqueueMerger, queue: Queue, calls: Calls) -> None:
    outcomes = await asyncio.gather(*(merger.enqueue(queue.tenant, build_task(number)) for number in range(30)))
    assert [read_payload(outcome) for outcome in outcomes] == [str(number) for number in range(30)]
    assert calls == [("acme", 30)]
    assert queue.claim_payloads() == [str(number) for number in range(30)]


async def test_a_request_that_arrives_alone_is_sent_alone(merger: EnqueueMerger, queue: Queue, calls: Calls) -> None:
    for number in range(3):
        assert read_payload(await merger.enqueue(queue.tenant, build_task(number))) == str(number)
    assert calls == [("acme", 1)] * 3


@pytest.mark.spec("TEN-3", "Tasks of several tenants that arrive together are stored by separate calls")
async def test_tenants_are_not_mixed(
    merger: EnqueueMerger, queue: Queue, other_queue: Queue, calls: Calls, store: redis.Redis
) -> None:
    tenants = [queue.tenant, other_queue.tenant]
    outcomes = await asyncio.gather(*(merger.enqueue(tenants[n % 2], build_task(n)) for n in range(20)))
    assert [read_payload(outcome) for outcome in outcomes] == [str(number) for number in range(20)]
    assert sorted(calls) == [("acme", 10), ("zeta", 10)]
    assert queue.claim_payloads() == [str(number) for number in range(0, 20, 2)]
    assert other_queue.claim_payloads() == [str(number) for number in range(1, 20, 2)]


async def test_each_request_has_its_own_error(merger: EnqueueMerger, queue: Queue, calls: Calls) -> None:
    tasks = [build_task(number) for number in range(5)]
    tasks[2] = build_task(2, delay_ms=10**13)
    outcomes = await asyncio.gather(*(merger.enqueue(queue.tenant, task) for task in tasks))
    assert [isinstance(outcome, errors.CodeqError) for outcome in outcomes] == [False, False, True, False, False]
    assert calls == [("acme", 5)]
    assert queue.claim_payloads() == ["0", "1", "3", "4"]


async def test_a_repeated_key_creates_one_task(merger: EnqueueMerger, queue: Queue) -> None:
    outcomes = await asyncio.gather(
        *(merger.enqueue(queue.tenant, build_task(1, idempotency_key="key")) for _ in range(5))
    )
    enqueued = [outcome for outcome in outcomes if isinstance(outcome, Enqueued)]
    assert len({outcome.task.id for outcome in enqueued}) == 1
    assert [outcome.is_repeated for outcome in enqueued] == [False, True, True, True, True]


async def test_an_outage_fails_every_request(
    merger: EnqueueMerger, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise errors.Unavailable(retry_after_seconds=1)

    monkeypatch.setattr(enqueue_merging.services, "enqueue", refuse)
    outcomes = await asyncio.gather(
        *(merger.enqueue(queue.tenant, build_task(number)) for number in range(5)), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [errors.Unavailable] * 5


@pytest.mark.parametrize("cancelled", [0, 3], ids=["first", "later"])
@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_a_cancelled_request_does_not_affect_the_others(
    merger: EnqueueMerger, queue: Queue, cancelled: int, turns: int
) -> None:
    requests = [asyncio.create_task(merger.enqueue(queue.tenant, build_task(number))) for number in range(6)]
    for _ in range(turns):
        await asyncio.sleep(0)
    requests[cancelled].cancel()
    outcomes = await asyncio.gather(*requests, return_exceptions=True)
    assert isinstance(outcomes[cancelled], asyncio.CancelledError)
    others = [outcome for number, outcome in enumerate(outcomes) if number != cancelled]
    assert [read_payload(outcome) for outcome in others] == [  # type: ignore[arg-type]
        str(number) for number in range(6) if number != cancelled
    ]


async def test_a_merged_call_is_bounded(merger: EnqueueMerger, queue: Queue, calls: Calls) -> None:
    await asyncio.gather(*(merger.enqueue(queue.tenant, build_task(number)) for number in range(MAX_TASKS + 20)))
    assert sorted(calls) == [("acme", 20), ("acme", MAX_TASKS)]
    assert len(queue.claim_payloads()) == MAX_TASKS + 20


LIMITED: list[Callable[[TenantSnapshot], TenantSnapshot]] = [
    lambda tenant: msgspec.structs.replace(tenant, rates=Rates(create=1000)),
    lambda tenant: msgspec.structs.replace(tenant, depth=1000),
]


@pytest.mark.parametrize("limit", LIMITED, ids=["rate", "depth"])
async def test_requests_of_a_limited_tenant_are_sent_alone(
    merger: EnqueueMerger, queue: Queue, calls: Calls, limit: Callable[[TenantSnapshot], TenantSnapshot]
) -> None:
    tenant = limit(queue.tenant)
    await asyncio.gather(*(merger.enqueue(tenant, build_task(number)) for number in range(4)))
    assert calls == [("acme", 1)] * 4
