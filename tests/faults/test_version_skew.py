"""Two releases on one server: each uses its own scripts on the same keys."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha1
from typing import Any

import pytest
import redis

from codeq_site.devserver.embedded import Valkey
from core.redis.runners import SyncRunner
from core.redis.script_call import ScriptCommand
from tests.faults.workload import OPTIONS, Workload
from tests.queues.engine.checked_engine import LONG, CheckedEngine, Clock
from tests.queues.engine.machine import run_machine


class TwoReleases(SyncRunner):
    """Run each call with the script of this or another release, like two web processes."""

    def __init__(self, client: redis.Redis, dice: random.Random) -> None:
        super().__init__(client)
        self.dice, self.shas = dice, set[str]()

    def run_sync(self, commands: Sequence[ScriptCommand]) -> list[Any]:
        selected = [self._change_release(*command) if self.dice.random() < 0.5 else command for command in commands]
        self.shas |= {script.sha for script, _ in selected}
        return super().run_sync(selected)

    @staticmethod
    def _change_release(script: Any, bound: tuple[Any, ...]) -> ScriptCommand:
        source = script.source + "\n-- another release"
        sha = sha1(source.encode(), usedforsecurity=False).hexdigest()
        return replace(script, source=source, sha=sha), (sha, *bound[1:])


@pytest.mark.spec("QUE-5", "Two releases of the scripts work side by side on the same tasks")
def test_two_releases_work_side_by_side(valkey: Valkey) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        runner, clock = TwoReleases(client, random.Random(1)), Clock()
        checked = CheckedEngine(client, clock=clock, runner=runner, partitions=1, **OPTIONS)
        for _ in Workload(checked, clock).steps():
            checked.check()
        loaded = client.script_exists(*runner.shas)
        assert all(loaded)
        assert len(runner.shas) > 18


@pytest.mark.timeout(900)
@pytest.mark.spec("QUE-5", "The model holds for calls from two releases")
def test_model_holds_for_two_releases(valkey: Valkey) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        counts = run_machine(client, 500 if LONG else 30, 40, TwoReleases(client, random.Random(2)))
    assert counts["claimed"] > 0
