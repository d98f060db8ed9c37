"""What clients send, and what lets them in, is in no line that any process of an installation logs."""

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
from tests.codeq_site.conftest import Installation, clean_environment
from tests.codeq_site.test_up import is_ready, published
from tests.conftest import free_port
from tests.queues.api.conftest import TASKS
from tests.waiting import until

CANARY = f"kanarie{uuid.uuid4().hex}"
MINT = """
from tenants import secret_encryption, services
for role in ("producer", "worker", "admin"):
    print("secret", services.issue_token("canaries", role))
print("secret", secret_encryption.decrypt(services.rotate_signing_secret("canaries").sealed))
"""


def secrets(own: Installation) -> list[str]:
    """Three tokens and a signing secret."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "manage.py", "shell", "-v0", "-c", MINT],
        env=clean_environment({"CODEQ_HOME": str(own.home)}), cwd=settings.BASE_DIR,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return [line.split()[1] for line in ran.stdout.splitlines() if line.startswith("secret ")]


class Speaker:
    def __init__(self, own: Installation) -> None:
        self.own = own
        self.open = urllib.request.build_opener(urllib.request.HTTPCookieProcessor()).open

    def say(self, path: str, token: str = "", body: Any = None, **headers: str) -> tuple[int, bytes]:
        """Whatever comes of it: refusals and broken connections are meant too."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        request = urllib.request.Request(f"{self.own.base}{path}", data, kind | headers)
        try:
            with self.open(request, timeout=30) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    def log_in(self, name: str, password: str) -> int:
        _, page = self.say("/admin/login/")
        found = re.search(rb'name="csrfmiddlewaretoken" value="(\w+)"', page)
        token = found[1].decode() if found else ""
        form = {"username": name, "password": password, "csrfmiddlewaretoken": token, "next": "/admin/"}
        encoded = urllib.parse.urlencode(form).encode()
        kind = {"Content-Type": "application/x-www-form-urlencoded", "Referer": self.own.base}
        return self.say("/admin/login/", "", encoded, **kind)[0]


@pytest.mark.spec("AUT-1", "No token, secret, password or payload is in a log of any process, nor in the broker (E-21)")
def test_no_log_says_what_was_sent_or_who_sent_it(running: Installation) -> None:
    secret = secrets(running)
    producer, worker, admin, _ = secret
    speaker, urls = Speaker(running), published(running)
    work(speaker, producer, worker, admin)
    refusals(speaker, producer, worker)
    what_postgresql_refuses(urls)
    a_row_that_is_refused(urls)
    without_postgresql(running, speaker, producer, admin)

    with psycopg.connect(urls["database_url"]) as database:
        kept = database.execute("SELECT count(*) FROM queues_auditedresult WHERE payload LIKE %s", (f"%{CANARY}%",))
        assert kept.fetchone() != (0,), "the canary is not where it should be"
    # Words of web, of Celery, and of the servers: it is their logs that are read.
    said = (
        "is refused for",
        "is in quarantine",
        "not properly shut down",
        "division by zero",
        "Ready to accept connections",
    )
    until(lambda: all(word in logs(running) for word in said))
    log = logs(running)
    shown = re.search(r"user \S+, password (\S+)", running.out)
    assert shown is not None
    passwords = [shown[1], urls["secret_key"], *re.findall(r"://[^/@:]*:([^@]+)@", json.dumps(urls))]
    broker = in_the_broker(urls)
    for word in (CANARY, *(each.rpartition(".")[2] for each in secret), *passwords):
        found = [line for line in log.splitlines() if word in line]
        assert found == []
        assert word not in broker


def in_the_broker(urls: dict[str, str]) -> str:
    with redis.Redis.from_url(urls["broker_url"]) as broker:
        read: dict[bytes, Callable[[bytes], object]] = {
            b"string": broker.get, b"hash": broker.hgetall, b"set": broker.smembers,
            b"list": lambda key: broker.lrange(key, 0, -1), b"zset": lambda key: broker.zrange(key, 0, -1),
        }  # fmt: skip
        found = {key: broker.type(key) for key in broker.scan_iter()}
        return " ".join(f"{key!r} {read[kind](key)!r}" for key, kind in found.items() if kind != b"none")


def logs(running: Installation) -> str:
    return running.err + "".join(path.read_text(errors="replace") for path in running.home.glob("log/*"))


def work(speaker: Speaker, producer: str, worker: str, admin: str) -> None:
    """Tasks that go all ways there are, with a canary wherever a client has the word."""
    hook = f"http://127.0.0.1:{free_port()}/{CANARY}?token={CANARY}"
    task = {"command": "canaries", "payload": {CANARY: CANARY}, "webhook": hook, "idempotencyKey": CANARY}
    artifacts = [{"name": CANARY, "contentBase64": base64.b64encode(CANARY.encode()).decode()}]
    endings: list[tuple[str, dict[str, Any]]] = [
        ("result", {"status": "COMPLETED", "result": {CANARY: 1}, "artifacts": artifacts}),
        ("result", {"status": "FAILED", "error": CANARY}),
        ("nack", {"reason": CANARY}),
    ]
    for number, (verb, body) in enumerate(endings):
        said = {**task, "idempotencyKey": f"{CANARY}-{number}", "maxAttempts": 1}
        assert speaker.say(TASKS, producer, said)[0] == 202
        status, claimed = speaker.say(f"{TASKS}/claim", worker, {"commands": ["canaries"]})
        assert status == 200
        path = f"{TASKS}/{json.loads(claimed)['id']}"
        assert speaker.say(f"{path}/heartbeat", worker, {"progress": {"percent": 4, "note": CANARY}})[0] == 200
        assert speaker.say(f"{path}/{verb}", worker, body)[0] == 200
    until(lambda: speaker.say(f"/v1/codeq/admin/dlq/canaries?text={CANARY}", admin)[1].count(CANARY.encode()) > 0)
    subscription = {"callbackUrl": hook, "eventTypes": ["canaries"]}
    speaker.say("/v1/codeq/workers/subscriptions", worker, subscription)
    speaker.say(TASKS, producer, task)


def refusals(speaker: Speaker, producer: str, worker: str) -> None:
    forged = f"{producer.rpartition('.')[0]}.{CANARY}"
    for body in (f'{{"command": "{CANARY}', f'{{"{CANARY}": 1}}', f'{{"command": "a", "payload": {CANARY}}}', CANARY):
        assert speaker.say(TASKS, producer, body.encode())[0] == 400
    assert speaker.say(TASKS, forged, {"command": "a", "payload": CANARY})[0] == 401
    assert speaker.say(TASKS, CANARY, {"command": "a", "payload": CANARY})[0] == 401
    assert speaker.say(TASKS, worker, {"command": "a", "payload": CANARY})[0] == 403
    assert speaker.say(f"{TASKS}/{CANARY}?{CANARY}={CANARY}", producer)[0] in (400, 404)
    assert speaker.say(f"/{CANARY}")[0] == 404
    assert speaker.say(TASKS, producer, b"\x1f\x8b" + CANARY.encode(), **{"Content-Encoding": "gzip"})[0] == 415
    # Eleven: attempts are counted anew every five minutes, perhaps just now.
    assert 429 in [speaker.log_in(f"somebody-{CANARY}", CANARY) for _ in range(11)]


def what_postgresql_refuses(urls: dict[str, str]) -> None:
    """It would log the statement, and the values that clash."""
    with psycopg.connect(urls["database_url"], autocommit=True) as database:
        with pytest.raises(psycopg.errors.DivisionByZero):
            database.execute(f"SELECT 1 / 0 AS {CANARY}")
        with pytest.raises(psycopg.errors.UniqueViolation):
            database.execute(f"CREATE TEMP TABLE t (word text UNIQUE); INSERT INTO t VALUES ('{CANARY}'), ('{CANARY}')")


def a_row_that_is_refused(urls: dict[str, str]) -> None:
    """As some release, or some accident, might have written it to the stream of what ended."""
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


def without_postgresql(running: Installation, speaker: Speaker, producer: str, admin: str) -> None:
    """What cannot be done is logged; not what it was about."""
    before = len(running.out)
    running.child("bin/postgres").kill()
    for _ in range(5):
        speaker.say(f"/v1/codeq/admin/dlq/canaries?text={CANARY}", admin)
        speaker.say(f"{TASKS}?text={CANARY}", producer)
        speaker.say(TASKS, producer, {"command": "canaries", "payload": CANARY, "delaySeconds": 3600})
        with contextlib.suppress(AssertionError):
            speaker.log_in(CANARY, CANARY)
    until(lambda: "runs again" in running.out[before:], 60)
    until(lambda: is_ready(running), 60)
