"""The Python client against a real web process: results, retries, leases and shutdown."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from codeq_client import (
    Client,
    CodeqError,
    Conflict,
    Fail,
    Job,
    LeaseLost,
    NewTask,
    NotFound,
    Retry,
    Unavailable,
    Worker,
)
from core.conf import conf
from core.redis.connections import client
from queues.engine import keys
from tests.queues.api.conftest import NORTH, SOUTH, make_token
from tests.queues.api.web_process import WebProcess
from tests.waiting import until

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "howto" / "python.md"
Run = Callable[[Worker], None]


@pytest.fixture(scope="module")
def web(_database: None) -> Iterator[WebProcess]:
    server = WebProcess()
    yield server
    server.stop()


@pytest.fixture
def codeq(web: WebProcess) -> Iterator[Client]:
    with Client(web.base, make_token("producer")) as client:
        yield client


@pytest.fixture
def worker(web: WebProcess) -> Worker:
    return Worker(web.base, make_token("worker"), slots=4, lease_seconds=2, wait_seconds=0.5)


@pytest.fixture
def start() -> Iterator[Run]:
    """Run a worker in a thread until the end of the test."""
    running: list[tuple[Worker, threading.Thread]] = []

    def run(worker: Worker) -> None:
        thread = threading.Thread(target=worker.run)
        thread.start()
        running.append((worker, thread))

    yield run
    for worker, _ in running:
        worker.stop()
    for _, thread in running:
        thread.join(20)
        assert not thread.is_alive()


def wait_for_result(codeq: Client, task_id: str) -> Any:
    result = codeq.result(task_id, wait_seconds=15)
    assert result is not None
    return result


@pytest.mark.spec("DOC-2", "With the Python client a task is enqueued, processed, and its result read")
def test_handlers_run_and_their_return_values_are_results(codeq: Client, worker: Worker, start: Run) -> None:
    @worker.on("double")
    def double(job: Job) -> dict[str, int]:
        return {"twice": 2 * job.payload["n"]}

    @worker.on("later")
    async def later(job: Job) -> None:
        job.progress(50, note="half")

    start(worker)
    tasks = codeq.enqueue_many([NewTask(command="double", payload={"n": n}, priority=n % 10) for n in range(120)])
    ids = [task.id for task in tasks if not isinstance(task, CodeqError)]
    assert [wait_for_result(codeq, task_id).result for task_id in ids] == [{"twice": 2 * n} for n in range(120)]
    empty_result = wait_for_result(codeq, codeq.enqueue("later", {}).id)
    assert (empty_result.status, empty_result.result, empty_result.attempts) == ("COMPLETED", {}, 0)


def test_handler_decides_how_its_task_ends(codeq: Client, worker: Worker, start: Run) -> None:
    @worker.on("end")
    def end(job: Job) -> Any:
        match job.payload:
            case "retry" if job.attempt == 1:
                raise Retry("not yet", delay_seconds=0)
            case "fail":
                raise Fail("never\0")
            case "raise":
                raise ValueError("no luck")
            case "list":
                return [1]
            case "huge":
                return {"text": "x" * 300_000}
        return {"attempt": job.attempt}

    start(worker)
    results = {
        case: wait_for_result(codeq, codeq.enqueue("end", case, max_attempts=2 if case == "retry" else 1).id)
        for case in ("retry", "fail", "raise", "list", "huge")
    }
    assert (results["retry"].is_completed, results["retry"].result) == (True, {"attempt": 2})
    errors = {case: result.error for case, result in results.items()}
    assert {result.status for case, result in results.items() if case != "retry"} == {"FAILED"}
    assert errors["fail"] == "never\ufffd"
    assert errors["raise"] == "ValueError: no luck"
    assert errors["list"] == "TypeError: the handler of end must return a dict or None, not list"
    assert str(errors["huge"]).startswith("The result was refused: ")


@pytest.mark.real_time
def test_lease_is_extended_while_the_handler_runs(codeq: Client, worker: Worker, start: Run) -> None:
    @worker.on("slow")
    def slow(job: Job) -> None:
        time.sleep(3)  # longer than the lease

    start(worker)
    task = codeq.enqueue("slow", {})
    result = wait_for_result(codeq, task.id)
    assert (result.status, result.attempts) == ("COMPLETED", 0)


def test_cancelled_task_stops_its_handler(codeq: Client, worker: Worker, start: Run) -> None:
    started, lost = threading.Event(), threading.Event()

    @worker.on("long")
    def long(job: Job) -> None:
        started.set()
        try:
            while True:
                job.progress(1)
                time.sleep(0.05)
        except LeaseLost:
            lost.set()
            raise

    start(worker)
    task = codeq.enqueue("long", {})
    assert started.wait(10)
    assert codeq.cancel(task.id).status == "CANCELLED"
    assert lost.wait(10)
    assert codeq.task(task.id).status == "CANCELLED"


def test_stopping_worker_gives_back_tasks_after_the_grace_time(codeq: Client, web: WebProcess) -> None:
    worker = Worker(web.base, make_token("worker"), grace_seconds=0.2)
    started, release = threading.Event(), threading.Event()

    @worker.on("stuck")
    def stuck(job: Job) -> None:
        started.set()
        release.wait(20)

    thread = threading.Thread(target=worker.run)
    thread.start()
    task = codeq.enqueue("stuck", {})
    assert started.wait(10)
    worker.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert (codeq.task(task.id).status, codeq.task(task.id).attempts) == ("PENDING", 1)
    release.set()


@pytest.mark.real_time
def test_idle_worker_stops_at_once_without_claiming(codeq: Client, web: WebProcess) -> None:
    worker = Worker(web.base, make_token("worker"), wait_seconds=25)
    worker.on("idle")(lambda job: None)
    thread = threading.Thread(target=worker.run)
    thread.start()
    until(lambda: is_awaited("idle"))
    stopped_at = time.monotonic()
    worker.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert time.monotonic() - stopped_at < 10  # its claim would have waited 25 seconds
    task = codeq.enqueue("idle", {})
    with Client(web.base, make_token("worker")) as other:
        assert [claimed.id for claimed in other.claim(["idle"], wait_seconds=5)] == [task.id]
    assert codeq.task(task.id).attempts == 0


def is_awaited(command: str) -> bool:
    """Whether a claim waits for this queue."""
    waiting = [keys.of_partition(partition).waiting for partition in range(conf().queues.partitions)]
    return any(name.endswith(f":{command}".encode()) for key in waiting for name in client().zrange(key, 0, -1))


class DelayingProxy:
    """A TCP proxy between worker and service that withholds responses until `let_through`."""

    def __init__(self, web: WebProcess) -> None:
        self._web, self._may_answer = web, threading.Event()
        listening = socket.create_server(("127.0.0.1", 0))
        self.base = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._sockets, self._threads = [listening], list[threading.Thread]()
        self._start(self._accept, listening)

    def let_through(self) -> None:
        self._may_answer.set()

    def close(self) -> None:
        self.let_through()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for sock in self._sockets:
            sock.close()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            worker, _ = listening.accept()
            service = socket.create_connection(("127.0.0.1", self._web.port))
            self._sockets += [worker, service]
            self._start(self._pump, worker, service)
            self._start(self._pump, service, worker, self._may_answer)

    def _pump(self, source: socket.socket, sink: socket.socket, gate: threading.Event | None = None) -> None:
        while data := source.recv(65_536):
            if gate is not None:
                gate.wait(20)
            sink.sendall(data)
        self._may_answer.wait(20)  # delay the end of the stream as well
        sink.shutdown(socket.SHUT_WR)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        def run() -> None:
            with contextlib.suppress(OSError):
                target(*args)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()


def test_task_that_arrives_after_stop_is_completed(codeq: Client, web: WebProcess) -> None:
    proxy = DelayingProxy(web)
    worker = Worker(proxy.base, make_token("worker"), wait_seconds=20)
    worker.on("late")(lambda job: {"attempt": job.attempt})
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        task = codeq.enqueue("late", {})
        until(lambda: codeq.task(task.id).status == "IN_PROGRESS")
        worker.stop()
        proxy.let_through()
        thread.join(20)
        assert not thread.is_alive()
        assert codeq.result(task.id).result == {"attempt": 1}
    finally:
        proxy.close()


def test_no_task_is_lost_if_its_worker_stops_meanwhile(codeq: Client, web: WebProcess) -> None:
    """The stopped worker completes the task, or the task returns to the queue at once."""
    for number in range(20):
        command = f"stopped-{number}"
        worker = Worker(web.base, make_token("worker"), wait_seconds=20, lease_seconds=600)
        worker.on(command)(lambda job: {})
        thread = threading.Thread(target=worker.run)
        thread.start()
        until(functools.partial(is_awaited, command))
        stopping = threading.Timer(number * 0.0005, worker.stop)
        stopping.start()
        task = codeq.enqueue(command, {})
        stopping.join()
        thread.join(20)
        assert not thread.is_alive()
        if codeq.task(task.id).status != "COMPLETED":
            with Client(web.base, make_token("worker")) as other:
                (again,) = other.claim([command], wait_seconds=5)
                assert again.id == task.id


def test_worker_raises_errors_that_retries_cannot_fix(web: WebProcess) -> None:
    worker = Worker(web.base, make_token("producer"))
    with pytest.raises(ValueError, match="has no handlers"):
        worker.run()
    worker.on("any")(lambda job: None)
    with pytest.raises(CodeqError) as refused:
        worker.run()
    assert refused.value.status in (401, 403)


class LossyTransport(httpx.HTTPTransport):
    """A transport that loses the first `lose` responses."""

    def __init__(self, lose: int) -> None:
        super().__init__()
        self.remaining = lose

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if self.remaining:
            self.remaining -= 1
            response.read()
            raise httpx.ReadError("the response was lost")
        return response


def test_enqueue_with_a_lost_response_creates_one_task(web: WebProcess, codeq: Client) -> None:
    with Client(web.base, make_token("producer"), transport=LossyTransport(2)) as lossy:
        task = lossy.enqueue("lost", {})
        again = lossy.enqueue("lost", {})
    assert task.id != again.id
    with Client(web.base, make_token("worker")) as claiming:
        claimed = claiming.claim(["lost"], count=10)
        assert {claimed_task.id for claimed_task in claimed} == {task.id, again.id}
        with Client(web.base, make_token("worker"), transport=LossyTransport(1)) as lossy:
            assert lossy.complete(claimed[0], {"n": 1}).result == {"n": 1}
        with pytest.raises(Conflict) as late:
            claiming.complete(claimed[0], {"n": 2})
        assert late.value.code == "already_ended"
    with pytest.raises(NotFound):
        codeq.result("00000000-0000-7000-8000-000000000000")
    assert codeq.result(claimed[1].id, wait_seconds=0.2) is None


def test_short_retry_after_is_honoured_and_a_long_one_raised() -> None:
    responses = iter([
        httpx.Response(503, headers={"Retry-After": "0.1"}, json={"code": "unavailable", "detail": "soon"}),
        httpx.Response(502, text="<html>a proxy</html>"),
        httpx.Response(429, headers={"Retry-After": "3600"}, json={"code": "too_many_requests", "detail": "later"}),
    ])  # fmt: skip
    with Client("http://codeq.test", "token", transport=httpx.MockTransport(lambda _: next(responses))) as client:
        with pytest.raises(CodeqError) as refused:
            client.task("x")
        assert (refused.value.status, refused.value.retry_after_seconds) == (429, 3600)
    bad_gateway = httpx.MockTransport(lambda _: httpx.Response(502, text="<html>a proxy</html>"))
    with (
        Client("http://codeq.test", "token", max_tries=2, transport=bad_gateway) as client,
        pytest.raises(Unavailable) as unavailable,
    ):
        client.task("x")
    assert "Check the base URL" in str(unavailable.value)


def test_rejected_token_is_replaced_once(web: WebProcess) -> None:
    tokens = iter(["expired", make_token("producer")])
    with Client(web.base, lambda: next(tokens)) as client:
        assert client.enqueue("any", {}).status == "PENDING"
    with Client(web.base, lambda: "never any good") as client, pytest.raises(CodeqError) as refused:
        client.enqueue("any", {})
    assert refused.value.status == 401
    assert "never any good" not in repr(client) + str(refused.value)


def test_rejected_token_does_not_count_as_a_try() -> None:
    responses = iter([
        httpx.Response(401, json={"code": "unauthenticated", "detail": "expired"}),
        httpx.Response(503, json={"code": "unavailable", "detail": "soon"}),
        httpx.Response(503, json={"code": "unavailable", "detail": "later"}),
    ])  # fmt: skip
    transport = httpx.MockTransport(lambda _: next(responses))
    with (
        Client("http://codeq.test", lambda: "token", max_tries=2, transport=transport) as client,
        pytest.raises(Unavailable, match="later"),
    ):
        client.task("x")


def start_program(text: str, web: WebProcess, tenant: str) -> subprocess.Popen[str]:
    environ = {
        "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "CODEQ": web.base,
        "PRODUCER": make_token("producer", tenant), "WORKER": make_token("worker", tenant),
    }  # fmt: skip
    return subprocess.Popen([sys.executable, "-c", text], env=environ, cwd=ROOT, stdout=-1, stderr=-1, text=True)


@pytest.mark.spec("DOC-2", "The programs of docs/howto/python.md and the example worker run unchanged and stop cleanly")
def test_documented_programs_run(web: WebProcess) -> None:
    producing, working = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    example = (ROOT / "examples" / "worker.py").read_text(encoding="utf-8")
    workers = [start_program(working, web, NORTH), start_program(example, web, SOUTH)]
    with Client(web.base, make_token("producer", SOUTH)) as codeq:
        try:
            producer = start_program(producing, web, NORTH)
            output, problem = producer.communicate(timeout=40)
            assert (producer.returncode, output) == (0, "COMPLETED {'sum': 6}\n"), problem
            assert wait_for_result(codeq, codeq.enqueue("ADD", {"numbers": [1, 2.5]}).id).result == {"sum": 3.5}
            assert (
                wait_for_result(codeq, codeq.enqueue("ADD", {"numbers": ["one"]}).id).error
                == "only numbers can be added"
            )
            again = codeq.enqueue("COUNT_DOWN", {"from": 2, "failsAt": 1})
            assert (wait_for_result(codeq, again.id).status, codeq.task(again.id).attempts) == ("COMPLETED", 1)
            task = codeq.enqueue("COUNT_DOWN", {"from": 20})
            until(lambda: codeq.task(task.id).status == "IN_PROGRESS", 10)
        finally:
            for process in workers:
                process.send_signal(signal.SIGTERM)
            problems = [process.communicate(timeout=20)[1] for process in workers]
        assert [process.returncode for process in workers] == [0, 0], problems
        assert codeq.task(task.id).status == "COMPLETED"
