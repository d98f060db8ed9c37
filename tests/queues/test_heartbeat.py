from __future__ import annotations

import pytest
import redis

from core import errors
from queues import selectors, services
from tests.fixtures.queues import Clock, Queue


@pytest.mark.spec("CLM-6", "A heartbeat sets the deadline relative to now, and writes nothing else")
def test_a_heartbeat_extends_the_lease(queue: Queue, clock: Clock, store: redis.Redis) -> None:
    queue.enqueue()
    task = queue.claim(lease_seconds=10)
    services.heartbeat(queue.tenant, task.id, "w1", extend_seconds=10).run_sync()
    clock.advance(9)
    store.config_resetstat()
    lease = services.heartbeat(queue.tenant, task.id, "w1", extend_seconds=60, token=task.lease_token).run_sync()
    assert lease.until_ms == clock.now_ms + 60_000
    written = {name for name in store.info("commandstats") if name in ("cmdstat_hset", "cmdstat_xadd", "cmdstat_zadd")}
    assert written == {"cmdstat_zadd"}
    clock.advance(59)
    assert queue.try_claim().expired == 0


def test_heartbeat_can_shorten_the_lease(queue: Queue, clock: Clock) -> None:
    queue.enqueue()
    task = queue.claim(lease_seconds=1000)
    services.heartbeat(queue.tenant, task.id, "w1", extend_seconds=5).run_sync()
    clock.advance(5)
    assert queue.try_claim().expired == 1


@pytest.mark.spec("CLM-7", "A lease expires at its deadline, even before the reaper runs")
@pytest.mark.parametrize("is_reaped", [False, True], ids=["before the reaper", "after the reaper"])
def test_a_heartbeat_after_the_deadline_is_refused(queue: Queue, clock: Clock, is_reaped: bool) -> None:
    queue.enqueue()
    task = queue.claim(lease_seconds=10)
    clock.advance(10)
    if is_reaped:
        queue.try_claim()
    with pytest.raises(errors.LeaseLost):
        services.heartbeat(queue.tenant, task.id, "w1").run_sync()


def test_worker_with_an_older_claim_of_the_same_name_is_refused(queue: Queue, clock: Clock) -> None:
    queue.enqueue()
    old = queue.claim("pool", lease_seconds=1)
    clock.advance(2000)
    queue.try_claim("pool")
    clock.advance(2000)
    new = queue.claim("pool")
    with pytest.raises(errors.LeaseLost):
        services.heartbeat(queue.tenant, old.id, "pool", token=old.lease_token).run_sync()
    services.heartbeat(queue.tenant, new.id, "pool", token=new.lease_token).run_sync()


def test_only_the_lease_owner_can_extend(queue: Queue, other_queue: Queue) -> None:
    queue.enqueue()
    task = queue.claim("w1")
    with pytest.raises(errors.NotLeaseOwner):
        services.heartbeat(queue.tenant, task.id, "w2").run_sync()
    with pytest.raises(errors.TaskNotFound):
        services.heartbeat(other_queue.tenant, task.id, "w1").run_sync()
    with pytest.raises(errors.TaskNotFound):
        services.heartbeat(queue.tenant, "01a1ed8e-3ca4-74d0-b8a9-263fd0dbaaea", "w1").run_sync()


@pytest.mark.parametrize("name", ["", "x", "01A1ED8E-3CA4-74D0-B8A9-263FD0DBAAEA", "01a1ed8e3ca474d0b8a9263fd0dbaaea"])
def test_invalid_id_is_not_found(queue: Queue, name: str) -> None:
    with pytest.raises(errors.TaskNotFound):
        services.heartbeat(queue.tenant, name, "w1").run_sync()


def test_a_task_never_claimed_has_no_lease_to_extend(queue: Queue) -> None:
    with pytest.raises(errors.LeaseLost):
        services.heartbeat(queue.tenant, queue.enqueue().id, "w1").run_sync()


def test_progress_is_kept_and_shown(queue: Queue) -> None:
    queue.enqueue()
    task = queue.claim()
    services.heartbeat(queue.tenant, task.id, "w1", progress="40 copying").run_sync()
    assert selectors.task(queue.tenant, task.id).run_sync().progress == "40 copying"


def test_a_tenant_can_require_the_token(queue: Queue) -> None:
    import msgspec

    queue.enqueue()
    task = queue.claim()
    strict = msgspec.structs.replace(queue.tenant, is_lease_token_required=True)
    with pytest.raises(errors.InvalidRequest, match="leaseToken"):
        services.heartbeat(strict, task.id, "w1")
    services.heartbeat(strict, task.id, "w1", token=task.lease_token).run_sync()
