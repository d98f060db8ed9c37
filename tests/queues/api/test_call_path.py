"""The call path of one claim, from the ASGI application to the Lua script and back.

docs/explanation/architecture.md gives the reason and the files of each step. `pytest -s` prints the steps and all
functions that the claim enters.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from django.conf import settings

from tests.queues.api.asgi_client import Client
from tests.queues.api.conftest import TASKS
from tests.queues.api.tasks import enqueue_task

PROJECT = f"{settings.BASE_DIR}/"
ARCHITECTURE = Path(settings.BASE_DIR) / "docs" / "explanation" / "architecture.md"
# The call path had 25 steps and 55 functions before closures, forwarding functions and repeated checks were removed.
MAX_STEPS = 20
MAX_FUNCTIONS = 45


class CallRecorder:
    """A profile function that records which functions of the project call which others."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], None] = {}

    @property
    def steps(self) -> list[str]:
        """The functions that call another function of the project: a reader has to follow these."""
        return list(dict.fromkeys(caller for caller, _ in self.calls))

    @property
    def functions(self) -> list[str]:
        """All functions that the claim enters, including those that call no other function."""
        return list(dict.fromkeys(name for call in self.calls for name in call))

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        function = name_of(frame)
        if event != "call" or function is None:
            return
        outer = frame.f_back
        while outer is not None:
            caller = name_of(outer)
            if caller is not None:
                self.calls[caller, function] = None
                return
            outer = outer.f_back


def name_of(frame: FrameType) -> str | None:
    """Return "module:function" for a function of the service, else None."""
    code = frame.f_code
    module = code.co_filename.removeprefix(PROJECT)
    is_production = module != code.co_filename and not module.startswith(("tests/", ".venv/"))
    return f"{module}:{code.co_qualname}" if is_production and not code.co_name.startswith("<") else None


def documented_name(step: str) -> str:
    """Return the name of a step in the documents: `Class.method` or `module.function`."""
    path, _, function = step.partition(":")
    function = function.replace("<locals>.", "")
    return function if function[0].isupper() else f"{Path(path).stem}.{function}"


def documented_steps() -> dict[str, str]:
    """Return the steps of the architecture page with the cell that names their files."""
    section = ARCHITECTURE.read_text().partition("## From a claim to a task")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `([^`]+)` \|[^|]+\|([^|]+)\|$", section, re.M))


async def test_a_claim_takes_the_documented_steps_and_at_most_twenty(producer: Client, worker: Client) -> None:
    for _ in range(2):  # the first request fills caches
        await enqueue_task(producer)
        recorder = CallRecorder()
        sys.setprofile(recorder)
        try:
            response = await worker.post(f"{TASKS}/claim", {"commands": ["RENDER"]})
        finally:
            sys.setprofile(None)
        assert response.status == 200
    steps = {documented_name(step): step.partition(":")[0] for step in recorder.steps}
    print(f"{len(steps)} steps:", *recorder.steps, sep="\n")
    print(f"{len(recorder.functions)} functions:", *recorder.functions, sep="\n")
    assert len(steps) <= MAX_STEPS
    assert len(recorder.functions) <= MAX_FUNCTIONS
    documented = documented_steps()
    assert steps.keys() == documented.keys()
    assert [name for name, path in steps.items() if f"`{path}`" not in documented[name]] == []
