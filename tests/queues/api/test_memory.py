"""Peak memory of a web process under the largest and most complex requests."""

from __future__ import annotations

import base64
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from core.conf import conf
from tests.queues.api.conftest import TASKS, make_token
from tests.queues.api.web_process import WebProcess

MIB = 2**20
LIMIT = conf().web.body_bytes
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")


@pytest.fixture(scope="module")
def web(_database: None) -> Iterator[WebProcess]:
    server = WebProcess()
    # The first requests load modules. Their memory is not a cost of the inputs.
    for _ in range(20):
        server.request("POST", TASKS, {"command": "A", "payload": "x" * 1000}, make_token("producer"))
    yield server
    server.stop()


def memory(web: WebProcess, name: str) -> int:
    """Return VmRSS, or VmHWM (its maximum), in bytes."""
    lines = Path(f"/proc/{web.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def peak(web: WebProcess, work: Callable[[], None]) -> int:
    """Return the largest increase of memory during the work."""
    Path(f"/proc/{web.process.pid}/clear_refs").write_text("5")  # resets the peak to the present value
    before = memory(web, "VmRSS")
    work()
    return memory(web, "VmHWM") - before


def post(web: WebProcess, path: str, body: bytes, role: str = "producer") -> tuple[int, bytes]:
    return web.send("POST", path, body, make_token(role))


def with_payload(payload: bytes) -> bytes:
    return b'{"command":"A","payload":' + payload + b"}"


def make_largest_batch() -> bytes:
    payload = "x" * (conf().queues.payload_bytes - 2)
    tasks = [{"command": "A", "payload": payload} for _ in range(LIMIT // (len(payload) + 100))]
    return json.dumps({"tasks": tasks}).encode()


INPUTS = {
    "a thousand levels": (with_payload(b"[" * 1_000), 400),
    "a hundred thousand levels": (with_payload(b"[" * 100_000), 400),
    "a million levels": (with_payload(b"[" * 1_000_000), 400),
    "a million levels that close": (with_payload(b"[" * 500_000 + b"]" * 500_000), 400),
    "levels to the limit": (with_payload(b"[" * (LIMIT - 30)), 400),
    "objects to the limit": (with_payload(b'{"a":' * (LIMIT // 5 - 10)), 400),
    "numbers to the limit": (with_payload(b"[" + b"1," * (LIMIT // 2 - 30) + b"1]"), 413),
    "digits to the limit": (with_payload(b"9" * (LIMIT - 30)), 413),
    "a batch of the limit": (make_largest_batch(), 200),
}
BOUNDED = pytest.mark.spec("ENQ-1", "The memory of the largest and deepest requests is bounded")


@BOUNDED
@pytest.mark.parametrize(("body", "status"), INPUTS.values(), ids=INPUTS.keys())
def test_request_costs_a_few_times_its_size(web: WebProcess, body: bytes, status: int) -> None:
    assert len(body) <= LIMIT
    responses: list[tuple[int, bytes]] = []
    cost = peak(web, lambda: responses.append(post(web, TASKS + "/batch" * (status == 200), body)))
    print(f"{cost / MIB:.1f} MiB")
    assert responses[0][0] == status, responses[0][1][:200]
    assert status == 400 or status == 413 or b'"error"' not in responses[0][1]
    # Its chunks, the joined body, and the decoded fields; no tree of objects is built.
    assert cost <= (10 * MIB if len(body) < 2 * MIB else 8 * LIMIT)


@BOUNDED
def test_artifact_costs_a_few_times_its_size(web: WebProcess) -> None:
    made = web.json("POST", TASKS, {"command": "LARGE", "payload": 1}, make_token("producer"))
    web.json("POST", f"{TASKS}/claim", {"commands": ["LARGE"]}, make_token("worker"))
    content = base64.b64encode(b"x" * conf().queues.artifact_bytes).decode()
    artifacts = [{"name": "large", "contentBase64": content}]
    body = json.dumps({"status": "COMPLETED", "result": {}, "artifacts": artifacts}).encode()
    responses: list[tuple[int, bytes]] = []
    cost = peak(web, lambda: responses.append(post(web, f"{TASKS}/{made['id']}/result", body, "worker")))
    print(f"{cost / MIB:.1f} MiB")
    assert responses[0][0] == 200, responses[0][1][:200]
    assert cost <= 8 * LIMIT


@BOUNDED
def test_memory_of_large_requests_is_freed(web: WebProcess) -> None:
    """Repeated concurrent requests: memory depends on the concurrency, not on the total number."""
    bodies = [body for body, _ in INPUTS.values() if len(body) > LIMIT - 2000]

    def many() -> None:
        threads = [threading.Thread(target=post, args=(web, TASKS, body)) for body in 2 * bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    cost, after = peak(web, many), []
    for _ in range(5):
        many()
        after.append(memory(web, "VmRSS"))
    print(f"{cost / MIB:.1f} MiB", [f"{size / MIB:.1f}" for size in after])
    assert cost <= 2 * len(bodies) * 8 * LIMIT
    assert after[-1] - after[0] <= 2 * LIMIT
    assert web.request("GET", "/healthz")[0] == 200
