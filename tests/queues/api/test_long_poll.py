"""Long polls: woken in order by one subscription. A disconnected client takes no task."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis
import redis.asyncio

from core.conf import conf
from core.redis.connections import client as redis_client
from queues import long_poll
from queues.domain import Claimed
from queues.engine import keys
from tests.queues.api.asgi_client import Client, PendingRequest, Response
from tests.queues.api.conftest import TASKS
from tests.queues.api.tasks import COMPLETED, claim_task, enqueue_task
from tests.waiting import until_async

MakeClient = Callable[..., Client]
# Shorter than every wait here, so a request that is answered in this time was woken.
SOON = 15.0


@pytest.fixture
async def registry(_registry: None) -> AsyncIterator[long_poll.LongPollRegistry]:
    """Return the registry of the process, subscribed."""
    registry = long_poll.registry()
    registry.open()
    await wait_until_subscribed()
    yield registry
    assert not registry.waited_names, "a request still waits"


async def wait_until_subscribed() -> None:
    channel = keys.of_partition(0).wake

    async def is_heard() -> bool:
        return dict(redis_client().pubsub_numsub(channel))[channel.encode()] == 1

    await until_async(is_heard)


def start_polls(worker: Client, count: int = 1, **fields: Any) -> list[PendingRequest]:
    return [worker.start("POST", f"{TASKS}/claim", {"waitSeconds": 20, **fields}) for _ in range(count)]


async def wait_until_parked(registry: long_poll.LongPollRegistry, count: int) -> None:
    async def are_parked() -> bool:
        return registry.parked_count == count

    await until_async(are_parked)


async def wait_for_answer(poll: PendingRequest, seconds: float = SOON) -> Response:
    response = await asyncio.wait_for(poll.response(), seconds)
    assert response is not None
    return response


@pytest.mark.spec("CLM-3", "A waiting claim is answered when a task arrives")
@pytest.mark.parametrize("fields", [{"commands": ["RENDER"]}, {}, {"commands": ["A", "RENDER"]}])
async def test_waiting_claim_gets_a_new_task(
    registry: long_poll.LongPollRegistry, producer: Client, worker: Client, fields: dict[str, Any]
) -> None:
    await enqueue_task(producer)  # so that the queue exists
    await claim_task(worker)
    (poll,) = start_polls(worker, **fields)
    await wait_until_parked(registry, 1)
    task = await enqueue_task(producer)
    response = await wait_for_answer(poll)
    assert (response.status, response.json["id"]) == (200, task["id"])


@pytest.mark.real_time
async def test_a_wait_ends_with_204(registry: long_poll.LongPollRegistry, worker: Client) -> None:
    began = time.monotonic()
    (poll,) = start_polls(worker, waitSeconds=0.3)
    assert (await wait_for_answer(poll)).status == 204
    assert time.monotonic() - began > 0.25


async def test_new_queue_wakes_waiters_for_its_name(
    registry: long_poll.LongPollRegistry, producer: Client, worker: Client
) -> None:
    (poll,) = start_polls(worker, commands=["NEVER_SEEN"])
    await wait_until_parked(registry, 1)
    await enqueue_task(producer, command="NEVER_SEEN")
    assert (await wait_for_answer(poll)).status == 200


async def test_new_queue_wakes_waiters_for_every_queue(
    registry: long_poll.LongPollRegistry, producer: Client, client: MakeClient
) -> None:
    waiters = []
    for number in range(3):
        waiters += start_polls(client("worker", sub=f"w-{number}", eventTypes=["*"]))
        await wait_until_parked(registry, number + 1)
    for number, poll in enumerate(waiters):
        await enqueue_task(producer, command=f"NEW-{number}")
        assert (await wait_for_answer(poll)).json["workerId"] == f"w-{number}"
        await wait_until_parked(registry, 2 - number)
    again = start_polls(client("worker", eventTypes=["*"]))[0]
    await wait_until_parked(registry, 1)
    await enqueue_task(producer, command="NEW-1")
    assert (await wait_for_answer(again)).status == 200


async def test_waiters_are_served_in_order_of_arrival(
    registry: long_poll.LongPollRegistry, producer: Client, client: MakeClient
) -> None:
    waiters = []
    for number in range(5):
        waiters += start_polls(client("worker", sub=f"w-{number}"), commands=["RENDER"])
        await wait_until_parked(registry, number + 1)
    for number, poll in enumerate(waiters):
        await enqueue_task(producer)
        assert (await wait_for_answer(poll)).json["workerId"] == f"w-{number}"
        # Wait until all other waiters are parked again: concurrent attempts are served in the order of Redis' replies.
        await wait_until_parked(registry, 4 - number)


async def test_one_batch_of_many_tasks_reaches_as_many_waiters(
    registry: long_poll.LongPollRegistry, producer: Client, worker: Client
) -> None:
    waiters = start_polls(worker, 50, commands=["RENDER"])
    await wait_until_parked(registry, 50)
    before = count_script_calls()
    tasks = [{"command": "RENDER", "payload": number} for number in range(40)]
    await producer.post(f"{TASKS}/batch", {"tasks": tasks})

    async def are_forty_answered() -> bool:
        return sum(poll.task.done() for poll in waiters) == 40

    await until_async(are_forty_answered)
    assert count_script_calls() - before <= 2 * 40 + 10, "a waiter without a task woke others"
    ids = {(await wait_for_answer(poll)).json["id"] for poll in waiters if poll.task.done()}
    assert len(ids) == 40
    await disconnect_all(registry, waiters)


def count_script_calls() -> int:
    """Return the number of claims that reached Redis."""
    stats: dict[str, Any] = redis_client().info("commandstats")
    return int(stats["cmdstat_evalsha"]["calls"])


async def disconnect_all(registry: long_poll.LongPollRegistry, waiters: list[PendingRequest]) -> None:
    for poll in waiters:
        poll.disconnect()
    await asyncio.gather(*(poll.response() for poll in waiters))
    assert registry.parked_count == 0


async def test_idle_waiters_send_no_commands(registry: long_poll.LongPollRegistry, worker: Client) -> None:
    waiters = start_polls(worker, 200, commands=["RENDER"])
    await wait_until_parked(registry, 200)
    before = count_script_calls()
    await asyncio.sleep(0.3)
    assert count_script_calls() == before
    await disconnect_all(registry, waiters)


@pytest.mark.spec("CLM-3", "A poll whose client has disconnected takes no task")
async def test_disconnected_client_takes_no_task(
    registry: long_poll.LongPollRegistry, producer: Client, worker: Client
) -> None:
    disconnecting, stays = start_polls(worker, 2, commands=["RENDER"])
    await wait_until_parked(registry, 2)
    disconnecting.disconnect()
    await wait_until_parked(registry, 1)
    assert await disconnecting.response() is None
    task = await enqueue_task(producer)
    response = await wait_for_answer(stays)
    assert (response.json["id"], response.json["attempts"]) == (task["id"], 0)


async def test_client_that_disconnects_at_its_wake_up_takes_no_task(
    registry: long_poll.LongPollRegistry, producer: Client, worker: Client
) -> None:
    disconnecting, stays = start_polls(worker, 2, commands=["RENDER"])
    await wait_until_parked(registry, 2)
    # Both in one loop iteration: the waiter has been called and has not tried yet.
    registry.wake(next(iter(registry.waited_names)))
    disconnecting.disconnect()
    task = await enqueue_task(producer)
    response = await wait_for_answer(stays)
    assert (response.json["id"], response.json["attempts"]) == (task["id"], 0)
    assert await disconnecting.response() is None


class Closing:
    """A transport whose connection is closed."""

    def is_closing(self) -> bool:
        return True


@pytest.mark.parametrize("wait_seconds", [0, 20], ids=["at once", "after a wait"])
async def test_tasks_claimed_while_the_client_disconnects_are_returned(
    registry: long_poll.LongPollRegistry, producer: Client, worker: Client, wait_seconds: int
) -> None:
    """The server reports a closed connection one loop iteration late; a response is lost then."""
    if not wait_seconds:
        task = await enqueue_task(producer)
    poll = worker.start("POST", f"{TASKS}/claim", {"commands": ["RENDER"], "waitSeconds": wait_seconds})
    poll.transport = Closing()
    if wait_seconds:
        await wait_until_parked(registry, 1)
        task = await enqueue_task(producer)
    assert await poll.response() is None
    assert (await worker.get(f"{TASKS}/{task['id']}")).json["status"] == "PENDING"


async def test_disconnected_client_returns_its_task_of_a_merged_claim(
    registry: long_poll.LongPollRegistry, producer: Client, worker: Client
) -> None:
    tasks = [await enqueue_task(producer) for _ in range(3)]
    claims = [worker.start("POST", f"{TASKS}/claim", {"commands": ["RENDER"]}) for _ in range(3)]
    claims[1].transport = Closing()
    first, lost, last = [await claim.response() for claim in claims]
    assert first is not None
    assert last is not None
    assert lost is None
    assert [first.json["id"], last.json["id"]] == [tasks[0]["id"], tasks[2]["id"]]
    states = [(await worker.get(f"{TASKS}/{task['id']}")).json["status"] for task in tasks]
    assert states == ["IN_PROGRESS", "PENDING", "IN_PROGRESS"]


class DisconnectingClaim:
    """A claim whose client disconnects while Redis answers its second attempt."""

    names = ("abcdefgh:RENDER",)
    seconds_until_due = None

    def __init__(self) -> None:
        self.attempts = 0
        self.has_undone = False
        self._is_disconnected = asyncio.Event()

    async def attempt(self, wait_ms: int) -> bool:
        self.attempts += 1
        if self.attempts == 1:
            return False
        self._is_disconnected.set()
        await asyncio.sleep(0.01)
        return True

    async def undo(self) -> None:
        self.has_undone = True

    async def wait_for_disconnect(self) -> None:
        await self._is_disconnected.wait()


async def test_tasks_claimed_by_a_poll_whose_client_disconnected_are_returned(
    registry: long_poll.LongPollRegistry,
) -> None:
    claim = DisconnectingClaim()
    poll = asyncio.create_task(registry.wait(claim, 20))
    await wait_until_parked(registry, 1)
    registry.wake(claim.names[0])
    with pytest.raises(long_poll.ClientDisconnected):
        await poll
    assert claim.has_undone


async def test_returned_task_of_a_disconnected_client_costs_one_attempt(
    registry: long_poll.LongPollRegistry, producer: Client, worker: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    (poll,) = start_polls(worker, commands=["RENDER"])
    await wait_until_parked(registry, 1)
    from queues import services

    claim = services.claim

    def claim_and_leave(*args: Any, **kwargs: Any) -> Any:
        async def slowly() -> Claimed:
            claimed = await claim(*args, **kwargs)
            poll.disconnect()
            await asyncio.sleep(0.01)
            return claimed

        return slowly()

    monkeypatch.setattr(services, "claim", claim_and_leave)
    task = await enqueue_task(producer)
    assert await poll.response() is None
    monkeypatch.undo()
    again = await claim_task(worker)
    assert (again["id"], again["attempts"]) == (task["id"], 1)


async def test_a_delayed_task_wakes_a_waiter_when_it_is_due(
    registry: long_poll.LongPollRegistry, producer: Client, worker: Client
) -> None:
    await enqueue_task(producer, delaySeconds=0.3)
    (poll,) = start_polls(worker, commands=["RENDER"])
    assert (await wait_for_answer(poll)).status == 200


async def test_a_nack_an_abandon_and_a_resume_wake_a_waiter(
    registry: long_poll.LongPollRegistry, producer: Client, worker: Client, other_worker: Client, admin: Client
) -> None:
    task = await enqueue_task(producer)
    for verb in ("nack", "abandon"):
        await claim_task(worker)
        (poll,) = start_polls(other_worker, commands=["RENDER"])
        await wait_until_parked(registry, 1)
        await worker.post(f"{TASKS}/{task['id']}/{verb}", {"delaySeconds": 0} if verb == "nack" else {})
        assert (await wait_for_answer(poll)).status == 200, verb
        await other_worker.post(f"{TASKS}/{task['id']}/abandon")
    await admin.post("/v1/codeq/admin/queues/RENDER/pause")
    (poll,) = start_polls(worker, commands=["RENDER"])
    await wait_until_parked(registry, 1)
    await admin.post("/v1/codeq/admin/queues/RENDER/resume")
    assert (await wait_for_answer(poll)).status == 200


async def test_lost_subscription_is_renewed_and_all_waiters_try_again(
    registry: long_poll.LongPollRegistry, producer: Client, worker: Client
) -> None:
    waiters = start_polls(worker, 3, commands=["RENDER"])
    await wait_until_parked(registry, 3)
    channel = keys.of_partition(0).wake
    for connection in redis_client().client_list(_type="pubsub"):
        redis_client().client_kill_filter(_id=connection["id"])
    # The following tasks wake no waiter: the subscription is lost, and no poll is recorded as waiting.
    redis_client().delete(*[keys.of_partition(number).waiting for number in range(conf().queues.partitions)])
    for number in range(3):
        await enqueue_task(producer, payload=number)
    responses = await asyncio.gather(*(wait_for_answer(poll) for poll in waiters))
    assert sorted(response.json["payload"] for response in responses) == ["0", "1", "2"]
    await wait_until_subscribed()
    assert dict(redis_client().pubsub_numsub(channel))[channel.encode()] == 1


async def test_silent_subscription_is_replaced(
    registry: long_poll.LongPollRegistry, worker: Client, producer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_poll, "PING_SECONDS", 0.3)
    monkeypatch.setattr(long_poll, "PONG_SECONDS", 0.3)
    await registry.close()
    silent, has_been_silent = asyncio.Event(), asyncio.Event()
    connect = registry._connect
    made_connections = 0

    class SilentSubscription(redis.asyncio.client.PubSub):
        async def get_message(self, *args: Any, **kwargs: Any) -> Any:
            if silent.is_set():
                has_been_silent.set()
                await asyncio.sleep(kwargs["timeout"])
                return None
            return await super().get_message(*args, **kwargs)

    def connect_silent() -> redis.asyncio.Redis:
        nonlocal made_connections
        made_connections += 1
        client = connect()
        if made_connections == 1:
            client.pubsub = lambda **options: SilentSubscription(client.connection_pool, **options)  # type: ignore[method-assign]
        return client

    monkeypatch.setattr(registry, "_connect", connect_silent)
    registry.open()
    (poll,) = start_polls(worker, commands=["RENDER"])
    await wait_until_parked(registry, 1)
    await wait_until_subscribed()
    silent.set()
    await asyncio.wait_for(has_been_silent.wait(), SOON)
    await enqueue_task(producer)
    assert (await wait_for_answer(poll)).status == 200
    assert made_connections == 2


async def test_shutting_down_ends_the_waits_at_once(
    registry: long_poll.LongPollRegistry, producer: Client, worker: Client
) -> None:
    task = await enqueue_task(producer)
    await claim_task(worker)
    waiters = start_polls(worker, 3, commands=["RENDER"])
    result = producer.start("GET", f"{TASKS}/{task['id']}/result?waitSeconds=60")
    await wait_until_parked(registry, 4)
    registry.end_polls()
    assert [(await wait_for_answer(poll)).status for poll in waiters] == [204] * 3
    assert (await wait_for_answer(result)).code == "result_not_found"
    (late,) = start_polls(worker, commands=["RENDER"])
    assert (await wait_for_answer(late)).status == 204
    registry.open()


async def test_cancelled_request_leaves_the_wait_queue(
    registry: long_poll.LongPollRegistry, producer: Client, worker: Client
) -> None:
    killed, stays = start_polls(worker, 2, commands=["RENDER"])
    await wait_until_parked(registry, 2)
    killed.task.cancel()
    await wait_until_parked(registry, 1)
    task = await enqueue_task(producer)
    assert (await wait_for_answer(stays)).json["id"] == task["id"]
    with pytest.raises(asyncio.CancelledError):
        await killed.response()


async def test_number_of_parked_requests_is_limited(
    registry: long_poll.LongPollRegistry, worker: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "max_parked", 2)
    waiters = start_polls(worker, 2, commands=["RENDER"])
    await wait_until_parked(registry, 2)
    (third,) = start_polls(worker, commands=["RENDER"])
    assert (await wait_for_answer(third)).status == 204
    await disconnect_all(registry, waiters)


async def test_exchange_can_wait(registry: long_poll.LongPollRegistry, producer: Client, worker: Client) -> None:
    exchange = worker.start("POST", f"{TASKS}/exchange", {"commands": ["RENDER"], "waitSeconds": 20})
    await wait_until_parked(registry, 1)
    task = await enqueue_task(producer)
    assert [task["id"] for task in (await wait_for_answer(exchange)).json["tasks"]] == [task["id"]]


@pytest.mark.spec("ACK-5", "Producers and workers can wait for a result without polling")
async def test_waiting_for_a_result(
    registry: long_poll.LongPollRegistry, producer: Client, worker: Client, other_worker: Client
) -> None:
    task = await enqueue_task(producer)
    await claim_task(worker)
    path = f"{TASKS}/{task['id']}/result"
    waits = [producer.start("GET", f"{path}?waitSeconds=60"), other_worker.start("GET", f"{path}?waitSeconds=60")]
    await wait_until_parked(registry, 2)
    before = count_script_calls()
    await worker.post(path, COMPLETED)
    for wait in waits:
        response = await wait_for_answer(wait)
        assert (response.status, response.json["result"]["result"]) == (200, {"ok": True})
    assert count_script_calls() - before == 3
    again = producer.start("GET", f"{path}?waitSeconds=60")
    assert (await wait_for_answer(again)).status == 200


async def test_a_task_that_ends_without_a_result_ends_the_wait(
    registry: long_poll.LongPollRegistry, producer: Client, worker: Client
) -> None:
    task = await enqueue_task(producer)
    path = f"{TASKS}/{task['id']}/result?waitSeconds=60"
    wait = producer.start("GET", path)
    await wait_until_parked(registry, 1)
    await producer.delete(f"{TASKS}/{task['id']}")
    assert (await wait_for_answer(wait)).code == "result_not_found"
    assert (await wait_for_answer(producer.start("GET", path))).code == "result_not_found"


async def test_result_of_another_tenant_cannot_be_awaited(producer: Client, stranger: Client) -> None:
    task = await enqueue_task(producer)
    wait = stranger.start("GET", f"{TASKS}/{task['id']}/result?waitSeconds=60")
    assert (await wait_for_answer(wait)).code == "task_not_found"


@pytest.mark.parametrize("query", ["waitSeconds=61", "waitSeconds=-1", "waitSeconds=x", "waitSeconds=1&waitSeconds=9",
                                   "waitseconds=1", "waitSeconds=", "waitSeconds=nan", "waitSeconds=1e400", "a=1",
                                   "waitSeconds=%ff", "&".join(f"a{n}=1" for n in range(100))])  # fmt: skip
async def test_invalid_wait_is_refused(producer: Client, query: str) -> None:
    task = await enqueue_task(producer)
    response = await producer.get(f"{TASKS}/{task['id']}/result?{query}")
    assert (response.status, response.code) == (400, "invalid_request")


async def test_failed_attempt_ends_its_wait(
    registry: long_poll.LongPollRegistry, worker: Client, producer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from core.errors import Unavailable
    from queues import services

    monkeypatch.setattr(long_poll, "FAILED_ATTEMPT_SECONDS", 0.05)
    first, second = start_polls(worker, 2, commands=["RENDER"])
    await wait_until_parked(registry, 2)
    claim, failures = services.claim, iter([True])

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        if next(failures, False):
            raise Unavailable
        return claim(*args, **kwargs)

    monkeypatch.setattr(services, "claim", fail_once)
    task = await enqueue_task(producer)
    failed = await wait_for_answer(first)
    assert (failed.status, failed.headers["retry-after"]) == (503, "1")
    # The wake-up of the failed request is passed to the next one.
    assert (await wait_for_answer(second)).json["id"] == task["id"]
