"""Two releases on one server: each sends its own texts, and they work on the same keys."""

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
from core.redis.script_call import Command
from tests.faults.workload import OPTIONS, Workload
from tests.queues.engine.test_model import run_machine
from tests.queues.engine.world import LONG, Clock, World


class TwoReleases(SyncRunner):
    """Every call goes by the text of this release or by that of another, as if two web processes took turns."""

    def __init__(self, client: redis.Redis, dice: random.Random) -> None:
        super().__init__(client)
        self.dice, self.shas = dice, set[str]()

    def run_sync(self, commands: Sequence[Command]) -> list[Any]:
        chosen = [self._other(*command) if self.dice.random() < 0.5 else command for command in commands]
        self.shas |= {script.sha for script, _ in chosen}
        return super().run_sync(chosen)

    @staticmethod
    def _other(script: Any, bound: tuple[Any, ...]) -> Command:
        source = script.source + "\n-- the release before"
        sha = sha1(source.encode(), usedforsecurity=False).hexdigest()
        return replace(script, source=source, sha=sha), (sha, *bound[1:])


@pytest.mark.spec("QUE-5", "Two releases of the scripts work side by side on the same tasks")
def test_two_releases_work_side_by_side(valkey: Valkey) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        runner, clock = TwoReleases(client, random.Random(1)), Clock()
        world = World(client, clock=clock, runner=runner, partitions=1, **OPTIONS)
        for _ in Workload(world, clock).steps():
            world.check()
        known = client.script_exists(*runner.shas)
        assert all(known)
        assert len(runner.shas) > 18


@pytest.mark.timeout(900)
@pytest.mark.spec("QUE-5", "The model holds whichever release a call comes from")
def test_the_model_holds_for_two_releases(valkey: Valkey) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        met = run_machine(client, 500 if LONG else 30, 40, TwoReleases(client, random.Random(2)))
    assert met["claimed"] > 0
