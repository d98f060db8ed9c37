"""Health of this process: `/healthz` and `/readyz`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal

import msgspec
from django.db import DatabaseError, connection
from django.http import HttpResponse

from core import errors, threadpool
from core.conf import conf
from core.http.api_view import ApiView, json_response
from core.http.operation import Operation

# Anybody may ask; the servers behind are asked once for all who ask at the same time.
ANSWER_SECONDS = 1.0
CHECK_SECONDS = 3.0


class Healthy(msgspec.Struct):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Ready(msgspec.Struct, kw_only=True):
    """A request would be answered now. With durability `fsync` an acknowledged write is on disk."""

    status: Literal["ok"] = "ok"
    durability: Literal["fsync", "relaxed"]


class HealthView(ApiView):
    @Operation("healthz", tag="Operations", summary="Is the process alive", is_open=True, answers={200: Healthy})
    async def get(self) -> HttpResponse:
        """Nothing else is looked at, so that a broken Redis restarts nobody."""
        return json_response(Healthy())


class ReadyView(ApiView):
    @Operation(
        "readyz",
        tag="Operations",
        summary="Would a request be answered",
        is_open=True,
        answers={200: Ready},
        errors=(errors.Unavailable,),
    )
    async def get(self) -> HttpResponse:
        """Redis, its durability, its scripts, the database; 503 says what is missing."""
        missing = await readiness.missing()
        if missing:
            raise errors.Unavailable("; ".join(missing), retry_after_seconds=5)
        return json_response(Ready(durability=conf().queues.durability))


class Readiness:
    """The last answer, for a second, and one look at a time."""

    def __init__(self, *checks: Callable[[], str | None]) -> None:
        self._checks = list(checks)
        self._looked = 0.0
        self._looking: asyncio.Task[list[str]] | None = None
        self._asked: dict[Callable[[], str | None], asyncio.Future[str | None]] = {}

    def register(self, check: Callable[[], str | None]) -> None:
        """Add a check of an app: it returns a problem in words, or None."""
        self._checks.append(check)

    async def missing(self) -> list[str]:
        loop = asyncio.get_running_loop()
        looking = self._looking
        if looking is None or looking.get_loop() is not loop or (looking.done() and self._is_old):
            self._looked = time.monotonic()
            looking = self._looking = loop.create_task(self._look())
        return await asyncio.shield(looking)

    @property
    def _is_old(self) -> bool:
        return time.monotonic() - self._looked > ANSWER_SECONDS

    async def _look(self) -> list[str]:
        # A check that hangs is not begun again beside itself: it would take one thread after the other.
        loop = asyncio.get_running_loop()
        for check in self._checks:
            if check not in self._asked or self._asked[check].get_loop() is not loop:
                self._asked[check] = threadpool.start_db(check)
        done, hanging = await asyncio.wait(self._asked.values(), timeout=CHECK_SECONDS)
        self._asked = {check: future for check, future in self._asked.items() if future in hanging}
        problems = [problem for future in done if (problem := future.result())]
        return [*problems, "a check did not end in time"] if hanging else problems


def database_is_missing() -> str | None:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except DatabaseError:
        return "database: does not answer"
    return None


readiness = Readiness(database_is_missing)
