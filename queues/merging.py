"""Requests that arrive together are sent as one call.

The web process reads many requests in one iteration of its event loop. The requests of a tenant that each enqueue one
task, submit one result, or claim one task from the same queues are sent as one call, and each gets its own answer or
error. For 100 requests, one script takes a third of the time per request that separate scripts take, and the process
encodes, sends and reads one command instead of many. No request is delayed until others arrive: the call is sent in
the next iteration of the loop, which follows immediately. A request that arrives alone is sent as a call of its own.

Large requests are not merged, nor those of a tenant with a rate limit or depth limit for them, because such a limit
accepts or refuses a request as a whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from functools import partial
from typing import Generic, TypeVar

import msgspec

from core import errors
from queues import services
from queues.domain import Claimed, Enqueued, NewResult, NewTask, Result
from tenants.domain import TenantSnapshot

# The maximum number of requests in one call. A longer script would delay the scripts of other tenants.
MAX_REQUESTS = 100
# A task with a larger payload, or a larger result, is sent alone, so that a merged call stays small.
MAX_CHARACTERS = 16 * 2**10

Item = TypeVar("Item")
Answer = TypeVar("Answer")
SendAlone = Callable[[], Awaitable[Answer]]
SendTogether = Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]]


class RequestMerger(Generic[Item, Answer]):
    """Sends the requests of one loop iteration that have the same key as one call."""

    def __init__(self) -> None:
        # By key: the requests that follow the first one, which waits for the next iteration.
        self._followers: dict[Hashable, list[tuple[Item, asyncio.Future[Answer]]]] = {}
        # The event loop itself keeps only weak references to tasks.
        self._calls: set[asyncio.Task[Sequence[Answer]]] = set()

    async def send(
        self, key: Hashable, item: Item, alone: SendAlone[Answer], together: SendTogether[Item, Answer]
    ) -> Answer:
        """Send a request, and return its answer.

        `alone` sends only this request. `together` sends the items of several requests, in the order of arrival, and
        returns an answer for each. If it fails, each of these requests raises its error. A request that is cancelled
        does not affect the others. If it is cancelled before the call, it is not sent.
        """
        followers = self._followers.get(key)
        if followers is not None and len(followers) < MAX_REQUESTS - 1:
            answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            followers.append((item, answer))
            return await answer
        followers = self._followers[key] = []
        try:
            await asyncio.sleep(0)  # the other requests of this iteration follow
        except asyncio.CancelledError:
            self._start_call(followers, together)
            raise
        finally:
            if self._followers.get(key) is followers:
                del self._followers[key]
        if not followers:
            return await alone()
        answer = asyncio.get_running_loop().create_future()
        self._start_call([(item, answer), *followers], together)
        return await answer

    def _start_call(
        self, requests: Sequence[tuple[Item, asyncio.Future[Answer]]], together: SendTogether[Item, Answer]
    ) -> None:
        """Send the requests that are not cancelled, in a task that no cancelled request can cancel."""
        requests = [(item, answer) for item, answer in requests if not answer.done()]
        items, pending = [item for item, _ in requests], [answer for _, answer in requests]
        if items:
            call = asyncio.create_task(_send(items, together))
            self._calls.add(call)
            call.add_done_callback(partial(self._end_call, pending))

    def _end_call(self, pending: Sequence[asyncio.Future[Answer]], call: asyncio.Task[Sequence[Answer]]) -> None:
        """Give each request its answer, or the error of the call."""
        self._calls.discard(call)
        if call.cancelled():  # the event loop is closing
            for future in pending:
                future.cancel()
            return
        error = call.exception()
        answers = [] if error else call.result()
        for position, future in enumerate(pending):
            if future.done():  # the request was cancelled
                continue
            if error:
                future.set_exception(error)
            else:
                future.set_result(answers[position])


async def _send(items: Sequence[Item], together: SendTogether[Item, Answer]) -> Sequence[Answer]:
    return await together(items)


_enqueues: RequestMerger[NewTask, Enqueued | errors.CodeqError] = RequestMerger()
_submits: RequestMerger[tuple[str, NewResult], Result | errors.CodeqError] = RequestMerger()
_claims: RequestMerger[tuple[str, int], Claimed] = RequestMerger()

# The keys contain the identity of the tenant's snapshot: requests before and after a change of the tenant are not
# merged. A call that is being prepared keeps its snapshot alive, so no other snapshot has this identity.


def enqueue(
    tenant: TenantSnapshot, task: NewTask, *, token_fingerprint: str = ""
) -> Awaitable[Enqueued | errors.CodeqError]:
    """Store a task. Return it or its error."""
    alone = partial(_enqueue_alone, tenant, task, token_fingerprint)
    if tenant.rates.create or tenant.depth or len(task.payload) > MAX_CHARACTERS:
        return alone()
    return _enqueues.send(id(tenant), task, alone, partial(services.enqueue, tenant))


def submit(tenant: TenantSnapshot, worker: str, result: NewResult) -> Awaitable[Result | errors.CodeqError]:
    """End a task with its result. Return the stored result or the error."""
    alone = partial(_submit_alone, tenant, worker, result)
    if len(result.result or b"") + len(result.error or "") + len(result.artifacts or b"") > MAX_CHARACTERS:
        return alone()
    return _submits.send(id(tenant), (worker, result), alone, partial(_submit_together, tenant))


def claim(
    tenant: TenantSnapshot,
    commands: Sequence[str],
    worker: str,
    *,
    lease_seconds: float | None = None,
    count: int = 1,
    wait_ms: int = 0,
    token_fingerprint: str = "",
    is_counted: bool = True,
) -> Awaitable[Claimed]:
    """Claim at most `count` ready tasks, as `services.claim` does.

    Claims of one task are merged. The claim that arrived first gets the first task.
    """
    alone = partial(
        services.claim,
        tenant,
        commands,
        worker,
        lease_seconds=lease_seconds,
        count=count,
        wait_ms=wait_ms,
        token_fingerprint=token_fingerprint,
        is_counted=is_counted,
    )
    if count > 1 or tenant.rates.claim:
        return alone()
    key = (id(tenant), *commands, lease_seconds, wait_ms > 0)
    return _claims.send(key, (worker, wait_ms), alone, partial(_claim_together, tenant, commands, lease_seconds))


async def _enqueue_alone(tenant: TenantSnapshot, task: NewTask, token_fingerprint: str) -> Enqueued | errors.CodeqError:
    (answer,) = await services.enqueue(tenant, [task], token_fingerprint=token_fingerprint)
    return answer


async def _submit_alone(tenant: TenantSnapshot, worker: str, result: NewResult) -> Result | errors.CodeqError:
    (answer,) = await services.submit(tenant, worker, [result])
    return answer


def _submit_together(
    tenant: TenantSnapshot, submissions: Sequence[tuple[str, NewResult]]
) -> Awaitable[Sequence[Result | errors.CodeqError]]:
    workers = {worker for worker, _ in submissions}
    if len(workers) == 1:
        return services.submit(tenant, workers.pop(), [result for _, result in submissions])
    results = [msgspec.structs.replace(result, worker=worker) for worker, result in submissions]
    return services.submit(tenant, None, results)


async def _claim_together(
    tenant: TenantSnapshot, commands: Sequence[str], lease_seconds: float | None, claims: Sequence[tuple[str, int]]
) -> Sequence[Claimed]:
    first_worker, *further_workers = [worker for worker, _ in claims]
    claimed = await services.claim(
        tenant,
        commands,
        first_worker,
        lease_seconds=lease_seconds,
        wait_ms=max(wait_ms for _, wait_ms in claims),
        further_workers=further_workers,
    )
    return [msgspec.structs.replace(claimed, tasks=claimed.tasks[n : n + 1]) for n in range(len(claims))]
