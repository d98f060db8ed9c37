"""Rate limits per tenant and token: 429 with `Retry-After`; a long poll counts once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import REGISTRY

from tenants.domain import Rates
from tests.queues.api.asgi_client import Client, Response
from tests.queues.api.conftest import TASKS, Configure
from tests.queues.api.tasks import enqueue_task

MakeClient = Callable[..., Client]
TASK = {"command": "RENDER", "payload": {}}


async def until_refused(call: Callable[[], Any], max_calls: int = 50) -> tuple[int, Response]:
    for count in range(max_calls):
        response = await call()
        if response.status == 429:
            return count, response
    raise AssertionError(f"{max_calls} requests without a refusal")


def count_hits(scope: str) -> float:
    return REGISTRY.get_sample_value("codeq_rate_limit_hits_total", {"scope": scope}) or 0


CALLS: dict[str, tuple[str, Callable[[MakeClient], Callable[[], Any]]]] = {
    "enqueue": ("create", lambda client: lambda: client("producer").post(TASKS, TASK)),
    "claim": ("claim", lambda client: lambda: client("worker").post(f"{TASKS}/claim")),
    "claim_batch": ("claim", lambda client: lambda: client("worker").post(f"{TASKS}/claim/batch")),
    "exchange": ("claim", lambda client: lambda: client("worker").post(f"{TASKS}/exchange")),
    "list_queues": ("admin", lambda client: lambda: client("admin").get("/v1/codeq/admin/queues")),
    "cleanup": ("admin", lambda client: lambda: client("admin").post("/v1/codeq/admin/tasks/cleanup")),
}


@pytest.mark.spec("AUT-3", "Beyond its rate a tenant gets 429 with Retry-After, for create, claim and admin")
@pytest.mark.parametrize(("name", "rate", "call"), [(name, *call) for name, call in CALLS.items()], ids=CALLS.keys())
async def test_rate_above_the_limit_gets_429(
    client: MakeClient, configure_tenant: Configure, name: str, rate: str, call: Callable[[MakeClient], Any]
) -> None:
    configure_tenant(rates=Rates(**{rate: 1.0}))
    before = count_hits(name)
    count, refused = await until_refused(call(client))
    assert count >= 1
    assert refused.code == "too_many_requests"
    assert int(refused.headers["retry-after"]) == refused.json["retryAfterSeconds"] >= 1
    assert count_hits(name) == before + 1


@pytest.mark.spec("AUT-3", "A new token does not raise its tenant's rate, and does not lower that of another tenant")
async def test_new_token_does_not_raise_the_rate(
    client: MakeClient, stranger: Client, configure_tenant: Configure
) -> None:
    configure_tenant(rates=Rates(create=1.0))
    await until_refused(lambda: client("producer", sub="first").post(TASKS, TASK))
    fresh = [await client("producer", sub=f"p-{number}").post(TASKS, TASK) for number in range(5)]
    assert sum(response.status == 202 for response in fresh) <= 2
    assert (await stranger.post(TASKS, TASK)).status == 202


async def test_batch_counts_each_task(producer: Client, configure_tenant: Configure) -> None:
    configure_tenant(rates=Rates(create=5.0))
    response = await producer.post(f"{TASKS}/batch", {"tasks": [TASK] * 100})
    codes = [item.get("error") for item in response.json["results"]]
    assert set(codes) <= {None, "too_many_requests"}
    again = await producer.post(f"{TASKS}/batch", {"tasks": [TASK] * 100})
    assert "too_many_requests" in {item.get("error") for item in again.json["results"]}


async def test_number_of_waiting_tasks_is_limited(
    producer: Client, worker: Client, configure_tenant: Configure
) -> None:
    configure_tenant(depth=2)
    await enqueue_task(producer)
    await enqueue_task(producer)
    refused = await producer.post(TASKS, TASK)
    assert (refused.status, refused.code) == (429, "queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    assert (await worker.post(f"{TASKS}/claim")).status == 200
    assert (await producer.post(TASKS, TASK)).status == 202
