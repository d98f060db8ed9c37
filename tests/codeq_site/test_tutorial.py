"""The tutorial, read by a program: every block is run in one shell, and what it prints is what the page says."""

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

from tests.codeq_site.conftest import Installation, clean_environment
from tests.conftest import free_port
from tests.waiting import until

PAGE = Path(settings.BASE_DIR) / "docs" / "tutorial.md"
IN_THE_CONSOLE = "<!-- what the browser sends is sent by the test here -->"
END = "--the block is over--"


class Reader:
    """A shell in which one block after the other is pasted."""

    def __init__(self, installation: Installation, room: Path) -> None:
        self.changes = {
            "http://127.0.0.1:8080": installation.base,
            "http://127.0.0.1:9000": f"http://127.0.0.1:{(port := free_port())}",
            "receiver.py 9000": f"receiver.py {port}",
            ".venv/bin/python": sys.executable,
            "var/tutorial": str(room),
        }
        # A group of its own: whatever it leaves behind is ended with it.
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
        for theirs, ours in self.changes.items():
            block = block.replace(theirs, ours)
        assert self.shell.stdin is not None
        assert self.shell.stdout is not None
        self.shell.stdin.write(f"{block}\necho; echo '{END}'\n")
        self.shell.stdin.flush()
        said = ""
        while not said.endswith(f"{END}\n"):
            line = self.shell.stdout.readline()
            assert line, f"the shell ended after {said}"
            said += line
        return said.removesuffix(f"{END}\n").strip()

    def close(self) -> None:
        os.killpg(self.shell.pid, signal.SIGTERM)
        self.shell.communicate(timeout=20)


@pytest.fixture
def reader(running: Installation, tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(running, tmp_path / "room")
    yield reader
    reader.close()


def in_the_console(installation: Installation, task_id: str) -> None:
    """Edit and replay, as the page's button sends it."""
    with httpx.Client(base_url=installation.base, follow_redirects=True, timeout=30) as browser:
        login = browser.get("/admin/login/")
        password = (installation.home / "admin_password").read_text().strip()
        asked = {"username": "admin", "password": password, "csrfmiddlewaretoken": token_in(login.text)}
        assert "Overview" in browser.post("/admin/login/?next=/admin/", data=asked).text

        def failures() -> list[str]:
            page = browser.get("/admin/console/dead/?tenant=demo&command=price").text
            return re.findall(r'href="(/admin/console/dead/list/\?[^"]*failure=[^"]*)"', page)

        (group,) = until(failures)  # the drain may be a second behind
        letters = browser.get(group.replace("&amp;", "&"))
        (link,) = re.findall(rf'href="(/admin/console/task/[^"]*{task_id})"', letters.text)
        task = browser.get(link.replace("&amp;", "&"))
        assert "Edit and replay" in task.text
        tenant = re.findall(r'name="tenant" value="(\w+)"', task.text)[0]
        said = browser.post(
            "/admin/console/task/replay/",
            data={
                "tenant": tenant, "id": task_id, "payload": '{"net": "50.00"}', "reason": "a comma for a point",
                "csrfmiddlewaretoken": token_in(task.text),
            },
        )  # fmt: skip
        assert "The task is in line again." in said.text


def token_in(page: str) -> str:
    return re.findall(r'name="csrfmiddlewaretoken" value="([^"]+)"', page)[0]


@pytest.mark.spec("DOC-2", "The tutorial's commands, pasted one after the other, print what it says")
def test_the_tutorial_does_what_it_says(running: Installation, reader: Reader) -> None:
    assert shutil.which("curl"), "the reader needs it too"
    parts = re.findall(
        rf"^```(sh|text)\n(.*?)^```$|^({re.escape(IN_THE_CONSOLE)})$",
        PAGE.read_text(encoding="utf-8"),
        flags=re.M | re.S,
    )
    assert sum(kind == "text" for kind, _, _ in parts) == 7
    said, died = "", ""
    for kind, block, is_console in parts:
        if is_console:
            in_the_console(running, died)
        elif kind == "sh":
            said = reader.paste(block)
            died = said.partition(" ")[0] if "FAILED" in said else died
        else:
            expected = ".*".join(re.escape(piece) for piece in block.strip().split("…"))
            assert re.fullmatch(expected, said, flags=re.S), f"{block}\nbut it says\n{said}"
    reader.paste("wait")  # for the worker and the receiver, which were told to stop
