"""Long polls: a request that waits is a future, woken by the one subscription this process has to Redis.

A wake-up is advice, never truth. It is given to one waiter at a time, because a message tells that a queue turned
non-empty and nothing of how much is in it: who found something wakes the next two, so a full queue reaches every
waiter in a few rounds and an empty one disturbs few. A wake-up that somebody could not use is passed on.
"""

from __future__ import annotations

import asyncio
import logging
import random
from bisect import bisect_left, insort
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cache
from itertools import count
from typing import TypeVar

import redis.asyncio
from redis.exceptions import RedisError

from codeq_site.conf import conf
from codeq_site.errors import Unavailable
from queues.engine import keys
from queues.task import Claimed

R = TypeVar("R")
log = logging.getLogger("codeq.waiting")

ANY_QUEUE = "*"
# A subscription that says nothing is asked whether it still is there, and given up when it does not answer.
PING_SECONDS = 10.0
PONG_SECONDS = 5.0
RECONNECT_SECONDS = (0.1, 2.0)
# After a lost subscription all waiters look again: not all in the same instant.
LOOKS_PER_SECOND = 1000
# A waiter whose look failed leaves what woke it to the next one, but a Redis in trouble is not asked in a chain.
FAILED_LOOK_SECONDS = 1.0
# Nobody waits longer, so no timer need.
LONGEST_SECONDS = 60.0
# Redis' clock has milliseconds; a timer that fires a hair early would find nothing.
DUE_MARGIN_SECONDS = 0.002


class Gone(Exception):
    """The client went away while it waited."""


class Waiter:
    """One parked request. It is idle, or looking, or has been called to look."""

    __slots__ = ("born", "called", "future", "has_missed_call", "is_gone", "is_idle", "names")

    def __init__(self, born: int, names: Sequence[str]) -> None:
        self.born = born
        self.names = names
        self.future: asyncio.Future[None] | None = None
        self.called = False
        self.has_missed_call = False
        self.is_gone = False
        self.is_idle = False


class Line:
    """Who waits for one thing, in the order of arrival."""

    __slots__ = ("everybody", "idle")

    def __init__(self) -> None:
        self.everybody: dict[int, Waiter] = {}
        # Births, sorted. Apart from the others, or finding the first idle one of 2,000 would cost as many steps.
        self.idle: list[int] = []

    def first(self) -> Waiter | None:
        """The eldest idle waiter; if all are looking, the eldest of them."""
        if self.idle:
            return self.everybody[self.idle[0]]
        return next(iter(self.everybody.values()), None)

    def put(self, waiter: Waiter) -> None:
        insort(self.idle, waiter.born)

    def take(self, waiter: Waiter) -> None:
        del self.idle[bisect_left(self.idle, waiter.born)]


class Room:
    """The waiters of one process, by what they wait for."""

    def __init__(self, connect: Callable[[], redis.asyncio.Redis], channels: Sequence[str], most: int) -> None:
        self._connect = connect
        self._channels = channels
        self._most = most
        self._births = count()
        self._parked = 0
        self._lines: dict[str, Line] = {}
        self._due: dict[tuple[str, ...], tuple[float, asyncio.TimerHandle]] = {}
        self._listener: asyncio.Task[None] | None = None
        self._is_closing = False

    # The process

    def open(self) -> None:
        """Start to listen. Redis need not be there yet."""
        self._is_closing = False
        if self._listener is None or self._listener.done():
            self._listener = asyncio.get_running_loop().create_task(self._listen(), name="codeq-waiting")

    def end_waits(self) -> None:
        """Let every waiter answer that nothing came. New waits end at once: the process is stopping."""
        self._is_closing = True
        for waiter in self._everybody():
            self._stir(waiter)

    async def close(self) -> None:
        self.end_waits()
        for _, timer in self._due.values():
            timer.cancel()
        self._due.clear()
        listener, self._listener = self._listener, None
        while listener is not None and not listener.done():
            # Once may not be enough: a cancellation that meets a timeout inside redis-py is taken for the timeout.
            listener.cancel()
            await asyncio.wait([listener], timeout=0.1)

    # Waits

    async def claim(
        self,
        queues: Sequence[str],
        look: Callable[[int], Awaitable[Claimed]],
        give_back: Callable[[Claimed], Awaitable[None]],
        gone: Callable[[], Awaitable[None]],
        seconds: float,
    ) -> Claimed:
        """What `look(wait_ms)` takes, now or when one of `queues` ("<tid>:<command>") has something.

        `gone()` returns when the client left: then nothing more is taken, what was on its way is given back, and Gone
        is raised.
        """
        found: list[Claimed] = []

        async def once(wait_ms: int) -> bool:
            found[:] = [await look(wait_ms)]
            if not found[0].tasks and found[0].next_due_ms:
                self._arm(queues, (found[0].next_due_ms - found[0].now_ms) / 1000)
            return bool(found[0].tasks)

        async def undo() -> None:
            await give_back(found[0])

        await self._wait(queues, once, undo, gone, seconds)
        for queue in {f"{tid}:{task.spec.command}" for tid in _tids(queues) for task in found[0].tasks}:
            self.wake(queue, 2)
        return found[0]

    async def ended(
        self, task_id: str, look: Callable[[int], Awaitable[bool]], gone: Callable[[], Awaitable[None]], seconds: float
    ) -> None:
        """Returns when `look` is content, at latest after `seconds`; looks again when the task ends."""

        async def nothing_to_undo() -> None:
            return

        await self._wait([task_id], look, nothing_to_undo, gone, seconds)

    async def _wait(
        self,
        names: Sequence[str],
        look: Callable[[int], Awaitable[bool]],
        undo: Callable[[], Awaitable[None]],
        gone: Callable[[], Awaitable[None]],
        seconds: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.open_once()
        deadline = loop.time() + seconds
        waiter = Waiter(next(self._births), names)
        watcher: asyncio.Task[None] | None = None
        # In line before the first look: what comes after that look was heard.
        self._enter(waiter)
        try:
            while True:
                waiter.called = waiter.has_missed_call = False
                left = 0.0 if self._is_full else deadline - loop.time()
                try:
                    is_content = await look(max(0, round(left * 1000)))
                except Unavailable:
                    loop.call_later(FAILED_LOOK_SECONDS, self._call_next, names)
                    raise
                if is_content:
                    if waiter.is_gone:
                        await undo()
                        raise Gone
                    return
                if left <= 0 or self._is_closing:
                    return
                if watcher is None:
                    watcher = loop.create_task(self._watch(gone, waiter))
                if not waiter.has_missed_call and not waiter.is_gone:
                    await self._park(waiter, deadline)
                if waiter.is_gone:
                    raise Gone
                if self._is_closing or not (waiter.called or waiter.has_missed_call):
                    return
        finally:
            self._leave(waiter)
            if watcher is not None:
                watcher.cancel()

    async def _park(self, waiter: Waiter, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        waiter.future = loop.create_future()
        timer = loop.call_at(deadline, self._stir, waiter)
        for name in waiter.names:
            self._lines[name].put(waiter)
        waiter.is_idle = True
        self._parked += 1
        try:
            await waiter.future
        finally:
            self._parked -= 1
            timer.cancel()
            self._stir(waiter)  # the request may have been cancelled
            waiter.future = None

    def _call(self, waiter: Waiter) -> None:
        """Have it look now, or again if it is looking."""
        if waiter.is_idle:
            waiter.called = True
            self._stir(waiter)
        else:
            waiter.has_missed_call = True

    def _stir(self, waiter: Waiter) -> None:
        """It is idle no more, from this moment: the next call is somebody else's."""
        if not waiter.is_idle:
            return
        waiter.is_idle = False
        for name in waiter.names:
            self._lines[name].take(waiter)
        if waiter.future is not None and not waiter.future.done():
            waiter.future.set_result(None)

    async def _watch(self, gone: Callable[[], Awaitable[None]], waiter: Waiter) -> None:
        await gone()
        waiter.is_gone = True
        self._stir(waiter)

    @property
    def _is_full(self) -> bool:
        return self._parked >= self._most

    def _enter(self, waiter: Waiter) -> None:
        for name in waiter.names:
            self._lines.setdefault(name, Line()).everybody[waiter.born] = waiter

    def _leave(self, waiter: Waiter) -> None:
        for name in waiter.names:
            line = self._lines[name]
            del line.everybody[waiter.born]
            if not line.everybody:
                del self._lines[name]
        if waiter.called or waiter.has_missed_call:
            self._call_next(waiter.names)

    def _everybody(self) -> list[Waiter]:
        return list({waiter: None for line in self._lines.values() for waiter in line.everybody.values()})

    def open_once(self) -> None:
        if self._listener is None and not self._is_closing:
            self.open()

    # Wake-ups

    def wake(self, queue: str, most: int = 1) -> None:
        """Call the eldest idle waiters of a queue; if all are looking, have one of them look again."""
        for _ in range(most):
            waiter = self._eldest(queue)
            if waiter is None:
                return
            self._call(waiter)

    def _eldest(self, queue: str) -> Waiter | None:
        """The first of the queue's waiters and those of every queue of its tenant: idle ones before busy ones."""
        tid = queue.partition(":")[0]
        firsts = [self._first(name) for name in (queue, f"{tid}:{ANY_QUEUE}")]
        return min(
            (waiter for waiter in firsts if waiter is not None),
            key=lambda waiter: (not waiter.is_idle, waiter.born),
            default=None,
        )

    def _call_next(self, names: Iterable[str]) -> None:
        for name in names:
            waiter = self._first(name)
            if waiter is not None:
                self._call(waiter)

    def _first(self, name: str) -> Waiter | None:
        line = self._lines.get(name)
        return None if line is None else line.first()

    def _waiters(self, name: str) -> list[Waiter]:
        line = self._lines.get(name)
        return [] if line is None else list(line.everybody.values())

    def _arm(self, queues: Sequence[str], seconds: float) -> None:
        """Have one waiter look when something of these queues falls due, whoever is waiting by then."""
        if seconds > LONGEST_SECONDS:
            return
        loop = asyncio.get_running_loop()
        names = tuple(queues)
        when = loop.time() + max(seconds, 0) + DUE_MARGIN_SECONDS
        armed = self._due.get(names)
        if armed is not None:
            if armed[0] <= when:
                return
            armed[1].cancel()

        def fall_due() -> None:
            del self._due[names]
            self._call_next(names)

        self._due[names] = (when, loop.call_at(when, fall_due))

    # The subscription

    async def _listen(self) -> None:
        pause, longest = RECONNECT_SECONDS
        is_first = True
        while True:
            client = self._connect()
            try:
                async with client.pubsub() as subscription:
                    await subscription.subscribe(*self._channels)
                    if not is_first:
                        log.info("subscribed again; %d waiters look", len(self._everybody()))
                    # Also the first time: somebody may have looked before this subscription heard anything.
                    self._look_again(self._everybody())
                    pause, is_first = RECONNECT_SECONDS[0], False
                    await self._hear(subscription)
            except (RedisError, OSError, TimeoutError) as error:
                log.warning("lost the subscription to Redis: %s", type(error).__name__)
            finally:
                await asyncio.shield(client.aclose())
            await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311 - spreads load, keeps no secret
            pause = min(2 * pause, longest)

    async def _hear(self, subscription: redis.asyncio.client.PubSub) -> None:
        is_asked = False
        while True:
            message = await subscription.get_message(timeout=PONG_SECONDS if is_asked else PING_SECONDS)
            if message is not None:
                is_asked = False
                if message["type"] == "message":
                    self._heard(message["data"].decode())
            elif is_asked:
                raise TimeoutError
            else:
                await subscription.ping()
                is_asked = True

    def _heard(self, text: str) -> None:
        word, _, name = text.partition(" ")
        if word == "ready":
            self.wake(name)
        elif word == "queue":
            tid = name.partition(":")[0]
            self._look_again(self._waiters(f"{tid}:{ANY_QUEUE}"))
        elif word == "ended":
            for waiter in self._waiters(name):
                self._call(waiter)

    def _look_again(self, waiters: Sequence[Waiter]) -> None:
        """Call them all, the eldest now and the others bit by bit."""
        loop = asyncio.get_running_loop()
        spread = len(waiters) / LOOKS_PER_SECOND
        for waiter in waiters[:1]:
            self._call(waiter)
        for waiter in waiters[1:]:
            loop.call_later(random.random() * spread, self._call, waiter)  # noqa: S311 - spreads load


def _tids(queues: Iterable[str]) -> set[str]:
    return {queue.partition(":")[0] for queue in queues}


@cache
def room() -> Room:
    """The room of this process. It belongs to the one event loop a web process has."""
    from codeq_site.redis import async_client

    channels = [keys.of_partition(partition).wake for partition in range(conf().queues.partitions)]
    return Room(async_client, channels, conf().web.max_waiters)
