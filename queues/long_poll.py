"""Long polls: requests that wait for a task or a result without polling Redis.

Each web process has one subscription to Redis and a registry of parked requests. A wake-up message is a hint: it says
that a queue became non-empty, not how much is in it. It is therefore given to one waiter at a time. A waiter that finds
tasks wakes two more, so a full queue reaches every waiter in a few rounds and an empty queue disturbs few. A wake-up
that a waiter could not use is passed to the next one.

A waiter alternates between two states until it has an answer or its time is over:

1. Trying: its attempt runs. A wake-up is remembered (`has_pending_wake_up`), and the next attempt begins at once.
2. Parked: it waits without calls to Redis. A wake-up ends this state, and the next attempt begins.

The start of an attempt uses up a pending wake-up. A waiter that leaves with a pending wake-up passes it on.
"""

from __future__ import annotations

import asyncio
import logging
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import count
from typing import Protocol

import redis.asyncio
from redis.exceptions import RedisError

from core.conf import conf
from core.errors import Unavailable
from core.redis.connections import async_client
from queues.engine import keys

log = logging.getLogger("codeq.waiting")

# `<tid>:*` is the name of a waiter that waits for all queues of a tenant.
ANY_QUEUE = "*"
# A subscription without messages for PING_SECONDS is pinged. It is replaced if no reply comes within PONG_SECONDS.
PING_SECONDS = 10.0
PONG_SECONDS = 5.0
RECONNECT_SECONDS = (0.1, 2.0)  # the first and the longest pause between two attempts to subscribe
# After each new subscription every waiter tries again, spread over time so that Redis gets no burst.
RETRIES_PER_SECOND = 1000
# A waiter whose attempt failed passes its wake-up on after this pause, so that an overloaded Redis does not get one
# failing request after the other.
FAILED_ATTEMPT_SECONDS = 1.0
# The longest wait of any request. A timer for a later time would wake no waiter.
LONGEST_SECONDS = 60.0
# Redis' clock counts milliseconds. If a timer fired slightly early, the task would not be due yet.
DUE_MARGIN_SECONDS = 0.002


class ClientDisconnected(Exception):
    """The client disconnected while its request waited."""


class Poll(Protocol):
    """A request that can wait."""

    @property
    def names(self) -> Sequence[str]:
        """The queues ("<tid>:<command>") or task ids whose messages wake it."""

    @property
    def seconds_until_due(self) -> float | None:
        """After an attempt: the seconds until the next task falls due, if known."""

    async def attempt(self, wait_ms: int) -> bool:
        """Try to get an answer. `wait_ms` is how long the request will wait if there is none."""

    async def undo(self) -> None:
        """Return the tasks that the last attempt claimed, because the client has disconnected."""

    async def wait_for_disconnect(self) -> None:
        """Return when the client disconnects."""


class Waiter:
    """A registered request, which is trying or parked."""

    __slots__ = ("arrival", "future", "has_pending_wake_up", "is_disconnected", "is_parked", "names")

    def __init__(self, arrival: int, names: Sequence[str]) -> None:
        self.arrival = arrival  # 0 for the first waiter of the process, 1 for the second, …
        self.names = names
        self.future: asyncio.Future[None] | None = None
        self.has_pending_wake_up = False  # a wake-up has arrived since the start of the last attempt
        self.is_disconnected = False
        self.is_parked = False


class WaitQueue:
    """The waiters for one name, in the order of arrival."""

    __slots__ = ("parked", "waiters")

    def __init__(self) -> None:
        self.waiters: dict[int, Waiter] = {}
        # The sorted `arrival` of the parked waiters: finding the first of 2,000 must not take 2,000 steps.
        self.parked: list[int] = []

    def first(self) -> Waiter | None:
        """Return the oldest parked waiter, or the oldest of all if none is parked."""
        if self.parked:
            return self.waiters[self.parked[0]]
        return next(iter(self.waiters.values()), None)

    def park(self, waiter: Waiter) -> None:
        insort(self.parked, waiter.arrival)

    def unpark(self, waiter: Waiter) -> None:
        del self.parked[bisect_left(self.parked, waiter.arrival)]


class LongPollRegistry:
    """The waiting requests of one process, by the names they wait for.

    At most `max_parked` requests are parked. Further requests are answered at once, as if their wait had ended.
    """

    def __init__(self, connect: Callable[[], redis.asyncio.Redis], channels: Sequence[str], max_parked: int) -> None:
        self._connect = connect
        self._channels = channels
        self.max_parked = max_parked
        self._arrivals = count()
        self._parked_count = 0
        self._wait_queues: dict[str, WaitQueue] = {}
        self._due_timers: dict[tuple[str, ...], tuple[float, asyncio.TimerHandle]] = {}
        self._listener: asyncio.Task[None] | None = None
        self._is_closing = False

    # Start and stop

    def open(self) -> None:
        """Start to listen. Redis may be down: the listener connects as soon as it can."""
        self._is_closing = False
        if self._listener is None or self._listener.done():
            self._listener = asyncio.get_running_loop().create_task(self._listen(), name="codeq-long-poll")

    def end_polls(self) -> None:
        """Answer all waiting requests now, and let no new ones wait: the process is stopping."""
        self._is_closing = True
        for waiter in self._all_waiters():
            self._unpark(waiter)

    async def close(self) -> None:
        self.end_polls()
        for _, timer in self._due_timers.values():
            timer.cancel()
        self._due_timers.clear()
        listener, self._listener = self._listener, None
        while listener is not None and not listener.done():
            # Cancel repeatedly: redis-py swallows a cancellation that coincides with one of its timeouts.
            listener.cancel()
            await asyncio.wait([listener], timeout=0.1)

    @property
    def is_listening(self) -> bool:
        return self._listener is not None

    @property
    def parked_count(self) -> int:
        return self._parked_count

    @property
    def waited_names(self) -> list[str]:
        return list(self._wait_queues)

    # Waiting

    async def wait(self, poll: Poll, seconds: float) -> None:
        """Return when an attempt of the poll succeeds, at the latest after `seconds`.

        Raises ClientDisconnected when the client disconnects, after undoing a successful last attempt.
        """
        loop = asyncio.get_running_loop()
        if self._listener is None and not self._is_closing:
            self.open()
        deadline = loop.time() + seconds
        waiter = Waiter(next(self._arrivals), poll.names)
        watcher: asyncio.Task[None] | None = None
        # Registered before the first attempt: a message that arrives after that attempt is not missed.
        self._register(waiter)
        try:
            while True:
                waiter.has_pending_wake_up = False
                seconds_left = 0.0 if self._parked_count >= self.max_parked else deadline - loop.time()
                try:
                    is_answered = await poll.attempt(max(0, round(seconds_left * 1000)))
                except Unavailable:
                    loop.call_later(FAILED_ATTEMPT_SECONDS, self._wake_first_of, waiter.names)
                    raise
                if is_answered:
                    if waiter.is_disconnected:
                        await poll.undo()
                        raise ClientDisconnected
                    return
                if poll.seconds_until_due is not None:
                    self._wake_when_due(waiter.names, poll.seconds_until_due)
                if seconds_left <= 0 or self._is_closing:
                    return
                if watcher is None:
                    watcher = loop.create_task(self._watch(poll, waiter))
                if not waiter.has_pending_wake_up and not waiter.is_disconnected:
                    await self._park(waiter, deadline)
                if waiter.is_disconnected:
                    raise ClientDisconnected
                if self._is_closing or not waiter.has_pending_wake_up:
                    return
        finally:
            self._unregister(waiter)
            if watcher is not None:
                watcher.cancel()

    async def _park(self, waiter: Waiter, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        waiter.future = loop.create_future()
        timer = loop.call_at(deadline, self._unpark, waiter)
        for name in waiter.names:
            self._wait_queues[name].park(waiter)
        waiter.is_parked = True
        self._parked_count += 1
        try:
            await waiter.future
        finally:
            self._parked_count -= 1
            timer.cancel()
            self._unpark(waiter)  # the request may have been cancelled
            waiter.future = None

    def _unpark(self, waiter: Waiter) -> None:
        """End the parking of a waiter at once, so that the next wake-up goes to another waiter.

        Does nothing if the waiter is not parked.
        """
        if not waiter.is_parked:
            return
        waiter.is_parked = False
        for name in waiter.names:
            self._wait_queues[name].unpark(waiter)
        if waiter.future is not None and not waiter.future.done():
            waiter.future.set_result(None)

    def _wake_waiter(self, waiter: Waiter) -> None:
        """Let a waiter try again: at once if it is parked, otherwise after its current attempt."""
        waiter.has_pending_wake_up = True
        self._unpark(waiter)

    async def _watch(self, poll: Poll, waiter: Waiter) -> None:
        await poll.wait_for_disconnect()
        waiter.is_disconnected = True
        self._unpark(waiter)

    def _register(self, waiter: Waiter) -> None:
        for name in waiter.names:
            self._wait_queues.setdefault(name, WaitQueue()).waiters[waiter.arrival] = waiter

    def _unregister(self, waiter: Waiter) -> None:
        for name in waiter.names:
            wait_queue = self._wait_queues[name]
            del wait_queue.waiters[waiter.arrival]
            if not wait_queue.waiters:
                del self._wait_queues[name]
        if waiter.has_pending_wake_up:
            self._wake_first_of(waiter.names)

    def _all_waiters(self) -> list[Waiter]:
        return list({waiter: None for queue in self._wait_queues.values() for waiter in queue.waiters.values()})

    # Wake-ups

    def wake(self, queue: str, limit: int = 1) -> None:
        """Wake the oldest parked waiters of a queue, at most `limit`.

        If no waiter is parked, the oldest waiter tries once more after its current attempt.
        """
        for _ in range(limit):
            waiter = self._oldest(queue)
            if waiter is None:
                return
            self._wake_waiter(waiter)

    def _oldest(self, queue: str) -> Waiter | None:
        """Return the first waiter for the queue or all queues of its tenant, parked ones first."""
        tid = queue.partition(":")[0]
        candidates = [self._first(name) for name in (queue, f"{tid}:{ANY_QUEUE}")]
        return min(
            (waiter for waiter in candidates if waiter is not None),
            key=lambda waiter: (not waiter.is_parked, waiter.arrival),
            default=None,
        )

    def _wake_first_of(self, names: Iterable[str]) -> None:
        for name in names:
            waiter = self._first(name)
            if waiter is not None:
                self._wake_waiter(waiter)

    def _first(self, name: str) -> Waiter | None:
        wait_queue = self._wait_queues.get(name)
        return None if wait_queue is None else wait_queue.first()

    def _waiters_of(self, name: str) -> list[Waiter]:
        wait_queue = self._wait_queues.get(name)
        return [] if wait_queue is None else list(wait_queue.waiters.values())

    def _wake_when_due(self, names: Sequence[str], seconds: float) -> None:
        """Wake one waiter for each of these names when a task becomes due."""
        if seconds > LONGEST_SECONDS:
            return
        loop = asyncio.get_running_loop()
        key = tuple(names)
        due_at = loop.time() + max(seconds, 0) + DUE_MARGIN_SECONDS
        scheduled = self._due_timers.get(key)
        if scheduled is not None:
            if scheduled[0] <= due_at:
                return
            scheduled[1].cancel()

        def wake_now() -> None:
            del self._due_timers[key]
            self._wake_first_of(key)

        self._due_timers[key] = (due_at, loop.call_at(due_at, wake_now))

    # The subscription

    async def _listen(self) -> None:
        pause_seconds, longest_pause_seconds = RECONNECT_SECONDS
        is_first = True
        while True:
            client = self._connect()
            try:
                async with client.pubsub() as subscription:
                    await subscription.subscribe(*self._channels)
                    if not is_first:
                        log.info("subscribed again; %d waiters try again", len(self._all_waiters()))
                    # Also after the first subscription: a request may have tried before it, and missed a message.
                    self._wake_gradually(self._all_waiters())
                    pause_seconds, is_first = RECONNECT_SECONDS[0], False
                    await self._receive(subscription)
            except (RedisError, OSError, TimeoutError) as error:
                log.warning("lost the subscription to Redis: %s", type(error).__name__)
            finally:
                await asyncio.shield(client.aclose())
            await asyncio.sleep(pause_seconds * (0.5 + random.random()))  # noqa: S311 - spreads load, keeps no secret
            pause_seconds = min(2 * pause_seconds, longest_pause_seconds)

    async def _receive(self, subscription: redis.asyncio.client.PubSub) -> None:
        is_pinged = False
        while True:
            message = await subscription.get_message(timeout=PONG_SECONDS if is_pinged else PING_SECONDS)
            if message is not None:
                is_pinged = False
                if message["type"] == "message":
                    self._handle(message["data"].decode())
            elif is_pinged:
                raise TimeoutError
            else:
                await subscription.ping()
                is_pinged = True

    def _handle(self, message: str) -> None:
        """Handle a message: `ready <queue>`, `queue <new queue>` or `ended <task id>`."""
        kind, _, name = message.partition(" ")
        if kind == "ready":
            self.wake(name)
        elif kind == "queue":
            tid = name.partition(":")[0]
            self._wake_gradually(self._waiters_of(f"{tid}:{ANY_QUEUE}"))
        elif kind == "ended":
            for waiter in self._waiters_of(name):
                self._wake_waiter(waiter)

    def _wake_gradually(self, waiters: Sequence[Waiter]) -> None:
        """Wake all of these waiters: the first at once, the others spread over time."""
        loop = asyncio.get_running_loop()
        window_seconds = len(waiters) / RETRIES_PER_SECOND
        for waiter in waiters[:1]:
            self._wake_waiter(waiter)
        for waiter in waiters[1:]:
            loop.call_later(random.random() * window_seconds, self._wake_waiter, waiter)  # noqa: S311 - spreads load


@cache
def registry() -> LongPollRegistry:
    """Return the registry of this process, which belongs to its one event loop."""
    channels = [keys.of_partition(partition).wake for partition in range(conf().queues.partitions)]
    return LongPollRegistry(async_client, channels, conf().web.max_waiters)
