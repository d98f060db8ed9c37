"""Installations: `manage.py up` as a process with its own home and port."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from django.conf import settings

from tests.conftest import free_port
from tests.waiting import until

# Enough for a start on two busy cores; on an idle machine it takes three seconds.
START_SECONDS = 120.0
STOP_SECONDS = 10.0


class Installation:
    """A home, a port, and the process of `up`, if it runs."""

    def __init__(self, home: Path, port: int | None = None) -> None:
        self.home = home
        self.port = port or free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._out = home.with_name(home.name + ".out")
        self._err = home.with_name(home.name + ".err")

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def launch(self, **environment: str) -> None:
        command = [sys.executable, str(settings.BASE_DIR / "manage.py"), "up", "--workers", "1"]
        for former in (self._out, self._err):
            former.unlink(missing_ok=True)  # children that outlive their parent for a moment still write to it
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*command, "--home", str(self.home), "--port", str(self.port)],
                env=clean_environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def start(self, **environment: str) -> None:
        """Launch `up`, and wait until it reports that it is ready."""
        self.launch(**environment)
        try:
            until(lambda: self.has_ended() or "Ctrl-C stops" in self.out, START_SECONDS, every=0.05)
            assert not self.has_ended()
        except AssertionError as error:
            raise AssertionError(f"it did not start; its output:\n{self.out}\n{self.err}") from error

    def refuse(self, **environment: str) -> str:
        """Launch `up` with settings that it refuses, and return its message.

        The message is one line without a traceback, and the exit code is 1.
        """
        self.launch(**environment)
        until(self.has_ended, START_SECONDS, every=0.05)
        assert self.process is not None
        assert self.process.returncode == 1
        message = self.err.strip()
        assert "Traceback" not in message
        assert len(message.splitlines()) == 1, message
        return message

    def has_ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, seconds: float) -> int:
        assert self.process is not None
        return self.process.wait(seconds)

    def children(self) -> list[psutil.Process]:
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, words: str) -> psutil.Process:
        """Wait for the direct child whose command line contains these words.

        Valkey replaces its command line some time after its start.
        """

        def matching() -> list[psutil.Process]:
            assert self.process is not None
            alive = psutil.Process(self.process.pid).children()
            return [child for child in alive if words in " ".join(command_line(child))]

        (child,) = until(matching)
        return child

    def curl_lines(self) -> list[str]:
        return re.findall(r"^curl .*$", self.out, flags=re.M)

    def close(self) -> None:
        if self.process is not None and not self.has_ended():
            children = self.children()
            self.signal(signal.SIGTERM)
            try:
                self.wait(2 * STOP_SECONDS)
            except subprocess.TimeoutExpired:
                for process in [*children, psutil.Process(self.process.pid)]:
                    process.kill()
                self.process.wait(5)
        shutil.rmtree(self.home, ignore_errors=True)


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def clean_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the settings of the tests."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    return {**kept, **changes}


@pytest.fixture(scope="session")
def running() -> Iterator[Installation]:
    """One `up` for all tests that leave it running."""
    directory = Path(tempfile.mkdtemp(prefix="codeq-u"))
    installation = Installation(directory / "home")
    try:
        installation.start()
        yield installation
    finally:
        installation.close()
        shutil.rmtree(directory)


@pytest.fixture
def installation() -> Iterator[Callable[[], Installation]]:
    """`installation()` creates an empty home. At the end everything that runs there is stopped."""
    directory = Path(tempfile.mkdtemp(prefix="codeq-u"))
    installations: list[Installation] = []

    def make() -> Installation:
        installations.append(Installation(directory / f"home-{len(installations)}"))
        return installations[-1]

    yield make
    for created in installations:
        created.close()
    shutil.rmtree(directory)
