"""Measure the engine's cost inside Redis: script time and memory per task.

    python -m bench.engine [--quick]

Valkey measures the script times itself (`INFO commandstats`). Each is the shortest of three or five repetitions,
followed by its ratio to another time of the same run, for example that of `EVALSHA return 1`. The ratio does not depend
on the machine's speed. The time to recover from expired leases is measured once, by this process.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from bench.servers import DAY_MS, PAYLOAD, Bench, print_row, start_bench
from core.redis.runners import SyncRunner
from core.redis.script_call import ScriptCall
from queues.domain import NewResult, NewTask, Task, TaskStatus
from queues.engine import Engine, Options, maintenance_commands, producer_commands, queries, worker_commands


def measure_operations(bench: Bench, count: int) -> None:
    return_one_sha = bench.client.script_load("#!lua\nreturn 1")

    def return_one() -> int:
        for _ in range(count):
            bench.client.evalsha(return_one_sha, 0)
        return count

    base = bench.script_us(return_one)
    print_row("EVALSHA return 1", f"{base:.2f} µs")
    for operation, us in measure_bare_commands(bench, count).items():
        print_row(f"{operation}, its commands alone", f"{us:.2f} µs, {us / base:.1f}x")
    targets = {1: (12, 12, 8), 100: (7, 6, 5)}
    for batch, limits in targets.items():
        bench.client.flushall()
        rounds = [measure_life_cycle(bench, f"b{batch}r{repeat}", count, batch) for repeat in range(3)]
        best = [min(times) for times in zip(*rounds, strict=True)]
        for operation, us, limit in zip(("enqueue", "claim", "submit"), best, limits, strict=True):
            print_row(
                f"{operation}, batches of {batch}",
                f"{us:.2f} µs/task, {us / base:.1f}x",
                f"<= {limit} µs",
                us <= limit,
            )


def measure_life_cycle(bench: Bench, tid: str, count: int, batch: int) -> tuple[float, float, float]:
    """Return the script time per task of enqueue, claim and submit, for `count` tasks."""
    claims: list[list[Task]] = []

    def claim() -> int:
        claims.extend(bench.claim(tid, count, batch))
        return sum(map(len, claims))

    return (
        bench.script_us(lambda: bench.enqueue(tid, count, batch), repeats=1),
        bench.script_us(claim, repeats=1),
        bench.script_us(lambda: bench.submit(tid, claims), repeats=1),
    )


# The Redis commands of each operation with the same arguments, without checks and without a record for a rollback: a
# lower bound of the cost of any script for the operation. Only `claim` replies, because `submit` needs the ids.
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


def measure_bare_commands(bench: Bench, count: int) -> dict[str, float]:
    """Return the script time of each operation's Redis commands without its script's logic."""
    shas = {
        operation: bench.client.script_load(f"#!lua flags=allow-oom\nlocal call = redis.call{commands}")
        for operation, commands in BARE.items()
    }
    new, ids = NewTask(command="send", payload=PAYLOAD), []

    def send(operation: str, call: ScriptCall[Any]) -> Any:
        [(_, arguments)] = call.commands
        return bench.client.evalsha(shas[operation], *arguments[1:])

    def enqueue() -> int:
        for _ in range(count):
            send("enqueue", producer_commands.enqueue(bench.engine, "bare", "bench", [new], retention_ms=DAY_MS))
        return count

    def claim() -> int:
        for _ in range(count):
            ids.append(
                send("claim", worker_commands.claim(bench.engine, "bare", ["send"], "w", lease_ms=300_000, limit=1))[
                    5
                ].decode()
            )
        return count

    def submit(batch: int) -> int:
        for start in range(0, len(ids), batch):
            results = [
                NewResult(task_id=task_id, status=TaskStatus.COMPLETED, result=b'{"ok":true}', lease_token="0" * 32)
                for task_id in ids[start : start + batch]
            ]
            send("submit", worker_commands.submit(bench.engine, "bare", "w", results, retention_ms=DAY_MS))
        ids.clear()
        return count

    single = {"enqueue": enqueue, "claim": claim, "submit": lambda: submit(1)}
    in_batches = {"enqueue": enqueue, "claim": claim, "submit, batches of 100": lambda: submit(100)}
    times: dict[str, list[float]] = {}
    for operations in (single, in_batches) * 3:
        for operation, work in operations.items():
            times.setdefault(operation, []).append(bench.script_us(work, repeats=1))
    return {operation: min(values) for operation, values in times.items()}


def measure_memory(bench: Bench, count: int) -> None:
    bench.client.execute_command("FLUSHALL", "SYNC")  # asynchronous freeing would distort the difference
    before = bench.client.info("memory")["used_memory"]
    bench.enqueue("mem", count, 100)
    bytes_per_task = (bench.client.info("memory")["used_memory"] - before) / count
    print_row(
        "memory per pending task, 200-byte payload",
        f"{bytes_per_task:.0f} bytes",
        "<= 900 bytes",
        bytes_per_task <= 900,
    )


def measure_growth(bench: Bench, big: int, tenants: int) -> None:
    """Compare claims with a large backlog, many leases or many tenants to small ones."""

    def claim_us(tid: str) -> float:
        return bench.script_us(lambda: len(bench.claim(tid, 2000, 1)), repeats=5)

    bench.client.execute_command("FLUSHALL", "SYNC")
    bench.enqueue("small", 11_000, 100)  # a thousand remain after the claims
    small_us = claim_us("small")
    print_row("claim, backlog about a thousand", f"{small_us:.2f} µs")
    bench.enqueue("big", big, 1000)
    us = claim_us("big")
    print_row(f"claim, backlog {big:,}", f"{us:.2f} µs, {us / small_us:.2f}x", "<= 1.2x", us / small_us <= 1.2)
    bench.claim("big", big - 20_000, 1000)
    bench.enqueue("big", 12_000, 100)
    in_progress = big - 10_000  # claim_us has claimed ten thousand
    us = claim_us("big")
    print_row(
        f"claim, {in_progress:,} in progress", f"{us:.2f} µs, {us / small_us:.2f}x", "<= 1.2x", us / small_us <= 1.2
    )
    bench.client.execute_command("FLUSHALL", "SYNC")
    fewer = tenants // 10
    base_us = measure_claims_of_many_tenants(bench, fewer, fewer)
    print_row(f"claim, {fewer:,} tenants", f"{base_us:.2f} µs, {base_us / small_us:.2f}x one tenant")
    us = measure_claims_of_many_tenants(bench, tenants, fewer)
    print_row(f"claim, {tenants:,} tenants", f"{us:.2f} µs, {us / base_us:.2f}x", "<= 1.2x", us / base_us <= 1.2)


def measure_claims_of_many_tenants(bench: Bench, tenants: int, claiming: int) -> float:
    """Return the script time of a claim with many tenants.

    `tenants` have tasks, and `claiming` of them, evenly chosen, claim in turn.
    """
    rounds = 5
    bench.client.execute_command("FLUSHALL", "SYNC")
    for n in range(tenants):
        bench.enqueue(f"t{n}", rounds + 1, rounds + 1)

    def claim() -> int:
        return sum(len(bench.claim(f"t{n}", 1, 1)) for n in range(0, tenants, tenants // claiming))

    return bench.script_us(claim, repeats=rounds)


def measure_storms(bench: Bench, count: int) -> None:
    """Expire all leases and make all tasks due at once.

    Measure the time until all tasks can be claimed, and count the slow scripts.
    """
    bench.client.flushall()
    bench.engine = Engine(SyncRunner(bench.client), Options(backoff="fixed", backoff_base_ms=1))
    tid = "storm"
    bench.enqueue(tid, count, 1000)
    bench.claim(tid, count, 1000, lease_ms=1)
    bench.client.config_set("slowlog-log-slower-than", 10_000)
    bench.client.slowlog_reset()
    started = time.perf_counter()
    while maintenance_commands.reap(bench.engine, tid, "send").run_sync()[0]:
        pass
    reap_seconds = time.perf_counter() - started
    while maintenance_commands.promote(bench.engine, tid, "send").run_sync()[0]:
        pass
    total_seconds = time.perf_counter() - started
    slow_ms = [entry["duration"] / 1000 for entry in bench.client.slowlog_get(100)]
    ready = queries.stats(bench.engine, tid).run_sync()[0].ready
    assert ready == count, f"{ready} of {count} claimable"
    print_row(
        f"{count:,} leases expired at once: reap + promote",
        f"{reap_seconds:.1f} + {total_seconds - reap_seconds:.1f} s",
        "<= 300 s",
        total_seconds <= 300,
    )
    print_row(
        "scripts over 10 ms among them", f"{len(slow_ms)} (max {max(slow_ms, default=0):.1f} ms)", "0", not slow_ms
    )
    bench.engine = Engine(SyncRunner(bench.client), Options())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="use a tenth of the sizes, for a quick check")
    scale = 10 if parser.parse_args().quick else 1
    with start_bench() as bench:
        measure_operations(bench, 20_000 // scale)
        measure_memory(bench, 100_000 // scale)
        measure_growth(bench, 1_000_000 // scale, 10_000 // scale)
        measure_storms(bench, 1_000_000 // scale)


if __name__ == "__main__":
    main()
