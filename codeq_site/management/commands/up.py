"""`manage.py up`: everything on this machine with one command, and one Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from django.conf import settings
from django.core.management.base import BaseCommand

from codeq_site import env
from codeq_site.conf import Conf, build
from codeq_site.embedded import PostgreSQL, Server
from codeq_site.errors import ConfigError
from codeq_site.home import Home
from codeq_site.seed import ADMIN, Seeded
from codeq_site.supervisor import Child, StartError, StopRequested, Supervisor, last_line
from codeq_site.supervisor import Command as Program

# Ctrl-C ends everything within 10 s: what serves first, then what it stands on.
SERVICES_STOP_SECONDS = 6.0
SERVERS_STOP_SECONDS = 3.0
READY_SECONDS = 60.0
CELERY_PROCESSES = 2
# What is true only while everything runs on one machine for one person. Production mode refuses each of them.
EMBEDDED_DEFAULTS = {
    "auth.provision_tenants": True,
    "webhooks.allow_hosts": ["127.0.0.0/8", "::1/128"],
}


class Command(BaseCommand):
    help = "Start everything: the servers (unless REDIS_URL and DATABASE_URL name others), web, Celery."
    requires_system_checks: Sequence[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--port", type=int, help="port of the API and the console (CODEQ_PORT, 8080)")
        parser.add_argument("--home", help="directory of all state (CODEQ_HOME, var)")
        parser.add_argument("--workers", type=int, help="web processes (CODEQ_WEB_WORKERS, one per core)")

    def handle(self, *args: Any, port: int | None, home: str | None, workers: int | None, **options: Any) -> None:
        chosen = {"CODEQ_WEB_PORT": port, "CODEQ_HOME": home, "CODEQ_WEB_WORKERS": workers}
        environ = env.inherited({name: str(value) for name, value in chosen.items() if value is not None})
        try:
            values = env.given(environ)
            Up(values, environ, Progress(sys.stdout)).run()
        except (StartError, ConfigError) as error:
            self.stderr.write(str(error))
            sys.exit(1)


class Progress:
    """A line per step: written in place on a terminal, once it is done elsewhere."""

    def __init__(self, out: Any) -> None:
        self._out = out
        self.is_terminal: bool = out.isatty()
        self._is_open = False
        with contextlib.suppress(AttributeError):
            out.reconfigure(errors="replace")

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

    def __init__(self, values: dict[str, Any], environ: dict[str, str], progress: Progress) -> None:
        self.conf: Conf = build(values)
        self.progress = progress
        self.environ = {
            **environ,
            "CODEQ_HOME": str(self.conf.home_path),
            "DJANGO_SETTINGS_MODULE": "codeq_site.settings",
            "PYTHONUNBUFFERED": "1",
        }

    def run(self) -> None:
        self._check_production()
        reserved = reserve_port(self.conf.web.host, self.conf.web.port)
        self.home = Home(self.conf.home_path)
        self.supervisor = Supervisor(self.progress.say)
        self.servers: list[Child] = []
        try:
            self._start_servers()
            with self.progress.step("Database"):
                seeded = self._prepare_database()
            self._start_services()
            self.progress.say(self._welcome(seeded))
            self.supervisor.watch()
        except StopRequested:
            self.progress.say("Stopping …")
        finally:
            started = time.monotonic()
            services = [child for child in self.supervisor.children if child not in self.servers]
            self.supervisor.stop(services, seconds=SERVICES_STOP_SECONDS)
            self.supervisor.stop(self.servers, seconds=SERVERS_STOP_SECONDS)
            reserved.close()
        self.progress.say(
            f"Stopped in {time.monotonic() - started:.1f} s. The state is in {self.conf.home_path}; the next start goes on."
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
        missing = [name for name, value in needed.items() if not value]
        if missing:
            raise StartError(
                f"Production mode starts no embedded servers and makes no secrets: set {', '.join(missing)}."
            )
        if self._manage("check", "--deploy", "--fail-level", "WARNING") != 0:
            raise StartError("The settings above are not fit for production: correct them, or unset CODEQ_PRODUCTION.")

    def _manage(self, *words: str) -> int:
        argv = [sys.executable, str(settings.BASE_DIR / "manage.py"), *words]
        return subprocess.run(argv, env=self.environ, stdout=sys.stderr, check=False).returncode

    def _start_servers(self) -> None:
        """Start those that no URL names, all at once, and publish where they are."""
        wanted: dict[str, Server] = {}
        if not self.conf.database_url:
            wanted["database_url"] = self.home.postgresql()
        if not self.conf.redis_url:
            wanted["redis_url"] = self.home.valkey()
        if not self.conf.broker_url:
            wanted["broker_url"] = self.home.broker()
        published: dict[str, Any] = dict(EMBEDDED_DEFAULTS) if wanted else {}
        begun: list[tuple[Server, Child]] = []
        for name, server in wanted.items():
            child = self.supervisor.start(server)
            self.servers.append(child)
            begun.append((server, child))
            published[name] = server.url
        for server, child in begun:
            with self.progress.step(server.name):
                self.supervisor.until_ready(child, server.is_ready, server.explain)
                if isinstance(server, PostgreSQL):
                    server.ensure_database()
        if self.conf.secret_key:
            published["secret_key"] = self.conf.secret_key
        self.home.publish(published, is_production=self.conf.production)

    def _prepare_database(self) -> Seeded:
        log = self.home.log("start")
        program = Program(
            "preparation",
            [sys.executable, "-m", "codeq_site.seed"],
            self.environ,
            settings.BASE_DIR,
            log,
            stdout=subprocess.PIPE,
        )
        code, output = self.supervisor.run(program)
        if code != 0:
            raise StartError(f"The database cannot be prepared: {last_line(log)} (details in {log}).")
        return msgspec.json.decode(output, type=Seeded)

    def _start_services(self) -> None:
        count = self.conf.web.workers or cores()
        python = [sys.executable, "-m"]
        celery = [*python, "celery", "-A", "codeq_site"]
        web = [self._program(f"web-{number}", [*python, "codeq_site.web"]) for number in range(1, count + 1)]
        worker = self._program(
            "celery-worker",
            [*celery, "--quiet", "worker", "--loglevel=WARNING", f"--concurrency={CELERY_PROCESSES}"]
            # One worker has nobody to gossip with.
            + ["--without-gossip", "--without-mingle", "--without-heartbeat", "--hostname=codeq@%h"],
        )
        beat = self._program(
            "celery-beat",
            [
                *celery,
                "--quiet",
                "beat",
                "--loglevel=WARNING",
                "--pidfile=",
                f"--schedule={self.home.path / 'beat-schedule'}",
            ],
        )
        plural = "es" if count > 1 else ""
        children = [self.supervisor.start(program) for program in (*web, worker, beat)]
        with self.progress.step(f"Web, {count} process{plural}"):
            self._until_serving(children)
        with self.progress.step("Celery worker, beat"):
            for child in children[count:]:
                self._still_alive(child)

    def _program(self, name: str, argv: list[str]) -> Program:
        # On a terminal the children's logs would bury what `up` says; elsewhere (a container, a service) somebody
        # collects them.
        log = self.home.log(name) if self.progress.is_terminal else None
        return Program(name, argv, self.environ, settings.BASE_DIR, log)

    def _until_serving(self, children: list[Child]) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            status, reason = probe(self.conf.web.host, self.conf.web.port, "/readyz")
            # A web process without that route still answers.
            if status in (200, 404):
                return
            for child in children:
                self._still_alive(child)
            if time.monotonic() > deadline:
                raise StartError(f"codeQ is not ready after {READY_SECONDS:g} s: {reason}")
            self.supervisor.pause(0.05)

    def _still_alive(self, child: Child) -> None:
        if child.process.poll() is not None:
            words = last_line(child.program.log) or "see its lines above"
            raise StartError(f"{child.program.name} ended at its start: {words}")

    def _welcome(self, seeded: Seeded) -> str:
        host = "127.0.0.1" if self.conf.web.host in ("0.0.0.0", "::", "") else self.conf.web.host  # noqa: S104
        base = f"http://{f'[{host}]' if ':' in host else host}:{self.conf.web.port}"
        password = f"user {ADMIN}, password {seeded.password or 'as you have set it'}"
        lines = [
            "",
            "codeQ is ready.",
            "",
            f"  API docs  {base}/api/docs/",
            f"  Admin     {base}/admin/   " + (password if seeded.producer else ""),
            f"  Metrics   {base}/metrics",
            f"  State     {self.conf.home_path}" + (" (logs in log/)" if self.progress.is_terminal else ""),
        ]
        if seeded.producer:
            lines += ["", "Tokens of tenant demo, valid for 24 hours:", ""]
            lines += [f"  producer  {seeded.producer}", f"  worker    {seeded.worker}", ""]
            lines += ["A task's whole way, to paste into another terminal (answers: 202, 200, 200):", ""]
            lines += three_lines(base, seeded)
        return "\n".join([*lines, "", "Ctrl-C stops everything; nothing is lost."])


def three_lines(base: str, seeded: Seeded) -> list[str]:
    """A task's way as three shell lines. Each stands alone: the claimed task is handed on in a file."""
    kept = "/tmp/codeq-task.json"  # noqa: S108  (a newcomer's own shell writes it)
    task = f'$(sed -n \'s/.*"id":"\\([^"]*\\)".*/\\1/p\' {kept})'

    def line(path: str, token: str, body: dict[str, Any]) -> str:
        return (
            f"curl -sS -w '\\n%{{http_code}}\\n' \"{base}/v1/codeq/{path}\" -H 'Content-Type: application/json' "
            f"-H 'Authorization: Bearer {token}' -d {shlex.quote(json.dumps(body))}"
        )

    return [
        line("tasks", seeded.producer, {"command": "greet", "payload": {"whom": "world"}}),
        line("tasks/claim", seeded.worker, {"commands": ["greet"], "waitSeconds": 5}) + f" | tee {kept}",
        line(f"tasks/{task}/result", seeded.worker, {"status": "COMPLETED", "result": {"text": "Hello, world"}}),
    ]


def cores() -> int:
    """The cores this process may use, which in a container are fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def reserve_port(host: str, port: int) -> socket.socket:
    """Take the port, or say that it is taken. The socket is bound and does not listen: the web processes do.

    They share the port by SO_REUSEPORT, with which a second codeQ of the same user would share it too; so first
    the port is tried without.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        for is_shared in (False, True):
            reserved = socket.socket(family, kind, protocol)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind(address)
            if not is_shared:
                reserved.close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartError(
                f"Port {port} is in use: stop what listens there, or choose another with --port or CODEQ_PORT."
            ) from error
        raise StartError(
            f"Cannot listen on {host} port {port} ({error.strerror}): choose others with CODEQ_WEB_HOST and --port."
        ) from error
    return reserved


def probe(host: str, port: int, path: str) -> tuple[int, str]:
    """What a path answers: the status (0 = nobody answers) and the reason in words."""
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read(2000).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, f"nobody answers on port {port} ({error})."
    finally:
        connection.close()
