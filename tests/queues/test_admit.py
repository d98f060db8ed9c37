from __future__ import annotations

import msgspec
import pytest

from core import errors
from queues import services
from queues.current_engine import engine
from queues.domain import Enqueued, NewTask
from queues.engine import admin_commands
from queues.engine.options import Limits
from tenants.domain import Rates
from tests.fixtures.queues import Clock, Queue


@pytest.fixture
def limited(queue: Queue) -> Queue:
    """A queue of a tenant with a rate of ten tasks per second and a burst of twenty."""
    queue.tenant = msgspec.structs.replace(queue.tenant, rates=Rates(create=10, claim=10))
    return queue


def count_accepted(queue: Queue, count: int) -> int:
    items = [services.enqueue(queue.tenant, [NewTask(command="send", payload="1")]).run_sync()[0] for _ in range(count)]
    return sum(isinstance(item, Enqueued) for item in items)


@pytest.mark.spec("AUT-3", "After a burst, a tenant can create tasks at its rate; beyond it, 429 with the time to wait")
def test_tenant_can_create_tasks_at_its_rate(limited: Queue, clock: Clock) -> None:
    total = count_accepted(limited, 100)
    assert total == 20
    for _ in range(600):
        clock.advance(0.05)
        total += count_accepted(limited, 1)
    assert total == pytest.approx(20 + 300, rel=0.05)


def test_rate_far_above_one_per_millisecond_is_kept(queue: Queue, clock: Clock) -> None:
    queue.tenant = msgspec.structs.replace(queue.tenant, rates=Rates(create=50_000))
    batch = [NewTask(command="send", payload="1")] * 1000
    sent = 0
    for _ in range(130):
        sent += sum(isinstance(item, Enqueued) for item in services.enqueue(queue.tenant, batch).run_sync())
    assert 100_000 <= sent <= 101_000


def test_retry_after_is_long_enough_and_not_too_long(limited: Queue, clock: Clock) -> None:
    count_accepted(limited, 20)
    (refused,) = services.enqueue(limited.tenant, [NewTask(command="send", payload="1")]).run_sync()
    assert isinstance(refused, errors.TooMany)
    assert refused.retry_after_seconds is not None
    assert refused.retry_after_seconds <= 0.11
    clock.advance(refused.retry_after_seconds)
    assert count_accepted(limited, 1) == 1


def test_each_task_of_a_batch_counts(limited: Queue, clock: Clock) -> None:
    batch = [NewTask(command="send", payload="1")] * 50
    first = services.enqueue(limited.tenant, batch).run_sync()
    assert all(isinstance(item, Enqueued) for item in first), (
        "a batch larger than the burst is accepted if the burst is unused"
    )
    assert {type(item) for item in services.enqueue(limited.tenant, batch).run_sync()} == {errors.TooMany}
    clock.advance(2.9)
    assert count_accepted(limited, 1) == 0
    clock.advance(0.2)
    assert count_accepted(limited, 1) == 1


def test_repeated_key_does_not_count_and_is_accepted_at_the_limit(limited: Queue) -> None:
    key = NewTask(command="send", payload="1", idempotency_key="k")
    services.enqueue(limited.tenant, [key]).run_sync()
    count_accepted(limited, 30)
    (again,) = services.enqueue(limited.tenant, [key]).run_sync()
    assert isinstance(again, Enqueued)
    assert again.is_repeated


@pytest.mark.spec("AUT-3", "Claims are limited too; repeating a claim after a wake-up does not count")
def test_claims_are_limited(limited: Queue) -> None:
    for _ in range(20):
        limited.try_claim()
    with pytest.raises(errors.TooMany):
        limited.try_claim()
    limited.try_claim(is_counted=False)


@pytest.mark.spec("AUT-3", "Tenants have separate limits, and a new token does not raise them")
def test_tokens_share_their_tenants_rate(limited: Queue, other_queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    new = [NewTask(command="send", payload="1")]
    taken = sum(
        isinstance(services.enqueue(limited.tenant, new, token_fingerprint=f"{n:x}").run_sync()[0], Enqueued)
        for n in range(100)
    )
    assert taken == 20
    assert count_accepted(other_queue, 100) == 100


def test_one_token_can_use_only_its_share(queue: Queue) -> None:
    def taken(token: str) -> int:
        count = 0
        for _ in range(100):
            try:
                admin_commands.admit(
                    engine(), queue.tenant.tid, Limits(kind="admin", per_second=10, token=token, token_percent=50)
                ).run_sync()
            except errors.TooMany:
                continue
            count += 1
        return count

    assert [taken("aa"), taken("bb"), taken("cc")] == [10, 10, 0]


@pytest.mark.spec("TEN-5", "A tenant has at most `depth` waiting tasks, and can enqueue again when some are claimed")
def test_depth_limits_the_waiting_tasks(queue: Queue) -> None:
    queue.tenant = msgspec.structs.replace(queue.tenant, depth=10)
    queue.enqueue_many(4, command="a", priority=9)
    queue.enqueue_many(4, command="b", delay_ms=1000)
    cancelled = queue.enqueue()
    queue.enqueue()
    with pytest.raises(errors.QueueFull):
        queue.enqueue()
    services.cancel(queue.tenant, cancelled.id).run_sync()
    queue.enqueue()
    with pytest.raises(errors.QueueFull):
        queue.enqueue()
    queue.claim(commands=["a"])
    queue.enqueue()
