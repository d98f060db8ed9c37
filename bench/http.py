"""What a request costs: one web process with all features on, beside a plain async Django view doing one EVALSHA.

    python -m bench.http [--seconds 5]

Client, web process and Valkey (durable, as `make run` has it) share this machine's cores; both web processes run in the
same minutes, in turn, three rounds, and what is compared is the rate of their best rounds and the p99 of their middle
ones. The client is a few dozen lines of asyncio on keep-alive connections, and costs the same beside both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
import uvloop

from bench.audit import stack
from bench.engine import row
from codeq_site import sockets

ROOT = Path(__file__).resolve().parent.parent
CONNECTIONS = 50
TASK = {
    "command": "send",
    "payload": {"to": "someone@example.com", "subject": "x" * 150, "n": 1234567, "at": "2026-01-01T00:00:00Z"},
    "priority": 5,
}
DONE = {"status": "COMPLETED", "result": {"ok": True, "bytes": 12345}}


class Rate(NamedTuple):
    per_second: float
    p50_ms: float
    p99_ms: float


class Answer(NamedTuple):
    status: int
    body: bytes


class Connection(asyncio.Protocol):
    """One keep-alive connection with one request in flight; knows just the HTTP that our server speaks."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[Answer] | None = None
        self._received = b""
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def ask(self, request: bytes) -> asyncio.Future[Answer]:
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, split, body = self._received.partition(b"\r\n\r\n")
        if not split:
            return
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if len(body) < int(length or 0):
            return
        self._received = b""
        if self._answer and not self._answer.done():
            self._answer.set_result(Answer(int(head[9:12]), body))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer and not self._answer.done():
            self._answer.set_exception(ConnectionError("the server closed the connection"))


def request(method: str, path: str, token: str, body: object) -> bytes:
    text = json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(text)}\r\n"
    if token:
        head += f"Authorization: Bearer {token}\r\n"
    return f"{head}\r\n".encode() + text


async def connect(port: int) -> Connection:
    _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    return connection


async def load(port: int, seconds: float, next_request: Callable[[], bytes | None], wanted: int) -> Rate:
    """Fifty connections that ask one after the other, for so long or until there is nothing more to ask."""
    took: list[float] = []
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds

    async def ask_on() -> None:
        connection = await connect(port)
        while loop.time() < until and (said := next_request()) is not None:
            began = time.perf_counter()  # the loop's own clock goes by milliseconds
            answer = await connection.ask(said)
            took.append(time.perf_counter() - began)
            if answer.status != wanted:
                raise SystemExit(f"{answer.status} where {wanted} was expected: {answer.body[:300]!r}")
        connection.transport.close()

    began = loop.time()
    await asyncio.gather(*(ask_on() for _ in range(CONNECTIONS)))
    took.sort()
    return Rate(len(took) / (loop.time() - began), took[len(took) // 2] * 1e3, took[int(len(took) * 0.99)] * 1e3)


@contextmanager
def web(module: str) -> Iterator[tuple[int, psutil.Process]]:
    """A web process on the benchmark's servers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", module], cwd=ROOT, env=os.environ | {"CODEQ_PORT": str(port)})
    try:
        deadline = time.monotonic() + 30
        while sockets.probe("127.0.0.1", port, "/healthz")[0] == 0:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{module} did not start")
            time.sleep(0.05)
        yield port, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(20)


def summed_up(rounds: list[Rate]) -> Rate:
    """The best round's rate, as others at work only take from it; the middle round's p99, as one round's is a matter
    of whether Valkey rewrote its log in it."""
    return max(rounds)._replace(p99_ms=median(each.p99_ms for each in rounds))


async def rates(port: int, plain_port: int, seconds: float, producer: str, worker: str) -> None:
    found: dict[str, list[Rate]] = {}
    again = request("POST", "/v1/codeq/plain", "", TASK)
    enqueue = request("POST", "/v1/codeq/tasks", producer, TASK)
    claim = request("POST", "/v1/codeq/tasks/claim", worker, {"commands": ["send"]})
    # One alone first: it loads the yardstick's script.
    await (await connect(plain_port)).ask(again)
    await load(plain_port, 1, lambda: again, 202)
    await load(port, 1, lambda: enqueue, 202)
    for _ in range(3):
        found.setdefault("plain", []).append(await load(plain_port, seconds, lambda: again, 202))
        found.setdefault("enqueue", []).append(await load(port, seconds, lambda: enqueue, 202))
        found.setdefault("claim", []).append(await load(port, seconds / 2, lambda: claim, 200))
        held = await claimed(port, worker, int(found["claim"][-1].per_second * seconds / 3))
        results = [request("POST", f"/v1/codeq/tasks/{task}/result", worker, DONE) for task in held]
        found.setdefault("result", []).append(
            await load(port, seconds, lambda left=results: left.pop() if left else None, 200)  # type: ignore[misc]
        )
    plain = summed_up(found["plain"])
    row("plain async view, one EVALSHA", f"{plain.per_second:,.0f}/s  p99 {plain.p99_ms:.1f} ms")
    for verb, least in (("enqueue", 0.55), ("claim", 0.5), ("result", 0.5)):
        rate = summed_up(found[verb])
        ratio = rate.per_second / plain.per_second
        row(
            f"{verb}: token, tenant, limits, metrics, request id",
            f"{rate.per_second:,.0f}/s = {ratio:.2f}x  p99 {rate.p99_ms:.1f} ms",
            f">= {least}x",
            ratio >= least,
        )
        if verb == "enqueue":
            slower = rate.p99_ms / plain.p99_ms
            row("its p99 to the plain view's", f"{slower:.2f}x", "<= 2x", slower <= 2)


async def claimed(port: int, worker: str, count: int) -> list[str]:
    """Ids of tasks that the worker holds now."""
    connection = await connect(port)
    found: list[str] = []
    batch = request("POST", "/v1/codeq/tasks/claim/batch", worker, {"commands": ["send"], "count": 10})
    while len(found) < count:
        answer = await connection.ask(batch)
        if answer.status != 200:
            break
        found += [task["id"] for task in json.loads(answer.body)["tasks"]]
    connection.transport.close()
    return found


async def waiting(port: int, process: psutil.Process, producer: str, worker: str) -> None:
    """Idle long polls: what two thousand cost, and how soon five hundred get what comes."""
    before = process.memory_info().rss
    poll = request("POST", "/v1/codeq/tasks/claim", worker, {"commands": ["rare"], "waitSeconds": 30})
    connections = [await connect(port) for _ in range(2000)]
    answers = [connection.ask(poll) for connection in connections]
    await asyncio.sleep(4)
    process.cpu_percent()
    await asyncio.sleep(10)
    cpu = process.cpu_percent()
    grown = (process.memory_info().rss - before) / 2**20
    row("2,000 idle long polls: CPU of the web process", f"{cpu:.1f} %", "<= 2 %", cpu <= 2)
    row("2,000 idle long polls: memory", f"{grown:.0f} MB", "<= 100 MB", grown <= 100)
    loop = asyncio.get_running_loop()
    sender = await connect(port)
    sent_at: dict[str, float] = {}
    got: list[float] = []

    def arrived(answer: asyncio.Future[Answer]) -> None:
        if not answer.cancelled() and answer.exception() is None and answer.result().status == 200:
            got.append(loop.time() - sent_at[json.loads(answer.result().body)["id"]])

    for answer in answers:
        answer.add_done_callback(arrived)
    new = request("POST", "/v1/codeq/tasks", producer, TASK | {"command": "rare"})
    for _ in range(500):
        began = loop.time()
        said = await sender.ask(new)
        sent_at[json.loads(said.body)["id"]] = began
    await asyncio.sleep(3)
    got.sort()
    p99 = got[int(len(got) * 0.99) - 1] * 1e3 if len(got) == 500 else float("inf")
    row("500 of them woken, enqueue to answer, p99", f"{p99:.1f} ms ({len(got)} woken)", "<= 50 ms", p99 <= 50)
    for connection in connections:
        connection.transport.abort()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5)
    seconds = parser.parse_args().seconds
    # A limit that is never reached still has to be looked at.
    limits = {"CODEQ_LIMITS_CREATE_PER_SECOND": "1000000", "CODEQ_LIMITS_CLAIM_PER_SECOND": "1000000"}
    with (
        stack(CODEQ_AUTH_PROVISION_TENANTS="true", **limits),
        web("codeq_site.web") as (port, process),
        web("bench.plain") as (plain_port, _),
    ):
        from tenants.services import issue_token
        from tenants.tenant import Role

        producer = issue_token("bench", Role.PRODUCER)
        worker = issue_token("bench", Role.WORKER, "worker-1")
        uvloop.run(rates(port, plain_port, seconds, producer, worker))
        uvloop.run(waiting(port, process, producer, worker))


if __name__ == "__main__":
    main()
