"""Producers and workers that use the HTTP API, and record the duration of every request."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, NamedTuple

TASKS = "/v1/codeq/tasks"


class RequestRecord(NamedTuple):
    """A request with its start, its duration and the status of its response."""

    started: float  # on the monotonic clock
    seconds: float
    operation: str
    status: int  # 0 = no response


class Client:
    """A keep-alive connection that changes its token every two seconds.

    The tokens are valid, and new to every process, so that they are not in any cache.
    """

    def __init__(
        self, port: int, tokens: Sequence[str], records: list[RequestRecord], tls: ssl.SSLContext | None = None
    ) -> None:
        self._connection = (
            http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=tls)
            if tls
            else http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        )
        self._tokens, self._records = tokens, records
        self._started = time.monotonic()

    def request(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        started = time.monotonic()
        token = self._tokens[int((started - self._started) / 2) % len(self._tokens)]
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        status, content = 0, b""
        try:
            self._connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = self._connection.getresponse()
            status, content = response.status, response.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
        self._records.append(RequestRecord(started, time.monotonic() - started, path.rpartition("/")[2], status))
        return status, json.loads(content) if content else None

    def close(self) -> None:
        self._connection.close()


class Load:
    """A load of about eighty tasks per second from enqueue to result.

    Use it as `with Load(...) as load:`. At the end of the block, all tasks that were created are completed. `tls` makes
    it use https, as through a proxy.
    """

    def __init__(
        self,
        port: int,
        producer: Sequence[str],
        worker: Sequence[str],
        *,
        pairs: int = 3,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.port, self._tls = port, tls
        self.connections = 2 * pairs
        self.records: list[RequestRecord] = []
        self.probes: list[RequestRecord] = []
        self.created: list[str] = []
        self.completed: list[str] = []
        self._is_ending, self._all_created = threading.Event(), threading.Event()
        self._producers = [self._build_thread(self._produce, producer[n::pairs]) for n in range(pairs)]
        self._others = [self._build_thread(self._work, worker[n::pairs]) for n in range(pairs)]
        self._others.append(self._build_thread(self._probe_readiness, producer[:1]))

    def _build_thread(self, target: Callable[[Client], None], tokens: Sequence[str]) -> threading.Thread:
        records = self.probes if target == self._probe_readiness else self.records

        def run() -> None:
            with closing(Client(self.port, tokens, records, self._tls)) as client:
                target(client)

        return threading.Thread(target=run, daemon=True)

    def __enter__(self) -> Load:
        for thread in [*self._producers, *self._others]:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending.set()
        for thread in self._producers:
            thread.join(60)
        self._all_created.set()
        for thread in self._others:
            thread.join(60)

    def _produce(self, client: Client) -> None:
        while not self._is_ending.wait(0.035):
            status, task = client.request("POST", TASKS, {"command": "render", "payload": {"n": len(self.created)}})
            if status == 202:
                self.created.append(task["id"])

    def _work(self, client: Client) -> None:
        while True:
            status, response = client.request("POST", f"{TASKS}/claim/batch", {"commands": ["render"], "count": 5})
            for task in response["tasks"] if status == 200 else ():
                if client.request("POST", f"{TASKS}/{task['id']}/result", self._build_result())[0] == 200:
                    self.completed.append(task["id"])
            if status != 200:
                if self._all_created.is_set():
                    return
                time.sleep(0.02)

    def _build_result(self) -> dict[str, object]:
        """Build a result: most are small, some have an artifact.

        Some are large and contain NUL, which PostgreSQL rejects.
        """
        number = len(self.completed)
        result: dict[str, object] = {"status": "COMPLETED", "result": {"n": number}}
        if number % 25 == 0:
            result["result"] = {"nul": "\0", "large": "x" * 100_000}
        if number % 10 == 0:
            result["artifacts"] = [{"name": "a.txt", "contentBase64": "aGVsbG8="}]
        return result

    def _probe_readiness(self, client: Client) -> None:
        """Probe the readiness every second, like a load balancer."""
        while not self._all_created.wait(1):
            client.request("GET", "/readyz")

    def between(self, begin: float, end: float) -> list[RequestRecord]:
        return [record for record in self.records if begin <= record.started < end]


def compute_percentile_ms(records: Sequence[RequestRecord], share: float = 0.99) -> float:
    seconds = sorted(record.seconds for record in records)
    return 1000 * seconds[min(len(seconds) - 1, int(len(seconds) * share))]
