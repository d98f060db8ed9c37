"""How many steps one claim takes through the code, from the ASGI server to the script and back."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from django.conf import settings

from tests.queues.api.asgi_client import Client
from tests.queues.api.conftest import TASKS
from tests.queues.api.tasks import enqueue_task

PROJECT = f"{settings.BASE_DIR}/"
MAX_STEPS = 20


class CallRecorder:
    """A profile function that records which functions of the project call which others."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], None] = {}

    @property
    def steps(self) -> list[str]:
        """The functions that call another function of the project. The others do their work themselves."""
        return list(dict.fromkeys(caller for caller, _ in self.calls))

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
    is_ours = module != code.co_filename and not module.startswith(("tests/", ".venv/"))
    return f"{module}:{code.co_qualname}" if is_ours and not code.co_name.startswith("<") else None


async def test_a_claim_takes_at_most_twenty_steps(producer: Client, worker: Client) -> None:
    for _ in range(2):  # the first request fills caches
        await enqueue_task(producer)
        recorder = CallRecorder()
        sys.setprofile(recorder)
        try:
            answer = await worker.post(f"{TASKS}/claim", {"commands": ["RENDER"]})
        finally:
            sys.setprofile(None)
        assert answer.status == 200
    steps = recorder.steps
    assert "queues/services.py:claim" in steps
    assert len(steps) <= MAX_STEPS, "\n".join(steps)
