"""The Python client, over a real socket against a real web process: what it tells, tries again, and gives back."""

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
from tests.queues.api.test_network import Web
from tests.waiting import until

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "howto" / "python.md"
Run = Callable[[Worker], None]


@pytest.fixture(scope="module")
def web(_database: None) -> Iterator[Web]:
    server = Web()
    yield server
    server.stop()


@pytest.fixture
def codeq(web: Web) -> Iterator[Client]:
    with Client(web.base, make_token("producer")) as client:
        yield client


@pytest.fixture
def worker(web: Web) -> Worker:
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


def ended(codeq: Client, task_id: str) -> Any:
    answer = codeq.result(task_id, wait_seconds=15)
    assert answer is not None
    return answer


@pytest.mark.spec("DOC-2", "With the Python client a task goes all the way: enqueued, worked on, its result read")
def test_functions_run_for_tasks_and_their_values_are_results(codeq: Client, worker: Worker, start: Run) -> None:
    @worker.on("double")
    def double(job: Job) -> dict[str, int]:
        return {"twice": 2 * job.payload["n"]}

    @worker.on("later")
    async def later(job: Job) -> None:
        job.progress(50, note="half")

    start(worker)
    made = codeq.enqueue_many([NewTask(command="double", payload={"n": n}, priority=n % 10) for n in range(120)])
    ids = [task.id for task in made if not isinstance(task, CodeqError)]
    assert [ended(codeq, task_id).result for task_id in ids] == [{"twice": 2 * n} for n in range(120)]
    of_none = ended(codeq, codeq.enqueue("later", {}).id)
    assert (of_none.status, of_none.result, of_none.attempts) == ("COMPLETED", {}, 0)


def test_a_function_says_how_its_task_ends(codeq: Client, worker: Worker, start: Run) -> None:
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
    answers = {
        how: ended(codeq, codeq.enqueue("end", how, max_attempts=2 if how == "retry" else 1).id)
        for how in ("retry", "fail", "raise", "list", "huge")
    }
    assert (answers["retry"].is_completed, answers["retry"].result) == (True, {"attempt": 2})
    errors = {how: answer.error for how, answer in answers.items()}
    assert {answer.status for how, answer in answers.items() if how != "retry"} == {"FAILED"}
    assert errors["fail"] == "never\ufffd"
    assert errors["raise"] == "ValueError: no luck"
    assert errors["list"] == "TypeError: the function for end returned list: not a dict or None"
    assert str(errors["huge"]).startswith("the result was refused: ")


@pytest.mark.real_time
def test_a_lease_is_kept_for_as_long_as_the_work_takes(codeq: Client, worker: Worker, start: Run) -> None:
    @worker.on("slow")
    def slow(job: Job) -> None:
        time.sleep(3)  # longer than the lease

    start(worker)
    task = codeq.enqueue("slow", {})
    answer = ended(codeq, task.id)
    assert (answer.status, answer.attempts) == ("COMPLETED", 0)


def test_a_cancelled_task_ends_its_function(codeq: Client, worker: Worker, start: Run) -> None:
    begun, lost = threading.Event(), threading.Event()

    @worker.on("long")
    def long(job: Job) -> None:
        begun.set()
        try:
            while True:
                job.progress(1)
                time.sleep(0.05)
        except LeaseLost:
            lost.set()
            raise

    start(worker)
    task = codeq.enqueue("long", {})
    assert begun.wait(10)
    assert codeq.cancel(task.id).status == "CANCELLED"
    assert lost.wait(10)
    assert codeq.task(task.id).status == "CANCELLED"


def test_what_runs_too_long_is_given_back_when_the_worker_stops(codeq: Client, web: Web) -> None:
    worker = Worker(web.base, make_token("worker"), grace_seconds=0.2)
    begun, go_on = threading.Event(), threading.Event()

    @worker.on("stuck")
    def stuck(job: Job) -> None:
        begun.set()
        go_on.wait(20)

    thread = threading.Thread(target=worker.run)
    thread.start()
    task = codeq.enqueue("stuck", {})
    assert begun.wait(10)
    worker.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert (codeq.task(task.id).status, codeq.task(task.id).attempts) == ("PENDING", 1)
    go_on.set()


@pytest.mark.real_time
def test_an_idle_worker_stops_at_once_and_takes_nothing_with_it(codeq: Client, web: Web) -> None:
    worker = Worker(web.base, make_token("worker"), wait_seconds=25)
    worker.on("idle")(lambda job: None)
    thread = threading.Thread(target=worker.run)
    thread.start()
    until(lambda: is_awaited("idle"))
    began = time.monotonic()
    worker.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert time.monotonic() - began < 10  # of the 25 seconds for which its claim would have waited
    task = codeq.enqueue("idle", {})
    with Client(web.base, make_token("worker")) as other:
        assert [each.id for each in other.claim(["idle"], wait_seconds=5)] == [task.id]
    assert codeq.task(task.id).attempts == 0


def is_awaited(command: str) -> bool:
    """Whether somebody's claim is parked for this queue."""
    lines = [keys.of_partition(partition).waiting for partition in range(conf().queues.partitions)]
    return any(name.endswith(f":{command}".encode()) for line in lines for name in client().zrange(line, 0, -1))


class Slow:
    """A network between worker and service that keeps the service's answers until they are let through."""

    def __init__(self, web: Web) -> None:
        self._web, self._may_answer = web, threading.Event()
        listening = socket.create_server(("127.0.0.1", 0))
        self.base = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._sockets, self._threads = [listening], list[threading.Thread]()
        self._start(self._accept, listening)

    def let_through(self) -> None:
        self._may_answer.set()

    def close(self) -> None:
        self.let_through()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for each in self._sockets:
            each.close()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            worker, _ = listening.accept()
            service = socket.create_connection(("127.0.0.1", self._web.port))
            self._sockets += [worker, service]
            self._start(self._pump, worker, service)
            self._start(self._pump, service, worker, self._may_answer)

    def _pump(self, source: socket.socket, sink: socket.socket, gate: threading.Event | None = None) -> None:
        while said := source.recv(65_536):
            if gate is not None:
                gate.wait(20)
            sink.sendall(said)
        self._may_answer.wait(20)  # neither is it heard on the other side that this one has hung up
        sink.shutdown(socket.SHUT_WR)

    def _start(self, work: Callable[..., None], *given: Any) -> None:
        def run() -> None:
            with contextlib.suppress(OSError):
                work(*given)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()


def test_a_task_on_its_way_to_a_worker_that_is_stopped_is_done(codeq: Client, web: Web) -> None:
    slow = Slow(web)
    worker = Worker(slow.base, make_token("worker"), wait_seconds=20)
    worker.on("late")(lambda job: {"attempt": job.attempt})
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        task = codeq.enqueue("late", {})
        until(lambda: codeq.task(task.id).status == "IN_PROGRESS")
        worker.stop()
        slow.let_through()
        thread.join(20)
        assert not thread.is_alive()
        assert codeq.result(task.id).result == {"attempt": 1}
    finally:
        slow.close()


def test_no_task_is_lost_to_workers_that_are_stopped_when_it_comes(codeq: Client, web: Web) -> None:
    """It is done by the one that was stopped, or given back at once: never held by nobody until its lease is over."""
    for turn in range(20):
        brink = f"brink-{turn}"
        worker = Worker(web.base, make_token("worker"), wait_seconds=20, lease_seconds=600)
        worker.on(brink)(lambda job: {})
        thread = threading.Thread(target=worker.run)
        thread.start()
        until(functools.partial(is_awaited, brink))
        stopping = threading.Timer(turn * 0.0005, worker.stop)
        stopping.start()
        task = codeq.enqueue(brink, {})
        stopping.join()
        thread.join(20)
        assert not thread.is_alive()
        if codeq.task(task.id).status != "COMPLETED":
            with Client(web.base, make_token("worker")) as other:
                (again,) = other.claim([brink], wait_seconds=5)
                assert again.id == task.id


def test_a_worker_says_at_once_what_will_never_work(web: Web) -> None:
    worker = Worker(web.base, make_token("producer"))
    with pytest.raises(ValueError, match="nothing to do"):
        worker.run()
    worker.on("any")(lambda job: None)
    with pytest.raises(CodeqError) as refused:
        worker.run()
    assert refused.value.status in (401, 403)


class Lossy(httpx.HTTPTransport):
    """Lets everything through, and loses the first answers."""

    def __init__(self, lose: int) -> None:
        super().__init__()
        self.left = lose

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if self.left:
            self.left -= 1
            response.read()
            raise httpx.ReadError("the answer was lost")
        return response


def test_a_task_whose_answer_was_lost_is_sent_again_and_made_once(web: Web, codeq: Client) -> None:
    with Client(web.base, make_token("producer"), transport=Lossy(2)) as lossy:
        task = lossy.enqueue("lost", {})
        again = lossy.enqueue("lost", {})
    assert task.id != again.id
    with Client(web.base, make_token("worker")) as taking:
        claimed = taking.claim(["lost"], count=10)
        assert {each.id for each in claimed} == {task.id, again.id}
        with Client(web.base, make_token("worker"), transport=Lossy(1)) as lossy:
            assert lossy.complete(claimed[0], {"n": 1}).result == {"n": 1}
        with pytest.raises(Conflict) as late:
            taking.complete(claimed[0], {"n": 2})
        assert late.value.code == "already_ended"
    with pytest.raises(NotFound):
        codeq.result("00000000-0000-7000-8000-000000000000")
    assert codeq.result(claimed[1].id, wait_seconds=0.2) is None


def test_it_waits_as_long_as_it_is_told_and_no_longer_than_it_makes_sense() -> None:
    answers = iter([
        httpx.Response(503, headers={"Retry-After": "0.1"}, json={"code": "unavailable", "detail": "soon"}),
        httpx.Response(502, text="<html>a proxy</html>"),
        httpx.Response(429, headers={"Retry-After": "3600"}, json={"code": "too_many_requests", "detail": "later"}),
    ])  # fmt: skip
    with Client("http://codeq.test", "token", transport=httpx.MockTransport(lambda _: next(answers))) as client:
        with pytest.raises(CodeqError) as refused:
            client.task("x")
        assert (refused.value.status, refused.value.retry_after_seconds) == (429, 3600)
    away = httpx.MockTransport(lambda _: httpx.Response(502, text="<html>a proxy</html>"))
    with Client("http://codeq.test", "token", tries=2, transport=away) as client, pytest.raises(Unavailable) as none:
        client.task("x")
    assert "is the address right?" in str(none.value)


def test_a_refused_token_is_asked_for_again_once(web: Web) -> None:
    tokens = iter(["expired", make_token("producer")])
    with Client(web.base, lambda: next(tokens)) as client:
        assert client.enqueue("any", {}).status == "PENDING"
    with Client(web.base, lambda: "never any good") as client, pytest.raises(CodeqError) as refused:
        client.enqueue("any", {})
    assert refused.value.status == 401
    assert "never any good" not in repr(client) + str(refused.value)


def program(text: str, web: Web, tenant: str) -> subprocess.Popen[str]:
    environ = {
        "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "CODEQ": web.base,
        "PRODUCER": make_token("producer", tenant), "WORKER": make_token("worker", tenant),
    }  # fmt: skip
    return subprocess.Popen([sys.executable, "-c", text], env=environ, cwd=ROOT, stdout=-1, stderr=-1, text=True)


@pytest.mark.spec("DOC-2", "The page's programs and the example worker run as they stand, and end what they began")
def test_the_programs_that_are_shown_run(web: Web) -> None:
    producing, working = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    example = (ROOT / "examples" / "worker.py").read_text(encoding="utf-8")
    workers = [program(working, web, NORTH), program(example, web, SOUTH)]
    with Client(web.base, make_token("producer", SOUTH)) as codeq:
        try:
            producer = program(producing, web, NORTH)
            said, problem = producer.communicate(timeout=40)
            assert (producer.returncode, said) == (0, "COMPLETED {'sum': 6}\n"), problem
            assert ended(codeq, codeq.enqueue("ADD", {"numbers": [1, 2.5]}).id).result == {"sum": 3.5}
            assert ended(codeq, codeq.enqueue("ADD", {"numbers": ["one"]}).id).error == "only numbers can be added"
            again = codeq.enqueue("COUNT_DOWN", {"from": 2, "failsAt": 1})
            assert (ended(codeq, again.id).status, codeq.task(again.id).attempts) == ("COMPLETED", 1)
            task = codeq.enqueue("COUNT_DOWN", {"from": 20})
            until(lambda: codeq.task(task.id).status == "IN_PROGRESS", 10)
        finally:
            for each in workers:
                each.send_signal(signal.SIGTERM)
            problems = [each.communicate(timeout=20)[1] for each in workers]
        assert [each.returncode for each in workers] == [0, 0], problems
        assert codeq.task(task.id).status == "COMPLETED"
