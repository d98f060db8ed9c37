"""Run every block of the tutorial in one shell and compare the output with the page."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from django.conf import settings

from tests.codeq_site.installation import Installation, clean_environment
from tests.conftest import free_port
from tests.waiting import until

PAGE = Path(settings.BASE_DIR) / "docs" / "tutorial.md"
CONSOLE_STEP = "<!-- the test sends the browser's form here -->"
END = "--end of block--"


class TutorialShell:
    """A shell into which the blocks are pasted one after the other."""

    def __init__(self, installation: Installation, directory: Path) -> None:
        self.replacements = {
            "http://127.0.0.1:8080": installation.base,
            "http://127.0.0.1:9000": f"http://127.0.0.1:{(port := free_port())}",
            "receiver.py 9000": f"receiver.py {port}",
            ".venv/bin/python": sys.executable,
            "var/tutorial": str(directory),
        }
        # A process group, so that `close` also ends the background processes of the blocks.
        self.shell = subprocess.Popen(
            ["sh", "-u"],
            env=clean_environment({"CODEQ_HOME": str(installation.home), "PYTHONPATH": str(settings.BASE_DIR)}),
            cwd=settings.BASE_DIR,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def paste(self, block: str) -> str:
        """Run a block and return its output."""
        for text, replacement in self.replacements.items():
            block = block.replace(text, replacement)
        assert self.shell.stdin is not None
        assert self.shell.stdout is not None
        self.shell.stdin.write(f"{block}\necho; echo '{END}'\n")
        self.shell.stdin.flush()
        output = ""
        while not output.endswith(f"{END}\n"):
            line = self.shell.stdout.readline()
            assert line, f"the shell ended after {output}"
            output += line
        return output.removesuffix(f"{END}\n").strip()

    def close(self) -> None:
        os.killpg(self.shell.pid, signal.SIGTERM)
        self.shell.communicate(timeout=20)


@pytest.fixture
def shell(running: Installation, tmp_path: Path) -> Iterator[TutorialShell]:
    shell = TutorialShell(running, tmp_path / "tutorial")
    yield shell
    shell.close()


def edit_and_replay(installation: Installation, task_id: str) -> None:
    """Send the form of *Edit and replay* as a browser does."""
    with httpx.Client(base_url=installation.base, follow_redirects=True, timeout=30) as browser:
        login = browser.get("/admin/login/")
        password = (installation.home / "admin_password").read_text().strip()
        form = {"username": "admin", "password": password, "csrfmiddlewaretoken": find_csrf_token(login.text)}
        assert "Overview" in browser.post("/admin/login/?next=/admin/", data=form).text

        def find_failure_groups() -> list[str]:
            page = browser.get("/admin/console/dead/?tenant=demo&command=price").text
            return re.findall(r'href="(/admin/console/dead/list/\?[^"]*failure=[^"]*)"', page)

        (group,) = until(find_failure_groups)  # the drain may be a second behind
        letters = browser.get(group.replace("&amp;", "&"))
        (link,) = re.findall(rf'href="(/admin/console/task/[^"]*{task_id})"', letters.text)
        task = browser.get(link.replace("&amp;", "&"))
        assert "Edit and replay" in task.text
        tenant = re.findall(r'name="tenant" value="(\w+)"', task.text)[0]
        response = browser.post(
            "/admin/console/task/replay/",
            data={
                "tenant": tenant, "id": task_id, "payload": '{"net": "50.00"}', "reason": "a comma for a point",
                "csrfmiddlewaretoken": find_csrf_token(task.text),
            },
        )  # fmt: skip
        assert "Edit and replay" not in response.text, "the task is still a dead letter"


def find_csrf_token(page: str) -> str:
    return re.findall(r'name="csrfmiddlewaretoken" value="([^"]+)"', page)[0]


@pytest.mark.spec("DOC-2", "The tutorial's commands, run in order, print the output that the page shows")
def test_tutorial_commands_print_the_documented_output(running: Installation, shell: TutorialShell) -> None:
    assert shutil.which("curl"), "the tutorial needs curl"
    parts = re.findall(
        rf"^```(sh|text)\n(.*?)^```$|^({re.escape(CONSOLE_STEP)})$",
        PAGE.read_text(encoding="utf-8"),
        flags=re.M | re.S,
    )
    assert sum(kind == "text" for kind, _, _ in parts) == 7
    output, dead_task_id = "", ""
    for kind, block, is_console in parts:
        if is_console:
            edit_and_replay(running, dead_task_id)
        elif kind == "sh":
            output = shell.paste(block)
            dead_task_id = output.partition(" ")[0] if "FAILED" in output else dead_task_id
        else:
            expected = ".*".join(re.escape(piece) for piece in block.strip().split("…"))
            assert re.fullmatch(expected, output, flags=re.S), f"expected\n{block}\ngot\n{output}"
    shell.paste("wait")  # until the worker and the receiver have stopped
