"""The stores of the systems, equally durable: an acknowledged task is on disk.

Each measurement gets a new store: the Valkey of the `embedded` extra with `appendfsync always` and the allocator of
`make run`, or the PostgreSQL of that extra with `synchronous_commit`. For codeQ it is the whole service on such a
Valkey.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import psycopg
import redis

from bench.beside.processes import MeasurementError, end
from codeq_site.devserver.embedded import DURABLE, PostgreSQL, Valkey
from codeq_site.devserver.supervisor import last_line, spawn

ROOT = Path(__file__).resolve().parents[2]
READY_SECONDS = 120.0


class Store(Protocol):
    """A running store. `count` returns the number of tasks that have not ended.

    Its argument is the `waiting` of the system.
    """

    url: str
    environ: dict[str, str]

    def __enter__(self) -> Store: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...
    def pids(self) -> list[int]: ...
    def versions(self) -> dict[str, str]: ...
    def count(self, waiting: tuple[str, ...]) -> int: ...


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class _OnDisk:
    """The directory of a store's data, and one for its sockets, whose paths must be short."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environ: dict[str, str] = {}
        self._sockets = Path(tempfile.mkdtemp(prefix="codeq-b"))

    def remove_sockets(self) -> None:
        shutil.rmtree(self._sockets, ignore_errors=True)


class ValkeyStore(_OnDisk):
    """Valkey on a loopback port. `waiting` are the keys with the tasks that have not ended."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        config = {**DURABLE, "port": str(free_port())}
        self.server = Valkey(directory / "valkey", directory / "valkey.log", self._sockets / "v.sock", config)
        self.url = self.server.url
        self.client: Any = redis.Redis.from_url(self.url)

    def __enter__(self) -> ValkeyStore:
        self.server.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.client.close()
        self.server.kill()
        self.remove_sockets()

    def pids(self) -> list[int]:
        return [self.server.pid]

    def versions(self) -> dict[str, str]:
        server = self.client.info("server")
        return {"valkey": server.get("valkey_version", server["redis_version"])}

    def count(self, waiting: tuple[str, ...]) -> int:
        lengths = {b"list": self.client.llen, b"hash": self.client.hlen, b"zset": self.client.zcard}
        types = [self.client.type(key) for key in waiting]
        return sum(lengths[kind](key) for key, kind in zip(waiting, types, strict=True) if kind in lengths)


class PostgreSQLStore(_OnDisk):
    """PostgreSQL on a unix socket. `waiting` is a statement that counts the tasks."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        durable = {"fsync": "on", "synchronous_commit": "on"}
        self.server = PostgreSQL(directory / "postgresql", directory / "postgresql.log", self._sockets / "p", durable)
        self.url = self.server.url
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None

    def __enter__(self) -> PostgreSQLStore:
        self.server.start()
        self.server.ensure_database()
        self._connection = psycopg.connect(self.url, autocommit=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._connection is not None:
            self._connection.close()
        self.server.stop(5)
        self.remove_sockets()

    def pids(self) -> list[int]:
        return [self.server.pid]

    def versions(self) -> dict[str, str]:
        return {"postgresql": str(self._value("SHOW server_version")).split()[0]}

    def count(self, waiting: tuple[str, ...]) -> int:
        return int(self._value(waiting[0]))

    def _value(self, statement: str) -> Any:
        assert self._connection is not None
        row = self._connection.execute(statement.encode()).fetchone()
        assert row is not None
        return row[0]


class CodeqStore(ValkeyStore):
    """The whole service on this Valkey: all processes that `manage.py up` starts.

    `waiting` is the name of the queue.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.valkey_url = self.url
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = directory / "up.log"
        self._up: subprocess.Popen[bytes] | None = None
        self._admin = ""

    def __enter__(self) -> CodeqStore:
        super().__enter__()
        try:
            self._start_service()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start_service(self) -> None:
        home = self.directory / "home"
        ours = ("CODEQ_", "REDIS_", "DATABASE_", "CELERY_", "BENCH_")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        environ |= {"REDIS_URL": self.valkey_url, "CODEQ_HOME": str(home), "PYTHONUNBUFFERED": "1"}
        environ["DJANGO_SETTINGS_MODULE"] = "codeq_site.settings"
        argv = [sys.executable, str(ROOT / "manage.py"), "up", "--port", str(self.port), "--home", str(home)]
        self._up = spawn(argv, log=self.log, env=environ, cwd=ROOT)
        deadline = time.monotonic() + READY_SECONDS
        # The banner is the last thing that `up` prints before it waits.
        while "codeQ is ready." not in (self.log.read_text(errors="replace") if self.log.exists() else ""):
            if self._up.poll() is not None or time.monotonic() > deadline:
                raise MeasurementError("codeQ did not start", last_line(self.log))
            time.sleep(0.05)
        issued = subprocess.run(
            [sys.executable, "-m", "bench.beside.tokens"],
            cwd=ROOT, env=environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if issued.returncode != 0:
            raise MeasurementError("codeQ issued no tokens", issued.stderr.strip())
        tokens = json.loads(issued.stdout)
        self._admin = tokens["admin"]
        self.environ = {"BENCH_PRODUCER": tokens["producer"], "BENCH_WORKER": tokens["worker"]}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._up is not None:
            end([self._up], seconds=20.0)
        super().__exit__(kind, error, at)

    def pids(self) -> list[int]:
        assert self._up is not None
        return [*super().pids(), self._up.pid]

    def versions(self) -> dict[str, str]:
        packages = ("codeq-server", "django", "uvicorn", "uvloop", "celery")
        return super().versions() | {package: metadata.version(package) for package in packages}

    def count(self, waiting: tuple[str, ...]) -> int:
        request = urllib.request.Request(
            f"{self.url}/v1/codeq/admin/queues/{waiting[0]}", headers={"Authorization": f"Bearer {self._admin}"}
        )
        with contextlib.closing(urllib.request.urlopen(request, timeout=10)) as response:
            queue = json.load(response)
        return int(queue["ready"]) + int(queue["delayed"]) + int(queue["inProgress"])
