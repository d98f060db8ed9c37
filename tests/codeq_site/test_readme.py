"""Run the README's commands against a running installation, and check all links."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from django.conf import settings

from tests.codeq_site.installation import Installation, clean_environment

README = Path(settings.BASE_DIR) / "README.md"


@pytest.mark.spec("DOC-2", "The README's commands work when pasted")
def test_readme_commands_work_when_pasted(running: Installation, tmp_path: Path) -> None:
    (block,) = re.findall(r"^```sh\n(.*?)^```$", README.read_text(encoding="utf-8"), flags=re.M | re.S)
    # Replace the address and the Python of the README with those of this test's installation.
    commands = block.replace("http://127.0.0.1:8080", running.base).replace(".venv/bin/python", sys.executable)
    assert commands.count(running.base) == 1
    completed = subprocess.run(
        ["sh", "-eu", "-c", commands.replace("\ncurl ", "\ncurl -w '\\n%{http_code}\\n\\n' ")],
        env=clean_environment({"CODEQ_HOME": str(running.home)}),
        cwd=settings.BASE_DIR,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    enqueued, submitted, read = completed.stdout.strip().split("\n\n")
    assert [answer.splitlines()[-1] for answer in (enqueued, submitted, read)] == ["202", "200", "200"]
    task = json.loads(enqueued.splitlines()[0])
    result = json.loads(read.splitlines()[0])
    assert result["task"]["id"] == task["id"]
    assert result["task"]["status"] == "COMPLETED"
    assert result["result"]["result"] == {"text": "Hello, world"}


def test_every_relative_link_of_the_documentation_exists() -> None:
    for page in [README, *Path(settings.BASE_DIR, "docs").rglob("*.md"), Path(settings.BASE_DIR, "CONTRIBUTING.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
