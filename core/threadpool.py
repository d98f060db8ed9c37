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

from core.errors import Unavailable

P = ParamSpec("P")
R = TypeVar("R")

# As many connections to the database as a web process opens for its API, of each of the two pools.
POOL_THREADS = 4
# Queries have limits of their own, of seconds. A PostgreSQL that is frozen, or behind a network that is, keeps none.
DB_TIMEOUT_SECONDS = 15.0
# Longer than an artifact takes to a bucket far away. Whoever waits is then told so; the thread goes on waiting.
STORAGE_TIMEOUT_SECONDS = 30.0
CHUNK_BYTES = 64 * 2**10
_pools: dict[str, ThreadPoolExecutor] = {}
_opened: set[BaseDatabaseWrapper] = set()


async def run_db(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of `work`, which may use the ORM. Unavailable if the database does not answer."""
    future = start_db(work, *args, **kwargs)
    try:
        done, _ = await asyncio.wait([future], timeout=DB_TIMEOUT_SECONDS)
    finally:
        # What has not begun never does: nobody waits for it any more.
        future.cancel()
    if not done:
        raise Unavailable("The database does not answer right now.", retry_after_seconds=5)
    return future.result()


def start_db(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
    """As `run`, however long it takes."""
    return _in("database", functools.partial(work, *args, **kwargs))


async def run_storage(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of `work` on the artifacts' storage, in threads that no database can hold up: workers must be able
    to finish."""
    async with asyncio.timeout(STORAGE_TIMEOUT_SECONDS):
        return await _in("storage", functools.partial(work, *args, **kwargs))


def _in(pool: str, work: Callable[[], R]) -> asyncio.Future[R]:
    """Django's own signals do not reach the lean handler, so a connection that is too old or broken is dropped here."""

    def guarded() -> R:
        close_old_connections()
        try:
            return work()
        finally:
            close_old_connections()
            _opened.update(connections.all(initialized_only=True))

    if pool not in _pools:
        _pools[pool] = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix=f"off-loop-{pool}")
    context = contextvars.copy_context()
    return asyncio.get_running_loop().run_in_executor(_pools[pool], context.run, guarded)


async def read_file(file: BinaryIO) -> AsyncIterator[bytes]:
    """A file piece by piece; closed at the end, also when nobody wants the rest."""
    try:
        while piece := await run_storage(file.read, CHUNK_BYTES):
            yield piece
    finally:
        await run_storage(file.close)


def stop_pools() -> None:
    """End the threads and their connections; the next work starts new ones."""
    while _pools:
        _pools.popitem()[1].shutdown(wait=True)
    while _opened:
        connection = _opened.pop()
        connection.inc_thread_sharing()  # its own thread has ended
        connection.close()
