"""The README's lines, run as they stand against a running installation."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from django.conf import settings

from tests.codeq_site.conftest import Installation, clean_environment

README = Path(settings.BASE_DIR) / "README.md"


@pytest.mark.spec("DOC-2", "The README's lines do what they say when pasted")
def test_the_readmes_lines_do_what_they_say(running: Installation, tmp_path: Path) -> None:
    (block,) = re.findall(r"^```sh\n(.*?)^```$", README.read_text(encoding="utf-8"), flags=re.M | re.S)
    # What is not the reader's: where this test's installation is, and which Python has it.
    here = block.replace("http://127.0.0.1:8080", running.base).replace(".venv/bin/python", sys.executable)
    assert here.count(running.base) == 1
    said = subprocess.run(
        ["sh", "-eu", "-c", here.replace("\ncurl ", "\ncurl -w '\\n%{http_code}\\n\\n' ")],
        env=clean_environment({"CODEQ_HOME": str(running.home)}),
        cwd=settings.BASE_DIR,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    enqueued, submitted, read = said.stdout.strip().split("\n\n")
    assert [answer.splitlines()[-1] for answer in (enqueued, submitted, read)] == ["202", "200", "200"]
    task = json.loads(enqueued.splitlines()[0])
    result = json.loads(read.splitlines()[0])
    assert result["task"]["id"] == task["id"]
    assert result["task"]["status"] == "COMPLETED"
    assert result["result"]["result"] == {"text": "Hello, world"}


def test_every_link_of_the_readme_leads_somewhere() -> None:
    for page in [README, *Path(settings.BASE_DIR, "docs").rglob("*.md"), Path(settings.BASE_DIR, "CONTRIBUTING.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
