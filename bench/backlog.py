"""Measure how far the audit falls behind at full load, and how fast it catches up.

A client sends batches of 100 to one web process: new tasks, and exchanges, which submit the last tasks' results and
claim the next tasks. The drain runs in a process of its own, once per second, as the Celery worker runs it. Client, web
process, drain and both servers share this machine's cores.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
import time

import psutil
import uvloop

from bench.http import ROOT, TASK, Connection, build_request, connect, start_web
from bench.servers import print_row, start_servers

BATCH = 100
CLIENTS = 4
SAMPLE_SECONDS = 1.0
MAX_BACKLOG = 100_000
# The duration of the load before the drain starts. It then catches up without other load.
LOAD_BEFORE_DRAIN_SECONDS = 5.0


async def send_cycles(port: int, producer: str, worker: str, until: float) -> int:
    """Enqueue, claim and complete tasks until this time. Return how many were completed."""
    completed = 0
    enqueue = build_request("POST", "/v1/codeq/tasks/batch", producer, {"tasks": [TASK] * BATCH})

    async def post(connection: Connection, request: bytes) -> bytes:
        response = await connection.send(request)
        if response.status != 200:
            raise SystemExit(f"status {response.status}: {response.body[:300]!r}")
        return response.body

    async def run_cycles() -> None:
        nonlocal completed
        connection = await connect(port)
        results: list[object] = []
        while time.monotonic() < until:
            await post(connection, enqueue)
            body = {"commands": ["send"], "count": BATCH, "results": results}
            reply = json.loads(await post(connection, build_request("POST", "/v1/codeq/tasks/exchange", worker, body)))
            completed += len(results)
            results = [
                {"taskId": task["id"], "status": "COMPLETED", "result": {"ok": True}, "leaseToken": task["leaseToken"]}
                for task in reply["tasks"]
            ]
        connection.transport.close()

    await asyncio.gather(*(run_cycles() for _ in range(CLIENTS)))
    return completed


def run_drain_every_second() -> None:
    """Run the periodic task every second, as Celery does.

    Start with the first line on the standard input, and end with the input.
    """
    import django

    django.setup()
    from queues import periodic_tasks

    print("ready", flush=True)
    sys.stdin.readline()
    is_ended = False
    while not is_ended:
        started = time.monotonic()
        periodic_tasks.drain()
        is_ended = bool(select.select([sys.stdin], [], [], max(0.0, 1 - (time.monotonic() - started)))[0])


async def sample_backlog(until: float, samples: list[int]) -> None:
    from queues.audit import stream

    while time.monotonic() < until:
        await asyncio.sleep(SAMPLE_SECONDS)
        samples.append(await asyncio.to_thread(stream.lag))


async def run_load(port: int, producer: str, worker: str, seconds: float) -> tuple[int, list[int]]:
    until = time.monotonic() + seconds
    samples: list[int] = []
    completed, _ = await asyncio.gather(send_cycles(port, producer, worker, until), sample_backlog(until, samples))
    return completed, samples


class CpuTimes:
    """The CPU time of processes and their children since the creation of this object."""

    def __init__(self, **processes: psutil.Process) -> None:
        self.processes = processes
        self.start = self._read()

    def _read(self) -> dict[str, float]:
        return {name: _cpu_of_tree(process) for name, process in self.processes.items()}

    def per_event(self, events: int) -> str:
        now = self._read()
        return ", ".join(f"{name} {(now[name] - self.start[name]) / max(1, events) * 1e6:.1f}" for name in now) + " µs"


def _cpu_of_tree(process: psutil.Process) -> float:
    seconds = 0.0
    for member in [process, *process.children(recursive=True)]:
        try:
            times = member.cpu_times()
        except psutil.NoSuchProcess:
            continue
        seconds += times.user + times.system
    return seconds


def measure_backlog(seconds: float) -> None:
    settings = {
        "CODEQ_AUTH_PROVISION_TENANTS": "true",
        "CODEQ_LIMITS_CREATE_PER_SECOND": "0",
        "CODEQ_LIMITS_CLAIM_PER_SECOND": "0",
        "CODEQ_QUEUES_CLAIM_BATCH": str(BATCH),
    }
    with (
        start_servers(**settings) as servers,
        start_web("codeq_site.web") as (port, web),
    ):
        from queues.audit import stream
        from tenants.domain import CallerRole
        from tenants.services import issue_token

        producer = issue_token("bench", CallerRole.PRODUCER)
        worker = issue_token("bench", CallerRole.WORKER, "worker-1")
        drain = subprocess.Popen(
            [sys.executable, "-m", "bench.backlog"],
            cwd=ROOT,
            env=dict(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert drain.stdin
        assert drain.stdout
        try:
            waiting, _ = uvloop.run(run_load(port, producer, worker, LOAD_BEFORE_DRAIN_SECONDS))
            drain.stdout.readline()
            cpu = CpuTimes(drain=psutil.Process(drain.pid), postgresql=servers.postgresql, valkey=servers.valkey)
            started = time.monotonic()
            drain.stdin.write(b"\n")
            drain.stdin.flush()
            while stream.lag():
                time.sleep(0.02)
            rate = waiting / (time.monotonic() - started)
            print_row(f"{waiting:,} events stored without other load", f"{rate:,.0f} events/s")
            print_row("  CPU per event", cpu.per_event(waiting))

            cpu = CpuTimes(web=web, **cpu.processes)
            completed, samples = uvloop.run(run_load(port, producer, worker, seconds))
            stored = completed - stream.lag()
            print_row(f"full batched load for {seconds:.0f} s", f"{completed / seconds:,.0f} cycles/s")
            print_row("stored meanwhile", f"{stored / seconds:,.0f} events/s")
            print_row("  CPU per event", cpu.per_event(stored))
            largest = max(samples)
            print_row("most events behind", f"{largest:,}", f"<= {MAX_BACKLOG:,}", largest <= MAX_BACKLOG)
            print("behind, every second: " + " ".join(f"{sample / 1000:.1f}k" for sample in samples))
        finally:
            drain.communicate()


if __name__ == "__main__":
    run_drain_every_second()
