"""Backoff policies, with the random numbers of a real Valkey."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from codeq_site.devserver.embedded import Valkey
from queues.engine import keys, maintenance_commands, producer_commands, worker_commands
from tests.queues.engine.checked_engine import DAY_MS, TID, CheckedEngine, Clock, build_task

BASE_MS, CAP_MS = 1_000, 60_000


@pytest.fixture
def client(valkey: Valkey) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey.url) as client:
        yield client


def make_checked_engine(client: redis.Redis, policy: str) -> CheckedEngine:
    return CheckedEngine(
        client, clock=Clock(), partitions=1, backoff=policy, backoff_base_ms=BASE_MS, backoff_cap_ms=CAP_MS
    )


def measure_delays(checked: CheckedEngine, failures: int, tasks: int = 1) -> list[list[int]]:
    """Return the delays after the n-th failure of each task, as one list per n."""
    producer_commands.enqueue(
        checked.engine, TID, "acme", [build_task(max_attempts=100)] * tasks, retention_ms=DAY_MS
    ).run_sync()
    delays_by_failure = []
    for _ in range(failures):
        maintenance_commands.promote(checked.engine, TID, "send", 1000).run_sync()
        claimed = worker_commands.claim(checked.engine, TID, ["send"], "w1", lease_ms=1, limit=tasks).run_sync().tasks
        assert len(claimed) == tasks
        delays_by_failure.append(
            [
                worker_commands.nack(
                    checked.engine, TID, task.id, "w1", token="", delay_ms=None, reason="", dead_retention_ms=1
                )
                .run_sync()
                .delay_ms
                for task in claimed
            ]
        )
        checked.engine.clock.advance(CAP_MS / 1000)  # type: ignore[union-attr]
    return delays_by_failure


@pytest.mark.spec("RET-1", "Without jitter the delay is base, base · n or base · 2^(n-1), at most the cap")
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fixed", [1_000] * 9),
        ("linear", [1_000, 2_000, 3_000, 4_000, 5_000, 6_000, 7_000, 8_000, 9_000]),
        ("exponential", [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000, 60_000]),
    ],
)
def test_policy_without_jitter_has_exact_delays(client: redis.Redis, policy: str, expected: list[int]) -> None:
    assert [delay for [delay] in measure_delays(make_checked_engine(client, policy), 9)] == expected


@pytest.mark.spec("RET-1", "Jitter is random within its bounds, for each task anew")
@pytest.mark.parametrize(
    ("policy", "min_share"), [("exp_full_jitter", 0.0), ("exp_equal_jitter", 0.5)], ids=["full", "equal"]
)
def test_jitter_spreads_over_its_bounds(client: redis.Redis, policy: str, min_share: float) -> None:
    tasks = 200
    for n, values in enumerate(measure_delays(make_checked_engine(client, policy), 8, tasks)):
        full = min(BASE_MS * 2**n, CAP_MS)
        assert min_share * full <= min(values)
        assert max(values) < full
        # For 200 uniform values, each assertion fails with a probability below 1e-9.
        span = full - min_share * full
        assert len(set(values)) > tasks / 2
        assert min(values) < min_share * full + 0.1 * span
        assert max(values) > full - 0.1 * span
        mean = sum(values) / tasks
        assert abs(mean - (min_share * full + span / 2)) < 6.5 * span / (12 * tasks) ** 0.5


@pytest.mark.spec("RET-1", "Tasks whose leases end in one reaping do not come back all at once")
@pytest.mark.parametrize("by", ["reap", "claim"])
def test_expired_leases_come_back_spread(client: redis.Redis, by: str) -> None:
    checked = make_checked_engine(client, "exp_full_jitter")
    scores_by_run = []
    for _ in range(2):
        client.flushall()
        producer_commands.enqueue(checked.engine, TID, "acme", [build_task()] * 100, retention_ms=DAY_MS).run_sync()
        worker_commands.claim(checked.engine, TID, ["send"], "w1", lease_ms=1, limit=100).run_sync()
        checked.engine.clock.advance(0.001)  # type: ignore[union-attr]
        if by == "reap":
            maintenance_commands.reap(checked.engine, TID, "send").run_sync()
        else:
            worker_commands.claim(checked.engine, TID, ["send"], "w1", lease_ms=1, limit=1).run_sync()
        delayed = client.zrange(keys.of_queue("codeq:{0}:", TID, "send").delayed, 0, -1, withscores=True)
        scores_by_run.append([int(score) for _, score in delayed])
    for scores in scores_by_run:
        assert len(set(scores)) > 50
    assert scores_by_run[0] != scores_by_run[1]  # each run of a script has its own seed


@pytest.mark.spec("RET-1", "A queue's own policy wins over the installation's")
def test_queue_policy_wins_over_the_default(client: redis.Redis) -> None:
    checked = make_checked_engine(client, "exponential")
    client.hset(keys.of_tenant("codeq:{0}:", TID).policies, "send", "linear 7 20")
    assert [delay for [delay] in measure_delays(checked, 4)] == [7, 14, 20, 20]


@pytest.mark.spec("RET-1", "Thousands of failures do not overflow the delay")
def test_delay_after_thousands_of_attempts_is_the_cap(client: redis.Redis) -> None:
    checked = make_checked_engine(client, "exponential")
    producer_commands.enqueue(
        checked.engine, TID, "acme", [build_task(max_attempts=5_000)], retention_ms=DAY_MS
    ).run_sync()
    [task] = worker_commands.claim(checked.engine, TID, ["send"], "w1", lease_ms=DAY_MS, limit=1).run_sync().tasks
    client.hset(keys.task("codeq:{0}:", task.id), "attempts", 4_000)  # 2^4000 is infinite
    returned = worker_commands.nack(
        checked.engine, TID, task.id, "w1", token="", delay_ms=None, reason="", dead_retention_ms=1
    ).run_sync()
    assert returned.delay_ms == CAP_MS
