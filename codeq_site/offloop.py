"""Work that blocks (the database, the sync Redis client), done in a few threads so that the event loop goes on."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, ParamSpec, TypeVar

from django.db import close_old_connections, connections
from django.db.backends.base.base import BaseDatabaseWrapper

P = ParamSpec("P")
R = TypeVar("R")

# As many connections to the database as a web process opens for its API, of each of the two pools.
THREADS = 4
# Whoever waits for a server that hangs is told so; the thread goes on waiting for it.
ANSWER_SECONDS = 30.0
PIECE_BYTES = 64 * 2**10
_pools: dict[str, ThreadPoolExecutor] = {}
_opened: set[BaseDatabaseWrapper] = set()


async def run(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of `work`, which may use the ORM. Django's own signals do not reach the lean handler, so a connection
    that is too old or broken is dropped here."""
    return await _run("off-loop", functools.partial(work, *args, **kwargs))


async def run_with_storage(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The same for what asks the artifacts' storage: one that hangs must not hold the threads that everybody needs."""
    return await _run("storage", functools.partial(work, *args, **kwargs))


async def _run(pool: str, work: Callable[[], R]) -> R:
    if pool not in _pools:
        _pools[pool] = ThreadPoolExecutor(THREADS, thread_name_prefix=pool)

    def guarded() -> R:
        close_old_connections()
        try:
            return work()
        finally:
            close_old_connections()
            _opened.update(connections.all(initialized_only=True))

    context = contextvars.copy_context()
    async with asyncio.timeout(ANSWER_SECONDS):
        return await asyncio.get_running_loop().run_in_executor(_pools[pool], functools.partial(context.run, guarded))


async def read(file: BinaryIO) -> AsyncIterator[bytes]:
    """A file piece by piece; closed at the end, also when nobody wants the rest."""
    try:
        while piece := await run_with_storage(file.read, PIECE_BYTES):
            yield piece
    finally:
        await run_with_storage(file.close)


def stop() -> None:
    """End the threads and their connections; the next work starts new ones."""
    while _pools:
        _pools.popitem()[1].shutdown(wait=True)
    while _opened:
        connection = _opened.pop()
        connection.inc_thread_sharing()  # its own thread has ended
        connection.close()
