"""A worker's claim: its queues, its lease, and the time it waits for a task."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

from django.core.exceptions import RequestAborted

from core.http.handler import ApiRequest
from queues import long_poll, merging, metrics, selectors, services, validation
from queues.api.schemas.leases import NewClaim
from queues.domain import Claimed, Task
from queues.engine.options import CLAIM_QUEUES
from tenants.domain import ANY_COMMAND, Caller, TenantSnapshot
from tenants.permissions import commands_for

# Names are cached for a short time only, so that a new queue does not starve behind a busy old one.
MAX_CACHED_TENANTS = 10_000
CACHE_SECONDS = 1.0


async def claim(request: ApiRequest, caller: Caller, body: NewClaim, count: int) -> list[Task]:
    """Claim up to `count` tasks, now or within `waitSeconds`."""
    claim_request = ClaimRequest(request, caller, body, count)
    if body.wait_seconds:
        await wait_for(claim_request, body.wait_seconds)
        # A wake-up goes to one request. There may be more tasks: pass it to two more requests of each queue.
        for queue in {f"{caller.tenant.tid}:{task.spec.command}" for task in claim_request.claimed.tasks}:
            long_poll.registry().wake(queue, 2)
    else:
        await claim_request.attempt(0)
    tasks = claim_request.claimed.tasks
    # If the client disconnected during the claim, give the tasks back at once instead of waiting for the leases to
    # expire. The handler does not await between this check and the answer, so the state cannot change in between.
    if tasks and request.is_disconnected:
        await claim_request.undo()
        raise RequestAborted
    return tasks


async def wait_for(poll: long_poll.Poll, seconds: float) -> None:
    """Let a request wait. Raises RequestAborted when the client disconnects."""
    try:
        await long_poll.registry().wait(poll, seconds)
    except long_poll.ClientDisconnected as error:
        raise RequestAborted from error


class ClaimRequest:
    """One claim, attempted once or, as a long poll, whenever one of its queues may have a task."""

    __slots__ = ("_caller", "_claim", "_commands", "_is_counted", "_request", "claimed")

    def __init__(self, request: ApiRequest, caller: Caller, body: NewClaim, count: int) -> None:
        self._request = request
        self._caller = caller
        self._commands = commands_for(caller, body.commands)
        if not body.commands:
            _check_commands_of_token(self._commands)
        self._claim = partial(
            merging.claim,
            caller.tenant,
            worker=caller.subject,
            lease_seconds=body.lease_seconds,
            count=count,
            token_fingerprint=caller.fingerprint,
        )
        # The rate limit counts a request once, regardless of the number of attempts.
        self._is_counted = True
        self.claimed = Claimed(tasks=[], now_ms=0)

    @property
    def names(self) -> list[str]:
        return [f"{self._caller.tenant.tid}:{command}" for command in self._commands]

    @property
    def seconds_until_due(self) -> float | None:
        if not self.claimed.next_due_ms:
            return None
        return (self.claimed.next_due_ms - self.claimed.now_ms) / 1000

    async def attempt(self, wait_ms: int) -> bool:
        if self._commands == [ANY_COMMAND]:
            self.claimed = await self._claim_from_every_queue(wait_ms)
        else:
            is_counted, self._is_counted = self._is_counted, False
            self.claimed = await self._claim(self._commands, wait_ms=wait_ms, is_counted=is_counted)
        for task in self.claimed.tasks:
            metrics.claimed.add(task.spec.command)
        return bool(self.claimed.tasks)

    async def undo(self) -> None:
        calls: list[Any] = [
            services.abandon(self._caller.tenant, task.id, self._caller.subject, token=task.lease_token)
            for task in self.claimed.tasks
        ]
        await asyncio.gather(*calls)

    async def wait_for_disconnect(self) -> None:
        await self._request.wait_for_disconnect()

    async def _claim_from_every_queue(self, wait_ms: int) -> Claimed:
        """Claim from the queues with cached names, then from all queues of the tenant, in chunks."""
        tenant = self._caller.tenant
        # Counted here: the loop below may claim several times, or never if there is no queue.
        if self._is_counted and tenant.rates.claim:
            await services.admit(tenant, "claim", tenant.rates.claim, token_fingerprint=self._caller.fingerprint)
        self._is_counted = False
        claim = partial(self._claim, wait_ms=wait_ms, is_counted=False)
        cached = _queue_names.get(tenant)
        soonest = Claimed(tasks=[], now_ms=0)
        if cached:
            # One claim covers at most CLAIM_QUEUES queues, because more would block Redis too long. If the tenant has
            # more, the fullest come first in `cached`.
            soonest = await claim(cached[:CLAIM_QUEUES])
            if soonest.tasks:
                return soonest
        names = await _queue_names.read(tenant)
        if names and set(names) <= set(cached) and len(cached) <= CLAIM_QUEUES:
            return soonest
        for start in range(0, len(names), CLAIM_QUEUES):
            claimed = await claim(names[start : start + CLAIM_QUEUES])
            if claimed.tasks:
                return claimed
            if claimed.next_due_ms and (not soonest.next_due_ms or claimed.next_due_ms < soonest.next_due_ms):
                soonest = claimed
        return soonest


def _check_commands_of_token(commands: Sequence[str]) -> None:
    """Check the commands of a token like those of a body. Raises InvalidRequest."""
    if commands == [ANY_COMMAND]:
        return
    validation.require(len(commands) <= CLAIM_QUEUES, f"commands: 1 to {CLAIM_QUEUES} in one claim")
    for command in commands:
        validation.check_command(command)


class QueueNames:
    """A short-lived cache of the names of tenants' queues.

    Cached names are enough to find a task. Before a claim answers that there is no task, it reads the names again.
    """

    def __init__(self) -> None:
        self._names: OrderedDict[str, tuple[float, list[str]]] = OrderedDict()

    def get(self, tenant: TenantSnapshot) -> list[str]:
        """Return the cached names, or an empty list."""
        expires_at, names = self._names.get(tenant.tid, (0.0, []))
        return names if time.monotonic() < expires_at else []

    async def read(self, tenant: TenantSnapshot) -> list[str]:
        """Read and cache all names. If one claim cannot cover them, the fullest queues come first."""
        names = await selectors.list_queues(tenant)
        if len(names) > CLAIM_QUEUES:
            queues = sorted(await selectors.queues(tenant), key=lambda queue: (queue.is_paused, -queue.ready))
            names = [queue.command for queue in queues]
        self._names[tenant.tid] = (time.monotonic() + CACHE_SECONDS, names)
        self._names.move_to_end(tenant.tid)
        while len(self._names) > MAX_CACHED_TENANTS:
            self._names.popitem(last=False)
        return names


_queue_names = QueueNames()
