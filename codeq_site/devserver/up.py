"""The supervisor of `manage.py up`: run the servers, the web processes and Celery.

`python -m codeq_site.devserver.up` reads the settings from the environment only. Django's settings are read after the
servers have been started, because they contain the addresses of the servers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import msgspec
import redis
from django.core.management.base import SystemCheckError

from codeq_site import env, sockets
from codeq_site.devserver import banner
from codeq_site.devserver.bootstrap import BootstrapResult
from codeq_site.devserver.data_dir import DataDirectory
from codeq_site.devserver.embedded import EmbeddedServer, PostgreSQL, Valkey
from codeq_site.devserver.forked import ForkedModule, import_application
from codeq_site.devserver.supervisor import (
    Child,
    CommandLineProgram,
    Program,
    StartError,
    StopRequested,
    Supervisor,
    last_line,
)
from core.conf import Conf, build
from core.errors import ConfigError

# Ctrl-C stops everything within 10 s: first web and Celery, then the servers that they use.
SERVICES_STOP_SECONDS = 5.0
SERVERS_STOP_SECONDS = 4.0
READY_SECONDS = 60.0
# Two for webhook senders, which overlap when a run ends; one for the pipeline, which takes minutes; one for the rest.
CELERY_PROCESSES = 4
# Celery would repeat it at every start.
ROOT_WARNING = "You're running the worker with superuser privileges"
# Libraries of macOS may crash in a process that was forked without a new program.
IS_FORK_SAFE = sys.platform == "linux"
# Defaults for development on one machine. Production mode refuses each of them.
EMBEDDED_DEFAULTS: dict[str, Any] = {
    "auth.provision_tenants": True,
    "webhooks.allow_hosts": ["127.0.0.0/8", "::1/128"],
}


def main() -> None:
    try:
        Up(build(env.read_variables()), StartProgress(sys.stdout)).run()
    except (StartError, ConfigError) as error:
        sys.exit(str(error))
    except OSError as error:
        # For example a full disk, or a permission that was removed. The system's message names the file.
        sys.exit(f"codeQ cannot run: {error}")


class StartProgress:
    """Prints one line per step. On a terminal, the line appears when the step begins."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.is_terminal = out.isatty()
        self._is_open = False
        # A terminal that cannot encode the tick shows a replacement instead of failing.
        with contextlib.suppress(AttributeError):
            out.reconfigure(errors="replace")  # type: ignore[attr-defined]

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        if self.is_terminal:
            self._put(f"  {name} …")
            self._is_open = True
        try:
            yield
        except BaseException:
            self._close()
            raise
        lead = "\r\x1b[K" if self._is_open else ""
        self._is_open = False
        self._put(f"{lead}✓ {name:<20} {time.monotonic() - started:4.1f} s\n")

    def report(self, text: str) -> None:
        self._close()
        self._put(f"{text}\n")

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._put("\n")

    def _put(self, text: str) -> None:
        # Writing fails if the terminal was closed. The processes must be stopped in order even then.
        with contextlib.suppress(OSError):
            self._out.write(text)
            self._out.flush()


class Up:
    """One run of `manage.py up`, from the first check to the end of the last child."""

    def __init__(self, conf: Conf, progress: StartProgress) -> None:
        self.conf = conf
        self.progress = progress
        self.servers: list[Child] = []
        self.broker: EmbeddedServer | None = None

    def run(self) -> None:
        # Only this user may read the files that this process and its children write.
        os.umask(0o077)
        self._check_production()
        web = self.conf.web
        self.home = DataDirectory(self.conf.home_path)
        self.home.end_leftovers()
        with sockets.reserve(web.host, web.port) as self.reserved:
            self.supervisor = Supervisor(self.progress.report)
            try:
                self._start_servers()
                with self.progress.step("Database"):
                    logins = self._prepare_database()
                self._start_services()
                base = sockets.url(web.host, web.port)
                self.progress.report(
                    banner.banner_text(base, self.home.path, logins, has_logs=self.progress.is_terminal),
                )
                self.supervisor.watch()
            except StopRequested:
                self.progress.report("Stopping …")
            finally:
                self._stop()

    def _stop(self) -> None:
        started = time.monotonic()
        services = [child for child in self.supervisor.children if child not in self.servers]
        self.supervisor.stop(services, seconds=SERVICES_STOP_SECONDS)
        self.supervisor.stop(self.servers, seconds=SERVERS_STOP_SECONDS)
        self.progress.report(
            f"Stopped in {time.monotonic() - started:.1f} s. "
            f"The state is in {self.home.path}; the next start continues from there."
        )

    def _check_production(self) -> None:
        if not self.conf.production:
            return
        needed = {
            "REDIS_URL": self.conf.redis_url,
            "DATABASE_URL": self.conf.database_url,
            "CELERY_BROKER_URL": self.conf.broker_url,
            "SECRET_KEY": self.conf.secret_key,
        }
        missing = ", ".join(name for name, value in needed.items() if not value)
        if missing:
            raise StartError(f"Production mode does not start embedded servers or create secrets: set {missing}.")
        manage = [sys.executable, "manage.py"]
        checked = subprocess.run(
            [*manage, "check", "--deploy", "--fail-level", "ERROR"],
            stdout=subprocess.DEVNULL,
            check=False,
        )
        if checked.returncode != 0:
            raise StartError("The settings are not safe for production: fix the problems above.")

    def _start_servers(self) -> None:
        """Start each server whose URL is not set, and publish the addresses."""
        embedded: dict[str, EmbeddedServer] = {}
        if not self.conf.database_url:
            embedded["database_url"] = self.home.postgresql()
        if not self.conf.redis_url:
            embedded["redis_url"] = self.home.valkey()
        if not self.conf.broker_url:
            self.broker = embedded["broker_url"] = self.home.broker()
        for server in embedded.values():
            with self.progress.step(server.name):
                child = self.supervisor.start(server)
                self.servers.append(child)
                self.supervisor.wait_until_ready(child, server.is_ready, server.explain)
                if isinstance(server, PostgreSQL):
                    server.ensure_database()
        if not self.conf.production:
            published = {name: server.url for name, server in embedded.items()}
            store = embedded.get("redis_url")
            if isinstance(store, Valkey) and store.allocator:
                published["redis_allocator"] = store.allocator.name
            self.home.publish({**(EMBEDDED_DEFAULTS if embedded else {}), **published}, self.conf.secret_key)

    def _prepare_database(self) -> BootstrapResult:
        log = self.home.log("start")
        argv = [sys.executable, "-m", "codeq_site.devserver.bootstrap"]
        program = CommandLineProgram("preparation", argv, os.environ, Path.cwd(), log, stdout=subprocess.PIPE)
        code, output = self.supervisor.run(program)
        if code != 0:
            raise StartError(f"The database cannot be prepared: {last_line(log)} (details in {log})")
        return msgspec.json.decode(output, type=BootstrapResult)

    def _start_services(self) -> None:
        count = self.conf.web.workers or cores()
        # Each process writes its own metrics files (core/metrics.py). Delete those of former runs.
        shutil.rmtree(self.home.path / "metrics", ignore_errors=True)
        celery = ["celery", "-A", "codeq_site", "--quiet"]
        # A single worker does not need to exchange messages with others.
        single = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        commands = {
            **{f"web-{number}": ["codeq_site.web"] for number in range(1, count + 1)},
            "celery-worker": [*celery, "worker", "--loglevel=WARNING", f"--concurrency={CELERY_PROCESSES}", *single],
            "celery-beat": [*celery, "beat", "--loglevel=WARNING", f"--schedule={self.home.path / 'beat-schedule'}"],
        }
        self._import_application()
        children = [self.supervisor.start(self._program(name, argv)) for name, argv in commands.items()]
        with self.progress.step(f"Web, {count} process{'es' if count > 1 else ''}"):
            self._wait_until_ready(self._web_problem, children)
        with self.progress.step("Celery"):
            self._wait_until_ready(self._celery_problem, children)

    def _import_application(self) -> None:
        warnings.filterwarnings("ignore", ROOT_WARNING)
        if not IS_FORK_SAFE:
            return
        with self.progress.step("Application"):
            try:
                import_application()
            except SystemCheckError as error:
                raise StartError(" ".join(str(error).split())) from error

    def _program(self, name: str, argv: list[str]) -> Program:
        # On a terminal, the children log to files, so that the output of `up` stays readable. In a container or a
        # service they log to stderr, which is collected there.
        log = self.home.log(name) if self.progress.is_terminal else None
        if IS_FORK_SAFE:
            return ForkedModule(name, argv, log, self._release)
        return CommandLineProgram(
            name, [sys.executable, "-W", f"ignore:{ROOT_WARNING}", "-m", *argv], os.environ, Path.cwd(), log
        )

    def _release(self) -> None:
        """Close the files of the supervisor in a fork."""
        self.supervisor.close()
        self.home.release()
        self.reserved.close()

    def _wait_until_ready(self, problem: Callable[[], str], children: list[Child]) -> None:
        """Wait until `problem` returns an empty text.

        Raises StartError if a child ends or the time is up.
        """
        deadline = time.monotonic() + READY_SECONDS
        while reason := problem():
            for child in children:
                if child.process.poll() is not None:
                    line = last_line(child.program.log) or "its log is above."
                    raise StartError(f"{child.program.name} ended during its start: {line}")
            if time.monotonic() > deadline:
                raise StartError(f"codeQ is not ready after {READY_SECONDS:g} s: {reason}")
            self.supervisor.pause(0.05)

    def _web_problem(self) -> str:
        status, reason = sockets.probe(self.conf.web.host, self.conf.web.port, "/readyz")
        return "" if status == 200 else reason

    def _celery_problem(self) -> str:
        """Return a problem unless Celery's worker waits for messages.

        Only the embedded broker is checked.
        """
        if self.broker is None:
            return ""
        with redis.Redis.from_url(self.broker.url) as client:
            is_waiting = any(connection["cmd"] == "brpop" for connection in client.client_list())
        return "" if is_waiting else "Celery's worker does not read messages from its broker."


def cores() -> int:
    """Return the number of cores that this process may use, which a container may limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


if __name__ == "__main__":
    main()
