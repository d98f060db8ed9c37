from __future__ import annotations

import pytest
import redis

from core import errors
from queues import selectors, services
from queues.current_engine import engine
from queues.domain import Location, TaskStatus
from queues.engine import Options
from tests.fixtures.queues import Clock, Queue


def measure_delays(
    queue: Queue, policy: str, attempts: int, *, base_ms: int = 5_000, cap_ms: int = 900_000
) -> list[int]:
    """Return the delay after each failed attempt of one task under a policy."""
    engine().options = Options(backoff=policy, backoff_base_ms=base_ms, backoff_cap_ms=cap_ms)
    queue.enqueue(max_attempts=attempts + 1)
    delays_ms = []
    for _ in range(attempts):
        task = queue.claim()
        delays_ms.append(services.nack(queue.tenant, task.id, "w1").run_sync().delay_ms)
        engine().clock.advance(cap_ms / 1000)  # type: ignore[union-attr]
    return delays_ms


@pytest.fixture(autouse=True)
def _options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine(), "options", engine().options)


@pytest.mark.spec("RET-1", "A nack counts the attempt and delays the task by its backoff")
def test_a_nack_delays_the_task_and_counts(queue: Queue, clock: Clock) -> None:
    queue.enqueue()
    task = queue.claim()
    answer = services.nack(queue.tenant, task.id, "w1", reason="disk full").run_sync()
    stored = selectors.task(queue.tenant, task.id).run_sync()
    assert not answer.is_dead
    assert (stored.status, stored.location, stored.attempts) == (TaskStatus.PENDING, Location.DELAYED_ZSET, 1)
    assert (stored.error, stored.worker, stored.visible_ms) == ("disk full", None, clock.now_ms + answer.delay_ms)


@pytest.mark.spec("RET-1", "Backoff policies: fixed, linear, exponential, with a cap")
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fixed", [5_000] * 6),
        ("linear", [5_000, 10_000, 15_000, 20_000, 25_000, 30_000]),
        ("exponential", [5_000, 10_000, 20_000, 40_000, 60_000, 60_000]),
    ],
)
def test_the_delay_follows_the_policy(queue: Queue, policy: str, expected: list[int]) -> None:
    assert measure_delays(queue, policy, 6, cap_ms=60_000) == expected


@pytest.mark.spec("RET-1", "Jitter is random between its bounds: 0..d in full, d/2..d in equal")
@pytest.mark.parametrize(("policy", "min_share"), [("exp_full_jitter", 0.0), ("exp_equal_jitter", 0.5)])
def test_jitter_is_random_between_its_bounds(queue: Queue, policy: str, min_share: float) -> None:
    delays_ms = measure_delays(queue, policy, 60, base_ms=100_000, cap_ms=100_000)
    assert all(min_share * 100_000 <= delay <= 100_000 for delay in delays_ms)
    assert len(set(delays_ms)) > 50
    middle = (min_share + 1) / 2 * 100_000
    assert abs(sum(delays_ms) / len(delays_ms) - middle) < 15_000


def test_a_huge_attempt_count_does_not_overflow_the_backoff(queue: Queue) -> None:
    assert measure_delays(queue, "exponential", 200, base_ms=1, cap_ms=1000)[-1] == 1000


@pytest.mark.spec("RET-1", "A queue may have a backoff of its own")
def test_a_queue_may_have_its_own_policy(queue: Queue, store: redis.Redis) -> None:
    root = f"codeq:{{{engine().partition_of(queue.tenant.tid)}}}:"
    store.hset(f"{root}policies:{queue.tenant.tid}", "send", "fixed 7000 9000")
    assert measure_delays(queue, "linear", 2) == [7000, 7000]


@pytest.mark.spec("RET-2", "`delaySeconds` overrides the backoff, up to its cap")
@pytest.mark.parametrize(("delay_seconds", "delay_ms"), [(0, 0), (1.5, 1_500), (10**9, 900_000)])
def test_requested_delay_is_limited_by_the_cap(queue: Queue, delay_seconds: float, delay_ms: int) -> None:
    queue.enqueue()
    assert (
        services.nack(queue.tenant, queue.claim().id, "w1", delay_seconds=delay_seconds).run_sync().delay_ms == delay_ms
    )


def test_nack_without_delay_makes_the_task_the_last_of_its_priority(queue: Queue) -> None:
    queue.enqueue("first")
    queue.enqueue("second")
    services.nack(queue.tenant, queue.claim().id, "w1", delay_seconds=0).run_sync()
    assert queue.claim_payloads() == ["second", "first"]


@pytest.mark.spec("RET-1", "After `maxAttempts` attempts the task is a dead letter: FAILED, with its last error")
@pytest.mark.parametrize("max_attempts", [1, 3])
def test_task_becomes_a_dead_letter_after_its_last_attempt(queue: Queue, clock: Clock, max_attempts: int) -> None:
    task = queue.enqueue(max_attempts=max_attempts)
    for number in range(max_attempts):
        clock.advance(1000)
        answer = services.nack(queue.tenant, queue.claim().id, "w1", reason=f"failure {number}").run_sync()
    assert answer.is_dead
    clock.advance(10_000)
    assert queue.try_claim().tasks == []
    stored = selectors.task(queue.tenant, task.id).run_sync()
    assert (stored.status, stored.location, stored.attempts) == (TaskStatus.FAILED, Location.DLQ_SET, max_attempts)
    assert stored.error == f"failure {max_attempts - 1}"
    assert [event["status"] for event in queue.read_events()] == ["PENDING"] * (max_attempts - 1) + ["FAILED"]


def test_dead_letter_without_a_reason_has_the_error_max_attempts(queue: Queue) -> None:
    task = queue.enqueue(max_attempts=1)
    services.nack(queue.tenant, queue.claim().id, "w1").run_sync()
    assert selectors.task(queue.tenant, task.id).run_sync().error == "MAX_ATTEMPTS"


def test_only_the_lease_owner_can_nack(queue: Queue, clock: Clock) -> None:
    queue.enqueue()
    task = queue.claim("w1", lease_seconds=10)
    with pytest.raises(errors.NotLeaseOwner):
        services.nack(queue.tenant, task.id, "w2").run_sync()
    with pytest.raises(errors.LeaseLost):
        services.nack(queue.tenant, task.id, "w1", token="0" * 32).run_sync()
    services.nack(queue.tenant, task.id, "w1", token=task.lease_token).run_sync()
    with pytest.raises(errors.LeaseLost):
        services.nack(queue.tenant, task.id, "w1", token=task.lease_token).run_sync()
