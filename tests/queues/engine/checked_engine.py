"""An engine on a real Valkey, and a consistency check of its whole keyspace.

The check relies on the keys that `queues.engine.keys` documents, but not on how the scripts work.
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

# `make test-long`: the same tests with more repetitions.
LONG = os.environ.get("CODEQ_TEST_LONG") == "1"
DAY_MS = 86_400_000
TID, OTHER_TID = "acme0001", "zeta0002"

# Reads all keys in one script. A script with a `#!lua` line would have to declare every key.
_DUMP = """
local dump = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  local type, value = redis.call('TYPE', key).ok, false
  if type == 'hash' then value = redis.call('HGETALL', key)
  elseif type == 'list' then value = redis.call('LRANGE', key, 0, -1)
  elseif type == 'zset' then value = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  elseif type == 'set' then value = redis.call('SMEMBERS', key)
  elseif type == 'stream' then value = redis.call('XRANGE', key, '-', '+')
  elseif type == 'string' then value = redis.call('GET', key) end
  dump[#dump + 1] = { key, type, value }
end
return dump
"""

Fields = dict[str, bytes]
Event = dict[str, str]


def _pair_fields(flat: list[bytes]) -> Fields:
    return {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}


def _decode_value(kind: str, value: Any) -> Any:
    if kind == "hash":
        return _pair_fields(value)
    if kind == "list":
        return [item.decode() for item in value]
    if kind == "zset":
        return {member.decode(): float(score) for member, score in zip(value[::2], value[1::2], strict=True)}
    if kind == "set":
        return {item.decode() for item in value}
    if kind == "stream":
        return [
            {name: text.decode("utf-8", "replace") for name, text in _pair_fields(flat).items()} for _, flat in value
        ]
    return value


def dump(client: redis.Redis) -> dict[str, Any]:
    """Return every key with its value, except streams without entries."""
    nodes = [client]
    if isinstance(client, ClusterClient):
        nodes = [client.topology.client(address) for address in client.topology.discover_primaries()]
    entries = [entry for node in nodes for entry in node.execute_command("EVAL", _DUMP, 0)]
    keyspace: dict[str, Any] = {}
    for key, kind, value in entries:
        name = key.decode()
        assert name not in keyspace, f"{name} is on two nodes"
        if kind != b"stream" or value:
            keyspace[name] = _decode_value(kind.decode(), value)
    return keyspace


def without_hints(keyspace: dict[str, Any]) -> dict[str, Any]:
    """Return the keyspace without `woken`, `waiting` and `tenants`.

    Scripts do not roll these keys back, because wrong entries in them are harmless.
    """
    return {name: value for name, value in keyspace.items() if not name.endswith(("}:woken", "}:waiting", "}:tenants"))}


@dataclass
class Snapshot:
    """The tasks of a keyspace, the places of each task, and the inconsistencies."""

    keyspace: dict[str, Any]
    tasks: dict[str, Fields] = field(default_factory=dict)
    places: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    scores: dict[str, float] = field(default_factory=dict)  # in delayed, inprog or dlq
    ready: dict[tuple[str, str, int], list[str]] = field(default_factory=dict)  # live ids, next first
    ghosts: Counter[tuple[str, str, int]] = field(default_factory=Counter)  # ids of ended or deleted tasks in `ready`
    events: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    expiry: dict[str, float] = field(default_factory=dict)
    idem: dict[tuple[str, str], str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _by_kind: dict[str, list[tuple[list[str], Any]]] = field(default_factory=lambda: defaultdict(list))

    def status(self, task_id: str) -> str:
        return self.tasks[task_id]["status"].decode() if task_id in self.tasks else "GONE"

    def keys_of_kind(self, kind: str) -> list[tuple[list[str], Any]]:
        """Return all keys of one kind: the parts of the name after the kind, and the value."""
        if not self._by_kind:
            for name, value in self.keyspace.items():
                first, *words = name.partition("}:")[2].split(":")
                self._by_kind[first].append((words, value))
        return self._by_kind.get(kind, [])


def read_snapshot(client: redis.Redis) -> Snapshot:
    """Read the keyspace and list its inconsistencies."""
    snapshot = Snapshot(dump(client))
    snapshot.problems += [
        f"{name} is not a documented key" for name in snapshot.keyspace if not keys.KEY_PATTERN.fullmatch(name)
    ]
    for (task_id,), task in snapshot.keys_of_kind("task"):
        snapshot.tasks[task_id] = task
    _read_indexes(snapshot)
    _check_tasks(snapshot)
    _check_ghosts(snapshot)
    _check_expiry(snapshot)
    _check_due(snapshot)
    _check_idempotency(snapshot)
    _check_events(snapshot)
    return snapshot


def _read_indexes(snapshot: Snapshot) -> None:
    for (tid, command, part, *rest), value in snapshot.keys_of_kind("q"):
        queue = f"{tid}:{command}"
        if part == "ready":
            ready = snapshot.ready[tid, command, int(rest[0])] = []
            for task_id in reversed(value):
                task = snapshot.tasks.get(task_id)
                if task is None or task["status"].decode() in TERMINAL:
                    snapshot.ghosts[tid, command, int(rest[0])] += 1
                    continue
                ready.append(task_id)
                snapshot.places[task_id][f"ready {rest[0]}"] += 1
                if task["queue"].decode() != queue or int(task["priority"]) != int(rest[0]):
                    snapshot.problems.append(
                        f"{task_id} is ready in {queue} {rest[0]}, which is not its queue and priority"
                    )
            continue
        for task_id, score in value.items():
            snapshot.places[task_id][part] += 1
            snapshot.scores[task_id] = score
            task = snapshot.tasks.get(task_id)
            if task is None:
                snapshot.problems.append(f"{part} of {queue} names {task_id}, which does not exist")
            elif task["queue"].decode() != queue:
                snapshot.problems.append(f"{task_id} is in {part} of {queue}, which is not its queue")


def _check_tasks(snapshot: Snapshot) -> None:
    queues = {(tid, command) for (tid,), hash_ in snapshot.keys_of_kind("queues") for command in hash_}
    listed = {tid for _, tids in snapshot.keys_of_kind("tenants") for tid in tids}
    snapshot.problems += [f"tenant {tid} has a queue and is not listed" for tid in {tid for tid, _ in queues} - listed]
    for task_id, task in snapshot.tasks.items():
        places, status = snapshot.places[task_id], task["status"].decode()
        if status in TERMINAL and not places:
            places["terminal"] += 1
        if places.total() != 1:
            snapshot.problems.append(f"{task_id} ({status}) is in {dict(places)}")
        allowed = {
            "PENDING": places.keys() <= {"delayed", f"ready {int(task['priority'])}"},
            "IN_PROGRESS": places.keys() <= {"inprog"},
            "FAILED": places.keys() <= {"dlq", "terminal"},
        }.get(status, places.keys() <= {"terminal"})
        if not allowed:
            snapshot.problems.append(f"{task_id} is {status} and in {dict(places)}")
        attempts, max_attempts = int(task.get("attempts", 0)), int(task["max"])
        if not 0 <= attempts <= max_attempts or ("dlq" in places and attempts != max_attempts):
            snapshot.problems.append(f"{task_id} ({dict(places)}) has had {attempts} of {max_attempts} attempts")
        tid, _, command = task["queue"].decode().partition(":")
        if (tid, command) not in queues:
            snapshot.problems.append(f"{task_id} is of {tid}:{command}, which is not among the queues")


def _check_ghosts(snapshot: Snapshot) -> None:
    counted: Counter[tuple[str, str, int]] = Counter()
    for (tid,), hash_ in snapshot.keys_of_kind("ghosts"):
        for name, count in hash_.items():
            command, _, priority = name.partition(":")
            counted[tid, command, int(priority)] = int(count)
    if +counted != +snapshot.ghosts or min(counted.values(), default=0) < 0:
        snapshot.problems.append(f"ghosts: counted {dict(counted)}, there are {dict(snapshot.ghosts)}")


def _check_expiry(snapshot: Snapshot) -> None:
    entries = Counter(task_id for _, zset in snapshot.keys_of_kind("expiry") for task_id in zset)
    ended = Counter(task_id for task_id, task in snapshot.tasks.items() if task["status"].decode() in TERMINAL)
    if entries != ended:
        snapshot.problems.append(f"expiry has {entries - ended} in excess and lacks {ended - entries}")
    for (tid,), zset in snapshot.keys_of_kind("expiry"):
        snapshot.expiry.update(zset)
        for task_id in zset:
            task = snapshot.tasks.get(task_id)
            if task and not task["queue"].startswith(f"{tid}:".encode()):
                snapshot.problems.append(f"{task_id} is in the expiry of {tid}, which is not its tenant")


def _check_due(snapshot: Snapshot) -> None:
    due = {queue: moment for _, zset in snapshot.keys_of_kind("due") for queue, moment in zset.items()}
    for (tid, command, part, *_), value in snapshot.keys_of_kind("q"):
        if part in ("delayed", "inprog"):
            queue, first = f"{tid}:{command}", min(value.values())
            if queue not in due or due[queue] > first:
                snapshot.problems.append(f"due says {due.get(queue)} for {queue}, whose first {part} is at {first}")


def _check_idempotency(snapshot: Snapshot) -> None:
    for (tid, digest), task_id in snapshot.keys_of_kind("idem"):
        snapshot.idem[tid, digest] = task_id.decode()
        task = snapshot.tasks.get(task_id.decode())
        if task is None:
            snapshot.problems.append(f"idempotency key {digest} maps to {task_id!r}, which does not exist")
        elif task["idem"].decode() != digest or not task["queue"].startswith(f"{tid}:".encode()):
            snapshot.problems.append(f"idempotency key {digest} of {tid} maps to {task_id!r}, which has another key")


def _check_events(snapshot: Snapshot) -> None:
    """Check that each ended attempt has one event; the last has the task's status."""
    for _, entries in snapshot.keys_of_kind("events"):
        for entry in entries:
            snapshot.events[entry["id"]].append(entry)
    for task_id, entries in snapshot.events.items():
        numbers = [int(entry["attempt"]) for entry in entries if entry["attempt"] != "0"]
        if numbers != list(range(1, len(numbers) + 1)):
            snapshot.problems.append(f"{task_id} has entries for attempts {numbers}")
        final = [entry for entry in entries if entry["outcome"] in TERMINAL]
        if len(final) > 1 or (final and final[0] is not entries[-1]):
            snapshot.problems.append(f"{task_id} has events after its end: {[entry['outcome'] for entry in entries]}")
    for task_id, task in snapshot.tasks.items():
        entries, status = snapshot.events.get(task_id, []), task["status"].decode()
        ended = int(task.get("attempts", 0)) + int(task.get("past", 0))
        if status == "COMPLETED" or (status == "CANCELLED" and entries and entries[-1]["attempt"] != "0"):
            ended += 1
        recorded = sum(entry["attempt"] != "0" for entry in entries)
        if recorded != ended:
            snapshot.problems.append(f"{task_id} has {ended} ended attempts, but {recorded} entries")
        if status in TERMINAL and (not entries or entries[-1]["status"] != status):
            snapshot.problems.append(f"{task_id} is {status} and its last entry is {entries[-1:]}")


def expected_stats(snapshot: Snapshot, tid: str, command: str) -> QueueStats:
    """Return the expected `stats` of a queue, from the places of its tasks."""
    queue = f"{tid}:{command}"
    counts = Counter(
        place
        for task_id, places in snapshot.places.items()
        for place in places
        if task_id in snapshot.tasks and snapshot.tasks[task_id]["queue"].decode() == queue
    )
    by_priority = [counts[f"ready {priority}"] for priority in keys.PRIORITIES]
    states = {
        (name, command): state for (name,), hash_ in snapshot.keys_of_kind("queues") for command, state in hash_.items()
    }
    return QueueStats(
        command=command,
        ready=sum(by_priority),
        delayed=counts["delayed"],
        in_progress=counts["inprog"],
        dlq=counts["dlq"],
        is_paused=states[tid, command].startswith(b"paused"),
        ready_by_priority=by_priority,
    )


def check_consistency(client: redis.Redis, engine: Engine) -> Snapshot:
    """Return a snapshot. Fail if it is inconsistent, or if the engine's `stats` differ from it."""
    snapshot = read_snapshot(client)
    for (tid,), hash_ in snapshot.keys_of_kind("queues"):
        stats_by_command = {stats.command: stats for stats in queries.stats(engine, tid).run_sync()}
        for command in hash_:
            expected, stats = expected_stats(snapshot, tid, command), stats_by_command.pop(command, None)
            # The age of the oldest task is not compared, because it is that of the first id, which may be a ghost.
            if stats is None or _select_counts(stats) != _select_counts(expected):
                snapshot.problems.append(f"stats of {tid}:{command}: {stats}, expected {expected}")
        snapshot.problems += [f"stats of {tid} contain {command}, which does not exist" for command in stats_by_command]
    assert not snapshot.problems, "\n".join(snapshot.problems)
    return snapshot


def _select_counts(stats: QueueStats) -> tuple[Any, ...]:
    return stats.ready, stats.delayed, stats.in_progress, stats.dlq, stats.is_paused, stats.ready_by_priority


class CheckedEngine:
    """An engine on a real server, with a clock that the test sets and a check of all keys."""

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

    def check(self) -> Snapshot:
        return check_consistency(self.client, self.engine)


def build_task(command: str = "send", payload: str = "{}", **fields: Any) -> NewTask:
    return NewTask(command=command, payload=payload, **fields)


__all__ = [
    "DAY_MS",
    "LONG",
    "OTHER_TID",
    "TID",
    "CheckedEngine",
    "Clock",
    "Location",
    "Snapshot",
    "build_task",
    "check_consistency",
    "dump",
    "expected_stats",
    "read_snapshot",
    "without_hints",
]  # fmt: skip
