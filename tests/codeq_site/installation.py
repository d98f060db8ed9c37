"""An installation as `manage.py up` makes it: a process with a home directory and a port."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import psutil
import psycopg
from django.conf import settings

from tests.conftest import free_port
from tests.waiting import until

# Enough for a start on two busy cores. On an idle machine, a start takes three seconds.
START_SECONDS = 120.0
STOP_SECONDS = 10.0


class Installation:
    """A home directory and a port, and the `up` process if it runs."""

    def __init__(self, home: Path, port: int | None = None) -> None:
        self.home = home
        self.port = port or free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.out_path = home.with_name(home.name + ".out")
        self.err_path = home.with_name(home.name + ".err")

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def out(self) -> str:
        return self.out_path.read_text()

    @property
    def err(self) -> str:
        return self.err_path.read_text()

    def launch(self, **environment: str) -> None:
        command = [sys.executable, str(settings.BASE_DIR / "manage.py"), "up", "--workers", "1"]
        for former in (self.out_path, self.err_path):
            former.unlink(missing_ok=True)  # a remaining child of a former `up` writes to the deleted file
        with self.out_path.open("wb") as out, self.err_path.open("wb") as err:
            self.process = subprocess.Popen(
                [*command, "--home", str(self.home), "--port", str(self.port)],
                env=clean_environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def start(self, **environment: str) -> None:
        """Launch `up`, and wait until it prints that it is ready."""
        self.launch(**environment)
        try:
            until(lambda: self.has_ended() or "Ctrl-C stops" in self.out, START_SECONDS, every=0.05)
            assert not self.has_ended()
        except AssertionError as error:
            raise AssertionError(f"`up` did not start. Its output:\n{self.out}\n{self.err}") from error

    def fail_to_start(self, **environment: str) -> str:
        """Launch an `up` that cannot start, and return its message.

        It must be one line without a traceback, with exit code 1.
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

    def child(self, *names: str) -> psutil.Process:
        """Wait for the direct child with one of these names in its name or its command line.

        Valkey and forked services set them after they have started.
        """

        def matching() -> list[psutil.Process]:
            assert self.process is not None
            alive = psutil.Process(self.process.pid).children()
            return [child for child in alive if any(name in command_line(child) for name in names)]

        (child,) = until(matching)
        return child

    def read_embedded_settings(self) -> dict[str, str]:
        """Return the URLs of the embedded servers, and the secret key."""
        embedded: dict[str, str] = json.loads((self.home / "embedded.json").read_text())
        return embedded

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base}/readyz", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def run_printed_commands(self, seconds: float) -> None:
        """Run the three commands that `up` printed, and wait until the audit has the result."""
        outputs = [
            subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, timeout=20, check=True).stdout
            for line in self.curl_lines()
        ]
        assert [output.strip().splitlines()[-1] for output in outputs] == ["202", "200", "200"], outputs
        task_id = json.loads(outputs[0].splitlines()[0])["id"]

        def is_audited() -> bool:
            with psycopg.connect(self.read_embedded_settings()["database_url"]) as connection:
                query = "SELECT 1 FROM queues_auditedresult WHERE task_id = %s"
                return connection.execute(query, (task_id,)).fetchone() is not None

        until(is_audited, seconds)

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


def command_line(process: psutil.Process) -> str:
    """Return the name and the command line of a process, or "" if it has ended."""
    try:
        return " ".join([process.name(), *process.cmdline()])
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def clean_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a new user, without the settings of the tests."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    return {**kept, **changes}
