"""CODEQ_HOME: the directory that holds the embedded servers' data, the secrets made for them, sockets and logs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path
from typing import Any

import msgspec
import psutil

from codeq_site.devserver.bootstrap import PASSWORD_FILE
from codeq_site.devserver.embedded import BROKER, PostgreSQL, Valkey
from codeq_site.devserver.embedded.files import private_directory, socket_directory, write_private
from codeq_site.devserver.supervisor import StartError
from codeq_site.env import EMBEDDED_FILE

LOG_BYTES = 10 * 2**20


class DataDirectory:
    """One installation's directory, held by one supervisor at a time."""

    def __init__(self, path: Path) -> None:
        self.path = private_directory(path)
        self._lock = self._hold()
        self.logs = private_directory(path / "log")
        self.sockets = socket_directory(path)

    def _hold(self) -> int:
        """Two supervisors on the same data would be two Valkeys on one AOF. The kernel lets go when we end."""
        file = self.path / "up.lock"
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StartError(
                f"Cannot write to {file} ({error.strerror}): run as the user who owns it, or choose another --home."
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(descriptor, 32).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise StartError(
                f"codeQ runs already with {self.path} (pid {owner}): stop it, or choose another directory with --home."
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return descriptor

    def end_leftovers(self) -> None:
        """End the web and Celery processes of a supervisor that was killed: they may still hold the port.

        We hold the lock, so whatever works for this home has lost its supervisor.
        """
        left = []
        for process in psutil.process_iter(["cmdline"]):
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.info["cmdline"] or ())
                ours = "codeq_site.web" in words or "celery -A codeq_site" in words
                if ours and process.environ().get("CODEQ_HOME") == str(self.path):
                    process.terminate()
                    left.append(process)
        _, stubborn = psutil.wait_procs(left, timeout=5)
        for process in stubborn:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(stubborn, timeout=5)

    def log(self, name: str) -> Path:
        """A program's log file. One that has grown too large becomes `.1` at the next start."""
        file = self.logs / f"{name}.log"
        if file.is_file() and file.stat().st_size > LOG_BYTES:
            file.replace(file.with_suffix(".log.1"))
        return file

    def valkey(self) -> Valkey:
        return Valkey(self.path / "valkey", self.log("valkey"), self.sockets / "valkey.sock")

    def broker(self) -> Valkey:
        return Valkey(
            self.path / "broker", self.log("broker"), self.sockets / "broker.sock", BROKER, name="Valkey (broker)"
        )

    def postgresql(self) -> PostgreSQL:
        return PostgreSQL(self.path / "postgresql", self.log("postgresql"), self.sockets / "postgresql")

    def secret(self, name: str, characters: int) -> str:
        """A secret made at the first start and kept in a file of that name."""
        file = self.path / name
        if not file.is_file():
            write_private(file, secrets.token_urlsafe(characters)[:characters] + "\n")
        return file.read_text(encoding="utf-8").strip()

    def publish(self, values: dict[str, Any], secret_key: str) -> None:
        """Let every other command of this home find the servers (`env.py` reads it)."""
        self.secret(PASSWORD_FILE, 20)
        key = secret_key or self.secret("secret_key", 64)
        write_private(self.path / EMBEDDED_FILE, msgspec.json.encode({**values, "secret_key": key}).decode() + "\n")
