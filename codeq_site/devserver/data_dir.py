"""The directory CODEQ_HOME: data of the embedded servers, secrets, sockets and logs."""

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

# A service that was forked from the supervisor has the supervisor's command line.
SERVICE_COMMANDS = ("codeq_site.devserver.up", "codeq_site.web", "celery -A codeq_site")
LOG_BYTES = 10 * 2**20


class DataDirectory:
    """The directory of one installation. One supervisor at a time holds its lock."""

    def __init__(self, path: Path) -> None:
        self.path = private_directory(path)
        self._lock = self._acquire_lock()
        self.logs = private_directory(path / "log")
        self.sockets = socket_directory(path)

    def _acquire_lock(self) -> int:
        """Lock the directory until this process ends.

        Two supervisors would run two Valkeys on one AOF. Raises StartError if another one holds the lock.
        """
        file = self.path / "up.lock"
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StartError(
                f"Cannot write to {file} ({error.strerror}): run as its owner, or set another directory with --home."
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(descriptor, 32).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise StartError(
                f"codeQ already runs with {self.path} (pid {owner}): stop it, or set another directory with --home."
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return descriptor

    def release(self) -> None:
        """Close the lock's file in a child that this process has forked."""
        os.close(self._lock)

    def end_leftovers(self) -> None:
        """End the web and Celery processes that a killed supervisor left.

        They may still hold the port. This process holds the lock, so any such process of this directory has lost its
        supervisor.
        """
        leftovers = []
        for process in psutil.process_iter(["cmdline"]):
            with contextlib.suppress(psutil.Error):
                command_line = " ".join(process.info["cmdline"] or ())
                is_codeq = any(words in command_line for words in SERVICE_COMMANDS)
                if is_codeq and process.pid != os.getpid() and process.environ().get("CODEQ_HOME") == str(self.path):
                    process.terminate()
                    leftovers.append(process)
        _, still_running = psutil.wait_procs(leftovers, timeout=5)
        for process in still_running:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(still_running, timeout=5)

    def log(self, name: str) -> Path:
        """Return a program's log file. If it exceeds LOG_BYTES, rename it to `.log.1` first."""
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
        """Return the secret in the file of that name. Generate it if there is no such file."""
        file = self.path / name
        if not file.is_file():
            write_private(file, secrets.token_urlsafe(characters)[:characters] + "\n")
        return file.read_text(encoding="utf-8").strip()

    def publish(self, values: dict[str, Any], secret_key: str) -> None:
        """Write the servers' addresses and the key to the file from which other commands read them.

        Also create the admin's password, which `bootstrap` reads.
        """
        self.secret(PASSWORD_FILE, 20)
        key = secret_key or self.secret("secret_key", 64)
        write_private(self.path / EMBEDDED_FILE, msgspec.json.encode({**values, "secret_key": key}).decode() + "\n")
