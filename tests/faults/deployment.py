"""Run web, Celery workers and beat as processes that tests can kill, freeze and stop."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import dj_database_url
import psutil
from django.conf import settings
from django.db import connection

from codeq_site.devserver.supervisor import spawn
from tests.conftest import free_port
from tests.waiting import until

Process = subprocess.Popen[bytes]


@contextmanager
def database_at(url: str) -> Iterator[None]:
    """Use another PostgreSQL in this thread: one that the test can stop."""
    before = connection.settings_dict
    connection.close()
    connection.settings_dict = {**before, **dj_database_url.parse(url)}
    try:
        yield
    finally:
        connection.close()
        connection.settings_dict = before


def get_database_url() -> str:
    """Return the URL of this test's database."""
    database = connection.settings_dict
    return f"postgresql://postgres@/{database['NAME']}?host={database['OPTIONS'].get('host') or database['HOST']}"


class Deployment:
    """Processes on the tests' Valkey and one database.

    Each process has a separate session, so that its children can be killed with it. `source` is the tree that they run.
    """

    def __init__(
        self, directory: Path, database_url: str, *, source: Path = settings.BASE_DIR, **environment: str
    ) -> None:
        self.directory, self.source = directory, source
        self.port = free_port()
        self.processes: list[Process] = []
        self.environment = {
            **{name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ},
            "DJANGO_SETTINGS_MODULE": "codeq_site.settings",
            "CODEQ_HOME": str(directory / "home"),
            "CODEQ_PORT": str(self.port),
            "REDIS_URL": settings.CODEQ["redis_url"],
            "CELERY_BROKER_URL": settings.CODEQ["broker_url"],
            "DATABASE_URL": database_url,
            "SECRET_KEY": settings.CODEQ["secret_key"],
            "CODEQ_WEBHOOKS_ALLOW_HOSTS": "127.0.0.0/8",
            **environment,
        }
        if source == settings.BASE_DIR:  # a former release refuses settings that it does not know
            self.environment["CODEQ_REDIS_ALLOCATOR"] = settings.CODEQ.get("redis_allocator", "")

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def web(self) -> Process:
        return self.start("web", "-m", "codeq_site.web")

    def worker(self, processes: int = 4) -> Process:
        isolated = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        return self.start("worker", *_build_celery_command("worker"), f"--concurrency={processes}", *isolated)

    def beat(self) -> Process:
        schedule = self.directory / f"schedule-{len(self.processes)}"
        return self.start("beat", *_build_celery_command("beat"), f"--schedule={schedule}")

    def start(self, name: str, *arguments: str) -> Process:
        # Start it as `up` does: in a separate session, and killed when the tests are killed.
        process = spawn(
            [sys.executable, "-W", "ignore:You're running the worker with superuser privileges", *arguments],
            log=self.log(name),
            env=self.environment,
            cwd=self.source,
            death_signal=signal.SIGKILL,
        )
        self.processes.append(process)
        return process

    def wait_until_it_accepts_connections(self, webs: Sequence[Process] = ()) -> None:
        def accepts_connections() -> bool:
            assert all(web.poll() is None for web in webs), self.log("web").read_text()[-2000:]
            with contextlib.suppress(OSError), closing(socket.create_connection(("127.0.0.1", self.port), 1)):
                return True
            return False

        until(accepts_connections, 60, every=0.05)

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def close(self) -> None:
        for process in self.processes:
            kill(process)


def _build_celery_command(command: str) -> list[str]:
    return ["-m", "celery", "-A", "codeq_site", "--quiet", command, "--loglevel=WARNING"]


def kill(process: Process) -> None:
    """Kill the process and all its children at once, as when a machine fails."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def list_process_tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def freeze(pid: int) -> list[psutil.Process]:
    """Suspend a process and its children. Their connections stay open without a response."""
    processes = list_process_tree(pid)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    return processes


def thaw(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
