"""Work that blocks (the database, the sync Redis client), done in a few threads so that the event loop goes on."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from django.db import close_old_connections

P = ParamSpec("P")
R = TypeVar("R")

# As many connections to the database as a web process opens for its API.
_threads = ThreadPoolExecutor(4, thread_name_prefix="off-loop")


async def run(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of `work`, which may use the ORM. Django's own signals do not reach the lean handler, so a connection
    that is too old or broken is dropped here."""

    def guarded() -> R:
        close_old_connections()
        try:
            return work(*args, **kwargs)
        finally:
            close_old_connections()

    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_threads, functools.partial(context.run, guarded))
