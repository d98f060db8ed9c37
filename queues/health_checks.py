"""Is the machinery behind the queues well: beat, the audit, Redis. Read for people and for nobody to decide by."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import msgspec
import redis
from django.conf import settings

from core.redis.connections import client, primaries
from queues.audit import stream
from queues.models import BeatJob, Quarantine

# A tick may be late by so many of its periods, and by so long in any case, before somebody should look: with much to do
# a run goes on for 20 s, and only its end is on record.
LATE_PERIODS = 3
LATE_AT_LEAST = timedelta(seconds=30)
LAG_ALARM = 10_000
FULL = 0.9


class Sign(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that can be well or not, in words."""

    name: str
    is_well: bool
    says: str


AWAY = Sign(name="Redis", is_well=False, says="does not answer")


def beat(now: datetime) -> Sign:
    """Whether every job of the schedule ran lately, and the last run of each ended well."""
    jobs = {job.name: job for job in BeatJob.objects.all()}
    if not jobs:
        return Sign(name="Beat", is_well=False, says="no job has run yet")
    late = [
        name
        for name, (_, every) in settings.PERIODIC_TASKS.items()
        if name in jobs and _is_late(jobs[name], every, now)
    ]
    failed = [name for name, job in jobs.items() if job.failed_at and job.failed_at == job.ended_at]
    if late:
        return Sign(name="Beat", is_well=False, says=f"late: {', '.join(sorted(late))}")
    if failed:
        return Sign(name="Beat", is_well=False, says=f"failing: {', '.join(sorted(failed))}")
    return Sign(name="Beat", is_well=True, says=f"{len(jobs)} jobs on time")


def audit() -> Sign:
    """How far PostgreSQL is behind."""
    try:
        lag = stream.lag()
    except redis.RedisError:
        return Sign(name="Audit", is_well=False, says="Redis does not answer")
    says = "up to date" if lag == 0 else f"{lag:,} entries behind"
    return Sign(name="Audit", is_well=lag < LAG_ALARM, says=says)


def quarantine() -> Sign:
    """What the audit could not store, and somebody has to look at."""
    count = Quarantine.objects.count()
    return Sign(name="Quarantine", is_well=not count, says=f"{count:,} could not be stored" if count else "empty")


def store() -> list[Sign]:
    """Redis' memory, and whether what it acknowledges is on disk: of a cluster the fullest and the least safe."""
    try:
        servers = primaries(client())
    except redis.RedisError:
        return [AWAY]
    found = {name: _asked(server) for name, server in servers.items()}
    there = [answers for answers in found.values() if answers]
    if not there:
        return [AWAY]
    signs = [
        _memory(max((memory for memory, _, _ in there), key=_fill)),
        min((_durability(persistence, config) for _, persistence, config in there), key=lambda sign: sign.is_well),
    ]
    if len(found) > 1:
        away = ", ".join(sorted(name for name, answers in found.items() if not answers))
        says = f"no answer from {away}" if away else f"{len(found)} primaries answer"
        signs.append(Sign(name="Redis", is_well=not away, says=says))
    return signs


def _asked(server: redis.Redis) -> tuple[dict[str, Any], dict[str, Any], Any] | None:
    try:
        with server.pipeline(transaction=False) as pipe:
            pipe.info("memory")
            pipe.info("persistence")
            pipe.config_get("appendfsync")
            memory, persistence, config = pipe.execute(raise_on_error=False)
    except redis.RedisError:
        return None
    return memory, persistence, config


def _fill(memory: dict[str, Any]) -> float:
    return int(memory["used_memory"]) / (int(memory.get("maxmemory") or 0) or 2**63)


def _memory(memory: dict[str, Any]) -> Sign:
    used, most = int(memory["used_memory"]), int(memory.get("maxmemory") or 0)
    if not most:
        return Sign(name="Memory", is_well=True, says=f"{_bytes(used)}, no limit set")
    return Sign(name="Memory", is_well=used < FULL * most, says=f"{_bytes(used)} of {_bytes(most)}")


def _durability(persistence: dict[str, Any], config: Any) -> Sign:
    if not persistence.get("aof_enabled"):
        return Sign(name="Durability", is_well=False, says="nothing is written to disk")
    if persistence.get("aof_last_write_status", "ok") != "ok":
        return Sign(name="Durability", is_well=False, says="the last write to disk failed")
    # A managed server may not let us ask.
    mode = config.get("appendfsync", "unknown") if isinstance(config, dict) else "unknown"
    words = {"always": "on disk before it is acknowledged", "everysec": "up to a second may be lost"}
    return Sign(name="Durability", is_well=mode == "always", says=words.get(mode, f"appendfsync {mode}"))


def _is_late(job: BeatJob, every_seconds: float, now: datetime) -> bool:
    return now - job.ended_at > max(LATE_PERIODS * timedelta(seconds=every_seconds), LATE_AT_LEAST)


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit in ("B", "KiB") else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
