"""A claim as a request asks for it: which queues, and for how long it waits."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from django.core.exceptions import RequestAborted

from codeq_site.lean import LeanRequest
from queues import metrics, selectors, services, waiting
from queues.api import translate
from queues.api.wire.leases import NewClaim
from queues.engine.options import CLAIM_QUEUES
from queues.task import Claimed, Task
from tenants.permissions import commands_for
from tenants.tenant import ANY_COMMAND, Caller, Tenant

R = TypeVar("R")
Take = Callable[[Sequence[str], int], Awaitable[Claimed]]
# Tenants whose queues are remembered by name; and how long, or a new queue would starve behind a busy old one.
REMEMBERED = 10_000
REMEMBERED_SECONDS = 1.0


async def claim(request: LeanRequest, caller: Caller, body: NewClaim, count: int) -> list[Task]:
    """What the caller may have, now or within `waitSeconds`."""
    tenant = caller.tenant
    asked = commands_for(caller, body.commands)

    # One request, however often it looks.
    is_counted = True

    async def take(commands: Sequence[str], wait_ms: int) -> Claimed:
        nonlocal is_counted
        call = services.claim(
            tenant,
            commands,
            caller.subject,
            lease_seconds=translate.whole(body.lease_seconds),
            count=count,
            wait_ms=wait_ms,
            by=caller.fingerprint,
            is_counted=is_counted,
        )
        is_counted = False
        return await call

    async def look(wait_ms: int) -> Claimed:
        nonlocal is_counted
        if asked == [ANY_COMMAND]:
            # Counted here: it may take several claims, or none where there is no queue.
            if is_counted and tenant.rates.claim:
                await services.admit(tenant, "claim", tenant.rates.claim, by=caller.fingerprint)
            is_counted = False
            claimed = await _of_every_queue(tenant, take, wait_ms)
        else:
            claimed = await take(asked, wait_ms)
        metrics.claimed(claimed.tasks)
        return claimed

    async def give_back(claimed: Claimed) -> None:
        back: list[Any] = [
            services.abandon(tenant, task.id, caller.subject, token=task.lease_token) for task in claimed.tasks
        ]
        await asyncio.gather(*back)

    if body.wait_seconds:
        queues = [f"{tenant.tid}:{command}" for command in asked]
        waits = waiting.room().claim(queues, look, give_back, request.disconnected, body.wait_seconds)
        claimed = await unless_gone(waits)
    else:
        claimed = await look(0)
    # Who hung up while Redis was answering is known to have gone a moment later: the tasks would be nobody's until
    # their leases are over. From here to the socket nothing else comes in between.
    if claimed.tasks and request.is_hung_up:
        await give_back(claimed)
        raise RequestAborted
    return claimed.tasks


async def unless_gone(wait: Coroutine[Any, Any, R]) -> R:
    """What a wait answers; there is nobody to answer when the client went away."""
    try:
        return await wait
    except waiting.Gone as gone:
        raise RequestAborted from gone


class _Names:
    """The names of tenants' queues as they were lately: enough to take a task, not to say that there is none."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, tuple[float, list[str]]] = OrderedDict()

    def get(self, tenant: Tenant) -> list[str]:
        until, names = self._of.get(tenant.tid, (0.0, []))
        return names if time.monotonic() < until else []

    async def read(self, tenant: Tenant) -> list[str]:
        """All of them; where one claim cannot look at all, those with something to take first."""
        names = await selectors.names(tenant)
        if len(names) > CLAIM_QUEUES:
            queues = sorted(await selectors.queues(tenant), key=lambda queue: (queue.is_paused, -queue.ready))
            names = [queue.command for queue in queues]
        self._of[tenant.tid] = (time.monotonic() + REMEMBERED_SECONDS, names)
        self._of.move_to_end(tenant.tid)
        while len(self._of) > REMEMBERED:
            self._of.popitem(last=False)
        return names


_names = _Names()


async def _of_every_queue(tenant: Tenant, take: Take, wait_ms: int) -> Claimed:
    known = _names.get(tenant)
    if known:
        # Of very many queues those that had most: to count them all for every claim would keep Redis busy.
        claimed = await take(known[:CLAIM_QUEUES], wait_ms)
        if claimed.tasks:
            return claimed
    else:
        claimed = Claimed(tasks=[], now_ms=0)
    names = await _names.read(tenant)
    if names and set(names) <= set(known) and len(known) <= CLAIM_QUEUES:
        return claimed
    soonest = claimed
    for some in _pieces(names, CLAIM_QUEUES):
        claimed = await take(some, wait_ms)
        if claimed.tasks:
            return claimed
        if claimed.next_due_ms and (not soonest.next_due_ms or claimed.next_due_ms < soonest.next_due_ms):
            soonest = claimed
    return soonest


def _pieces(names: Sequence[str], size: int) -> Iterable[Sequence[str]]:
    return (names[at : at + size] for at in range(0, len(names), size))
