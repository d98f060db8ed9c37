"""Workers that want to be told, over HTTP."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from tests.queues.api.asgi_client import Client
from tests.queues.api.conftest import SOUTH

WAKE = {"callbackUrl": "https://worker.example.com/wake"}
ROUTE = "/v1/codeq/workers/subscriptions"


@pytest.fixture
def worker(client: Callable[..., Client]) -> Client:
    """One that no other test has subscribed."""
    return client("worker", sub=f"worker-{uuid.uuid4()}")


@pytest.mark.spec("WHK-1", "A worker subscribes, lists, renews and ends its subscriptions over HTTP")
async def test_a_worker_looks_after_its_subscriptions(worker: Client) -> None:
    made = await worker.post(ROUTE, WAKE | {"eventTypes": ["RENDER"], "ttlSeconds": 60, "minIntervalSeconds": 1})
    assert made.status == 200
    assert set(made.json) == {"subscriptionId", "expiresAt"}
    (listed,) = (await worker.get(ROUTE)).json["subscriptions"]
    assert listed["subscriptionId"] == made.json["subscriptionId"]
    assert (listed["eventTypes"], listed["deliveryMode"], listed["minIntervalSeconds"]) == (["RENDER"], "fanout", 1)
    one = f"{ROUTE}/{listed['subscriptionId']}"
    renewed = await worker.post(f"{one}/heartbeat", {"ttlSeconds": 600})
    assert renewed.status == 200
    assert renewed.json["expiresAt"] > made.json["expiresAt"]
    assert (await worker.request("DELETE", one)).status == 200
    assert (await worker.get(ROUTE)).json == {"subscriptions": []}
    assert (await worker.request("DELETE", one)).status == 404


async def test_the_same_callback_again_renews(worker: Client) -> None:
    first = (await worker.post(ROUTE, WAKE)).json
    again = (await worker.post(ROUTE, WAKE | {"ttlSeconds": 900})).json
    assert again["subscriptionId"] == first["subscriptionId"]
    assert len((await worker.get(ROUTE)).json["subscriptions"]) == 1


async def test_nobody_sees_or_touches_anothers_subscription(worker: Client, client: Callable[..., Client]) -> None:
    one = f"{ROUTE}/{(await worker.post(ROUTE, WAKE)).json['subscriptionId']}"
    for other in (client("worker", sub="worker-2"), client("worker", SOUTH, sub="worker-1")):
        assert (await other.get(ROUTE)).json == {"subscriptions": []}
        assert (await other.post(f"{one}/heartbeat", {})).status == 404
        assert (await other.request("DELETE", one)).status == 404
    assert len((await worker.get(ROUTE)).json["subscriptions"]) == 1


async def test_a_workers_group_is_its_tokens(client: Callable[..., Client]) -> None:
    worker = client("worker", sub="worker-of-blue", workerGroup="blue")
    assert (await worker.post(ROUTE, WAKE | {"groupId": "red", "deliveryMode": "group"})).status == 403
    await worker.post(ROUTE, WAKE)
    (listed,) = (await worker.get(ROUTE)).json["subscriptions"]
    assert (listed["deliveryMode"], listed["groupId"]) == ("group", "blue")


async def test_only_commands_of_the_token_can_be_subscribed_to(client: Callable[..., Client]) -> None:
    worker = client("worker", eventTypes=["A"])
    assert (await worker.post(ROUTE, WAKE | {"eventTypes": ["B"]})).status == 403
    assert (await worker.post(ROUTE, WAKE)).status == 200


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"callbackUrl": "http://169.254.169.254/latest"},
        {"callbackUrl": "ftp://worker.example.com/"},
        WAKE | {"ttlSeconds": 0},
        WAKE | {"deliveryMode": "everybody"},
        WAKE | {"deliveryMode": "group"},
        WAKE | {"minIntervalSeconds": -1},
        WAKE | {"workerId": "worker-9"},
    ],
    ids=str,
)
async def test_what_cannot_be_is_refused(worker: Client, said: dict[str, object]) -> None:
    assert (await worker.post(ROUTE, said)).status == 400
    assert (await worker.get(ROUTE)).json == {"subscriptions": []}
