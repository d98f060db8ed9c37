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


class RequestMerger(Generic[Item, Answer]):
    """Sends the requests of one loop iteration that have the same key as one call.

    `send_one` sends one item of a tenant. `send_all` sends several, in the order of arrival, and returns an answer for
    each.
    """

    def __init__(
        self,
        send_one: Callable[[TenantSnapshot, Item], Awaitable[Answer]],
        send_all: Callable[[TenantSnapshot, Sequence[Item]], Awaitable[Sequence[Answer]]],
    ) -> None:
        self._send_one = send_one
        self._send_all = send_all
        # By key: the requests that follow the first one, which waits for the next iteration.
        self._followers: dict[Hashable, list[tuple[Item, asyncio.Future[Answer]]]] = {}
        # The event loop itself keeps only weak references to tasks.
        self._calls: set[asyncio.Task[Sequence[Answer]]] = set()

    async def send(self, tenant: TenantSnapshot, item: Item, *key: Hashable) -> Answer:
        """Send a request, and return its answer.

        Requests are merged if they have the same tenant and key. If the merged call fails, each of its requests raises
        the error. A request that is cancelled does not affect the others. If it is cancelled before the call, it is
        not sent.
        """
        # A tenant that has changed has another snapshot. Its requests before and after the change are not merged.
        key = (id(tenant), *key)
        followers = self._followers.get(key)
        if followers is not None and len(followers) < MAX_REQUESTS - 1:
            answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            followers.append((item, answer))
            return await answer
        followers = self._followers[key] = []
        try:
            await asyncio.sleep(0)  # the other requests of this iteration follow
        except asyncio.CancelledError:
            self._start_call(tenant, followers)
            raise
        finally:
            if self._followers.get(key) is followers:
                del self._followers[key]
        if not followers:
            return await self._send_one(tenant, item)
        answer = asyncio.get_running_loop().create_future()
        self._start_call(tenant, [(item, answer), *followers])
        return await answer

    def _start_call(self, tenant: TenantSnapshot, requests: Sequence[tuple[Item, asyncio.Future[Answer]]]) -> None:
        """Send the requests that are not cancelled, in a task that no cancelled request can cancel."""
        requests = [(item, answer) for item, answer in requests if not answer.done()]
        items, pending = [item for item, _ in requests], [answer for _, answer in requests]
        if items:
            call = asyncio.create_task(self._call(tenant, items))
            self._calls.add(call)
            call.add_done_callback(partial(self._end_call, pending))

    async def _call(self, tenant: TenantSnapshot, items: Sequence[Item]) -> Sequence[Answer]:
        return await self._send_all(tenant, items)

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


class SubmittedResult(msgspec.Struct, frozen=True):
    """A result and the worker that submits it."""

    worker: str
    result: NewResult


class SingleClaim(msgspec.Struct, frozen=True):
    """A claim of one task."""

    commands: Sequence[str]
    worker: str
    lease_seconds: float | None
    wait_ms: int


async def _enqueue_one(
    tenant: TenantSnapshot, task: NewTask, token_fingerprint: str = ""
) -> Enqueued | errors.CodeqError:
    (answer,) = await services.enqueue(tenant, [task], token_fingerprint=token_fingerprint)
    return answer


async def _submit_one(tenant: TenantSnapshot, new: SubmittedResult) -> Result | errors.CodeqError:
    (answer,) = await services.submit(tenant, new.worker, [new.result])
    return answer


def _submit_all(
    tenant: TenantSnapshot, submitted: Sequence[SubmittedResult]
) -> Awaitable[Sequence[Result | errors.CodeqError]]:
    workers = {new.worker for new in submitted}
    if len(workers) == 1:
        return services.submit(tenant, workers.pop(), [new.result for new in submitted])
    results = [msgspec.structs.replace(new.result, worker=new.worker) for new in submitted]
    return services.submit(tenant, None, results)


def _claim_one(tenant: TenantSnapshot, claim: SingleClaim) -> Awaitable[Claimed]:
    return services.claim(
        tenant, claim.commands, claim.worker, lease_seconds=claim.lease_seconds, wait_ms=claim.wait_ms
    )


async def _claim_all(tenant: TenantSnapshot, claims: Sequence[SingleClaim]) -> Sequence[Claimed]:
    first, *others = claims
    claimed = await services.claim(
        tenant,
        first.commands,
        first.worker,
        lease_seconds=first.lease_seconds,
        wait_ms=max(claim.wait_ms for claim in claims),
        further_workers=[claim.worker for claim in others],
    )
    return [msgspec.structs.replace(claimed, tasks=claimed.tasks[n : n + 1]) for n in range(len(claims))]


_enqueues: RequestMerger[NewTask, Enqueued | errors.CodeqError] = RequestMerger(_enqueue_one, services.enqueue)
_submits: RequestMerger[SubmittedResult, Result | errors.CodeqError] = RequestMerger(_submit_one, _submit_all)
_claims: RequestMerger[SingleClaim, Claimed] = RequestMerger(_claim_one, _claim_all)


def enqueue(
    tenant: TenantSnapshot, task: NewTask, *, token_fingerprint: str = ""
) -> Awaitable[Enqueued | errors.CodeqError]:
    """Store a task. Return it or its error."""
    if tenant.rates.create or tenant.depth or len(task.payload) > MAX_CHARACTERS:
        return _enqueue_one(tenant, task, token_fingerprint)
    return _enqueues.send(tenant, task)


def submit(tenant: TenantSnapshot, worker: str, result: NewResult) -> Awaitable[Result | errors.CodeqError]:
    """End a task with its result. Return the stored result or the error."""
    new = SubmittedResult(worker, result)
    if len(result.result or b"") + len(result.error or "") + len(result.artifacts or b"") > MAX_CHARACTERS:
        return _submit_one(tenant, new)
    return _submits.send(tenant, new)


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
    if count > 1 or tenant.rates.claim:
        return services.claim(
            tenant,
            commands,
            worker,
            lease_seconds=lease_seconds,
            count=count,
            wait_ms=wait_ms,
            token_fingerprint=token_fingerprint,
            is_counted=is_counted,
        )
    return _claims.send(
        tenant, SingleClaim(commands, worker, lease_seconds, wait_ms), lease_seconds, wait_ms > 0, *commands
    )
