"""Long polls: woken when there is something, in order, by one subscription; nothing is taken for a client that left."""

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
from tests.queues.api.asgi_client import Answer, Client, Exchange
from tests.queues.api.conftest import TASKS
from tests.queues.api.tasks import COMPLETED, claim_task, enqueue_task
from tests.waiting import until_async

MakeClient = Callable[..., Client]
# Sooner than any wait here ends by itself, so who was answered by then was woken.
SOON = 15.0


@pytest.fixture
async def room(_room: None) -> AsyncIterator[long_poll.LongPollRegistry]:
    """The process' room, subscribed."""
    found = long_poll.registry()
    found.open()
    await subscribed()
    yield found
    assert not found.waited_names, "somebody is still in line"


async def subscribed() -> None:
    channel = keys.of_partition(0).wake

    async def is_heard() -> bool:
        return dict(redis_client().pubsub_numsub(channel))[channel.encode()] == 1

    await until_async(is_heard)


def polls(worker: Client, count: int = 1, **said: Any) -> list[Exchange]:
    return [worker.start("POST", f"{TASKS}/claim", {"waitSeconds": 20, **said}) for _ in range(count)]


async def parked(room: long_poll.LongPollRegistry, count: int) -> None:
    async def are_parked() -> bool:
        return room.parked_count == count

    await until_async(are_parked)


async def answered(exchange: Exchange, seconds: float = SOON) -> Answer:
    answer = await asyncio.wait_for(exchange.answer(), seconds)
    assert answer is not None
    return answer


@pytest.mark.spec("CLM-3", "A claim that waits is answered when a task comes")
@pytest.mark.parametrize("said", [{"commands": ["RENDER"]}, {}, {"commands": ["A", "RENDER"]}])
async def test_a_waiting_claim_gets_the_task_that_comes(
    room: long_poll.LongPollRegistry, producer: Client, worker: Client, said: dict[str, Any]
) -> None:
    await enqueue_task(producer)  # so that the queue is known
    await claim_task(worker)
    (poll,) = polls(worker, **said)
    await parked(room, 1)
    task = await enqueue_task(producer)
    answer = await answered(poll)
    assert (answer.status, answer.json["id"]) == (200, task["id"])


@pytest.mark.real_time
async def test_a_wait_ends_with_204(room: long_poll.LongPollRegistry, worker: Client) -> None:
    began = time.monotonic()
    (poll,) = polls(worker, waitSeconds=0.3)
    assert (await answered(poll)).status == 204
    assert time.monotonic() - began > 0.25


async def test_a_queue_that_is_new_wakes_who_waits_for_it_by_name(
    room: long_poll.LongPollRegistry, producer: Client, worker: Client
) -> None:
    (poll,) = polls(worker, commands=["NEVER_SEEN"])
    await parked(room, 1)
    await enqueue_task(producer, command="NEVER_SEEN")
    assert (await answered(poll)).status == 200


async def test_a_queue_that_is_new_wakes_who_waits_for_every_queue(
    room: long_poll.LongPollRegistry, producer: Client, client: MakeClient
) -> None:
    waiters = []
    for number in range(3):
        waiters += polls(client("worker", sub=f"w-{number}", eventTypes=["*"]))
        await parked(room, number + 1)
    for number, poll in enumerate(waiters):
        await enqueue_task(producer, command=f"NEW-{number}")
        assert (await answered(poll)).json["workerId"] == f"w-{number}"
        await parked(room, 2 - number)
    again = polls(client("worker", eventTypes=["*"]))[0]
    await parked(room, 1)
    await enqueue_task(producer, command="NEW-1")
    assert (await answered(again)).status == 200


async def test_waiters_are_served_in_the_order_they_came(
    room: long_poll.LongPollRegistry, producer: Client, client: MakeClient
) -> None:
    waiters = []
    for number in range(5):
        waiters += polls(client("worker", sub=f"w-{number}"), commands=["RENDER"])
        await parked(room, number + 1)
    for number, poll in enumerate(waiters):
        await enqueue_task(producer)
        assert (await answered(poll)).json["workerId"] == f"w-{number}"
        # Those it woke in turn have looked: two who look at once are served as Redis answers them.
        await parked(room, 4 - number)


async def test_one_push_of_many_tasks_reaches_as_many_waiters(
    room: long_poll.LongPollRegistry, producer: Client, worker: Client
) -> None:
    waiters = polls(worker, 50, commands=["RENDER"])
    await parked(room, 50)
    before = looks()
    tasks = [{"command": "RENDER", "payload": number} for number in range(40)]
    await producer.post(f"{TASKS}/batch", {"tasks": tasks})

    async def forty() -> bool:
        return sum(poll.task.done() for poll in waiters) == 40

    await until_async(forty)
    assert looks() - before <= 2 * 40 + 10, "who found nothing woke others"
    ids = {(await answered(poll)).json["id"] for poll in waiters if poll.task.done()}
    assert len(ids) == 40
    await leave_all(room, waiters)


def looks() -> int:
    """How many claims reached Redis."""
    stats: dict[str, Any] = redis_client().info("commandstats")
    return int(stats["cmdstat_evalsha"]["calls"])


async def leave_all(room: long_poll.LongPollRegistry, waiters: list[Exchange]) -> None:
    for poll in waiters:
        poll.leave()
    await asyncio.gather(*(poll.answer() for poll in waiters))
    assert room.parked_count == 0


async def test_idle_waiters_ask_redis_nothing(room: long_poll.LongPollRegistry, worker: Client) -> None:
    waiters = polls(worker, 200, commands=["RENDER"])
    await parked(room, 200)
    before = looks()
    await asyncio.sleep(0.3)
    assert looks() == before
    await leave_all(room, waiters)


@pytest.mark.spec("CLM-3", "An abandoned poll never takes a task")
async def test_a_client_that_left_takes_nothing(
    room: long_poll.LongPollRegistry, producer: Client, worker: Client
) -> None:
    gone, stays = polls(worker, 2, commands=["RENDER"])
    await parked(room, 2)
    gone.leave()
    await parked(room, 1)
    assert await gone.answer() is None
    task = await enqueue_task(producer)
    answer = await answered(stays)
    assert (answer.json["id"], answer.json["attempts"]) == (task["id"], 0)


async def test_leaving_at_the_very_moment_of_the_wake_up_takes_nothing(
    room: long_poll.LongPollRegistry, producer: Client, worker: Client
) -> None:
    gone, stays = polls(worker, 2, commands=["RENDER"])
    await parked(room, 2)
    # Both in one turn of the loop: it has been called, and has not looked yet.
    room.wake(next(iter(room.waited_names)))
    gone.leave()
    task = await enqueue_task(producer)
    answer = await answered(stays)
    assert (answer.json["id"], answer.json["attempts"]) == (task["id"], 0)
    assert await gone.answer() is None


@pytest.mark.parametrize("wait_seconds", [0, 20], ids=["at once", "after a wait"])
async def test_what_is_taken_in_the_turn_of_the_loop_in_which_the_client_hung_up_is_given_back(
    room: long_poll.LongPollRegistry, producer: Client, worker: Client, wait_seconds: int
) -> None:
    """The server closes the connection a turn before it tells of it, and an answer written then is lost."""

    class Closing:
        def is_closing(self) -> bool:
            return True

    if not wait_seconds:
        task = await enqueue_task(producer)
    poll = worker.start("POST", f"{TASKS}/claim", {"commands": ["RENDER"], "waitSeconds": wait_seconds})
    poll.transport = Closing()
    if wait_seconds:
        await parked(room, 1)
        task = await enqueue_task(producer)
    assert await poll.answer() is None
    assert (await worker.get(f"{TASKS}/{task['id']}")).json["status"] == "PENDING"


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

    async def disconnected(self) -> None:
        await self._is_disconnected.wait()


async def test_tasks_taken_for_a_client_that_disconnected_meanwhile_are_given_back(
    room: long_poll.LongPollRegistry,
) -> None:
    claim = DisconnectingClaim()
    poll = asyncio.create_task(room.wait(claim, 20))
    await parked(room, 1)
    room.wake(claim.names[0])
    with pytest.raises(long_poll.ClientDisconnected):
        await poll
    assert claim.has_undone


async def test_a_task_given_back_for_a_client_that_left_costs_one_attempt(
    room: long_poll.LongPollRegistry, producer: Client, worker: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    (poll,) = polls(worker, commands=["RENDER"])
    await parked(room, 1)
    from queues import services

    claim = services.claim

    def claim_and_leave(*args: Any, **kwargs: Any) -> Any:
        async def slowly() -> Claimed:
            taken = await claim(*args, **kwargs)
            poll.leave()
            await asyncio.sleep(0.01)
            return taken

        return slowly()

    monkeypatch.setattr(services, "claim", claim_and_leave)
    task = await enqueue_task(producer)
    assert await poll.answer() is None
    monkeypatch.undo()
    again = await claim_task(worker)
    assert (again["id"], again["attempts"]) == (task["id"], 1)


async def test_a_delayed_task_wakes_a_waiter_when_it_is_due(
    room: long_poll.LongPollRegistry, producer: Client, worker: Client
) -> None:
    await enqueue_task(producer, delaySeconds=0.3)
    (poll,) = polls(worker, commands=["RENDER"])
    assert (await answered(poll)).status == 200


async def test_a_nack_an_abandon_and_a_resume_wake_a_waiter(
    room: long_poll.LongPollRegistry, producer: Client, worker: Client, other_worker: Client, admin: Client
) -> None:
    task = await enqueue_task(producer)
    for verb in ("nack", "abandon"):
        await claim_task(worker)
        (poll,) = polls(other_worker, commands=["RENDER"])
        await parked(room, 1)
        await worker.post(f"{TASKS}/{task['id']}/{verb}", {"delaySeconds": 0} if verb == "nack" else {})
        assert (await answered(poll)).status == 200, verb
        await other_worker.post(f"{TASKS}/{task['id']}/abandon")
    await admin.post("/v1/codeq/admin/queues/RENDER/pause")
    (poll,) = polls(worker, commands=["RENDER"])
    await parked(room, 1)
    await admin.post("/v1/codeq/admin/queues/RENDER/resume")
    assert (await answered(poll)).status == 200


async def test_a_lost_subscription_is_made_again_and_everybody_looks(
    room: long_poll.LongPollRegistry, producer: Client, worker: Client
) -> None:
    waiters = polls(worker, 3, commands=["RENDER"])
    await parked(room, 3)
    channel = keys.of_partition(0).wake
    for connection in redis_client().client_list(_type="pubsub"):
        redis_client().client_kill_filter(_id=connection["id"])
    # Nobody hears of these: the wake-ups go to a subscription that is not there.
    redis_client().delete(*[keys.of_partition(number).waiting for number in range(conf().queues.partitions)])
    for number in range(3):
        await enqueue_task(producer, payload=number)
    answers = await asyncio.gather(*(answered(poll) for poll in waiters))
    assert sorted(answer.json["payload"] for answer in answers) == ["0", "1", "2"]
    await subscribed()
    assert dict(redis_client().pubsub_numsub(channel))[channel.encode()] == 1


async def test_a_silent_subscription_is_given_up(
    room: long_poll.LongPollRegistry, worker: Client, producer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_poll, "PING_SECONDS", 0.3)
    monkeypatch.setattr(long_poll, "PONG_SECONDS", 0.3)
    await room.close()
    silent, is_deaf = asyncio.Event(), asyncio.Event()
    connect = room._connect
    made_connections = 0

    class Deaf(redis.asyncio.client.PubSub):
        async def get_message(self, *args: Any, **kwargs: Any) -> Any:
            if silent.is_set():
                is_deaf.set()
                await asyncio.sleep(kwargs["timeout"])
                return None
            return await super().get_message(*args, **kwargs)

    def connect_deaf() -> redis.asyncio.Redis:
        nonlocal made_connections
        made_connections += 1
        client = connect()
        if made_connections == 1:
            client.pubsub = lambda **said: Deaf(client.connection_pool, **said)  # type: ignore[method-assign]
        return client

    monkeypatch.setattr(room, "_connect", connect_deaf)
    room.open()
    (poll,) = polls(worker, commands=["RENDER"])
    await parked(room, 1)
    await subscribed()
    silent.set()
    await asyncio.wait_for(is_deaf.wait(), SOON)
    await enqueue_task(producer)
    assert (await answered(poll)).status == 200
    assert made_connections == 2


async def test_shutting_down_ends_the_waits_at_once(
    room: long_poll.LongPollRegistry, producer: Client, worker: Client
) -> None:
    task = await enqueue_task(producer)
    await claim_task(worker)
    waiters = polls(worker, 3, commands=["RENDER"])
    result = producer.start("GET", f"{TASKS}/{task['id']}/result?waitSeconds=60")
    await parked(room, 4)
    room.end_polls()
    assert [(await answered(poll)).status for poll in waiters] == [204] * 3
    assert (await answered(result)).code == "result_not_found"
    (late,) = polls(worker, commands=["RENDER"])
    assert (await answered(late)).status == 204
    room.open()


async def test_a_request_that_is_cancelled_leaves_its_place(
    room: long_poll.LongPollRegistry, producer: Client, worker: Client
) -> None:
    killed, stays = polls(worker, 2, commands=["RENDER"])
    await parked(room, 2)
    killed.task.cancel()
    await parked(room, 1)
    task = await enqueue_task(producer)
    assert (await answered(stays)).json["id"] == task["id"]
    with pytest.raises(asyncio.CancelledError):
        await killed.answer()


async def test_beyond_its_limit_a_process_parks_nobody(
    room: long_poll.LongPollRegistry, worker: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "max_parked", 2)
    waiters = polls(worker, 2, commands=["RENDER"])
    await parked(room, 2)
    (third,) = polls(worker, commands=["RENDER"])
    assert (await answered(third)).status == 204
    await leave_all(room, waiters)


async def test_an_exchange_waits_too(room: long_poll.LongPollRegistry, producer: Client, worker: Client) -> None:
    exchange = worker.start("POST", f"{TASKS}/exchange", {"commands": ["RENDER"], "waitSeconds": 20})
    await parked(room, 1)
    task = await enqueue_task(producer)
    assert [each["id"] for each in (await answered(exchange)).json["tasks"]] == [task["id"]]


@pytest.mark.spec("ACK-5", "A result is waited for, by producers and workers, without polling")
async def test_waiting_for_a_result(
    room: long_poll.LongPollRegistry, producer: Client, worker: Client, other_worker: Client
) -> None:
    task = await enqueue_task(producer)
    await claim_task(worker)
    path = f"{TASKS}/{task['id']}/result"
    waits = [producer.start("GET", f"{path}?waitSeconds=60"), other_worker.start("GET", f"{path}?waitSeconds=60")]
    await parked(room, 2)
    before = looks()
    await worker.post(path, COMPLETED)
    for wait in waits:
        answer = await answered(wait)
        assert (answer.status, answer.json["result"]["result"]) == (200, {"ok": True})
    assert looks() - before == 3
    again = producer.start("GET", f"{path}?waitSeconds=60")
    assert (await answered(again)).status == 200


async def test_a_task_that_ends_without_a_result_ends_the_wait(
    room: long_poll.LongPollRegistry, producer: Client, worker: Client
) -> None:
    task = await enqueue_task(producer)
    path = f"{TASKS}/{task['id']}/result?waitSeconds=60"
    wait = producer.start("GET", path)
    await parked(room, 1)
    await producer.delete(f"{TASKS}/{task['id']}")
    assert (await answered(wait)).code == "result_not_found"
    assert (await answered(producer.start("GET", path))).code == "result_not_found"


async def test_nobody_waits_for_another_tenants_result(producer: Client, stranger: Client) -> None:
    task = await enqueue_task(producer)
    wait = stranger.start("GET", f"{TASKS}/{task['id']}/result?waitSeconds=60")
    assert (await answered(wait)).code == "task_not_found"


@pytest.mark.parametrize("query", ["waitSeconds=61", "waitSeconds=-1", "waitSeconds=x", "waitSeconds=1&waitSeconds=9",
                                   "waitseconds=1", "waitSeconds=", "waitSeconds=nan", "waitSeconds=1e400", "a=1",
                                   "waitSeconds=%ff", "&".join(f"a{n}=1" for n in range(100))])  # fmt: skip
async def test_a_query_has_its_bounds(producer: Client, query: str) -> None:
    task = await enqueue_task(producer)
    answer = await producer.get(f"{TASKS}/{task['id']}/result?{query}")
    assert (answer.status, answer.code) == (400, "invalid_request")


async def test_redis_in_trouble_ends_the_waits_that_notice(
    room: long_poll.LongPollRegistry, worker: Client, producer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from core.errors import Unavailable
    from queues import services

    monkeypatch.setattr(long_poll, "FAILED_ATTEMPT_SECONDS", 0.05)
    first, second = polls(worker, 2, commands=["RENDER"])
    await parked(room, 2)
    claim, failures = services.claim, iter([True])

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        if next(failures, False):
            raise Unavailable
        return claim(*args, **kwargs)

    monkeypatch.setattr(services, "claim", fail_once)
    task = await enqueue_task(producer)
    failed = await answered(first)
    assert (failed.status, failed.headers["retry-after"]) == (503, "1")
    # What woke the one that failed reaches the next.
    assert (await answered(second)).json["id"] == task["id"]
