"""Sends what is due: many at once, each host bounded, one round trip to the database for a whole batch.

The POSTs are coroutines of one loop; the database is spoken to by one thread beside it. A round records what has
ended since the last and reserves what there is room for, so a crash between a POST and its record sends that one
again, under the same id, and nothing else. So that these are few, only so many (`burst`) may just have begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import takewhile

from django.db import InterfaceError, OperationalError, connection

from core import tracing
from core.conf import conf
from queues import pace
from tenants.cache import tenant_cache
from webhooks import http, metrics, outbox, record, schedule, signing
from webhooks.outbox import Reserved
from webhooks.record import Finished
from webhooks.services import Secrets

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25  # how often a run that has something under way looks for more
BATCH_SECONDS = 0.002  # what ends within so long is recorded together
QUICK_SECONDS = 0.02  # what takes longer than so is slow, and keeps no other from beginning
OUTAGE_SECONDS = 20.0  # how long finished tries wait for a database that has gone

TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)
TRACE_STATE = re.compile(r"[ -~]{1,512}", re.ASCII)
Lane = tuple[str, str]  # tid and host


def utc_now() -> datetime:
    return datetime.now(UTC)


class Sender:
    def __init__(
        self,
        *,
        clock: Callable[[], datetime] = utc_now,
        resolve: http.Resolve | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.token = uuid.uuid4()
        self.delivered = self.failed = 0
        self._clock, self._resolve, self._tls = clock, resolve, tls
        self._secrets = Secrets()
        self._waiting: dict[Lane, deque[Reserved]] = {}
        self._active: dict[Lane, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun: dict[uuid.UUID, float] = {}  # and not recorded yet; the latest last
        self._look_again: asyncio.TimerHandle | None = None
        self._finished: list[Finished] = []
        self._changed = asyncio.Event()
        self._is_taking = True
        self._give_up_at: float | None = None

    async def run(
        self, may_go_on: Callable[[], bool], seconds: float, *, on_last: Callable[[], None] = lambda: None
    ) -> None:
        """Send until nothing is due and nothing is under way, taking new ones for at most so long.

        `on_last` is called when no more are taken: the next run may begin while this one's last are under way.
        """
        until = time.monotonic() + seconds
        with ThreadPoolExecutor(1, thread_name_prefix="webhook-database") as database:
            in_database = partial(asyncio.get_running_loop().run_in_executor, database)
            try:
                while True:
                    if self._is_taking and (time.monotonic() >= until or not await in_database(may_go_on)):
                        await in_database(self._release, self._stop_taking())
                        await in_database(on_last)
                    finished, self._finished = self._finished, []
                    taken = await in_database(self._round, finished, self._room())
                    if taken is None:
                        self._finished = finished + self._finished
                        self._stop_taking()
                    else:
                        for each in finished:
                            self._begun.pop(each.delivery.id, None)
                    self._begin(taken or [])
                    if not (taken or self._tasks or self._finished):
                        return
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_SECONDS):
                            await self._changed.wait()
                    await asyncio.sleep(BATCH_SECONDS)
                    self._changed.clear()
            finally:
                for task in self._tasks:
                    task.cancel()
                await in_database(_close_connection)

    def _room(self) -> int:
        """How many more are to be reserved: up to twice the slots, so that the next are at hand when one is free."""
        slots = conf().webhooks.slots
        under_way = len(self._tasks) + sum(map(len, self._waiting.values()))
        return 2 * slots - under_way if self._is_taking and under_way <= slots else 0

    def _stop_taking(self) -> list[uuid.UUID]:
        """From here on only finish what is under way; what was reserved and not begun."""
        self._is_taking = False
        unbegun = [delivery.id for lane in self._waiting.values() for delivery in lane]
        self._waiting.clear()
        return unbegun

    def _release(self, unbegun: list[uuid.UUID]) -> None:
        if unbegun:
            outbox.release(self.token, unbegun, self._clock())

    def _round(self, finished: list[Finished], room: int) -> list[Reserved] | None:
        """Record what has ended and reserve what there is room for; None while the database is away."""
        try:
            record.record(self.token, finished, self._clock())
            if not room:
                return []
            taken = self._within_rates(outbox.reserve(self.token, room, self._clock()))
            self._secrets.load({(each.tid, each.address) for each in taken}, self._clock())
        except (OperationalError, InterfaceError) as error:
            # What was sent is not forgotten at once: the database may be back before the reservations run out.
            connection.close()
            self._give_up_at = self._give_up_at or time.monotonic() + OUTAGE_SECONDS
            if time.monotonic() > self._give_up_at:
                raise
            log.warning("deliveries: %d wait to be recorded: %s", len(finished), type(error).__name__)
            time.sleep(1)
            return None
        return taken

    def _within_rates(self, taken: list[Reserved]) -> list[Reserved]:
        """Those that the tenants' rates allow now; the others are due again when there is room."""
        allowed: list[Reserved] = []
        refused: dict[str, tuple[float, list[uuid.UUID]]] = {}
        for delivery in taken:
            tenant = tenant_cache.find_tid(delivery.tid)
            if delivery.tid not in refused:
                wait = pace.webhook(tenant) if tenant else 0.0
                if not wait:
                    allowed.append(delivery)
                    continue
                refused[delivery.tid] = (wait, [])
            refused[delivery.tid][1].append(delivery.id)
        for wait, ids in refused.values():
            outbox.release(self.token, ids, self._clock() + timedelta(seconds=wait))
        return allowed

    def _begin(self, taken: list[Reserved]) -> None:
        """Start what a host, the slots and the burst have room for: one of each host, then the next of each."""
        for delivery in taken:
            self._waiting.setdefault((delivery.tid, delivery.host), deque()).append(delivery)
        settings = conf().webhooks
        latest = self._clock() + timedelta(seconds=settings.deadline_seconds + 1)
        is_any_begun = True
        while is_any_begun:
            is_any_begun = False
            for lane in list(self._waiting):
                if len(self._tasks) >= settings.slots or self._is_burst():
                    return
                if self._active.get(lane, 0) >= settings.slots_per_host:
                    continue
                waiting = self._waiting.pop(lane)
                delivery = waiting.popleft()
                if waiting:
                    self._waiting[lane] = waiting  # behind the others
                is_any_begun = True
                if latest <= delivery.until:  # else it is due again: it waited too long for its turn
                    self._start(delivery, lane)

    def _start(self, delivery: Reserved, lane: Lane) -> None:
        self._begun[delivery.id] = time.monotonic()
        self._active[lane] = self._active.get(lane, 0) + 1
        task = asyncio.create_task(self._try(delivery, lane))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _is_burst(self) -> bool:
        """Whether as many as may be have just begun and are not on record: a crash now would send those again."""
        quick = time.monotonic() - QUICK_SECONDS
        burst = conf().webhooks.burst
        if sum(1 for _ in takewhile(lambda begun: begun > quick, reversed(self._begun.values()))) < burst:
            return False
        if self._look_again is None:
            self._look_again = asyncio.get_running_loop().call_later(QUICK_SECONDS, self._after_burst)
        return True

    def _after_burst(self) -> None:
        self._look_again = None
        self._begin([])

    async def _try(self, delivery: Reserved, lane: Lane) -> None:
        started = self._clock()
        body = delivery.body.encode()
        with tracing.span("codeq/deliver", delivery.trace_parent, delivery.trace_state) as trace:
            headers = common_headers(*trace) | self._signature(delivery, started, body)
            posted = await http.post(delivery.url, headers, body, resolve=self._resolve, tls=self._tls)
        step = schedule.after(delivery.tries + 1, posted.status, posted.retry_after, self._clock())
        metrics.sent("task_result", delivery.command, is_delivered=posted.is_delivered)
        if posted.is_delivered:
            self.delivered += 1
        else:
            self.failed += 1
        self._finished.append(Finished(delivery, started, posted, step))
        self._active[lane] -= 1
        self._begin([])
        self._changed.set()

    def _signature(self, delivery: Reserved, moment: datetime, body: bytes) -> dict[str, str]:
        secrets = self._secrets.of(delivery.tid, delivery.address)
        return signing.headers(secrets, str(delivery.id), int(moment.timestamp()), body)


def _close_connection() -> None:
    connection.close()  # that of the thread it is called in


def common_headers(trace_parent: str = "", trace_state: str = "") -> dict[str, str]:
    headers = {"Content-Type": "application/json", "User-Agent": "codeQ"}
    if TRACE_PARENT.fullmatch(trace_parent):
        headers["traceparent"] = trace_parent
        if TRACE_STATE.fullmatch(trace_state):
            headers["tracestate"] = trace_state
    return headers
