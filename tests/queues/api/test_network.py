"""The example client, and requests over a raw connection, to a real web process."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from tests.queues.api.conftest import TASKS, make_token
from tests.queues.api.web_process import WebProcess
from tests.waiting import until

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def web(_database: None) -> Iterator[WebProcess]:
    server = WebProcess()
    yield server
    if server.process.poll() is None:
        server.stop()


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("codeq_example_client", ROOT / "examples" / "client.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.spec("DOC-2", "A client written from the contract alone, with plain urllib, completes a task")
def test_the_example_client_runs(web: WebProcess) -> None:
    ran = subprocess.run(
        [sys.executable, "examples/client.py", web.base, make_token("producer"), make_token("worker")],
        cwd=ROOT, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    words = [line.split() for line in ran.stdout.splitlines()]
    assert [line[0] for line in words] == ["enqueued", "claimed", "heartbeat", "result", "task"]
    assert len({line[1] for line in words}) == 1
    assert (words[3][2:], words[4][2]) == (["COMPLETED", '{"sum":', "6}"], "COMPLETED")


def test_the_example_client_shows_errors(web: WebProcess, example: ModuleType) -> None:
    with pytest.raises(example.Problem) as caught:
        example.Client(web.base, make_token("worker")).enqueue("A", 1)
    assert (caught.value.status, caught.value.code) == (403, "forbidden")


def connect(web: WebProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", web.port), timeout=10)


def read_all(connection: socket.socket) -> bytes:
    """Return all bytes until the other side closes."""
    received = b""
    try:
        while piece := connection.recv(65_536):
            received += piece
    except ConnectionResetError:
        pass
    return received


def request_head(web: WebProcess, method: str, path: str, *more: str, token: str | None = None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{web.port}", "Content-Type: application/json", *more]
    if token is not None:
        lines.append(f"Authorization: Bearer {token}")
    return "\r\n".join([*lines, "", ""]).encode()


def test_an_endless_body_is_read_no_further_than_the_limit(web: WebProcess) -> None:
    with connect(web) as connection:
        connection.sendall(request_head(web, "POST", TASKS, "Transfer-Encoding: chunked", token=make_token("producer")))
        sent = 0
        chunk = b"10000\r\n" + b" " * 65_536 + b"\r\n"
        try:
            while sent < 64 * 2**20:
                connection.sendall(chunk)
                sent += 65_536
        except OSError:
            pass
        assert sent < 32 * 2**20, "the process reads an endless body"


def test_slightly_too_large_body_gets_its_response(web: WebProcess) -> None:
    with connect(web) as connection:
        size = 8 * 2**20 + 1
        lines = (f"Content-Length: {size}", "Connection: close")
        connection.sendall(request_head(web, "POST", TASKS, *lines, token=make_token("producer")))
        connection.sendall(b" " * size)
        response = read_all(connection)
    assert response.startswith(b"HTTP/1.1 413")
    assert b"payload_too_large" in response


@pytest.mark.parametrize(("token", "status"), [(None, b"401"), ("producer", b"413")])
def test_refused_body_is_not_requested(web: WebProcess, token: str | None, status: bytes) -> None:
    lines = ("Content-Length: 99999999", "Expect: 100-continue")
    with connect(web) as connection:
        connection.sendall(request_head(web, "POST", TASKS, *lines, token=token and make_token(token)))
        response = read_all(connection)
    assert response.startswith(b"HTTP/1.1 " + status)
    assert b"connection: close" in response


REQUESTS = {
    "both lengths": ["Content-Length: 5", "Transfer-Encoding: chunked"],
    "two lengths": ["Content-Length: 5", "Content-Length: 50"],
    "two encodings": ["Transfer-Encoding: chunked", "Transfer-Encoding: identity"],
    "folded": ["X-A: b", " c"],
    "a space before the colon": ["Content-Length : 5"],
    "a negative length": ["Content-Length: -5"],
    "no name": [": x"],
    "a null": ["X-A: a\0b"],
    "two hosts": ["Host: evil.example.com"],
    "a line of ten thousand": ["X-A: " + "a" * 10_000],
    "a thousand headers": [f"X-{number}: a" for number in range(1_000)],
}
TARGETS = {
    "absolute": "http://evil.example.com/v1/codeq/tasks",
    "only a host": "evil.example.com:443",
    "a star": "*",
    "two slashes": "//evil.example.com/v1/codeq/tasks",
    "a fragment": "/v1/codeq/tasks#x",
    "an escaped slash": "/v1/codeq%2ftasks",
    "dots": "/v1/codeq/../../admin/",
    "bytes": "/v1/codeq/\xff\x01",
    "a null": "/v1/codeq/tasks/%00",
    "long": "/v1/codeq/tasks/" + "a" * 60_000,
}


@pytest.mark.parametrize("lines", REQUESTS.values(), ids=REQUESTS.keys())
def test_ambiguous_request_is_answered_once_and_never_with_a_5xx(web: WebProcess, lines: list[str]) -> None:
    canary = request_head(web, "GET", "/v1/codeq/smuggled", "Connection: close")
    with connect(web) as connection:
        connection.settimeout(3)
        connection.sendall(request_head(web, "POST", TASKS, *lines) + b"0\r\n\r\n" + canary)
        try:
            response = read_all(connection)
        except TimeoutError:
            response = b""
    statuses = [int(part[9:12]) for part in response.split(b"HTTP/1.1 ")[1:] for part in [b"HTTP/1.1 " + part]]
    assert all(status < 500 for status in statuses), response
    assert len(statuses) <= 2


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_unusual_request_target_reaches_no_route(web: WebProcess, target: str) -> None:
    with connect(web) as connection:
        lines = f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        connection.sendall(lines.encode("latin-1"))
        response = read_all(connection)
    assert response.startswith(b"HTTP/1.1 4"), response[:200]


def test_bare_line_feeds_hide_no_second_request(web: WebProcess) -> None:
    with connect(web) as connection:
        connection.sendall(
            b"GET /healthz HTTP/1.1\nHost: a\nX-A: b\n\nGET /v1/codeq/tasks HTTP/1.1\nHost: a\nConnection: close\n\n"
        )
        response = read_all(connection)
    assert all(part[:1] in (b"2", b"4") for part in response.split(b"HTTP/1.1 ")[1:]), response
    assert response.count(b"HTTP/1.1 ") <= 2


def test_poll_of_a_disconnected_client_takes_no_task(web: WebProcess, example: ModuleType) -> None:
    worker, producer = make_token("worker", sub="hangs-up"), example.Client(web.base, make_token("producer"))
    body = b'{"commands":["DISCONNECT"],"waitSeconds":20}'
    connections = [connect(web) for _ in range(20)]
    for connection in connections:
        connection.sendall(
            request_head(web, "POST", f"{TASKS}/claim", f"Content-Length: {len(body)}", token=worker) + body
        )
    process = psutil.Process(web.process.pid)
    until(
        lambda: (
            len([connection for connection in process.net_connections() if connection.status == "ESTABLISHED"]) >= 20
        )
    )
    time.sleep(0.3)  # until all are parked, which cannot be observed from outside
    for connection in connections:
        connection.close()
    stays = threading.Thread(
        target=lambda: claimed.append(example.Client(web.base, worker).claim("DISCONNECT", wait_seconds=10))
    )
    claimed: list[Any] = []
    stays.start()
    time.sleep(0.2)  # the claim waits by now
    task = producer.enqueue("DISCONNECT", 1)
    stays.join(15)
    assert claimed[0]["id"] == task["id"]
    assert claimed[0]["attempts"] == 0


@pytest.mark.real_time
def test_idle_polls_use_no_cpu(web: WebProcess) -> None:
    """200 polls; `bench/` measures 2,000."""
    body = b'{"commands":["IDLE"],"waitSeconds":25}'
    token = make_token("worker")
    connections = [connect(web) for _ in range(200)]
    for connection in connections:
        connection.sendall(
            request_head(web, "POST", f"{TASKS}/claim", f"Content-Length: {len(body)}", token=token) + body
        )
    process = psutil.Process(web.process.pid)

    def is_idle() -> bool:
        before = sum(process.cpu_times()[:2])
        time.sleep(2)
        return sum(process.cpu_times()[:2]) - before <= 0.1

    # On a slow machine, the process may still be reading the requests.
    until(is_idle, 20)  # 200 idle polls use no more than 5 % of a core
    for connection in connections:
        connection.close()


@pytest.mark.usefixtures("_database")
def test_stop_answers_waiting_polls() -> None:
    web = WebProcess()
    token = make_token("worker")
    body = b'{"commands":["STOP"],"waitSeconds":30}'
    with connect(web) as connection:
        connection.sendall(
            request_head(web, "POST", f"{TASKS}/claim", f"Content-Length: {len(body)}", token=token) + body
        )
        time.sleep(0.5)  # the claim waits by now
        web.stop()
        assert connection.recv(65_536).startswith(b"HTTP/1.1 204")


def test_metrics_of_two_processes_are_summed(web: WebProcess) -> None:
    """Each process counts in a file of its own; a scrape of any process returns the sum."""
    second = WebProcess()
    try:
        for server in (web, second):
            assert server.request("POST", TASKS, {"command": "COUNTED", "payload": 1}, make_token("producer"))[0] == 202
        counted = 'codeq_task_created_total{command="COUNTED"} 2.0'
        for server in (web, second):  # each process writes its counts within half a second
            until(lambda server=server: counted in server.request("GET", "/metrics")[1].decode())
    finally:
        second.stop()
