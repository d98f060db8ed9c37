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

# As many connections to the database as a web process opens for its API.
THREADS = 4
PIECE_BYTES = 64 * 2**10
_pool: ThreadPoolExecutor | None = None
_opened: set[BaseDatabaseWrapper] = set()


async def run(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of `work`, which may use the ORM. Django's own signals do not reach the lean handler, so a connection
    that is too old or broken is dropped here."""
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(THREADS, thread_name_prefix="off-loop")

    def guarded() -> R:
        close_old_connections()
        try:
            return work(*args, **kwargs)
        finally:
            close_old_connections()
            _opened.update(connections.all(initialized_only=True))

    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_pool, functools.partial(context.run, guarded))


async def read(file: BinaryIO) -> AsyncIterator[bytes]:
    """A file piece by piece; closed at the end, also when nobody wants the rest."""
    try:
        while piece := await run(file.read, PIECE_BYTES):
            yield piece
    finally:
        await run(file.close)


def stop() -> None:
    """End the threads and their connections; the next work starts new ones."""
    global _pool
    if _pool is not None:
        _pool.shutdown(wait=True)
        _pool = None
    while _opened:
        connection = _opened.pop()
        connection.inc_thread_sharing()  # its own thread has ended
        connection.close()
