"""The readiness check of Redis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis

from core import errors
from core.conf import conf
from core.http.health import readiness
from core.redis.connections import client, primaries, serving_primaries, settle_partitions
from queues.engine import script_loader


def find_redis_problem() -> str | None:
    """Return the problem that keeps Redis from serving queues, or None.

    Redis must answer, accept writes, be durable, not evict keys, and have this installation's partitions. Missing
    scripts are loaded. On a cluster every primary is checked. The failure of one is a problem here, although the
    tenants of the other primaries are still served.
    """
    try:
        store = client()
        servers = serving_primaries(store)
        if missing := sorted(primaries(store).keys() - servers.keys()):
            return f"redis: not serving: {', '.join(missing)}"
        for name, server in servers.items():
            if problem := _find_server_problem(server):
                return f"{problem} ({name})" if name else problem
        settle_partitions(store)
    except errors.ConfigError as error:
        return f"redis: {error}"
    except redis.ResponseError:
        return "redis: rejects the commands of codeQ"
    except (redis.RedisError, OSError):
        return "redis: does not answer"
    return None


def allocator_warning(info: Mapping[str, Any]) -> str | None:
    """Return a warning if the memory allocator of Redis causes fragmentation (ADR 0016).

    `info` is the section `memory` of INFO.
    """
    allocator = conf().redis_allocator or str(info.get("mem_allocator", ""))
    if allocator != "libc":
        return None
    return "redis: its memory allocator is libc, with which CPU and memory per task grow with time; use jemalloc"


def _find_server_problem(server: redis.Redis) -> str | None:
    server.ping()
    for script in script_loader.load_all():
        if not server.script_exists(script.sha)[0]:
            server.script_load(script.source)
    return _find_state_problem(server)


def _find_state_problem(server: redis.Redis) -> str | None:
    persistence = server.info("persistence")
    if persistence.get("loading"):
        return "redis: still loads its data"
    memory = server.info("memory")
    warning = allocator_warning(memory)
    readiness.warnings = {warning} if warning else set()
    if memory.get("maxmemory_policy", "noeviction") != "noeviction":
        return "redis: maxmemory-policy is not noeviction, so tasks could be evicted"
    if conf().queues.durability == "relaxed":
        return None
    if not persistence.get("aof_enabled"):
        return "durability: appendonly is off"
    if persistence.get("aof_last_write_status", "ok") != "ok":
        return "durability: the last write to disk failed"
    fsync = server.config_get("appendfsync").get("appendfsync")
    return None if fsync == "always" else "durability: appendfsync is not always"
