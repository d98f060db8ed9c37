"""Invalid input: a 4xx that names the problem, no change, and never a 5xx."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from core.redis.connections import client as redis_client
from queues.api.schemas import LIMITS
from tenants.domain import TenantSnapshot
from tests.queues.api.asgi_client import Client
from tests.queues.api.conftest import TASKS
from tests.queues.api.redis_dump import dump_redis
from tests.queues.api.tasks import enqueue_task

VALID_TASK: dict[str, Any] = {"command": "A", "payload": {}}


PAYLOADS = {
    "null": b"null",
    "nothing": b"",
    "a thousand levels": b"[" * 1_000 + b"]" * 1_000,
    "101 levels": b'{"a":' * 101 + b"1" + b"}" * 101,
    "101 levels, mixed": b'{"a":[' * 50 + b"{}" + b"]}" * 50,
    "a hundred thousand levels": b"[" * 100_000 + b"]" * 100_000,
    "a million, never closed": b"[" * 1_000_000,
    "NaN": b"NaN",
    "Infinity": b"Infinity",
    "-Infinity": b"-Infinity",
    "not UTF-8": b'"\xff"',
    "a surrogate in UTF-8": b'"\xed\xa0\x80"',
    "an overlong byte": b'"\xc0\xaf"',
    "a lone surrogate": rb'"\ud800"',
    "a lone low surrogate": rb'"\udc00 and more"',
    "a torn pair": rb'"\ud800A and more"',
    "a surrogate as a key": rb'{"\ud800 and more":1}',
    "a control character": b'"\x01"',
    "a line break in a text": b'"a\nb"',
    "a single quote": b"'a'",
    "a leading zero": b"01",
    "a trailing comma": b"[1,]",
    "a comment": b"1 /* one */",
    "hexadecimal": b"0x10",
    "a bare word": b"undefined",
}


@pytest.mark.spec("ENQ-1", "A payload that some JSON libraries cannot read is refused by name")
@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
async def test_unreadable_payload_is_refused(producer: Client, payload: bytes) -> None:
    began = time.perf_counter()
    response = await producer.post(TASKS, b'{"command":"A","payload":' + payload + b"}")
    assert (response.status, response.code) == (400, "invalid_request")
    assert time.perf_counter() - began < 10
    assert len(response.json["detail"]) < 500
    assert not dump_redis()


async def test_deep_result_is_refused(producer: Client, worker: Client) -> None:
    task = await enqueue_task(producer)
    await worker.post(f"{TASKS}/claim")
    deep = b'{"a":' * 200 + b"1" + b"}" * 200
    body = b'{"status":"COMPLETED","result":' + deep + b"}"
    response = await worker.post(f"{TASKS}/{task['id']}/result", body)
    assert response.status == 400
    assert "result" in response.json["detail"]


BODIES = [b"", b" ", b"null", b"[]", b'"x"', b"1", b"{", b"{}{}", b"{}x", b"\xff\xfe{}\x00", b"\xef\xbb\xbf{}",
          b'{"command"}', b"{'command':'A'}", b"\x00", b"[" * 100_000, b'{"a":' * 100_000, b'{"\xff":1}',
          b'{"command":"\xff","payload":1}', rb'{"command":"\ud800","payload":1}', b"payload=1&command=A"]  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("path", ["", "/batch"])
async def test_invalid_body_of_a_producer_is_refused(producer: Client, path: str, body: bytes) -> None:
    response = await producer.post(TASKS + path, body, headers={"Content-Type": "application/json"})
    assert (response.status, response.code) == (400, "invalid_request")


@pytest.mark.parametrize("body", BODIES[1:])
@pytest.mark.parametrize("path", ["claim", "claim/batch", "exchange", "batch/results"])
async def test_invalid_body_of_a_worker_is_refused(worker: Client, path: str, body: bytes) -> None:
    response = await worker.post(f"{TASKS}/{path}", body)
    assert (response.status, response.code) == (400, "invalid_request")


FIELDS: dict[str, list[Any]] = {
    "command": [None, 1, True, [], {}, "", "a b", "a:b", "a{b", "a}b", "*", "?", "[", "]", "a/b", "a\n", "\r", "a\0b",
                "x" * 129, "x" * 10_000, "é", "e\u0301", "\u202e", "Ａ"],
    "priority": [-1, 10, 9.5, 1e400, "5", True, [], {}, 2**70],
    "maxAttempts": [0, -1, 1001, 10**6, 1.5, "5", True, []],
    "webhook": ["", "x", "ftp://example.org/", "file:///etc/passwd", "javascript:1", 1, True, [],
                "https://example.org/a b", "https://example.org/a\nb", "https://exa\tmple.org/", "https://",
                "https://example.org/" + "x" * 2048],
    "idempotencyKey": ["", 1, True, [], "x" * 256, "a\0", "a\n", "é", "\x7f"],
    "runAt": ["", 1, 1.7e9, True, "now", "20260101", "2026-01-01", "2026-01-01T00:00:00", "2026-13-01T00:00:00Z",
              "2026-02-30T00:00:00Z", "2026-06-30T23:59:60Z", "0000-01-01T00:00:00Z", "2026-01-01T24:00:00Z",
              "9999-12-31T23:59:59-23:59", "9999-01-01T00:00:00Z", "2026-01-01T00:00:00+25:00",
              "10000-01-01T00:00:00Z"],
    "delaySeconds": [-1, -0.001, 1e308, 366 * 86_400 + 1, "5", True, []],
    "tenantId": ["x"], "status": ["COMPLETED"], "id": ["x"], "attempts": [0], "__proto__": [{}], "": [1],
}  # fmt: skip


@pytest.mark.spec("ENQ-1", "Every field is checked, and the response names the invalid one")
@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in FIELDS.items() for value in values], ids=repr
)
async def test_invalid_field_is_named(producer: Client, field: str, value: Any) -> None:
    response = await producer.post(TASKS, json.dumps(VALID_TASK | {field: value}).replace("Infinity", "1e400").encode())
    assert (response.status, response.code) == (400, "invalid_request"), response.body
    assert field in response.json["detail"]
    assert not dump_redis()


TASK_ID = "01920f3e-8d5a-7c31-9a54-0b6f3c2d1e10"
OUT_OF_BOUNDS = {
    "a lease of no time": ("claim", {"leaseSeconds": 0}),
    "a lease above the limit": ("claim", {"leaseSeconds": 43_201}),
    "a wait above the limit": ("claim", {"waitSeconds": 31}),
    "a command with a space": ("claim", {"commands": ["a b"]}),
    "101 commands": ("claim", {"commands": ["A"] * 101}),
    "no task": ("claim/batch", {"count": 0}),
    "too many tasks": ("claim/batch", {"count": 11}),
    "an extension of no time": (f"{TASK_ID}/heartbeat", {"extendSeconds": 0}),
    "a negative extension": (f"{TASK_ID}/heartbeat", {"extendSeconds": -1}),
    "an extension above the limit": (f"{TASK_ID}/heartbeat", {"extendSeconds": 43_201}),
    "a negative delay": (f"{TASK_ID}/nack", {"delaySeconds": -1}),
    "an infinite delay": (f"{TASK_ID}/nack", b'{"delaySeconds":1e400}'),
    "a delay that is no number": (f"{TASK_ID}/nack", b'{"delaySeconds":NaN}'),
    "an unknown status": (f"{TASK_ID}/result", {"status": "PENDING"}),
    "a success without a result": (f"{TASK_ID}/result", {"status": "COMPLETED"}),
    "a failure without an error": (f"{TASK_ID}/result", {"status": "FAILED"}),
    "too many results": (
        "batch/results", {"results": [{"taskId": TASK_ID, "status": "COMPLETED", "result": {}}] * (LIMITS.batch + 1)},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("path", "body"), OUT_OF_BOUNDS.values(), ids=OUT_OF_BOUNDS.keys())
async def test_worker_request_out_of_bounds_is_refused(worker: Client, path: str, body: Any) -> None:
    response = await worker.post(f"{TASKS}/{path}", body)
    assert (response.status, response.code) == (400, "invalid_request")


async def test_batch_above_the_limit_is_refused(producer: Client) -> None:
    response = await producer.post(f"{TASKS}/batch", {"tasks": [VALID_TASK] * (LIMITS.batch + 1)})
    assert (response.status, response.code) == (400, "invalid_request")
    assert not dump_redis()


@pytest.mark.parametrize("commands", [["a b"], ["a}b"], ["A", "b\n"], [f"C{number}" for number in range(101)]])
async def test_commands_of_a_token_are_checked_like_those_of_a_body(
    client: Callable[..., Client], commands: list[str]
) -> None:
    worker = client("worker", eventTypes=commands)
    response = await worker.post(f"{TASKS}/claim")
    assert (response.status, response.code) == (400, "invalid_request")


@pytest.mark.parametrize("field", ["priority", "maxAttempts", "webhook", "idempotencyKey", "runAt", "delaySeconds"])
async def test_null_stands_for_absent_where_a_field_may_be_absent(producer: Client, field: str) -> None:
    response = await producer.post(TASKS, VALID_TASK | {field: None})
    assert response.status == (400 if field == "priority" else 202)


@pytest.mark.parametrize("number", ["3", "3.0", "3e0", "30e-1"])
async def test_a_whole_number_may_be_written_in_several_ways(producer: Client, worker: Client, number: str) -> None:
    body = f'{{"command":"A","payload":1,"priority":{number},"maxAttempts":{number}}}'
    response = await producer.post(TASKS, body.encode())
    assert response.status == 202
    assert b'"priority":3,' in response.body
    assert b'"maxAttempts":3,' in response.body
    body = f'{{"leaseSeconds":{number},"count":{number}}}'
    assert (await worker.post(f"{TASKS}/claim/batch", body.encode())).status == 200


async def test_last_value_of_a_repeated_key_counts(producer: Client) -> None:
    response = await producer.post(TASKS, b'{"command":"A","priority":1,"payload":1,"priority":9,"payload":2}')
    assert (response.status, response.json["priority"], response.json["payload"]) == (202, 9, "2")


async def test_huge_field_name_is_not_returned(producer: Client) -> None:
    response = await producer.post(TASKS, VALID_TASK | {"x" * 2**20: 1})
    assert response.status == 400
    assert len(response.body) < 1200


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize(
    "segment", ["%00", "%0d%0a", "%2e%2e%2f", "..", "%ff", "\\", "'", '"', "<script>", "{}", "a" * 5000]
)
async def test_odd_paths_are_not_found(producer: Client, method: str, segment: str) -> None:
    response = await producer.request(method, f"{TASKS}/{segment}")
    assert response.status in (404, 405)


@pytest.mark.parametrize("command", ["a:b", "%00", "a%0ab", "x" * 129, "*", "%7Ba%7D"])
async def test_invalid_command_in_an_admin_path_is_refused(admin: Client, command: str) -> None:
    for response in (
        await admin.get(f"/v1/codeq/admin/queues/{command}"),
        await admin.post(f"/v1/codeq/admin/queues/{command}/pause"),
        await admin.post(f"/v1/codeq/admin/queues/{command}/resume"),
    ):
        assert (response.status, response.code) == (400, "invalid_request")
    assert not dump_redis()


@pytest.mark.spec("TEN-1", "Similar names are different queues, and no name reaches the keys of another")
async def test_distinct_commands_never_share_a_queue(producer: Client, worker: Client) -> None:
    names = ["A", "a", "A.", "A-", "A_", ".", "..", "-", "_", "0", "00", "ready", "q", "A" * 128, "A" * 127]
    for name in names:
        await enqueue_task(producer, command=name, payload=name)
    for name in names:
        response = await worker.post(f"{TASKS}/claim", {"commands": [name]})
        assert json.loads(response.json["payload"]) == name
    assert (await worker.post(f"{TASKS}/claim", {"commands": names})).status == 204


class KeyRecorder:
    """Collects the service's Redis keys that commands and scripts use within the block."""

    def __init__(self) -> None:
        self.words: set[str] = set()
        self._monitor = redis_client().monitor()
        self._thread = threading.Thread(target=self._listen)

    def __enter__(self) -> set[str]:
        self._monitor.__enter__()
        self._thread.start()
        return self.words

    def __exit__(self, *_: object) -> None:
        redis_client().echo("end of the recording")
        self._thread.join(10)
        self._monitor.__exit__(None, None, None)

    def _listen(self) -> None:
        while "end of the recording" not in (command := self._monitor.next_command()["command"]):
            self.words |= {word for word in re.split(r'[" ]', command) if word.startswith("codeq:{")}


@pytest.mark.spec("TEN-1", "A command of any name uses only the keys of its own queue and tenant")
async def test_queue_uses_only_its_own_keys(
    producer: Client, worker: Client, admin: Client, stranger: Client, tenant: TenantSnapshot
) -> None:
    rng = random.Random(random.randrange(2**32))
    alphabet = "AZaz09_.-"
    names = {"".join(rng.choices(alphabet, k=rng.randint(1, 128))) for _ in range(300)}
    await stranger.post(TASKS, {"command": "A", "payload": 1})
    with KeyRecorder() as words:
        for name in names:
            task = await enqueue_task(producer, command=name)
            await worker.post(f"{TASKS}/claim", {"commands": [name]})
            await worker.post(f"{TASKS}/{task['id']}/nack", {"delaySeconds": 1})
            await admin.get(f"/v1/codeq/admin/queues/{name}")
    queues = [match for word in words if (match := re.fullmatch(r"codeq:\{\d+\}:q:([^:]*):([^:]*):(.*)", word))]
    assert {match[2] for match in queues} == names
    assert {match[1] for match in queues} == {tenant.tid}
    assert {match[3] for match in queues} <= {*(f"ready:{n}" for n in range(10)), "inprog", "delayed", "dlq"}
    for word in words - {match[0] for match in queues}:
        assert not any(name in word for name in names if len(name) > 12), word


async def test_ten_thousand_mutations_of_good_requests_never_cause_a_5xx(
    producer: Client, worker: Client, admin: Client
) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    task = await enqueue_task(producer)
    failed = {"taskId": task["id"], "status": "FAILED", "error": "x"}
    requests = [
        (producer, TASKS,
         json.dumps(VALID_TASK | {"priority": 3, "runAt": "2026-01-01T00:00:00Z", "delaySeconds": 1.5})),
        (producer, f"{TASKS}/batch", json.dumps({"tasks": [VALID_TASK, VALID_TASK]})),
        (worker, f"{TASKS}/claim", json.dumps({"commands": ["A"], "leaseSeconds": 30})),
        (worker, f"{TASKS}/{task['id']}/heartbeat", json.dumps({"extendSeconds": 3, "progress": {"percent": 3}})),
        (worker, f"{TASKS}/{task['id']}/nack", json.dumps({"delaySeconds": 3, "reason": "no"})),
        (worker, f"{TASKS}/{task['id']}/result", json.dumps({"status": "COMPLETED", "result": {"a": [1, 2.5e3]}})),
        (worker, f"{TASKS}/batch/results", json.dumps({"results": [failed]})),
        (worker, f"{TASKS}/exchange", json.dumps({"count": 1, "results": []})),
        (admin, "/v1/codeq/admin/tasks/cleanup", json.dumps({"limit": 3, "before": "2026-01-01T00:00:00Z"})),
    ]  # fmt: skip
    pieces = b'" { } [ ] , : \\ \\u \\ud800 null true - 1e999 0 \0 \xff \xed\xa0\x80 NaN \n -1 [[[[ \xc3\xa9'.split(
        b" "
    )
    pieces += [b" ", b"9" * 400]
    for number in range(10_000):
        client, path, text = rng.choice(requests)
        body = bytearray(text.encode())
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(body) + 1)
            body[at : at + rng.choice((0, 0, 1, 2, 8))] = rng.choice(pieces)
        response = await client.post(path, bytes(body))
        assert response.status < 500, (seed, number, path, bytes(body), response.body)


@pytest.mark.spec("ENQ-3", "A task with a bad webhook does not fail its batch")
@pytest.mark.parametrize(
    "webhook", ["x", "https://user@example.org/", "http://169.254.169.254/", "https://example.org/\0"]
)
async def test_bad_webhook_fails_its_own_task_only(producer: Client, webhook: str) -> None:
    response = await producer.post(f"{TASKS}/batch", {"tasks": [VALID_TASK | {"webhook": webhook}, VALID_TASK]})
    bad, good = response.json["results"]
    assert (bad["error"], bad["status"]) == ("invalid_request", 400)
    assert "webhook" in bad["detail"]
    assert good["task"]["status"] == "PENDING"
