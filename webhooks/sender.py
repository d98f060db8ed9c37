"""Send due deliveries, many at once, and record the results in batches.

The POSTs are coroutines on one event loop, a bounded number to each host; one thread beside it makes all database
calls. Each round records the attempts that finished since the last round and reserves deliveries for the free slots.
After a crash, only the POSTs that were not yet recorded are repeated, under the same ids. The setting `max_unrecorded`
limits their number: the sender starts no more deliveries while so many have recently started without a record.
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
from core.errors import TooMany, Unavailable
from core.http_client import Resolve
from queues import services as queue_services
from tenants.cache import tenant_cache
from tenants.domain import TenantSnapshot
from webhooks import delivery_results, due_deliveries, http, metrics, retry_schedule, signing
from webhooks.delivery_results import DeliveryResult
from webhooks.due_deliveries import ReservedDelivery
from webhooks.services import SigningSecrets

log = logging.getLogger(__name__)

POLL_SECONDS = 0.25  # how often a run with attempts under way checks for due deliveries
BATCH_SECONDS = 0.002  # attempts that finish within this time are recorded together
RECENT_START_SECONDS = 0.02  # an attempt that takes longer is slow, and does not count towards `max_unrecorded`
OUTAGE_SECONDS = 20.0  # how long finished attempts wait for an unavailable database
# How long callbacks wait if Redis cannot check their rate: the rate limit must not be exceeded during an outage.
RATE_RETRY_SECONDS = 1.0

TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)
TRACE_STATE = re.compile(r"[ -~]{1,512}", re.ASCII)
TenantHost = tuple[str, str]  # tid and host


def utc_now() -> datetime:
    return datetime.now(UTC)


class Sender:
    """One run of the sender. `delivered` and `failed` count its attempts."""

    def __init__(
        self,
        *,
        clock: Callable[[], datetime] = utc_now,
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.token = uuid.uuid4()
        self.delivered = self.failed = 0
        self._clock, self._resolve, self._tls = clock, resolve, tls
        self._secrets = SigningSecrets()
        self._queued: dict[TenantHost, deque[ReservedDelivery]] = {}
        self._active: dict[TenantHost, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unrecorded: dict[uuid.UUID, float] = {}  # delivery id -> start time, in order of start
        self._start_timer: asyncio.TimerHandle | None = None
        self._finished: list[DeliveryResult] = []
        self._changed = asyncio.Event()
        self._is_reserving = True
        self._outage_deadline: float | None = None

    async def run(
        self, may_continue: Callable[[], bool], seconds: float, *, on_reserving_ended: Callable[[], None] = lambda: None
    ) -> None:
        """Send until nothing is due or under way; reserve deliveries for at most `seconds`.

        `may_continue` is called in each round; the run stops reserving when it returns False. `on_reserving_ended` is
        called when the run stops reserving, so that the next run can begin while the last attempts of this one finish.
        """
        deadline = time.monotonic() + seconds
        with ThreadPoolExecutor(1, thread_name_prefix="webhook-database") as database:
            in_database = partial(asyncio.get_running_loop().run_in_executor, database)
            try:
                while True:
                    if self._is_reserving and (time.monotonic() >= deadline or not await in_database(may_continue)):
                        await in_database(self._release, self._stop_reserving())
                        await in_database(on_reserving_ended)
                    finished, self._finished = self._finished, []
                    reserved = await in_database(self._record_and_reserve, finished, self._reserve_limit())
                    if reserved is None:
                        self._finished = finished + self._finished
                        self._stop_reserving()
                    else:
                        for result in finished:
                            self._unrecorded.pop(result.delivery.id, None)
                    self._queue(reserved or [])
                    self._start_queued()
                    if not (reserved or self._tasks or self._finished):
                        return
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(POLL_SECONDS):
                            await self._changed.wait()
                    await asyncio.sleep(BATCH_SECONDS)
                    self._changed.clear()
            finally:
                for task in self._tasks:
                    task.cancel()
                await in_database(_close_connection)

    def _reserve_limit(self) -> int:
        """Return how many deliveries to reserve.

        Up to twice the slots are reserved, so that a free slot is used at once.
        """
        slots = conf().webhooks.slots
        reserved = len(self._tasks) + sum(map(len, self._queued.values()))
        return 2 * slots - reserved if self._is_reserving and reserved <= slots else 0

    def _stop_reserving(self) -> list[uuid.UUID]:
        """Reserve and start no more deliveries; return the ids of those that are still queued."""
        self._is_reserving = False
        unstarted = [delivery.id for deliveries in self._queued.values() for delivery in deliveries]
        self._queued.clear()
        return unstarted

    def _release(self, ids: list[uuid.UUID]) -> None:
        if ids:
            due_deliveries.release(self.token, ids, self._clock())

    def _record_and_reserve(self, finished: list[DeliveryResult], limit: int) -> list[ReservedDelivery] | None:
        """Record finished attempts and reserve at most `limit` deliveries.

        Returns None while the database is unavailable; raises after `OUTAGE_SECONDS`.
        """
        try:
            delivery_results.record(self.token, finished, self._clock())
            if not limit:
                return []
            reserved = self._within_rates(due_deliveries.reserve(self.token, limit, self._clock()))
            self._secrets.load({(delivery.tid, delivery.address) for delivery in reserved}, self._clock())
        except (OperationalError, InterfaceError) as error:
            # Keep the results for a while: the database may be back before the reservations expire.
            connection.close()
            self._outage_deadline = self._outage_deadline or time.monotonic() + OUTAGE_SECONDS
            if time.monotonic() > self._outage_deadline:
                raise
            log.warning("%d webhook attempts not recorded yet: %s", len(finished), type(error).__name__)
            time.sleep(1)
            return None
        return reserved

    def _within_rates(self, reserved: list[ReservedDelivery]) -> list[ReservedDelivery]:
        """Return the deliveries that their tenants' rates allow, and release the others."""
        allowed: list[ReservedDelivery] = []
        limited: dict[str, tuple[float, list[uuid.UUID]]] = {}
        for delivery in reserved:
            if delivery.tid not in limited:
                tenant = tenant_cache.find_by_tid(delivery.tid)
                delay_seconds = _count_against_rate(tenant) if tenant else 0.0
                if not delay_seconds:
                    allowed.append(delivery)
                    continue
                limited[delivery.tid] = (delay_seconds, [])
            limited[delivery.tid][1].append(delivery.id)
        for delay_seconds, ids in limited.values():
            due_deliveries.release(self.token, ids, self._clock() + timedelta(seconds=delay_seconds))
        return allowed

    def _queue(self, reserved: list[ReservedDelivery]) -> None:
        for delivery in reserved:
            self._queued.setdefault((delivery.tid, delivery.host), deque()).append(delivery)

    def _start_queued(self) -> None:
        """Start queued deliveries, one of each host in turn.

        The settings `slots`, `slots_per_host` and `max_unrecorded` limit them.
        """
        settings = conf().webhooks
        earliest_expiry = self._clock() + timedelta(seconds=settings.deadline_seconds + 1)
        has_started = True
        while has_started:
            has_started = False
            for tenant_host in list(self._queued):
                if len(self._tasks) >= settings.slots or self._is_unrecorded_limit_reached():
                    return
                if self._active.get(tenant_host, 0) >= settings.slots_per_host:
                    continue
                deliveries = self._queued.pop(tenant_host)
                delivery = deliveries.popleft()
                if deliveries:
                    self._queued[tenant_host] = deliveries  # moved behind the other hosts
                has_started = True
                # Drop a delivery whose reservation would expire during the attempt: it will be due again.
                if earliest_expiry <= delivery.until:
                    self._start(delivery, tenant_host)

    def _start(self, delivery: ReservedDelivery, tenant_host: TenantHost) -> None:
        self._unrecorded[delivery.id] = time.monotonic()
        self._active[tenant_host] = self._active.get(tenant_host, 0) + 1
        task = asyncio.create_task(self._attempt(delivery, tenant_host))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _is_unrecorded_limit_reached(self) -> bool:
        """Return whether `max_unrecorded` recently started deliveries have no record yet.

        If so, schedule another start for the time when they no longer count. The limit bounds the number of deliveries
        that a crash repeats.
        """
        since = time.monotonic() - RECENT_START_SECONDS
        limit = conf().webhooks.max_unrecorded
        if sum(1 for _ in takewhile(lambda started: started > since, reversed(self._unrecorded.values()))) < limit:
            return False
        if self._start_timer is None:
            self._start_timer = asyncio.get_running_loop().call_later(RECENT_START_SECONDS, self._start_after_timer)
        return True

    def _start_after_timer(self) -> None:
        self._start_timer = None
        self._start_queued()

    async def _attempt(self, delivery: ReservedDelivery, tenant_host: TenantHost) -> None:
        started_at = self._clock()
        body = delivery.body.encode()
        with tracing.span("codeq/deliver", delivery.trace_parent, delivery.trace_state) as trace:
            headers = common_headers(*trace) | self._signature_headers(delivery, started_at, body)
            posted = await http.post(delivery.url, headers, body, resolve=self._resolve, tls=self._tls)
        decision = retry_schedule.decide(
            delivery.attempts_since_replay + 1, posted.status, posted.retry_after, self._clock()
        )
        metrics.count_post("task_result", delivery.command, is_delivered=posted.is_delivered)
        if posted.is_delivered:
            self.delivered += 1
        else:
            self.failed += 1
        self._finished.append(DeliveryResult(delivery, started_at, posted, decision))
        self._active[tenant_host] -= 1
        self._start_queued()
        self._changed.set()

    def _signature_headers(self, delivery: ReservedDelivery, moment: datetime, body: bytes) -> dict[str, str]:
        secrets = self._secrets.get(delivery.tid, delivery.address)
        return signing.headers(secrets, str(delivery.id), int(moment.timestamp()), body)


def _count_against_rate(tenant: TenantSnapshot) -> float:
    """Count one callback against the tenant's rate; return the seconds to wait, 0 for none."""
    if not tenant.rates.webhook:
        return 0.0
    try:
        queue_services.admit(tenant, "webhook", tenant.rates.webhook).run_sync()
    except TooMany as error:
        return error.retry_after_seconds or RATE_RETRY_SECONDS
    except Unavailable:
        return RATE_RETRY_SECONDS
    return 0.0


def _close_connection() -> None:
    connection.close()  # the connection of the calling thread


def common_headers(trace_parent: str = "", trace_state: str = "") -> dict[str, str]:
    """Return the headers that every webhook request has. Leave out a malformed trace context."""
    headers = {"Content-Type": "application/json", "User-Agent": "codeQ"}
    if TRACE_PARENT.fullmatch(trace_parent):
        headers["traceparent"] = trace_parent
        if TRACE_STATE.fullmatch(trace_state):
            headers["tracestate"] = trace_state
    return headers
