"""How long a task waits after a failure: the policies on real Redis dice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from codeq_site.devserver.embedded import Valkey
from queues.engine import keys, maintenance_commands, producer_commands, worker_commands
from tests.queues.engine.world import DAY_MS, TID, Clock, World, new

BASE_MS, CAP_MS = 1_000, 60_000


@pytest.fixture
def client(valkey: Valkey) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey.url) as client:
        yield client


def world_with(client: redis.Redis, policy: str) -> World:
    return World(client, clock=Clock(), partitions=1, backoff=policy, backoff_base_ms=BASE_MS, backoff_cap_ms=CAP_MS)


def delays(world: World, failures: int, tasks: int = 1) -> list[list[int]]:
    """What the n-th failure of each task costs it: one list for each n, one claim and one nack a value."""
    producer_commands.enqueue(
        world.engine, TID, "acme", [new(max_attempts=100)] * tasks, retention_ms=DAY_MS
    ).run_sync()
    found = []
    for _ in range(failures):
        maintenance_commands.promote(world.engine, TID, "send", 1000).run_sync()
        claimed = worker_commands.claim(world.engine, TID, ["send"], "w1", lease_ms=1, limit=tasks).run_sync().tasks
        assert len(claimed) == tasks
        found.append(
            [
                worker_commands.nack(
                    world.engine, TID, task.id, "w1", token="", delay_ms=None, reason="", dead_retention_ms=1
                )
                .run_sync()
                .delay_ms
                for task in claimed
            ]
        )
        world.engine.clock.advance(CAP_MS / 1000)  # type: ignore[union-attr]
    return found


@pytest.mark.spec("RET-1", "Without jitter the wait is base, base · n or base · 2^(n-1), at most the cap")
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fixed", [1_000] * 9),
        ("linear", [1_000, 2_000, 3_000, 4_000, 5_000, 6_000, 7_000, 8_000, 9_000]),
        ("exponential", [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000, 60_000]),
    ],
)
def test_a_policy_without_dice_waits_exactly(client: redis.Redis, policy: str, expected: list[int]) -> None:
    assert [one for [one] in delays(world_with(client, policy), 9)] == expected


@pytest.mark.spec("RET-1", "Jitter is really random within its bounds, for one task after another")
@pytest.mark.parametrize(
    ("policy", "least"), [("exp_full_jitter", 0.0), ("exp_equal_jitter", 0.5)], ids=["full", "equal"]
)
def test_jitter_spreads_over_its_bounds(client: redis.Redis, policy: str, least: float) -> None:
    tasks = 200
    for n, found in enumerate(delays(world_with(client, policy), 8, tasks)):
        full = min(BASE_MS * 2**n, CAP_MS)
        assert least * full <= min(found)
        assert max(found) < full
        # 200 uniform values: outside of these with a probability below 1e-9.
        span = full - least * full
        assert len(set(found)) > tasks / 2
        assert min(found) < least * full + 0.1 * span
        assert max(found) > full - 0.1 * span
        mean = sum(found) / tasks
        assert abs(mean - (least * full + span / 2)) < 6.5 * span / (12 * tasks) ** 0.5


@pytest.mark.spec("RET-1", "Tasks whose leases end in one reaping do not come back all at once")
@pytest.mark.parametrize("by", ["reap", "claim"])
def test_expired_leases_come_back_spread(client: redis.Redis, by: str) -> None:
    world = world_with(client, "exp_full_jitter")
    found = []
    for _ in range(2):
        client.flushall()
        producer_commands.enqueue(world.engine, TID, "acme", [new()] * 100, retention_ms=DAY_MS).run_sync()
        worker_commands.claim(world.engine, TID, ["send"], "w1", lease_ms=1, limit=100).run_sync()
        world.engine.clock.advance(0.001)  # type: ignore[union-attr]
        if by == "reap":
            maintenance_commands.reap(world.engine, TID, "send").run_sync()
        else:
            worker_commands.claim(world.engine, TID, ["send"], "w1", lease_ms=1, limit=1).run_sync()
        delayed = client.zrange(keys.of_queue("codeq:{0}:", TID, "send").delayed, 0, -1, withscores=True)
        found.append([int(score) for _, score in delayed])
    for scores in found:
        assert len(set(scores)) > 50
    assert found[0] != found[1]  # another script run, other dice


@pytest.mark.spec("RET-1", "A queue's own policy wins over the installation's")
def test_a_queue_has_its_own_policy(client: redis.Redis) -> None:
    world = world_with(client, "exponential")
    client.hset(keys.of_tenant("codeq:{0}:", TID).policies, "send", "linear 7 20")
    assert [one for [one] in delays(world, 4)] == [7, 14, 20, 20]


@pytest.mark.spec("RET-1", "Hundreds of failures do not make a wait that is no number")
def test_a_high_attempt_count_stays_at_the_cap(client: redis.Redis) -> None:
    world = world_with(client, "exponential")
    producer_commands.enqueue(world.engine, TID, "acme", [new(max_attempts=5_000)], retention_ms=DAY_MS).run_sync()
    [task] = worker_commands.claim(world.engine, TID, ["send"], "w1", lease_ms=DAY_MS, limit=1).run_sync().tasks
    client.hset(keys.task("codeq:{0}:", task.id), "attempts", 4_000)  # 2^4000 is infinite
    returned = worker_commands.nack(
        world.engine, TID, task.id, "w1", token="", delay_ms=None, reason="", dead_retention_ms=1
    ).run_sync()
    assert returned.delay_ms == CAP_MS
