"""Is this process alive, and can it do its work: `/healthz`, `/readyz`, `/metrics`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import redis
from django.db import DatabaseError, connection
from django.http import HttpResponse

from codeq_site import errors, metrics, offloop
from codeq_site.conf import conf
from codeq_site.redis import client, primaries, serving, settle_partitions
from queues.api.operation import Operation
from queues.api.view import ApiView, answer
from queues.engine import scripts
from tenants import views as tenant_views
from tenants.authentication import BearerAuthentication
from tenants.tenant import Role
from webhooks import metrics as _webhook_metrics  # noqa: F401 - its gauges are read at a scrape

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


class KeySet(msgspec.Struct):
    """RFC 7517: public keys."""

    keys: list[dict[str, Any]]


class HealthView(ApiView):
    @Operation("healthz", tag="Operations", summary="Is the process alive", is_open=True, answers={200: Healthy})
    async def get(self) -> HttpResponse:
        """Nothing else is looked at, so that a broken Redis restarts nobody."""
        return answer(Healthy())


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
        return answer(Ready(durability=conf().queues.durability))


class MetricsView(ApiView):
    @Operation(
        "metrics",
        tag="Operations",
        summary="Metrics for Prometheus",
        is_open=True,
        answers={200: "text/plain"},
        errors=(errors.Unauthenticated, errors.Forbidden),
    )
    async def get(self) -> HttpResponse:
        """No label names a tenant. In production an operator's token is asked for (`CODEQ_WEB_METRICS`)."""
        who = conf().web.metrics
        if who == "operator" or (who == "auto" and conf().production):
            caller = await BearerAuthentication().authenticate_async(self.request.header(b"authorization"))
            if Role.OPERATOR not in caller.roles:
                raise errors.Forbidden("This needs a platform operator's token.")
        metrics.flush()
        return HttpResponse(await offloop.run(metrics.scrape), content_type=metrics.CONTENT_TYPE)


class KeysView(ApiView):
    @Operation(
        "jwks",
        tag="Operations",
        summary="The public keys of this installation's tokens",
        is_open=True,
        answers={200: ("application/jwk-set+json", KeySet)},
        errors=(errors.Unavailable,),
    )
    async def get(self) -> HttpResponse:
        """RFC 7517."""
        return await offloop.run(tenant_views.jwks, self.request)


class Readiness:
    """The last answer, for a second, and one look at a time."""

    def __init__(self, *checks: Callable[[], str | None]) -> None:
        self._checks = checks
        self._looked = 0.0
        self._looking: asyncio.Task[list[str]] | None = None
        self._asked: dict[Callable[[], str | None], asyncio.Future[str | None]] = {}

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
                self._asked[check] = offloop.start(check)
        done, hanging = await asyncio.wait(self._asked.values(), timeout=CHECK_SECONDS)
        self._asked = {check: future for check, future in self._asked.items() if future in hanging}
        problems = [problem for future in done if (problem := future.result())]
        return [*problems, "a check did not end in time"] if hanging else problems


def redis_is_missing() -> str | None:
    """Redis answers, writes, keeps what it acknowledges, throws nothing away, has the scripts and our partitions.

    Every primary of a cluster must. Tenants of the others are answered all the same, as they are without PostgreSQL.
    """
    try:
        store = client()
        there = serving(store)
        if away := sorted(primaries(store).keys() - there.keys()):
            return f"redis: not serving: {', '.join(away)}"
        for name, server in there.items():
            if problem := _server_is_missing(server):
                return f"{problem} ({name})" if name else problem
        settle_partitions(store)
    except errors.ConfigError as error:
        return f"redis: {error}"
    except redis.ResponseError:
        return "redis: refuses our commands"
    except (redis.RedisError, OSError):
        return "redis: does not answer"
    return None


def _server_is_missing(server: redis.Redis) -> str | None:
    server.ping()
    for script in scripts.everything():
        if not server.script_exists(script.sha)[0]:
            server.script_load(script.source)
    return _not_durable(server)


def _not_durable(server: redis.Redis) -> str | None:
    persistence = server.info("persistence")
    if persistence.get("loading"):
        return "redis: still reads its data"
    if server.info("memory").get("maxmemory_policy", "noeviction") != "noeviction":
        return "redis: maxmemory-policy is not noeviction, tasks could be thrown away"
    if conf().queues.durability == "relaxed":
        return None
    if not persistence.get("aof_enabled"):
        return "durability: appendonly is off"
    if persistence.get("aof_last_write_status", "ok") != "ok":
        return "durability: the last write to disk failed"
    fsync = server.config_get("appendfsync").get("appendfsync")
    return None if fsync == "always" else "durability: appendfsync is not always"


def database_is_missing() -> str | None:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except DatabaseError:
        return "database: does not answer"
    return None


readiness = Readiness(redis_is_missing, database_is_missing)
