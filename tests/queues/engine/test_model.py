"""The engine equals the model: random operations on a real Valkey, with the same result."""

from __future__ import annotations

import pytest
import redis

from codeq_site.devserver.embedded import Valkey
from tests.queues.engine.checked_engine import LONG
from tests.queues.engine.machine import REQUIRED_CASES, run_machine


@pytest.mark.timeout(0 if LONG else 900)
@pytest.mark.spec("QUE-5", "Over every random history, each task is in exactly one place, as in the model")
@pytest.mark.spec("QUE-2", "Higher priority first, over every random history and all claimed queues")
@pytest.mark.spec("QUE-3", "First in, first out within a priority, with returned tasks at its end, over every history")
@pytest.mark.spec("QUE-6", "Stats equal the lengths of the indexes after every step")
@pytest.mark.spec("SCH-4", "Due tasks are appended to their priority, over every random history")
@pytest.mark.spec("CLM-4", "A claim first promotes due tasks and reaps expired leases of its queues, up to its limit")
@pytest.mark.spec("RET-4", "Dead letters are never claimed, and leave only by replay, purge or their own retention")
@pytest.mark.spec("CLN-1", "Cleanup deletes ended tasks whose retention has expired, oldest first, with all their keys")
@pytest.mark.spec("CLN-2", "Neither purge nor cleanup ever deletes a live task")
def test_engine_equals_the_model(valkey: Valkey) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        covered = run_machine(client, 5_000, 100) if LONG else run_machine(client, 300, 60)
        # The rarest cases, such as a bulk replay, occur between 0 and 100 times per run.
        for _ in range(6):
            if REQUIRED_CASES - set(+covered):
                covered += run_machine(client, 100, 60)
    assert not REQUIRED_CASES - set(+covered)
