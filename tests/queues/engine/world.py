"""An engine on a real Valkey, and `places`: one read-only pass over its whole keyspace that says what is wrong in it.

The checker knows the legend of `queues.engine.keys` and nothing of how the scripts work.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import redis

from core.redis.cluster import ClusterClient
from core.redis.runners import ClusterRunner, SyncRunner
from core.redis.script_call import Runner
from queues.domain import TERMINAL, Location, NewTask, QueueStats
from queues.engine import Engine, Options, keys, queries
from tests.fixtures.queues import Clock

# `make test-long`: the same proofs, more of them.
LONG = os.environ.get("CODEQ_TEST_LONG") == "1"
DAY_MS = 86_400_000
TID, OTHER_TID = "acme0001", "zeta0002"

# One snapshot, taken while nobody else runs. Plain EVAL on purpose: `#!lua` would want every key declared.
_DUMP = """
local found = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  local type, value = redis.call('TYPE', key).ok, false
  if type == 'hash' then value = redis.call('HGETALL', key)
  elseif type == 'list' then value = redis.call('LRANGE', key, 0, -1)
  elseif type == 'zset' then value = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  elseif type == 'set' then value = redis.call('SMEMBERS', key)
  elseif type == 'stream' then value = redis.call('XRANGE', key, '-', '+')
  elseif type == 'string' then value = redis.call('GET', key) end
  found[#found + 1] = { key, type, value }
end
return found
"""

Fields = dict[str, bytes]
Event = dict[str, str]


def _fields(flat: list[bytes]) -> Fields:
    return {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}


def _decoded(kind: str, value: Any) -> Any:
    if kind == "hash":
        return _fields(value)
    if kind == "list":
        return [item.decode() for item in value]
    if kind == "zset":
        return {member.decode(): float(score) for member, score in zip(value[::2], value[1::2], strict=True)}
    if kind == "set":
        return {item.decode() for item in value}
    if kind == "stream":
        return [{name: text.decode("utf-8", "replace") for name, text in _fields(flat).items()} for _, flat in value]
    return value


def dump(client: redis.Redis) -> dict[str, Any]:
    """Every key with its value. A stream without entries is no different from no stream."""
    nodes = [client]
    if isinstance(client, ClusterClient):
        nodes = [client.nodes.client(address) for address in client.nodes.all()]
    lines = [line for node in nodes for line in node.execute_command("EVAL", _DUMP, 0)]
    found: dict[str, Any] = {}
    for key, kind, value in lines:
        name = key.decode()
        assert name not in found, f"{name} is on two nodes"
        if kind != b"stream" or value:
            found[name] = _decoded(kind.decode(), value)
    return found


def lasting(keyspace: dict[str, Any]) -> dict[str, Any]:
    """The keyspace without what is advisory: who waits, what was woken; and without who is known to have a queue."""
    return {name: value for name, value in keyspace.items() if not name.endswith(("}:woken", "}:waiting", "}:tenants"))}


@dataclass
class Places:
    """What one pass found: where each task is, and everything that must not be."""

    keyspace: dict[str, Any]
    tasks: dict[str, Fields] = field(default_factory=dict)
    places: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    scores: dict[str, float] = field(default_factory=dict)  # of the index that a live or dead task is in
    ready: dict[tuple[str, str, int], list[str]] = field(default_factory=dict)  # live ids, the next one first
    ghosts: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    events: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    expiry: dict[str, float] = field(default_factory=dict)
    idem: dict[tuple[str, str], str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    _by_kind: dict[str, list[tuple[list[str], Any]]] = field(default_factory=lambda: defaultdict(list))

    def status(self, task_id: str) -> str:
        return self.tasks[task_id]["status"].decode() if task_id in self.tasks else "GONE"

    def kinds(self, kind: str) -> list[tuple[list[str], Any]]:
        """The words after the kind, and the value, of every key of one kind."""
        if not self._by_kind:
            for name, value in self.keyspace.items():
                first, *words = name.partition("}:")[2].split(":")
                self._by_kind[first].append((words, value))
        return self._by_kind.get(kind, [])


def places(client: redis.Redis) -> Places:
    """Read everything once and check what can be checked without knowing what was done."""
    found = Places(dump(client))
    wrong = found.wrong
    wrong += [f"{name} is not in the legend" for name in found.keyspace if not keys.LEGEND.fullmatch(name)]
    for (task_id,), task in found.kinds("task"):
        found.tasks[task_id] = task
    _read_indexes(found)
    _check_tasks(found)
    _check_ghosts(found)
    _check_expiry(found)
    _check_due(found)
    _check_idempotency(found)
    _check_events(found)
    return found


def _read_indexes(found: Places) -> None:
    for (tid, command, part, *rest), value in found.kinds("q"):
        queue = f"{tid}:{command}"
        if part == "ready":
            line = found.ready[tid, command, int(rest[0])] = []
            for task_id in reversed(value):
                task = found.tasks.get(task_id)
                if task is None or task["status"].decode() in TERMINAL:
                    found.ghosts[tid, command, int(rest[0])] += 1
                    continue
                line.append(task_id)
                found.places[task_id][f"ready {rest[0]}"] += 1
                if task["queue"].decode() != queue or int(task["priority"]) != int(rest[0]):
                    found.wrong.append(f"{task_id} stands in the line of {queue} {rest[0]}, which is not its own")
            continue
        for task_id, score in value.items():
            found.places[task_id][part] += 1
            found.scores[task_id] = score
            task = found.tasks.get(task_id)
            if task is None:
                found.wrong.append(f"{part} of {queue} names {task_id}, which does not exist")
            elif task["queue"].decode() != queue:
                found.wrong.append(f"{task_id} is in {part} of {queue}, which is not its own")


def _check_tasks(found: Places) -> None:
    queues = {(tid, command) for (tid,), hash_ in found.kinds("queues") for command in hash_}
    known = {tid for _, tids in found.kinds("tenants") for tid in tids}
    found.wrong += [f"tenant {tid} has a queue and is not listed" for tid in {tid for tid, _ in queues} - known]
    for task_id, task in found.tasks.items():
        where, status = found.places[task_id], task["status"].decode()
        if status in TERMINAL and not where:
            where["terminal"] += 1
        if where.total() != 1:
            found.wrong.append(f"{task_id} ({status}) is in {dict(where)}")
        allowed = {
            "PENDING": where.keys() <= {"delayed", f"ready {int(task['priority'])}"},
            "IN_PROGRESS": where.keys() <= {"inprog"},
            "FAILED": where.keys() <= {"dlq", "terminal"},
        }.get(status, where.keys() <= {"terminal"})
        if not allowed:
            found.wrong.append(f"{task_id} is {status} and in {dict(where)}")
        attempts, most = int(task.get("attempts", 0)), int(task["max"])
        if not 0 <= attempts <= most or ("dlq" in where and attempts != most):
            found.wrong.append(f"{task_id} ({dict(where)}) has had {attempts} of {most} attempts")
        tid, _, command = task["queue"].decode().partition(":")
        if (tid, command) not in queues:
            found.wrong.append(f"{task_id} is of {tid}:{command}, which is not among the queues")


def _check_ghosts(found: Places) -> None:
    counted: Counter[tuple[str, str, int]] = Counter()
    for (tid,), hash_ in found.kinds("ghosts"):
        for name, count in hash_.items():
            command, _, priority = name.partition(":")
            counted[tid, command, int(priority)] = int(count)
    if +counted != +found.ghosts or min(counted.values(), default=0) < 0:
        found.wrong.append(f"ghosts: counted {dict(counted)}, there are {dict(found.ghosts)}")


def _check_expiry(found: Places) -> None:
    entries = Counter(task_id for _, zset in found.kinds("expiry") for task_id in zset)
    ended = Counter(task_id for task_id, task in found.tasks.items() if task["status"].decode() in TERMINAL)
    if entries != ended:
        found.wrong.append(f"expiry has {entries - ended} too much and lacks {ended - entries}")
    for (tid,), zset in found.kinds("expiry"):
        found.expiry.update(zset)
        for task_id in zset:
            task = found.tasks.get(task_id)
            if task and not task["queue"].startswith(f"{tid}:".encode()):
                found.wrong.append(f"{task_id} is in the expiry of {tid}, which is not its tenant")


def _check_due(found: Places) -> None:
    due = {queue: moment for _, zset in found.kinds("due") for queue, moment in zset.items()}
    for (tid, command, part, *_), value in found.kinds("q"):
        if part in ("delayed", "inprog"):
            queue, first = f"{tid}:{command}", min(value.values())
            if queue not in due or due[queue] > first:
                found.wrong.append(f"due says {due.get(queue)} for {queue}, whose first {part} is at {first}")


def _check_idempotency(found: Places) -> None:
    for (tid, digest), task_id in found.kinds("idem"):
        found.idem[tid, digest] = task_id.decode()
        task = found.tasks.get(task_id.decode())
        if task is None:
            found.wrong.append(f"idempotency key {digest} maps to {task_id!r}, which does not exist")
        elif task["idem"].decode() != digest or not task["queue"].startswith(f"{tid}:".encode()):
            found.wrong.append(f"idempotency key {digest} of {tid} maps to {task_id!r}, which is not its own")


def _check_events(found: Places) -> None:
    """One entry per ended attempt, numbered without gaps; the last one tells what the task is now."""
    for _, entries in found.kinds("events"):
        for entry in entries:
            found.events[entry["id"]].append(entry)
    for task_id, entries in found.events.items():
        numbers = [int(entry["attempt"]) for entry in entries if entry["attempt"] != "0"]
        if numbers != list(range(1, len(numbers) + 1)):
            found.wrong.append(f"{task_id} has entries for attempts {numbers}")
        final = [entry for entry in entries if entry["outcome"] in TERMINAL]
        if len(final) > 1 or (final and final[0] is not entries[-1]):
            found.wrong.append(f"{task_id} went on after its end: {[entry['outcome'] for entry in entries]}")
    for task_id, task in found.tasks.items():
        entries, status = found.events.get(task_id, []), task["status"].decode()
        ended = int(task.get("attempts", 0)) + int(task.get("past", 0))
        if status == "COMPLETED" or (status == "CANCELLED" and entries and entries[-1]["attempt"] != "0"):
            ended += 1
        told = sum(entry["attempt"] != "0" for entry in entries)
        if told != ended:
            found.wrong.append(f"{task_id} has ended {ended} attempts and {told} entries say so")
        if status in TERMINAL and (not entries or entries[-1]["status"] != status):
            found.wrong.append(f"{task_id} is {status} and its last entry is {entries[-1:]}")


def stats_of(found: Places, tid: str, command: str) -> QueueStats:
    """What `stats` must say of a queue: counted, not remembered."""
    queue = f"{tid}:{command}"
    mine = Counter(
        place
        for task_id, where in found.places.items()
        for place in where
        if task_id in found.tasks and found.tasks[task_id]["queue"].decode() == queue
    )
    by_priority = [mine[f"ready {priority}"] for priority in keys.PRIORITIES]
    states = {(name, command): state for (name,), hash_ in found.kinds("queues") for command, state in hash_.items()}
    return QueueStats(
        command=command,
        ready=sum(by_priority),
        delayed=mine["delayed"],
        in_progress=mine["inprog"],
        dlq=mine["dlq"],
        is_paused=states[tid, command].startswith(b"paused"),
        ready_by_priority=by_priority,
    )


def checked(client: redis.Redis, engine: Engine) -> Places:
    """The places, after asserting that nothing is wrong and that `stats` counts the same."""
    found = places(client)
    for (tid,), hash_ in found.kinds("queues"):
        said = {stats.command: stats for stats in queries.stats(engine, tid).run_sync()}
        for command in hash_:
            expected, answer = stats_of(found, tid, command), said.pop(command, None)
            # When the oldest came is said from the first in line, which may be a ghost: not counted here.
            if answer is None or _counts(answer) != _counts(expected):
                found.wrong.append(f"stats of {tid}:{command}: {answer} where {expected} is true")
        found.wrong += [f"stats of {tid} tell of {command}, which it has not" for command in said]
    assert not found.wrong, "\n".join(found.wrong)
    return found


def _counts(stats: QueueStats) -> tuple[Any, ...]:
    return (
        stats.ready, stats.delayed, stats.in_progress, stats.dlq, stats.is_paused, stats.ready_by_priority,
    )  # fmt: skip


class World:
    """An engine whose clock moves when told, on one server."""

    def __init__(
        self,
        client: redis.Redis,
        *,
        clock: Callable[[], int] | None = None,
        runner: Runner | None = None,
        **options: Any,
    ) -> None:
        self.client = client
        if runner is None:
            runner = ClusterRunner(client) if isinstance(client, ClusterClient) else SyncRunner(client)
        self.engine = Engine(runner, Options(**options), clock)

    def check(self) -> Places:
        return checked(self.client, self.engine)


def new(command: str = "send", payload: str = "{}", **asked: Any) -> NewTask:
    return NewTask(command=command, payload=payload, **asked)


__all__ = [
    "DAY_MS", "LONG", "OTHER_TID", "TID", "Clock", "Location", "Places", "World", "checked", "dump", "lasting", "new",
    "places", "stats_of",
]  # fmt: skip
