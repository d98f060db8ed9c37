"""What the engine costs inside Redis: script time per task, memory per task, and what does not grow.

    python -m bench.engine [--quick]

Times are Valkey's own (`INFO commandstats`), the least of three repeats, and beside each the ratio to
`EVALSHA return 1` measured in the same run: the machine's speed cancels out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from codeq_site.devserver.embedded import DURABLE, Valkey
from core.redis.runners import SyncRunner
from core.redis.script_call import ScriptCall
from queues.domain import NewResult, NewTask, Status, Task
from queues.engine import Engine, Options, maintenance_commands, producer_commands, queries, worker_commands

DAY_MS = 86_400_000
PAYLOAD = json.dumps({"to": "someone@example.com", "subject": "x" * 120, "n": 1234567, "at": "2026-01-01T00:00:00Z"})
PAYLOAD += " " * (200 - len(PAYLOAD))


class World:
    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.engine = Engine(SyncRunner(client), Options())

    def script_us(self, work: Callable[[], int], repeats: int = 3) -> float:
        """Microseconds of script time per unit that `work` says it did; the least of the repeats."""
        found = []
        for _ in range(repeats):
            self.client.config_resetstat()
            units = work()
            found.append(self.client.info("commandstats")["cmdstat_evalsha"]["usec"] / units)
        return min(found)

    def enqueue(self, tid: str, count: int, batch: int, **asked: Any) -> int:
        new = NewTask(command="send", payload=PAYLOAD, **asked)
        for _ in range(count // batch):
            producer_commands.enqueue(self.engine, tid, "bench", [new] * batch, retention_ms=DAY_MS).run_sync()
        return count

    def claim(self, tid: str, count: int, batch: int, lease_ms: int = 300_000) -> list[list[Task]]:
        return [
            worker_commands.claim(self.engine, tid, ["send"], "w", lease_ms=lease_ms, limit=batch).run_sync().tasks
            for _ in range(count // batch)
        ]

    def submit(self, tid: str, claims: list[list[Task]]) -> int:
        for tasks in claims:
            results = [
                NewResult(task_id=t.id, status=Status.COMPLETED, result=b'{"ok":true}', lease_token=t.lease_token)
                for t in tasks
            ]
            worker_commands.submit(self.engine, tid, "w", results, retention_ms=DAY_MS).run_sync()
        return sum(map(len, claims))


@contextmanager
def world() -> Iterator[World]:
    """A Valkey of its own, configured as `make run` does it, but without a disk."""
    directory = Path(tempfile.mkdtemp(prefix="codeq-b"))
    server = Valkey(directory / "data", directory / "log", directory / "s", {**DURABLE, "appendonly": "no"})
    server.start()
    try:
        yield World(redis.Redis.from_url(server.url))
    finally:
        server.kill()
        shutil.rmtree(directory, ignore_errors=True)


def row(what: str, figure: str, target: str = "", is_met: bool | None = None) -> None:
    mark = {True: "ok", False: "MISSED", None: ""}[is_met]
    print(f"{what:<58} {figure:>24}   {target:<18} {mark}", flush=True)


def verbs(w: World, count: int) -> None:
    one = w.client.script_load("#!lua\nreturn 1")

    def return_one() -> int:
        for _ in range(count):
            w.client.evalsha(one, 0)
        return count

    base = w.script_us(return_one)
    row("EVALSHA return 1", f"{base:.2f} µs")
    for verb, us in bare(w, count).items():
        row(f"{verb}, its commands alone", f"{us:.2f} µs, {us / base:.1f}x")
    targets = {1: (12, 12, 8), 100: (7, 6, 5)}
    for batch, limits in targets.items():
        w.client.flushall()
        rounds = [one_way(w, f"b{batch}r{repeat}", count, batch) for repeat in range(3)]
        best = [min(found) for found in zip(*rounds, strict=True)]
        for verb, us, limit in zip(("enqueue", "claim", "submit"), best, limits, strict=True):
            row(
                f"{verb}, batches of {batch}",
                f"{us:.2f} µs/task, {us / base:.1f}x",
                f"<= {limit} µs",
                us <= limit,
            )


def one_way(w: World, tid: str, count: int, batch: int) -> tuple[float, float, float]:
    """Script time per task of `count` tasks going all the way: enqueue, claim, submit."""
    claims: list[list[Task]] = []

    def claim() -> int:
        claims.extend(w.claim(tid, count, batch))
        return sum(map(len, claims))

    return (
        w.script_us(lambda: w.enqueue(tid, count, batch), repeats=1),
        w.script_us(claim, repeats=1),
        w.script_us(lambda: w.submit(tid, claims), repeats=1),
    )


# What Redis itself must do for a call, on the same words: no check, no way back, no answer. No script does it for less.
BARE = {
    "enqueue": """
        call('TIME')
        call('EXISTS', ARGV[1] .. 'task:' .. ARGV[10])
        call('HEXISTS', KEYS[4], 'send')
        call('HSET', ARGV[1] .. 'task:' .. ARGV[10], 'spec', ARGV[11], 'queue', ARGV[3], 'priority', ARGV[4],
          'max', ARGV[12], 'status', 'PENDING', 'created', '1234567890123')
        call('LPUSH', KEYS[1], ARGV[10])""",
    "claim": """
        call('TIME')
        call('HMGET', KEYS[2], ARGV[14])
        call('ZSCORE', KEYS[1], 'bare:send')
        local taken = call('LMPOP', 10, KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[12], KEYS[13], KEYS[14], KEYS[15],
          KEYS[16], KEYS[17], 'RIGHT', 'COUNT', 1)
        local id = taken[2][1]
        local key = ARGV[1] .. 'task:' .. id
        local task = call('HMGET', key, 'status', 'lease', 'spec', 'max', 'attempts', 'created', 'visible', 'error')
        call('HSET', key, 'status', 'IN_PROGRESS', 'lease', '1234567890123 ' .. ARGV[4] .. ' ' .. ARGV[3])
        call('ZADD', ARGV[1] .. 'q:bare:send:inprog', '1234567890123', id)
        return { 1, 2, 3, 4, 5, id, task[3], task[4], task[6] }""",
    "submit": """
        call('TIME')
        local ids, ends = {}, {}
        for i = 6, #ARGV, 5 do
          local id = ARGV[i]
          local key = ARGV[1] .. 'task:' .. id
          local task = call('HMGET', key, 'status', 'attempts', 'error', 'ended', 'answer', 'queue', 'lease',
            'priority', 'created', 'visible', 'past', 'awaited')
          call('ZSCORE', ARGV[1] .. 'q:bare:send:inprog', id)
          call('HSET', key, 'status', ARGV[i + 1], 'ended', '1234567890123', 'answer', ARGV[i + 3])
          call('XADD', KEYS[1], '*', 'id', id, 'queue', task[6], 'attempt', 1, 'outcome', ARGV[i + 1], 'status',
            ARGV[i + 1], 'attempts', 0, 'priority', task[8], 'worker', ARGV[3], 'created', task[9], 'visible', task[9],
            'claimed', task[9], 'ended', '1234567890123', 'error', '')
          ids[#ids + 1], ends[#ends + 1], ends[#ends + 2] = id, '1234567890123', id
        end
        call('ZREM', ARGV[1] .. 'q:bare:send:inprog', unpack(ids))
        call('ZADD', KEYS[2], unpack(ends))""",
}


def bare(w: World, count: int) -> dict[str, float]:
    """Script time of each verb's commands alone, one by one; and of a submit's in batches of 100."""
    shas = {verb: w.client.script_load(f"#!lua flags=allow-oom\nlocal call = redis.call{BARE[verb]}") for verb in BARE}
    new, ids = NewTask(command="send", payload=PAYLOAD), []

    def send(verb: str, call: ScriptCall[Any]) -> Any:
        [(_, words)] = call.commands
        return w.client.evalsha(shas[verb], *words[1:])

    def enqueue() -> int:
        for _ in range(count):
            send("enqueue", producer_commands.enqueue(w.engine, "bare", "bench", [new], retention_ms=DAY_MS))
        return count

    def claim() -> int:
        for _ in range(count):
            ids.append(
                send("claim", worker_commands.claim(w.engine, "bare", ["send"], "w", lease_ms=300_000, limit=1))[
                    5
                ].decode()
            )
        return count

    def submit(batch: int) -> int:
        for at in range(0, len(ids), batch):
            done = [
                NewResult(task_id=each, status=Status.COMPLETED, result=b'{"ok":true}', lease_token="0" * 32)
                for each in ids[at : at + batch]
            ]
            send("submit", worker_commands.submit(w.engine, "bare", "w", done, retention_ms=DAY_MS))
        ids.clear()
        return count

    works = {"enqueue": enqueue, "claim": claim, "submit": lambda: submit(1)}
    in_batches = {"enqueue": enqueue, "claim": claim, "submit, batches of 100": lambda: submit(100)}
    found: dict[str, list[float]] = {}
    for verbs_of in (works, in_batches) * 3:
        for verb, work in verbs_of.items():
            found.setdefault(verb, []).append(w.script_us(work, repeats=1))
    return {verb: min(each) for verb, each in found.items()}


def memory(w: World, count: int) -> None:
    w.client.execute_command("FLUSHALL", "SYNC")  # or what is still being freed would be subtracted
    before = w.client.info("memory")["used_memory"]
    w.enqueue("mem", count, 100)
    each = (w.client.info("memory")["used_memory"] - before) / count
    row("memory per pending task, 200-byte payload", f"{each:.0f} bytes", "<= 900 bytes", each <= 900)


def growth(w: World, big: int, tenants: int) -> None:
    """A claim among many, to one among a thousand: tasks in line, tasks in progress, tenants."""

    def claim_us(tid: str) -> float:
        return w.script_us(lambda: len(w.claim(tid, 2000, 1)), repeats=5)

    w.client.execute_command("FLUSHALL", "SYNC")
    w.enqueue("small", 11_000, 100)  # a thousand are left at the end
    small = claim_us("small")
    row("claim, backlog about a thousand", f"{small:.2f} µs")
    w.enqueue("big", big, 1000)
    us = claim_us("big")
    row(f"claim, backlog {big:,}", f"{us:.2f} µs, {us / small:.2f}x", "<= 1.2x", us / small <= 1.2)
    w.claim("big", big - 20_000, 1000)
    w.enqueue("big", 12_000, 100)
    us = claim_us("big")
    row(f"claim, {big - 20_000:,} in progress", f"{us:.2f} µs, {us / small:.2f}x", "<= 1.2x", us / small <= 1.2)
    w.client.execute_command("FLUSHALL", "SYNC")
    fewer = tenants // 10
    few = claim_by_many(w, fewer, fewer)
    row(f"claim, {fewer:,} tenants", f"{few:.2f} µs, {few / small:.2f}x one tenant")
    us = claim_by_many(w, tenants, fewer)
    row(f"claim, {tenants:,} tenants", f"{us:.2f} µs, {us / few:.2f}x", "<= 1.2x", us / few <= 1.2)


def claim_by_many(w: World, tenants: int, claiming: int) -> float:
    """Script time of a claim when `tenants` have work and `claiming` of them, evenly chosen, claim in turn."""
    rounds = 5
    w.client.execute_command("FLUSHALL", "SYNC")
    for n in range(tenants):
        w.enqueue(f"t{n}", rounds + 1, rounds + 1)

    def claim() -> int:
        return sum(len(w.claim(f"t{n}", 1, 1)) for n in range(0, tenants, tenants // claiming))

    return w.script_us(claim, repeats=rounds)


def storms(w: World, count: int) -> None:
    """Every lease over at once, every task due at once: how long until all can be claimed, and the longest script."""
    w.client.flushall()
    w.engine = Engine(SyncRunner(w.client), Options(backoff="fixed", backoff_base_ms=1))
    tid = "storm"
    w.enqueue(tid, count, 1000)
    w.claim(tid, count, 1000, lease_ms=1)
    w.client.config_set("slowlog-log-slower-than", 10_000)
    w.client.slowlog_reset()
    started = time.perf_counter()
    while maintenance_commands.reap(w.engine, tid, "send").run_sync()[0]:
        pass
    reaped = time.perf_counter() - started
    while maintenance_commands.promote(w.engine, tid, "send").run_sync()[0]:
        pass
    took = time.perf_counter() - started
    slow = [entry["duration"] / 1000 for entry in w.client.slowlog_get(100)]
    ready = queries.stats(w.engine, tid).run_sync()[0].ready
    assert ready == count, f"{ready} of {count} claimable"
    row(
        f"{count:,} leases over at once: reap + promote",
        f"{reaped:.1f} + {took - reaped:.1f} s",
        "<= 300 s",
        took <= 300,
    )
    row("scripts over 10 ms among them", f"{len(slow)} (max {max(slow, default=0):.1f} ms)", "0", not slow)
    w.engine = Engine(SyncRunner(w.client), Options())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the size: for a look, not for the record")
    scale = 10 if parser.parse_args().quick else 1
    with world() as w:
        verbs(w, 20_000 // scale)
        memory(w, 100_000 // scale)
        growth(w, 1_000_000 // scale, 10_000 // scale)
        storms(w, 1_000_000 // scale)


if __name__ == "__main__":
    main()
