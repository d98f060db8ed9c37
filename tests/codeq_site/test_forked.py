"""The services of `manage.py up` run in forks that share the memory of the application."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from codeq_site.devserver.up import IS_FORK_SAFE
from tests.codeq_site.installation import Installation, clean_environment

pytestmark = pytest.mark.skipif(not IS_FORK_SAFE, reason="services are forked on Linux only")
REPOSITORY = str(Path(__file__).parents[2])


def run_python(script: str, directory: Path, **environment: str) -> str:
    """Run a script in a new process, because a fork of pytest would have its threads and files."""
    path = os.pathsep.join([str(directory), REPOSITORY])
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=directory,
        env=clean_environment({"PYTHONPATH": path, **environment}),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


@pytest.mark.parametrize(
    ("source", "code", "output"),
    [
        ("import sys; print(__name__, sys.argv[1:])", 0, "__main__ ['a', 'b']"),
        ("raise SystemExit('out of luck')", 1, "out of luck"),
        ("raise SystemExit(3)", 3, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGHUP)", -signal.SIGHUP, ""),
        ("import atexit; atexit.register(print, 'the last line')", 0, "the last line"),
        ("import os; print(os.getsid(0) == os.getpid(), os.read(0, 1))", 0, "True b''"),
    ],
)
def test_forked_module_runs_like_a_program(source: str, code: int, output: str, tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(source)
    script = (
        "import atexit, signal\n"
        "from pathlib import Path\n"
        "from codeq_site.devserver.forked import ForkedModule\n"
        "from codeq_site.devserver.supervisor import Supervisor\n"
        "atexit.register(print, 'the parent ends')\n"
        "supervisor = Supervisor(print)\n"
        "child = supervisor.start(ForkedModule('it', ['service', 'a', 'b'], Path('log'), supervisor.close))\n"
        "print(child.process.wait(30))\n"
    )
    assert run_python(script, tmp_path).splitlines() == [str(code), "the parent ends"]
    assert (tmp_path / "log").read_text().strip().endswith(output)


def test_import_of_the_application_opens_no_connection_and_starts_no_thread(tmp_path: Path) -> None:
    script = (
        "import psutil\n"
        "from codeq_site.devserver.forked import import_application\n"
        "import_application()\n"
        "process = psutil.Process()\n"
        "print(process.num_threads(), len(process.net_connections('all')))\n"
    )
    home = str(tmp_path / "home")
    output = run_python(script, tmp_path, CODEQ_HOME=home, DJANGO_SETTINGS_MODULE="codeq_site.settings")
    assert output.split() == ["1", "0"]


@pytest.mark.parametrize("name", ["web-1", "celery-worker", "celery-beat"])
def test_service_shares_most_of_its_memory(running: Installation, name: str) -> None:
    memory = running.child(name).memory_full_info()
    assert memory.uss < memory.rss / 2, f"{memory.uss / 2**20:.0f} of {memory.rss / 2**20:.0f} MiB are its own"
