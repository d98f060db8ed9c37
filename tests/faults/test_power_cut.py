"""The append-only file cut at every place where a crash can cut it: the server boots into a state there has been."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import redis

from codeq_site.devserver.embedded import Valkey
from tests.conftest import ValkeyFactory
from tests.faults.aof import booted, path_of, records
from tests.faults.workload import OPTIONS, Workload
from tests.queues.engine.world import LONG, Clock, World, checked, dump


class Recorded:
    """A day's work, and after each acknowledged step the file's size and the whole keyspace."""

    def __init__(self, server: Valkey) -> None:
        self.server, self.sizes, self.names = server, [0], ["nothing"]
        self.states: list[dict[str, Any]] = [{}]
        with redis.Redis.from_url(server.url) as client:
            world = World(client, clock=Clock(), partitions=1, **OPTIONS)
            assert isinstance(world.engine.clock, Clock)
            for name in Workload(world, world.engine.clock).steps():
                world.check()
                # `always`: what is acknowledged is in the file, whole, before the answer leaves.
                self.sizes.append(path_of(server).stat().st_size)
                self.states.append(dump(client))
                self.names.append(name)
        self.data = path_of(server).read_bytes()

    def state_at(self, size: int) -> int:
        """The last step that was acknowledged when the file had this size."""
        return max(n for n, at in enumerate(self.sizes) if at <= size)


@pytest.fixture
def recorded(valkey_server: ValkeyFactory) -> Recorded:
    server = valkey_server()
    recorded = Recorded(server)
    server.kill()
    return recorded


@pytest.mark.timeout(0 if LONG else 300)
@pytest.mark.spec("QUE-5", "A crash between any two instructions, at any byte written, leaves each task in one place")
def test_a_crash_at_any_point_loses_nothing_and_doubles_nothing(recorded: Recorded, tmp_path: Path) -> None:
    ends = list(records(recorded.data))
    assert ends[-1][0] == len(recorded.data)
    dice = random.Random(20)
    whole = set(recorded.sizes)
    within = [end for end, _ in ends if end not in whole]
    torn = dice.sample(range(1, len(recorded.data)), 2_000 if LONG else 50)
    cuts = [*whole, *(within if LONG else dice.sample(within, 80)), *torn]
    assert len(cuts) >= 150
    assert len([command for _, command in ends if command == b"EXEC"]) > 25
    for cut in cuts:
        with booted(recorded.server, cut, tmp_path / "cut") as client:
            step = recorded.state_at(cut)
            # Not one write of the script that was being written, and all of those before: not merely a sound state,
            # but the one that was acknowledged last.
            where = f"cut at {cut} of {len(recorded.data)}, after {recorded.names[step]!r}"
            assert dump(client) == recorded.states[step], where
            checked(client, World(client, partitions=1).engine)


@pytest.mark.spec("ENQ-2", "What is acknowledged is on disk: the answer waits for the file")
def test_an_acknowledged_task_is_in_the_file(recorded: Recorded) -> None:
    ids = {key.removeprefix("codeq:{0}:task:") for state in recorded.states for key in state if ":task:" in key}
    assert ids
    for size, state in zip(recorded.sizes, recorded.states, strict=True):
        written = recorded.data[:size]
        assert all(key.encode() in written for key in state if ":task:" in key)
