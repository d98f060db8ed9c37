"""Schemathesis compares the API of a full installation with its OpenAPI document.

All checks are on; `fuzz_hooks.py` lists the known differences. With CODEQ_TEST_LONG=1 it runs for an hour.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psycopg
import pytest
from django.conf import settings

from tests.codeq_site.installation import Installation, clean_environment
from tests.queues.api.routes import list_routes

HOOKS = Path(__file__).with_name("fuzz_hooks.py")
IS_LONG = os.environ.get("CODEQ_TEST_LONG") == "1"
SECONDS = 3600 if IS_LONG else 120
NORTH, SOUTH = "north", "south"
# One token with all permissions in its tenant. tests/queues/api/test_isolation.py tests permissions.
MINT = """
import time
from tenants import services
from tenants.auth import installation_keys
from tenants.domain import WORKER_SCOPES
for tenant in {tenants}:
    services.issue_token(tenant, "producer")
    now = int(time.time())
    print("token", installation_keys.sign({{
        "iss": "codeq", "sub": "fuzzer", "tenantId": tenant, "iat": now, "exp": now + 2 * 3600,
        "aud": ["codeq-producer", "codeq-worker"], "eventTypes": ["*"], "role": "ADMIN",
        "scope": " ".join([*WORKER_SCOPES, "codeq:admin"]),
    }}))
"""


class Sink(BaseHTTPRequestHandler):
    """An HTTP server that accepts every callback."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def sink() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def issue_tokens(installation: Installation) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "manage.py", "shell", "-c", MINT.format(tenants=(NORTH, SOUTH))],
        env=clean_environment({"CODEQ_HOME": str(installation.home)}),
        cwd=settings.BASE_DIR, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return [line.split()[1] for line in ran.stdout.splitlines() if line.startswith("token ")]


@pytest.mark.timeout(SECONDS + 200)
@pytest.mark.spec("DOC-1", "A fuzzer that reads the OpenAPI document finds no 5xx and no undeclared answer")
def test_api_conforms_to_its_openapi_document(
    make_installation: Callable[[], Installation], sink: str, tmp_path: Path
) -> None:
    own = make_installation()
    own.start()
    tokens = issue_tokens(own)
    users = [
        {"name": name, "fixedHeaders": [{"name": "Authorization", "value": f"Bearer {token}"}]}
        for name, token in zip((NORTH, SOUTH), tokens, strict=True)
    ]
    (tmp_path / "users.json").write_text(json.dumps({"auth": users}))
    # The second user must not see data of the first one.
    (tmp_path / "schemathesis.toml").write_text(
        f'hooks = "{HOOKS}"\n[auth.wfc]\npath = "users.json"\nuser = "{NORTH}"\npeers = ["{NORTH}", "{SOUTH}"]\n'
    )
    ran = subprocess.run(
        [
            sys.executable, "-m", "schemathesis.cli", "--config-file", "schemathesis.toml",
            "run", f"{own.base}/api/schema/", "--checks", "all", "--max-time", str(SECONDS), "--request-timeout", "15",
            "--continue-on-failure", "--generation-database", "none", "--no-color",
        ],
        cwd=tmp_path, env=clean_environment({"CODEQ_FUZZ_SINK": sink}), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert parse_count("Tested", ran.stdout) == len(list_routes())
    # In a limited time, the number of links that are followed depends on the machine: 28 to 37 of 126 were seen.
    assert parse_count("API Links", ran.stdout) >= 15, "hardly any sequence was tried"
    # Accepted input must not block later tasks in the audit or in deliveries.
    assert own.is_ready()
    own.run_printed_commands(seconds=30.0)
    assert count_rows(own, "queues_quarantine") == 0
    assert count_rows(own, "webhooks_delivery WHERE status = 'delivered'") > 0
    logged = own.err + "".join(path.read_text(errors="replace") for path in own.home.glob("log/*.log"))
    assert "Traceback" not in logged, logged
    for token in tokens:
        assert token.rpartition(".")[2] not in logged, "a token is in a log"


def parse_count(label: str, report: str) -> int:
    match = re.search(rf"{label}: +([0-9]+)", report)
    assert match is not None, report
    return int(match[1])


def count_rows(installation: Installation, table: str) -> int:
    with psycopg.connect(installation.read_embedded_settings()["database_url"]) as connection:
        row = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
    assert row is not None
    return int(row[0])
