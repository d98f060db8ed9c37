"""Health checks of beat, the audit and Redis.

The console shows them to operators. No code depends on their outcome.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import msgspec
import redis
from django.conf import settings

from core.redis.connections import client, primaries
from queues.audit import stream
from queues.models import PeriodicTaskRun, Quarantine
from queues.readiness import allocator_warning

# A periodic task is late if it has not ended a run for LATE_PERIODS of its periods and for at least MIN_LATE: a long
# run takes 20 s, and only its end is recorded.
LATE_PERIODS = 3
MIN_LATE = timedelta(seconds=30)
LAG_ALARM = 10_000
MAX_FILL_RATIO = 0.9


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one health check."""

    name: str
    is_well: bool
    message: str


NO_ANSWER = Check(name="Redis", is_well=False, message="Redis does not answer")


def beat(now: datetime) -> Check:
    """Check that periodic tasks run in time and that their last runs succeeded.

    A task that has never run is not reported, unless no task has run yet.
    """
    runs = {run.name: run for run in PeriodicTaskRun.objects.all()}
    if not runs:
        return Check(name="Beat", is_well=False, message="no periodic task has run yet")
    late = [
        name
        for name, (_, every_seconds) in settings.PERIODIC_TASKS.items()
        if name in runs and _is_late(runs[name], every_seconds, now)
    ]
    failed = [name for name, run in runs.items() if run.failed_at and run.failed_at == run.ended_at]
    if late:
        return Check(name="Beat", is_well=False, message=f"late: {', '.join(sorted(late))}")
    if failed:
        return Check(name="Beat", is_well=False, message=f"failing: {', '.join(sorted(failed))}")
    return Check(name="Beat", is_well=True, message=f"{len(runs)} periodic tasks on time")


def audit() -> Check:
    """Check the number of entries that PostgreSQL does not have yet."""
    try:
        lag = stream.lag()
    except redis.RedisError:
        return Check(name="Audit", is_well=False, message="Redis does not answer")
    message = "up to date" if lag == 0 else f"{lag:,} entries behind"
    return Check(name="Audit", is_well=lag < LAG_ALARM, message=message)


def quarantine() -> Check:
    """Check for entries that the audit could not store. An operator has to look at them."""
    count = Quarantine.objects.count()
    return Check(name="Quarantine", is_well=not count, message=f"{count:,} could not be stored" if count else "empty")


def redis_servers() -> list[Check]:
    """Check the memory of Redis and whether an acknowledged write is on disk.

    Also reports a bad allocator, and primaries that do not answer. On a cluster, the memory is that of the fullest
    primary, and the durability that of the least durable one.
    """
    try:
        servers = primaries(client())
    except redis.RedisError:
        return [NO_ANSWER]
    states = {name: _read_state(server) for name, server in servers.items()}
    answers = [state for state in states.values() if state]
    if not answers:
        return [NO_ANSWER]
    checks = [
        _check_memory(max((memory for memory, _, _ in answers), key=_fill_ratio)),
        min(
            (_check_durability(persistence, config) for _, persistence, config in answers),
            key=lambda check: check.is_well,
        ),
    ]
    if any(allocator_warning(memory) for memory, _, _ in answers):
        message = "libc: CPU and memory per task grow with time; use jemalloc"
        checks.append(Check(name="Allocator", is_well=False, message=message))
    if len(states) > 1:
        silent = ", ".join(sorted(name for name, state in states.items() if not state))
        message = f"no answer from {silent}" if silent else f"{len(states)} primaries answer"
        checks.append(Check(name="Redis", is_well=not silent, message=message))
    return checks


def _read_state(server: redis.Redis) -> tuple[dict[str, Any], dict[str, Any], Any] | None:
    try:
        with server.pipeline(transaction=False) as pipe:
            pipe.info("memory")
            pipe.info("persistence")
            pipe.config_get("appendfsync")
            memory, persistence, config = pipe.execute(raise_on_error=False)
    except redis.RedisError:
        return None
    return memory, persistence, config


def _fill_ratio(memory: dict[str, Any]) -> float:
    return int(memory["used_memory"]) / (int(memory.get("maxmemory") or 0) or 2**63)


def _check_memory(memory: dict[str, Any]) -> Check:
    used, limit = int(memory["used_memory"]), int(memory.get("maxmemory") or 0)
    if not limit:
        return Check(name="Memory", is_well=True, message=f"{_bytes(used)}, no limit set")
    return Check(name="Memory", is_well=used < MAX_FILL_RATIO * limit, message=f"{_bytes(used)} of {_bytes(limit)}")


def _check_durability(persistence: dict[str, Any], config: Any) -> Check:
    if not persistence.get("aof_enabled"):
        return Check(name="Durability", is_well=False, message="writes are not stored on disk: appendonly is off")
    if persistence.get("aof_last_write_status", "ok") != "ok":
        return Check(name="Durability", is_well=False, message="the last write to disk failed")
    # A managed server may forbid CONFIG GET.
    mode = config.get("appendfsync", "unknown") if isinstance(config, dict) else "unknown"
    messages = {"always": "writes are on disk when acknowledged", "everysec": "up to a second of writes may be lost"}
    return Check(name="Durability", is_well=mode == "always", message=messages.get(mode, f"appendfsync {mode}"))


def _is_late(run: PeriodicTaskRun, every_seconds: float, now: datetime) -> bool:
    return now - run.ended_at > max(LATE_PERIODS * timedelta(seconds=every_seconds), MIN_LATE)


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit in ("B", "KiB") else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
