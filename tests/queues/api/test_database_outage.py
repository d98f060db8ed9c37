"""An outage of PostgreSQL under a running web process.

Tasks are enqueued and claimed, other requests get a 503, and all recover afterwards.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
from django.conf import settings

from core import threadpool
from tests.queues.api.asgi_client import Client
from tests.queues.api.conftest import SIGNER, TASKS, make_token
from tests.queues.api.routes import ABSENT, PROTECTED, fill_in_id
from tests.queues.api.web_process import WebProcess
from tests.waiting import until


class DatabaseLink:
    """A link to the socket of the tests' PostgreSQL. Closing it simulates an outage."""

    def __init__(self, directory: Path) -> None:
        self.settings = settings.DATABASES["default"]
        self.server_socket = Path(self.settings["OPTIONS"]["host"]) / ".s.PGSQL.5432"
        self.link = directory / ".s.PGSQL.5432"
        self.open()

    @property
    def url(self) -> str:
        host = quote(str(self.link.parent), safe="")
        return f"postgresql://postgres@/{self.settings['NAME']}?host={host}&application_name=database-link"

    def close(self) -> None:
        self.link.unlink()
        with psycopg.connect(
            host=str(self.server_socket.parent), user="postgres", dbname=self.settings["NAME"]
        ) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'database-link'"
            )

    def open(self) -> None:
        self.link.symlink_to(self.server_socket)


@pytest.fixture
def database(_database: None) -> Iterator[DatabaseLink]:
    with tempfile.TemporaryDirectory(prefix="codeq-w") as directory:
        yield DatabaseLink(Path(directory))


@pytest.mark.spec("AUT-1", "While PostgreSQL is down, cached tokens stay valid and tasks are enqueued and completed")
def test_tasks_continue_and_other_requests_get_a_503(database: DatabaseLink) -> None:
    assert SIGNER
    web = WebProcess(DATABASE_URL=database.url)
    tokens = {role: make_token(role) for role in ("producer", "worker", "admin")}
    tokens["either"] = tokens["producer"]
    try:
        for path in ("/v1/codeq/admin/topics", "/v1/codeq/workers/subscriptions"):
            assert web.request("GET", path, None, tokens["worker" if "workers" in path else "admin"])[0] == 200
        assert web.request("GET", TASKS, None, tokens["producer"])[0] == 200
        database.close()
        for _ in range(5):
            task = web.json("POST", TASKS, {"command": "AWAY", "payload": 1}, tokens["producer"])
            web.json("POST", f"{TASKS}/claim", {"commands": ["AWAY"]}, tokens["worker"])
            web.json("POST", f"{TASKS}/{task['id']}/heartbeat", {}, tokens["worker"])
            done = {"status": "COMPLETED", "result": {}}
            web.json("POST", f"{TASKS}/{task['id']}/result", done, tokens["worker"])
            assert web.json("GET", f"{TASKS}/{task['id']}", None, tokens["producer"])["status"] == "COMPLETED"
        unavailable = set()
        for (method, path), case in PROTECTED.items():
            target = (
                path.replace("<str:artifact_id>", "0" * 64).replace("<str:name>", "A").replace("<str:command>", "A")
            )
            for name in ("task_id", "subscription_id", "job_id"):
                target = target.replace(f"<str:{name}>", ABSENT)
            body = None if case.body is None else fill_in_id(case.body, ABSENT)
            status, response = web.request(method, target + case.query, body, tokens[case.role])
            assert status < 500 or (status == 503 and b'"retryAfterSeconds":' in response), (
                method,
                path,
                status,
                response,
            )
            if status == 503:
                unavailable.add((method, path))
        assert ("GET", "/v1/codeq/tasks/<str:task_id>") in unavailable, "the task is only in the audit"
        assert ("GET", "/v1/codeq/admin/topics") in unavailable
        assert ("POST", "/v1/codeq/tasks") not in unavailable
        database.open()
        until(lambda: web.request("GET", "/v1/codeq/admin/topics", None, tokens["admin"])[0] == 200, 60)
    finally:
        web.stop()


@pytest.mark.spec("ADM-5", "A hanging database delays a response only up to a timeout")
async def test_a_database_that_hangs_is_a_503(admin: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threadpool, "DB_TIMEOUT_SECONDS", 0.3)
    database_settings = settings.DATABASES["default"]
    with psycopg.connect(
        host=database_settings["OPTIONS"]["host"], user="postgres", dbname=database_settings["NAME"]
    ) as connection:
        connection.execute("LOCK TABLE queues_queuepolicy IN ACCESS EXCLUSIVE MODE")
        for _ in range(2 * threadpool.POOL_THREADS):
            response = await admin.get("/v1/codeq/admin/topics")
            assert (response.status, response.code) == (503, "unavailable")
    monkeypatch.undo()
    assert (await admin.get("/v1/codeq/admin/topics")).status == 200
