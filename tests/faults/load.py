"""Producers and workers that talk HTTP as clients do, and note how long every answer took."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, NamedTuple

TASKS = "/v1/codeq/tasks"


class Answered(NamedTuple):
    began: float
    seconds: float
    what: str
    status: int  # 0 = none came


class Client:
    """One connection that is kept, and a new token every few seconds: a genuine one that no process has seen."""

    def __init__(self, port: int, tokens: Sequence[str], heard: list[Answered]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self._tokens, self._heard = tokens, heard
        self._began = time.monotonic()

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        began = time.monotonic()
        token = self._tokens[int((began - self._began) / 2) % len(self._tokens)]
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        status, said = 0, b""
        try:
            self._connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = self._connection.getresponse()
            status, said = response.status, response.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
        self._heard.append(Answered(began, time.monotonic() - began, path.rpartition("/")[2], status))
        return status, json.loads(said) if said else None

    def close(self) -> None:
        self._connection.close()


class Load:
    """`with Load(...) as load:` some eighty tasks a second go all the way; at the end every one that was made."""

    def __init__(self, port: int, producer: Sequence[str], worker: Sequence[str], *, pairs: int = 3) -> None:
        self.port = port
        self.connections = 2 * pairs
        self.heard: list[Answered] = []
        self.looks: list[Answered] = []
        self.made: list[str] = []
        self.done: list[str] = []
        self._ending, self._all_made = threading.Event(), threading.Event()
        self._producers = [self._thread(self._produce, producer[n::pairs]) for n in range(pairs)]
        self._others = [self._thread(self._work, worker[n::pairs]) for n in range(pairs)]
        self._others.append(self._thread(self._look, producer[:1]))

    def _thread(self, target: Callable[[Client], None], tokens: Sequence[str]) -> threading.Thread:
        heard = self.looks if target == self._look else self.heard

        def run() -> None:
            with closing(Client(self.port, tokens, heard)) as client:
                target(client)

        return threading.Thread(target=run, daemon=True)

    def __enter__(self) -> Load:
        for thread in [*self._producers, *self._others]:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._producers:
            thread.join(60)
        self._all_made.set()
        for thread in self._others:
            thread.join(60)

    def _produce(self, client: Client) -> None:
        while not self._ending.wait(0.035):
            status, task = client.ask("POST", TASKS, {"command": "render", "payload": {"n": len(self.made)}})
            if status == 202:
                self.made.append(task["id"])

    def _work(self, client: Client) -> None:
        while True:
            status, answer = client.ask("POST", f"{TASKS}/claim/batch", {"commands": ["render"], "count": 5})
            for task in answer["tasks"] if status == 200 else ():
                if client.ask("POST", f"{TASKS}/{task['id']}/result", self._result())[0] == 200:
                    self.done.append(task["id"])
            if status != 200:
                if self._all_made.is_set():
                    return
                self._ending.wait(0.02) or time.sleep(0.02)

    def _result(self) -> dict[str, object]:
        """Mostly small; some that PostgreSQL would not take as they are, some large, some with a file."""
        number = len(self.done)
        result: dict[str, object] = {"status": "COMPLETED", "result": {"n": number}}
        if number % 25 == 0:
            result["result"] = {"nul": "\0", "large": "x" * 100_000}
        if number % 10 == 0:
            result["artifacts"] = [{"name": "a.txt", "contentBase64": "aGVsbG8="}]
        return result

    def _look(self, client: Client) -> None:
        """A load balancer asks every second."""
        while not self._all_made.wait(1):
            client.ask("GET", "/readyz")

    def between(self, begin: float, end: float) -> list[Answered]:
        return [each for each in self.heard if begin <= each.began < end]


def percentile_ms(answers: Sequence[Answered], share: float = 0.99) -> float:
    took = sorted(each.seconds for each in answers)
    return 1000 * took[min(len(took) - 1, int(len(took) * share))]
