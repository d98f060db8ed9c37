"""The outbox in Redis: reading the events stream, acknowledging what is stored, trimming behind it.

One consumer name for all processes: what a dead worker had read and not acknowledged is then simply what
the next run reads first, at once, without waiting for an idle time to pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from core.redis import connections
from queues.audit.events import Blobs, Entry
from queues.engine import keys

GROUP = "audit"
CONSUMER = "drain"
NEW = ">"
FIRST = "0"


class StreamState(NamedTuple):
    """Where the audit stands in one partition's stream."""

    waiting: int  # entries not yet stored
    length: int


def survey() -> dict[int, StreamState]:
    """Every partition that is there and has a stream. A stream without the group gets it."""
    found: dict[int, StreamState] = {}
    every = connections.reachable_partitions()
    with connections.client().pipeline(transaction=False) as pipe:
        for partition in every:
            pipe.xlen(_key(partition))
        lengths = pipe.execute()
    for partition, groups, length in zip(every, _groups(every), lengths, strict=True):
        ours = next((group for group in groups if group["name"] == GROUP.encode()), None)
        if ours:
            # Redis does not know the lag when entries it had not given out were deleted: then look.
            lag = length if ours["lag"] is None else int(ours["lag"])
            found[partition] = StreamState(int(ours["pending"]) + lag, length)
        elif length:
            _join(partition)
            found[partition] = StreamState(length, length)
    return found


def lag() -> int:
    """Entries that are not in PostgreSQL yet."""
    return sum(state.waiting for state in survey().values())


def read(after: Mapping[int, str], count: int) -> list[Entry]:
    """Up to `count` entries of each partition: NEW ones, or (FIRST) those read before and not stored."""
    with connections.client().pipeline(transaction=False) as pipe:
        for partition, start in after.items():
            pipe.xreadgroup(GROUP, CONSUMER, {_key(partition): start}, count=count)
        replies = pipe.execute()
    return [
        Entry(partition, stream_id.decode(), fields)
        for partition, reply in zip(after, replies, strict=True)
        for _, entries in reply or ()
        for stream_id, fields in entries
    ]


def blobs(entries: Sequence[Entry]) -> list[Blobs]:
    """What Redis still has of the entries' tasks, in one round trip."""
    with connections.client().pipeline(transaction=False) as pipe:
        for entry in entries:
            # An odd id reads nothing; `events.parse` then says what is wrong with it.
            root = keys.of_partition(entry.partition).root
            task_id = entry.fields.get(b"id", b"").decode("ascii", "replace")
            pipe.hmget(keys.task(root, task_id), "spec", "max", "answer")
        return [Blobs(*found) for found in pipe.execute()]


def acknowledge(entries: Iterable[Entry]) -> None:
    """These are stored. Everything before the first entry that is not goes from the stream."""
    ids: dict[int, list[str]] = {}
    for entry in entries:
        ids.setdefault(entry.partition, []).append(entry.stream_id)
    if not ids:
        return
    with connections.client().pipeline(transaction=False) as pipe:
        for partition, stored in ids.items():
            pipe.xack(_key(partition), GROUP, *stored)
        pipe.execute()
    _trim(list(ids))


def drained_until_ms(partition: int) -> int:
    """Everything that ended before this moment is in PostgreSQL: cleanup must not pass it."""
    client, key = connections.client(), _key(partition)
    seconds, micros = connections.partition_primary(partition).time()
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    # The state comes before the entries: one that is read or stored in between only makes the answer earlier.
    ours = next((group for group in _groups([partition])[0] if group["name"] == GROUP.encode()), None)
    oldest = _oldest_pending(key, ours) if ours else None
    if oldest is None:
        start = "(" + ours["last-delivered-id"].decode() if ours else "-"
        following: Any = client.xrange(key, min=start, count=1)
        oldest = following[0][0].decode() if following else None
    return now_ms if oldest is None else min(now_ms, int(oldest.split("-")[0]))


def _trim(touched: Sequence[int]) -> None:
    """Only what every group has acknowledged goes, so that another reader of the stream loses nothing."""
    with connections.client().pipeline(transaction=False) as pipe:
        for partition, groups in zip(touched, _groups(touched), strict=True):
            key = _key(partition)
            keep = [_oldest_pending(key, group) or _after(group) for group in groups]
            pipe.xtrim(key, minid=min(keep, key=_order), approximate=False)
        pipe.execute()


def _groups(of: Sequence[int]) -> list[list[dict[str, Any]]]:
    """The consumer groups of each partition's stream; none where there is no stream."""
    with connections.client().pipeline(transaction=False) as pipe:
        for partition in of:
            pipe.xinfo_groups(_key(partition))
        replies = pipe.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, Exception) and not isinstance(reply, ResponseError):
            raise reply
    # The only error of the command itself is "no such key": nothing ever ended in that partition.
    return [[] if isinstance(reply, Exception) else reply for reply in replies]


def _oldest_pending(key: str, group: Mapping[str, Any]) -> str | None:
    if not group["pending"]:
        return None
    oldest: bytes | None = connections.client().xpending(key, group["name"])["min"]
    return oldest.decode() if oldest else None


def _after(group: Mapping[str, Any]) -> str:
    ms, _, sequence = group["last-delivered-id"].decode().partition("-")
    return f"{ms}-{int(sequence) + 1}"


def _order(stream_id: str) -> tuple[int, ...]:
    return tuple(map(int, stream_id.split("-")))


def _join(partition: int) -> None:
    with contextlib.suppress(ResponseError):  # somebody else was quicker
        connections.client().xgroup_create(_key(partition), GROUP, id=FIRST)


def _key(partition: int) -> str:
    return keys.of_partition(partition).events
