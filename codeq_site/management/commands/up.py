"""`manage.py up`: everything on this machine with one command, and one Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import msgspec
import redis
from django.conf import settings
from django.core.management.base import BaseCommand

from codeq_site import env, sockets
from codeq_site.devserver import banner
from codeq_site.devserver.bootstrap import BootstrapResult
from codeq_site.devserver.data_dir import DataDirectory
from codeq_site.devserver.embedded import PostgreSQL, Server
from codeq_site.devserver.supervisor import Child, StartError, StopRequested, Supervisor, last_line
from codeq_site.devserver.supervisor import Command as Program
from core.conf import Conf, build
from core.errors import ConfigError

# Ctrl-C ends everything within 10 s: what serves first, then what it stands on.
SERVICES_STOP_SECONDS = 5.0
SERVERS_STOP_SECONDS = 4.0
READY_SECONDS = 60.0
# Senders wait for slow endpoints, two at a change of runs; the pipeline works for minutes; drain and repair go on.
CELERY_PROCESSES = 4
# True only while everything is on one machine for one person. Production mode refuses each of them.
EMBEDDED_DEFAULTS: dict[str, Any] = {
    "auth.provision_tenants": True,
    "webhooks.allow_hosts": ["127.0.0.0/8", "::1/128"],
}


class Command(BaseCommand):
    help = "Start everything: the servers (unless REDIS_URL and DATABASE_URL name others), web, Celery."
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--port", type=int, help="port of the API and the console (CODEQ_PORT, 8080)")
        parser.add_argument("--home", help="directory of all state (CODEQ_HOME, var)")
        parser.add_argument("--workers", type=int, help="web processes (CODEQ_WEB_WORKERS, one per core)")

    def handle(self, *args: Any, port: int | None, home: str | None, workers: int | None, **options: Any) -> None:
        chosen = {"CODEQ_WEB_PORT": port, "CODEQ_HOME": home, "CODEQ_WEB_WORKERS": workers}
        environ = env.for_child({name: str(value) for name, value in chosen.items() if value is not None})
        try:
            Up(build(env.read_variables(environ)), environ, Progress(sys.stdout)).run()
        except (StartError, ConfigError) as error:
            self.stderr.write(str(error))
            sys.exit(1)
        except OSError as error:
            # A full disk, a right taken away meanwhile: the system's own words name the file.
            self.stderr.write(f"codeQ cannot run: {error}")
            sys.exit(1)


class Progress:
    """A line per step: written in place on a terminal, once it is done elsewhere."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.is_terminal = out.isatty()
        self._is_open = False
        # A step is worth more than its tick on a terminal that cannot show one.
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

    def say(self, text: str) -> None:
        self._close()
        self._put(f"{text}\n")

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._put("\n")

    def _put(self, text: str) -> None:
        # A terminal that was closed must not keep us from an orderly end.
        with contextlib.suppress(OSError):
            self._out.write(text)
            self._out.flush()


class Up:
    """One run, from the first check to the last child's end."""

    def __init__(self, conf: Conf, environ: dict[str, str], progress: Progress) -> None:
        self.conf = conf
        self.progress = progress
        self.environ = {
            **environ,
            "CODEQ_HOME": str(self.conf.home_path),
            "DJANGO_SETTINGS_MODULE": "codeq_site.settings",
            "PYTHONUNBUFFERED": "1",
        }
        self.servers: list[Child] = []
        self.broker: Server | None = None

    def run(self) -> None:
        # Whatever we and our children write is nobody else's business.
        os.umask(0o077)
        self._check_production()
        web = self.conf.web
        self.home = DataDirectory(self.conf.home_path)
        self.home.end_leftovers()
        with sockets.reserve(web.host, web.port):
            self.supervisor = Supervisor(self.progress.say)
            try:
                self._start_servers()
                with self.progress.step("Database"):
                    seeded = self._prepare_database()
                self._start_services()
                base = sockets.url(web.host, web.port)
                self.progress.say(
                    banner.banner_text(base, self.home.path, seeded, has_logs=self.progress.is_terminal),
                )
                self.supervisor.watch()
            except StopRequested:
                self.progress.say("Stopping …")
            finally:
                self._stop()

    def _stop(self) -> None:
        started = time.monotonic()
        services = [child for child in self.supervisor.children if child not in self.servers]
        self.supervisor.stop(services, seconds=SERVICES_STOP_SECONDS)
        self.supervisor.stop(self.servers, seconds=SERVERS_STOP_SECONDS)
        self.progress.say(
            f"Stopped in {time.monotonic() - started:.1f} s. "
            f"The state is in {self.home.path}; the next start goes on from there."
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
            raise StartError(f"Production mode starts no embedded servers and makes no secrets: set {missing}.")
        manage = [sys.executable, str(settings.BASE_DIR / "manage.py")]
        checked = subprocess.run(
            [*manage, "check", "--deploy", "--fail-level", "ERROR"],
            env=self.environ,
            stdout=subprocess.DEVNULL,
            check=False,
        )
        if checked.returncode != 0:
            raise StartError("The settings are not fit for production: correct what is named above.")

    def _start_servers(self) -> None:
        """Start those that no URL names, and publish where they are."""
        wanted: dict[str, Server] = {}
        if not self.conf.database_url:
            wanted["database_url"] = self.home.postgresql()
        if not self.conf.redis_url:
            wanted["redis_url"] = self.home.valkey()
        if not self.conf.broker_url:
            self.broker = wanted["broker_url"] = self.home.broker()
        for server in wanted.values():
            with self.progress.step(server.name):
                child = self.supervisor.start(server)
                self.servers.append(child)
                self.supervisor.until_ready(child, server.is_ready, server.explain)
                if isinstance(server, PostgreSQL):
                    server.ensure_database()
        if not self.conf.production:
            published = {name: server.url for name, server in wanted.items()}
            self.home.publish({**(EMBEDDED_DEFAULTS if wanted else {}), **published}, self.conf.secret_key)

    def _prepare_database(self) -> BootstrapResult:
        log = self.home.log("start")
        argv = [sys.executable, "-m", "codeq_site.devserver.bootstrap"]
        program = Program("preparation", argv, self.environ, settings.BASE_DIR, log, stdout=subprocess.PIPE)
        code, output = self.supervisor.run(program)
        if code != 0:
            raise StartError(f"The database cannot be prepared: {last_line(log)} (details in {log})")
        return msgspec.json.decode(output, type=BootstrapResult)

    def _start_services(self) -> None:
        count = self.conf.web.workers or cores()
        # Each process counts in files of its own (core/metrics.py); those of former runs would only pile up.
        shutil.rmtree(self.home.path / "metrics", ignore_errors=True)
        python = [sys.executable, "-m"]
        # Whoever runs `up` as root has been told so often enough.
        calm = [sys.executable, "-W", "ignore:You're running the worker with superuser privileges", "-m"]
        celery = [*calm, "celery", "-A", "codeq_site", "--quiet"]
        # One worker has nobody to gossip with.
        alone = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        commands = {
            **{f"web-{number}": [*python, "codeq_site.web"] for number in range(1, count + 1)},
            "celery-worker": [*celery, "worker", "--loglevel=WARNING", f"--concurrency={CELERY_PROCESSES}", *alone],
            "celery-beat": [*celery, "beat", "--loglevel=WARNING", f"--schedule={self.home.path / 'beat-schedule'}"],
        }
        children = [self.supervisor.start(self._program(name, argv)) for name, argv in commands.items()]
        with self.progress.step(f"Web, {count} process{'es' if count > 1 else ''}"):
            self._until(self._serving, children)
        with self.progress.step("Celery"):
            self._until(self._consuming, children)

    def _program(self, name: str, argv: list[str]) -> Program:
        # On a terminal the children's logs would bury what `up` says; elsewhere (a container, a service) somebody
        # collects them.
        log = self.home.log(name) if self.progress.is_terminal else None
        return Program(name, argv, self.environ, settings.BASE_DIR, log)

    def _until(self, problem: Callable[[], str], children: list[Child]) -> None:
        """Wait until there is no problem left; a child that ends meanwhile ends the start."""
        deadline = time.monotonic() + READY_SECONDS
        while reason := problem():
            for child in children:
                if child.process.poll() is not None:
                    words = last_line(child.program.log) or "its lines are above."
                    raise StartError(f"{child.program.name} ended at its start: {words}")
            if time.monotonic() > deadline:
                raise StartError(f"codeQ is not ready after {READY_SECONDS:g} s: {reason}")
            self.supervisor.pause(0.05)

    def _serving(self) -> str:
        status, reason = sockets.probe(self.conf.web.host, self.conf.web.port, "/readyz")
        return "" if status == 200 else reason

    def _consuming(self) -> str:
        """Whether Celery's worker waits at the broker. Only our own broker is asked; of another we know too little."""
        if self.broker is None:
            return ""
        with redis.Redis.from_url(self.broker.url) as client:
            waits = any(each["cmd"] == "brpop" for each in client.client_list())
        return "" if waits else "Celery's worker does not take from its broker."


def cores() -> int:
    """The cores this process may use, which in a container are fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
