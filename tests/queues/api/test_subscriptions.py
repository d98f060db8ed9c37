"""The subscription routes."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from tests.queues.api.asgi_client import Client
from tests.queues.api.conftest import SOUTH

SUBSCRIPTION = {"callbackUrl": "https://worker.example.com/wake"}
ROUTE = "/v1/codeq/workers/subscriptions"


@pytest.fixture
def worker(client: Callable[..., Client]) -> Client:
    """A worker that no other test has subscribed."""
    return client("worker", sub=f"worker-{uuid.uuid4()}")


@pytest.mark.spec("WHK-1", "A worker creates, lists, renews and deletes its subscriptions over HTTP")
async def test_worker_manages_its_subscriptions(worker: Client) -> None:
    created = await worker.post(
        ROUTE, SUBSCRIPTION | {"eventTypes": ["RENDER"], "ttlSeconds": 60, "minIntervalSeconds": 1}
    )
    assert created.status == 200
    assert set(created.json) == {"subscriptionId", "expiresAt"}
    (listed,) = (await worker.get(ROUTE)).json["subscriptions"]
    assert listed["subscriptionId"] == created.json["subscriptionId"]
    assert (listed["eventTypes"], listed["deliveryMode"], listed["minIntervalSeconds"]) == (["RENDER"], "fanout", 1)
    path = f"{ROUTE}/{listed['subscriptionId']}"
    renewed = await worker.post(f"{path}/heartbeat", {"ttlSeconds": 600})
    assert renewed.status == 200
    assert renewed.json["expiresAt"] > created.json["expiresAt"]
    assert (await worker.request("DELETE", path)).status == 200
    assert (await worker.get(ROUTE)).json == {"subscriptions": []}
    assert (await worker.request("DELETE", path)).status == 404


async def test_subscribing_again_renews(worker: Client) -> None:
    first = (await worker.post(ROUTE, SUBSCRIPTION)).json
    again = (await worker.post(ROUTE, SUBSCRIPTION | {"ttlSeconds": 900})).json
    assert again["subscriptionId"] == first["subscriptionId"]
    assert len((await worker.get(ROUTE)).json["subscriptions"]) == 1


async def test_other_workers_cannot_read_or_change_a_subscription(
    worker: Client, client: Callable[..., Client]
) -> None:
    path = f"{ROUTE}/{(await worker.post(ROUTE, SUBSCRIPTION)).json['subscriptionId']}"
    for other in (client("worker", sub="worker-2"), client("worker", SOUTH, sub="worker-1")):
        assert (await other.get(ROUTE)).json == {"subscriptions": []}
        assert (await other.post(f"{path}/heartbeat", {})).status == 404
        assert (await other.request("DELETE", path)).status == 404
    assert len((await worker.get(ROUTE)).json["subscriptions"]) == 1


async def test_group_of_the_token_is_required(client: Callable[..., Client]) -> None:
    worker = client("worker", sub="worker-of-blue", workerGroup="blue")
    assert (await worker.post(ROUTE, SUBSCRIPTION | {"groupId": "red", "deliveryMode": "group"})).status == 403
    await worker.post(ROUTE, SUBSCRIPTION)
    (listed,) = (await worker.get(ROUTE)).json["subscriptions"]
    assert (listed["deliveryMode"], listed["groupId"]) == ("group", "blue")


async def test_only_event_types_of_the_token_can_be_subscribed_to(client: Callable[..., Client]) -> None:
    worker = client("worker", eventTypes=["A"])
    assert (await worker.post(ROUTE, SUBSCRIPTION | {"eventTypes": ["B"]})).status == 403
    assert (await worker.post(ROUTE, SUBSCRIPTION)).status == 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"callbackUrl": "http://169.254.169.254/latest"},
        {"callbackUrl": "ftp://worker.example.com/"},
        SUBSCRIPTION | {"ttlSeconds": 0},
        SUBSCRIPTION | {"deliveryMode": "everybody"},
        SUBSCRIPTION | {"deliveryMode": "group"},
        SUBSCRIPTION | {"minIntervalSeconds": -1},
        SUBSCRIPTION | {"workerId": "worker-9"},
    ],
    ids=str,
)
async def test_invalid_subscription_is_refused(worker: Client, body: dict[str, object]) -> None:
    assert (await worker.post(ROUTE, body)).status == 400
    assert (await worker.get(ROUTE)).json == {"subscriptions": []}
