"""The events stream in Redis: read entries, acknowledge stored ones, and trim the stream.

All processes use the same consumer name. If a process is killed, the next run immediately reads the entries that the
process did not acknowledge. With separate names, another process could only claim entries that have been idle for some
time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from core.redis import connections
from core.redis.script_call import merge_calls
from queues.audit.events import Blobs, StreamEntry
from queues.current_engine import engine
from queues.engine import keys, queries

GROUP = "audit"
CONSUMER = "drain"
# The most entries that one round trip reads, and that one command acknowledges. It bounds how long a command blocks
# Redis.
MAX_ENTRIES = 250
# Select the entries to read: those that no process has read, or those that were read and not acknowledged.
NEW = ">"
UNACKNOWLEDGED = "0"


class StreamState(NamedTuple):
    """The length of one partition's stream, and how many of its entries are not stored."""

    waiting: int  # entries not yet stored
    length: int


def survey() -> dict[int, StreamState]:
    """Return the state of each reachable partition that has a stream.

    Create the consumer group of a stream that does not have it yet.
    """
    states: dict[int, StreamState] = {}
    partitions = connections.reachable_partitions()
    with connections.client().pipeline(transaction=False) as pipe:
        for partition in partitions:
            pipe.xlen(_key(partition))
        lengths = pipe.execute()
    for partition, groups, length in zip(partitions, _read_groups(partitions), lengths, strict=True):
        audit_group = _find_audit_group(groups)
        if audit_group:
            # Redis reports no lag after unread entries were deleted. The length is then the upper bound.
            unread = length if audit_group["lag"] is None else int(audit_group["lag"])
            states[partition] = StreamState(int(audit_group["pending"]) + unread, length)
        elif length:
            _create_group(partition)
            states[partition] = StreamState(length, length)
    return states


def lag() -> int:
    """Return the number of entries that are not in PostgreSQL yet."""
    return sum(state.waiting for state in survey().values())


def read(after: Mapping[int, str], count: int) -> list[StreamEntry]:
    """Return up to `count` entries of each partition.

    `after` maps a partition to NEW, to UNACKNOWLEDGED, or to the id after which unacknowledged entries are read.
    Reading 2,000 entries with one command would block Redis for 10 ms, so each round trip reads MAX_ENTRIES.
    """
    starts = dict(after)
    entries: dict[int, list[StreamEntry]] = {partition: [] for partition in after}
    while starts:
        share = max(1, MAX_ENTRIES // len(starts))
        counts = {partition: min(share, count - len(entries[partition])) for partition in starts}
        with connections.client().pipeline(transaction=False) as pipe:
            for partition, start in starts.items():
                pipe.xreadgroup(GROUP, CONSUMER, {_key(partition): start}, count=counts[partition])
            replies = pipe.execute()
        for partition, reply in zip(list(starts), replies, strict=True):
            part = [
                StreamEntry(partition, stream_id.decode(), fields)
                for _, stream_entries in reply or ()
                for stream_id, fields in stream_entries
            ]
            entries[partition] += part
            if len(part) < counts[partition] or len(entries[partition]) == count:
                del starts[partition]
            elif starts[partition] != NEW:
                starts[partition] = part[-1].stream_id
    return [entry for part in entries.values() for entry in part]


def read_blobs(entries: Sequence[StreamEntry]) -> list[Blobs]:
    """Return the data that Redis has of the entries' tasks.

    It takes one round trip, or more if the data is large.
    """
    # For an invalid id, Redis returns no data. `events.parse` raises the error later.
    calls = [
        queries.blobs(engine(), partition, [entry.fields.get(b"id", b"") for entry in part])
        for partition, part in groupby(entries, key=attrgetter("partition"))
    ]
    return [Blobs(*fields) for part in merge_calls(engine().runner, calls).run_sync() for fields in part]


def acknowledge(entries: Iterable[StreamEntry]) -> None:
    """Acknowledge stored entries, and trim the stream up to the first entry that is not stored."""
    ids: dict[int, list[str]] = {}
    for entry in entries:
        ids.setdefault(entry.partition, []).append(entry.stream_id)
    if not ids:
        return
    with connections.client().pipeline(transaction=False) as pipe:
        for partition, stored in ids.items():
            for start in range(0, len(stored), MAX_ENTRIES):
                pipe.xack(_key(partition), GROUP, *stored[start : start + MAX_ENTRIES])
        pipe.execute()
    _trim(list(ids))


def drained_until_ms(partition: int) -> int:
    """Return a time such that all tasks that ended before it are stored in PostgreSQL.

    Cleanup must not remove tasks that ended later.
    """
    client, key = connections.client(), _key(partition)
    seconds, micros = connections.partition_primary(partition).time()
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    # Read the group before the entries: an entry that is read or stored in between only makes the result earlier.
    audit_group = _find_audit_group(_read_groups([partition])[0])
    oldest = _find_oldest_pending(key, audit_group) if audit_group else None
    if oldest is None:
        start = "(" + audit_group["last-delivered-id"].decode() if audit_group else "-"
        following: Any = client.xrange(key, min=start, count=1)
        oldest = following[0][0].decode() if following else None
    return now_ms if oldest is None else min(now_ms, int(oldest.split("-")[0]))


def _trim(partitions: Sequence[int]) -> None:
    """Remove the entries that all consumer groups have acknowledged.

    Another reader of the stream, with its own group, therefore loses no entry.
    """
    with connections.client().pipeline(transaction=False) as pipe:
        for partition, groups in zip(partitions, _read_groups(partitions), strict=True):
            key = _key(partition)
            first_kept_ids = [_find_oldest_pending(key, group) or _next_id(group) for group in groups]
            pipe.xtrim(key, minid=min(first_kept_ids, key=_sort_key), approximate=False)
        pipe.execute()


def _read_groups(partitions: Sequence[int]) -> list[list[dict[str, Any]]]:
    """Return the consumer groups of each partition's stream: an empty list without a stream."""
    with connections.client().pipeline(transaction=False) as pipe:
        for partition in partitions:
            pipe.xinfo_groups(_key(partition))
        replies = pipe.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, Exception) and not isinstance(reply, ResponseError):
            raise reply
    # The only error of the command itself is "no such key": no task has ended in that partition.
    return [[] if isinstance(reply, Exception) else reply for reply in replies]


def _find_audit_group(groups: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    return next((group for group in groups if group["name"] == GROUP.encode()), None)


def _find_oldest_pending(key: str, group: Mapping[str, Any]) -> str | None:
    if not group["pending"]:
        return None
    oldest: bytes | None = connections.client().xpending(key, group["name"])["min"]
    return oldest.decode() if oldest else None


def _next_id(group: Mapping[str, Any]) -> str:
    """Return the lowest id after the last entry that the group has read."""
    ms, _, sequence = group["last-delivered-id"].decode().partition("-")
    return f"{ms}-{int(sequence) + 1}"


def _sort_key(stream_id: str) -> tuple[int, ...]:
    return tuple(map(int, stream_id.split("-")))


def _create_group(partition: int) -> None:
    with contextlib.suppress(ResponseError):  # another process has created it
        connections.client().xgroup_create(_key(partition), GROUP, id="0")


def _key(partition: int) -> str:
    return keys.of_partition(partition).events
