"""The readiness check of Redis."""

from __future__ import annotations

import redis

from core import errors
from core.conf import conf
from core.redis.connections import client, primaries, serving_primaries, settle_partitions
from queues.engine import script_loader


def redis_is_missing() -> str | None:
    """Redis answers, writes, keeps what it acknowledges, throws nothing away, has the scripts and our partitions.

    Every primary of a cluster must. Tenants of the others are answered all the same, as they are without PostgreSQL.
    """
    try:
        store = client()
        there = serving_primaries(store)
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
    for script in script_loader.everything():
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
