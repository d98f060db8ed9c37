"""No process of an installation logs payloads or credentials of clients."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
import redis
from django.conf import settings

from queues.engine import keys
from tests.codeq_site.installation import Installation, clean_environment
from tests.conftest import free_port
from tests.queues.api.conftest import TASKS
from tests.waiting import until

CANARY = f"canary{uuid.uuid4().hex}"
MINT = """
from tenants import secret_encryption, services
for role in ("producer", "worker", "admin"):
    print("secret", services.issue_token("canaries", role))
print("secret", secret_encryption.decrypt(services.rotate_signing_secret("canaries").encrypted_secret))
"""


def create_credentials(installation: Installation) -> list[str]:
    """Issue three tokens and create a signing secret."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "manage.py", "shell", "-v0", "-c", MINT],
        env=clean_environment({"CODEQ_HOME": str(installation.home)}), cwd=settings.BASE_DIR,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return [line.split()[1] for line in ran.stdout.splitlines() if line.startswith("secret ")]


class HttpClient:
    def __init__(self, installation: Installation) -> None:
        self.installation = installation
        self.open = urllib.request.build_opener(urllib.request.HTTPCookieProcessor()).open

    def send(self, path: str, token: str = "", body: Any = None, **headers: str) -> tuple[int, bytes]:
        """Send a request and return status and body. A broken connection returns status 0."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        request = urllib.request.Request(f"{self.installation.base}{path}", data, kind | headers)
        try:
            with self.open(request, timeout=30) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    def log_in(self, name: str, password: str) -> int:
        _, page = self.send("/admin/login/")
        field = re.search(rb'name="csrfmiddlewaretoken" value="(\w+)"', page)
        token = field[1].decode() if field else ""
        form = {"username": name, "password": password, "csrfmiddlewaretoken": token, "next": "/admin/"}
        encoded = urllib.parse.urlencode(form).encode()
        kind = {"Content-Type": "application/x-www-form-urlencoded", "Referer": self.installation.base}
        return self.send("/admin/login/", "", encoded, **kind)[0]


@pytest.mark.spec("AUT-1", "No log and no broker message has a token, secret, password or payload in it")
def test_logs_and_broker_contain_no_payload_and_no_credential(running: Installation) -> None:
    credentials = create_credentials(running)
    producer, worker, admin, _ = credentials
    client, urls = HttpClient(running), running.read_embedded_settings()
    send_tasks_with_canaries(client, producer, worker, admin)
    send_refused_requests(client, producer, worker)
    send_failing_statements(urls)
    add_invalid_stream_entry(urls)
    send_requests_without_postgresql(running, client, producer, admin)

    with psycopg.connect(urls["database_url"]) as database:
        kept = database.execute("SELECT count(*) FROM queues_auditedresult WHERE payload LIKE %s", (f"%{CANARY}%",))
        assert kept.fetchone() != (0,), "the audit does not contain the canary"
    # These messages of web processes, Celery and the servers prove that the logs of all of them are read.
    messages = (
        "too many login attempts from",
        "is in quarantine",
        "not properly shut down",
        "division by zero",
        "Ready to accept connections",
    )
    until(lambda: all(message in logs(running) for message in messages))
    log = logs(running)
    shown = re.search(r"user \S+, password (\S+)", running.out)
    assert shown is not None
    passwords = [shown[1], urls["secret_key"], *re.findall(r"://[^/@:]*:([^@]+)@", json.dumps(urls))]
    broker = read_broker(urls)
    for word in (CANARY, *(credential.rpartition(".")[2] for credential in credentials), *passwords):
        assert [line for line in log.splitlines() if word in line] == []
        assert word not in broker


def read_broker(urls: dict[str, str]) -> str:
    """Return all keys and values of the broker as text."""
    with redis.Redis.from_url(urls["broker_url"]) as broker:
        read: dict[bytes, Callable[[bytes], object]] = {
            b"string": broker.get, b"hash": broker.hgetall, b"set": broker.smembers,
            b"list": lambda key: broker.lrange(key, 0, -1), b"zset": lambda key: broker.zrange(key, 0, -1),
        }  # fmt: skip
        types = {key: broker.type(key) for key in broker.scan_iter()}
        return " ".join(f"{key!r} {read[kind](key)!r}" for key, kind in types.items() if kind != b"none")


def logs(running: Installation) -> str:
    return running.err + "".join(path.read_text(errors="replace") for path in running.home.glob("log/*"))


def send_tasks_with_canaries(client: HttpClient, producer: str, worker: str, admin: str) -> None:
    """Complete tasks with every outcome, with a canary in every field that a client sets."""
    hook = f"http://127.0.0.1:{free_port()}/{CANARY}?token={CANARY}"
    task = {"command": "canaries", "payload": {CANARY: CANARY}, "webhook": hook, "idempotencyKey": CANARY}
    artifacts = [{"name": CANARY, "contentBase64": base64.b64encode(CANARY.encode()).decode()}]
    endings: list[tuple[str, dict[str, Any]]] = [
        ("result", {"status": "COMPLETED", "result": {CANARY: 1}, "artifacts": artifacts}),
        ("result", {"status": "FAILED", "error": CANARY}),
        ("nack", {"reason": CANARY}),
    ]
    for number, (verb, body) in enumerate(endings):
        new_task = {**task, "idempotencyKey": f"{CANARY}-{number}", "maxAttempts": 1}
        assert client.send(TASKS, producer, new_task)[0] == 202
        status, claimed = client.send(f"{TASKS}/claim", worker, {"commands": ["canaries"]})
        assert status == 200
        path = f"{TASKS}/{json.loads(claimed)['id']}"
        assert client.send(f"{path}/heartbeat", worker, {"progress": {"percent": 4, "note": CANARY}})[0] == 200
        assert client.send(f"{path}/{verb}", worker, body)[0] == 200
    until(lambda: client.send(f"/v1/codeq/admin/dlq/canaries?text={CANARY}", admin)[1].count(CANARY.encode()) > 0)
    subscription = {"callbackUrl": hook, "eventTypes": ["canaries"]}
    client.send("/v1/codeq/workers/subscriptions", worker, subscription)
    client.send(TASKS, producer, task)


def send_refused_requests(client: HttpClient, producer: str, worker: str) -> None:
    forged = f"{producer.rpartition('.')[0]}.{CANARY}"
    for body in (f'{{"command": "{CANARY}', f'{{"{CANARY}": 1}}', f'{{"command": "a", "payload": {CANARY}}}', CANARY):
        assert client.send(TASKS, producer, body.encode())[0] == 400
    assert client.send(TASKS, forged, {"command": "a", "payload": CANARY})[0] == 401
    assert client.send(TASKS, CANARY, {"command": "a", "payload": CANARY})[0] == 401
    assert client.send(TASKS, worker, {"command": "a", "payload": CANARY})[0] == 403
    assert client.send(f"{TASKS}/{CANARY}?{CANARY}={CANARY}", producer)[0] in (400, 404)
    assert client.send(f"/{CANARY}")[0] == 404
    assert client.send(TASKS, producer, b"\x1f\x8b" + CANARY.encode(), **{"Content-Encoding": "gzip"})[0] == 415
    # Five attempts are allowed in a window of five minutes. Eleven are enough if a new window begins in between.
    assert 429 in [client.log_in(f"somebody-{CANARY}", CANARY) for _ in range(11)]


def send_failing_statements(urls: dict[str, str]) -> None:
    """Execute statements that PostgreSQL would log with their values."""
    with psycopg.connect(urls["database_url"], autocommit=True) as database:
        with pytest.raises(psycopg.errors.DivisionByZero):
            database.execute(f"SELECT 1 / 0 AS {CANARY}")
        with pytest.raises(psycopg.errors.UniqueViolation):
            database.execute(f"CREATE TEMP TABLE t (word text UNIQUE); INSERT INTO t VALUES ('{CANARY}'), ('{CANARY}')")


def add_invalid_stream_entry(urls: dict[str, str]) -> None:
    """Add an entry that PostgreSQL refuses, as an older release could have written it."""
    with psycopg.connect(urls["database_url"], autocommit=True) as database:
        (tid,) = database.execute("SELECT tid FROM tenants_tenant WHERE slug = 'canaries'").fetchone() or ("",)
        entry = {
            "id": str(uuid.uuid4()), "queue": f"{tid}:canaries", "attempt": "1", "outcome": "COMPLETED",
            "status": "COMPLETED", "attempts": "0", "priority": "9" * 12, "worker": CANARY, "created": "1760000000000",
            "visible": "1760000000000", "claimed": "1760000000000", "ended": "1760000001000", "error": CANARY,
            "payload": f'"{CANARY}"', "result": f'"{CANARY}"',
        }  # fmt: skip
        with redis.Redis.from_url(urls["redis_url"]) as store:
            store.xadd(keys.of_partition(0).events, dict(entry))
        quarantined = "SELECT count(*) FROM queues_quarantine"
        until(lambda: (database.execute(quarantined).fetchone() or (0,))[0] > 0)


def send_requests_without_postgresql(running: Installation, client: HttpClient, producer: str, admin: str) -> None:
    """Kill PostgreSQL and send requests. The log has the failures, but not their content."""
    before = len(running.out)
    running.child("bin/postgres").kill()
    for _ in range(5):
        client.send(f"/v1/codeq/admin/dlq/canaries?text={CANARY}", admin)
        client.send(f"{TASKS}?text={CANARY}", producer)
        client.send(TASKS, producer, {"command": "canaries", "payload": CANARY, "delaySeconds": 3600})
        with contextlib.suppress(AssertionError):
            client.log_in(CANARY, CANARY)
    until(lambda: "runs again" in running.out[before:], 60)
    until(running.is_ready, 60)
