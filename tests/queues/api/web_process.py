"""A web process on a port of its own, and requests to it over the network."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from django.conf import settings

from tests.conftest import free_port
from tests.waiting import until

ROOT = Path(__file__).parents[3]


class WebProcess:
    """A web process on the servers of the tests."""

    def __init__(self, **environment: str) -> None:
        self.port = free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        database = settings.DATABASES["default"]
        environ = {
            "PATH": os.environ["PATH"],
            "DJANGO_SETTINGS_MODULE": "codeq_site.settings",
            "CODEQ_PORT": str(self.port),
            "CODEQ_HOME": str(settings.CODEQ["home"]),
            "REDIS_URL": settings.CODEQ["redis_url"],
            "CELERY_BROKER_URL": settings.CODEQ["broker_url"],
            "DATABASE_URL": settings.CODEQ["database_url"].replace("/codeq?", f"/{database['NAME']}?"),
            "SECRET_KEY": settings.CODEQ["secret_key"],
            **environment,
        }
        self.process = subprocess.Popen([sys.executable, "-m", "codeq_site.web"], cwd=ROOT, env=environ)
        until(self.is_up, 30)

    def is_up(self) -> bool:
        assert self.process.poll() is None, "the web process ended"
        try:
            return self.request("GET", "/healthz")[0] == 200
        except OSError:
            return False

    def json(self, *request: Any, **headers: str) -> Any:
        status, body = self.request(*request, **headers)
        assert status < 300, body
        return json.loads(body)

    def request(self, method: str, path: str, body: Any = None, token: str = "", **headers: str) -> tuple[int, bytes]:
        return self.send(method, path, None if body is None else json.dumps(body).encode(), token, **headers)

    def send(self, method: str, path: str, body: bytes | None, token: str, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"} | headers
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(20)
