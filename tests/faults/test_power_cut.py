"""Truncate the append-only file as a crash can: the server starts in an earlier state."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import redis

from codeq_site.devserver.embedded import Valkey
from tests.conftest import ValkeyFactory
from tests.faults.aof import find_aof, parse_records, start_from_prefix
from tests.faults.workload import OPTIONS, Workload
from tests.queues.engine.checked_engine import LONG, CheckedEngine, Clock, check_consistency, dump


class Recording:
    """A workload with the size of the file and the whole keyspace after each acknowledged step."""

    def __init__(self, server: Valkey) -> None:
        self.server, self.sizes, self.names = server, [0], ["nothing"]
        self.states: list[dict[str, Any]] = [{}]
        with redis.Redis.from_url(server.url) as client:
            checked = CheckedEngine(client, clock=Clock(), partitions=1, **OPTIONS)
            assert isinstance(checked.engine.clock, Clock)
            for name in Workload(checked, checked.engine.clock).steps():
                checked.check()
                # With appendfsync=always, an acknowledged write is in the file before the reply is sent.
                self.sizes.append(find_aof(server).stat().st_size)
                self.states.append(dump(client))
                self.names.append(name)
        self.data = find_aof(server).read_bytes()

    def find_step(self, size: int) -> int:
        """Return the index of the last step that was acknowledged when the file had this size."""
        return max(n for n, step_size in enumerate(self.sizes) if step_size <= size)


@pytest.fixture
def recording(valkey_server: ValkeyFactory) -> Recording:
    server = valkey_server()
    recording = Recording(server)
    server.kill()
    return recording


@pytest.mark.timeout(0 if LONG else 300)
@pytest.mark.spec("QUE-5", "After a crash between any two instructions, at any byte, each task is in exactly one place")
def test_crash_at_any_point_loses_and_duplicates_nothing(recording: Recording, tmp_path: Path) -> None:
    ends = list(parse_records(recording.data))
    assert ends[-1][0] == len(recording.data)
    dice = random.Random(20)
    step_ends = set(recording.sizes)
    within = [end for end, _ in ends if end not in step_ends]
    torn = dice.sample(range(1, len(recording.data)), 2_000 if LONG else 50)
    cuts = [*step_ends, *(within if LONG else dice.sample(within, 80)), *torn]
    assert len(cuts) >= 150
    assert len([command for _, command in ends if command == b"EXEC"]) > 25
    for cut in cuts:
        with start_from_prefix(recording.server, cut, tmp_path / "cut") as client:
            step = recording.find_step(cut)
            # The state must not only be consistent: it must equal the last acknowledged one, without any write of the
            # interrupted script.
            location = f"cut at {cut} of {len(recording.data)}, after {recording.names[step]!r}"
            assert dump(client) == recording.states[step], location
            check_consistency(client, CheckedEngine(client, partitions=1).engine)


@pytest.mark.spec("ENQ-2", "Acknowledged data is on disk: the reply waits for the file")
def test_acknowledged_task_is_in_the_file(recording: Recording) -> None:
    ids = {key.removeprefix("codeq:{0}:task:") for state in recording.states for key in state if ":task:" in key}
    assert ids
    for size, state in zip(recording.sizes, recording.states, strict=True):
        written = recording.data[:size]
        assert all(key.encode() in written for key in state if ":task:" in key)
