"""Conversion of Redis error replies to the exceptions of redis-py."""

from __future__ import annotations

from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

# By the first word of the reply, which redis-py removes from the message. Other words need no class of their own.
CLASSES: dict[str, type[RedisError]] = {
    "ASK": AskError,
    "CLUSTERDOWN": ClusterDownError,
    "ERR": ResponseError,
    "LOADING": BusyLoadingError,
    "MASTERDOWN": MasterDownError,
    "MOVED": MovedError,
    "NOAUTH": AuthenticationError,
    "NOSCRIPT": NoScriptError,
    "OOM": OutOfMemoryError,
    "READONLY": ReadOnlyError,
    "TRYAGAIN": TryAgainError,
    "WRONGPASS": AuthenticationError,
}


def parse_error_reply(reply: str) -> RedisError:
    """Return the exception for a reply, or a ResponseError if its first word is not in CLASSES."""
    word, _, message = reply.partition(" ")
    error = CLASSES.get(word)
    return error(message) if error else ResponseError(reply)
