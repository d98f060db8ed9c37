"""Health of this process: `/healthz` and `/readyz`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from django.db import DatabaseError, connection
from django.http import HttpResponse

from core import errors, threadpool
from core.conf import conf
from core.http.api_view import ApiView, json_response
from core.http.operation import Operation

# /readyz needs no token, so the result of the checks is shared by all requests within this time.
CACHE_SECONDS = 1.0
CHECK_TIMEOUT_SECONDS = 3.0


class Healthy(msgspec.Struct):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Ready(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The process can serve requests. With durability `fsync` an acknowledged write is on disk."""

    status: Literal["ok"]
    durability: Literal["fsync", "relaxed"]
    warnings: Annotated[
        list[str], msgspec.Meta(description="Conditions that will cause trouble later. They do not affect readiness.")
    ] = []


class HealthView(ApiView):
    @Operation(
        "healthz", tag="Operations", summary="Check that the process is alive", is_open=True, answers={200: Healthy}
    )
    async def get(self) -> HttpResponse:
        """Check only that this process answers.

        If Redis is down, restarting web processes does not help.
        """
        return json_response(Healthy())


class ReadyView(ApiView):
    @Operation(
        "readyz",
        tag="Operations",
        summary="Check that requests can be served",
        is_open=True,
        answers={200: Ready},
        errors=(errors.Unavailable,),
    )
    async def get(self) -> HttpResponse:
        """Check Redis, its durability and scripts, and the database.

        A 503 response names the problem.
        """
        problems = await readiness.problems()
        if problems:
            raise errors.Unavailable("; ".join(problems), retry_after_seconds=5)
        return json_response(
            Ready(status="ok", durability=conf().queues.durability, warnings=sorted(readiness.warnings))
        )


class Readiness:
    """The readiness checks. A run starts at most once a second, and after the previous one."""

    def __init__(self, *checks: Callable[[], str | None]) -> None:
        self._checks = list(checks)
        self._checked_at = 0.0
        self._run: asyncio.Task[list[str]] | None = None
        self._pending: dict[Callable[[], str | None], asyncio.Future[str | None]] = {}
        # Set by the checks; they do not affect readiness.
        self.warnings: set[str] = set()

    def register(self, check: Callable[[], str | None]) -> None:
        """Add a check: a function that returns the description of a problem, or None."""
        self._checks.append(check)

    async def problems(self) -> list[str]:
        """Return the problems found by the last run, which is at most a second old."""
        loop = asyncio.get_running_loop()
        run = self._run
        is_old = time.monotonic() - self._checked_at > CACHE_SECONDS
        if run is None or run.get_loop() is not loop or (run.done() and is_old):
            self._checked_at = time.monotonic()
            run = self._run = loop.create_task(self._run_checks())
        return await asyncio.shield(run)

    async def _run_checks(self) -> list[str]:
        # Do not start a check again while it hangs: it would occupy another thread each time.
        loop = asyncio.get_running_loop()
        for check in self._checks:
            if check not in self._pending or self._pending[check].get_loop() is not loop:
                self._pending[check] = threadpool.start_db(check)
        done, hanging = await asyncio.wait(self._pending.values(), timeout=CHECK_TIMEOUT_SECONDS)
        self._pending = {check: future for check, future in self._pending.items() if future in hanging}
        problems = [problem for future in done if (problem := future.result())]
        return [*problems, "a check did not end in time"] if hanging else problems


def database_problem() -> str | None:
    """Return a problem if PostgreSQL does not answer."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except DatabaseError:
        return "database: does not answer"
    return None


readiness = Readiness(database_problem)
