"""Thread pools for blocking work of the API, such as the database."""

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

# The threads of each pool, and so the database connections that the API of a web process opens.
POOL_THREADS = 4
# Queries have shorter limits of their own, but a frozen PostgreSQL or network does not enforce them.
DB_TIMEOUT_SECONDS = 15.0
# Longer than it takes to store an artifact in a distant bucket. After this time the request fails, but its thread keeps
# waiting.
STORAGE_TIMEOUT_SECONDS = 30.0
CHUNK_BYTES = 64 * 2**10
_pools: dict[str, ThreadPoolExecutor] = {}
_connections: set[BaseDatabaseWrapper] = set()


async def run_db(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run `work`, which may use the ORM, and return its result.

    Raises Unavailable if the database does not answer in time.
    """
    future = start_db(work, *args, **kwargs)
    try:
        done, _ = await asyncio.wait([future], timeout=DB_TIMEOUT_SECONDS)
    finally:
        # Drop work that has not started: nothing waits for its result any more.
        future.cancel()
    if not done:
        raise Unavailable("The database does not answer. Try again in a few seconds.", retry_after_seconds=5)
    return future.result()


def start_db(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
    """Start `work` as `run_db` does, without a time limit."""
    return _run_in("database", functools.partial(work, *args, **kwargs))


async def run_storage(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run `work` on the artifact storage and return its result.

    It has a pool of its own: workers can submit results while the database does not answer.
    """
    async with asyncio.timeout(STORAGE_TIMEOUT_SECONDS):
        return await _run_in("storage", functools.partial(work, *args, **kwargs))


def _run_in(pool: str, work: Callable[[], R]) -> asyncio.Future[R]:
    """Run `work` in a thread of the pool.

    Old and broken connections are closed here, because the API handler does not send Django's request signals.
    """

    def work_with_fresh_connections() -> R:
        close_old_connections()
        try:
            return work()
        finally:
            close_old_connections()
            _connections.update(connections.all(initialized_only=True))

    if pool not in _pools:
        _pools[pool] = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix=f"codeq-{pool}")
    context = contextvars.copy_context()
    return asyncio.get_running_loop().run_in_executor(_pools[pool], context.run, work_with_fresh_connections)


async def read_file(file: BinaryIO) -> AsyncIterator[bytes]:
    """Yield a file in chunks, and close it at the end, also if the client disconnects."""
    try:
        while chunk := await run_storage(file.read, CHUNK_BYTES):
            yield chunk
    finally:
        await run_storage(file.close)


def stop_pools() -> None:
    """Stop the threads and close their connections. The next call starts new ones."""
    while _pools:
        _pools.popitem()[1].shutdown(wait=True)
    while _connections:
        connection = _connections.pop()
        connection.inc_thread_sharing()  # its own thread has ended
        connection.close()
