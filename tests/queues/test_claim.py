from __future__ import annotations

import pytest
import redis

from queues import selectors, services
from queues.current_engine import engine
from queues.domain import Location, TaskStatus
from queues.engine import Options
from tests.fixtures.queues import Clock, Queue


@pytest.mark.spec("CLM-1", "A claim takes one id and opens a lease: owner, deadline, IN_PROGRESS")
def test_a_claim_opens_a_lease(queue: Queue, clock: Clock) -> None:
    task = queue.enqueue()
    claimed = queue.claim("w1", lease_seconds=60)
    assert (claimed.id, claimed.worker, claimed.status) == (task.id, "w1", TaskStatus.IN_PROGRESS)
    assert claimed.lease_until_ms == clock.now_ms + 60_000
    assert claimed.lease_token is not None
    assert len(claimed.lease_token) == 32
    stored = selectors.task(queue.tenant, task.id).run_sync()
    assert (stored.worker, stored.location, stored.lease_until_ms) == (
        "w1",
        Location.INPROG_SET,
        clock.now_ms + 60_000,
    )
    assert stored.lease_token is None, "only the claim returns the token"


@pytest.mark.spec("CLM-3", "A claim from an empty queue returns no task, and the time at which the next one is due")
def test_empty_claim_returns_the_next_due_time(queue: Queue, clock: Clock) -> None:
    assert queue.try_claim().tasks == []
    queue.enqueue(delay_ms=5_000)
    looked = queue.try_claim()
    assert (looked.tasks, looked.next_due_ms) == ([], clock.now_ms + 5_000)


@pytest.mark.spec("CLM-3", "A batch claim takes up to `count` tasks, the highest priority first")
def test_batch_claim_takes_the_highest_priority_first(queue: Queue) -> None:
    for priority in (0, 9, 4, 9):
        queue.enqueue(str(priority), priority=priority)
    assert [task.priority for task in queue.try_claim(count=3).tasks] == [9, 9, 4]
    assert [task.priority for task in queue.try_claim(count=3).tasks] == [0]


@pytest.mark.spec("QUE-2", "A higher priority is taken first, across all queues of the claim")
def test_priority_comes_before_command(queue: Queue) -> None:
    for command, priority in (("a", 1), ("b", 8), ("c", 1), ("a", 8)):
        queue.enqueue(f"{command}{priority}", command=command, priority=priority)
    assert queue.claim_payloads(commands=["a", "b", "c"]) == ["a8", "b8", "a1", "c1"]


@pytest.mark.spec("QUE-1", "A queue belongs to one tenant: queues with the same name are separate")
def test_tenants_never_take_each_others_tasks(queue: Queue, other_queue: Queue) -> None:
    queue.enqueue("of acme")
    assert other_queue.try_claim(count=10).tasks == []
    assert queue.claim().spec.payload == "of acme"


@pytest.mark.spec(
    "TEN-1", "Structures of two tenants are independent: every key but the partition's own names one tenant"
)
def test_every_key_names_its_tenant(queue: Queue, other_queue: Queue, store: redis.Redis) -> None:
    for tenant_queue in (queue, other_queue):
        tenant_queue.enqueue(idempotency_key="k")
        tenant_queue.enqueue(delay_ms=1000)
        tenant_queue.complete(tenant_queue.claim())
        tenant_queue.make_dead_letter()
    shared = ("due", "tenants", "woken", "waiting", "events", "task:")
    for key in store.keys("*"):
        name = key.decode().split("}:", 1)[1]
        assert name.startswith(shared) or name.count("acme0001") + name.count("zeta0002") == 1


@pytest.mark.spec("SCH-2", "Due tasks move at claim time, at most `CODEQ_QUEUES_REPAIR_LIMIT` of them")
def test_a_claim_promotes_at_most_its_limit(queue: Queue, clock: Clock) -> None:
    queue.enqueue_many(450, delay_ms=1000)
    clock.advance(2)
    queue.try_claim()
    stats = selectors.queue_stats(queue.tenant, "send").run_sync()
    assert (stats.ready, stats.delayed, stats.in_progress) == (199, 250, 1)


@pytest.mark.spec(
    "CLM-4", "Expired leases are repaired before a claim takes, at most `CODEQ_QUEUES_REPAIR_LIMIT` of them"
)
def test_a_claim_repairs_expired_leases(queue: Queue, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine(), "options", Options(backoff="fixed"))  # jitter can choose a delay of zero
    queue.enqueue_many(250)
    assert len(queue.try_claim(count=250, lease_seconds=1).tasks) == 250
    clock.advance(1)
    looked = queue.try_claim()
    assert (looked.tasks, looked.expired, looked.dead) == ([], 200, 0)
    stats = selectors.queue_stats(queue.tenant, "send").run_sync()
    assert (stats.delayed, stats.in_progress) == (200, 50)


@pytest.mark.spec(
    "CLM-5", "The work of one script call is limited: after a number of ghosts the claim continues in another call"
)
def test_claim_skips_any_number_of_ghosts(queue: Queue, store: redis.Redis) -> None:
    for task in queue.enqueue_many(1000):
        services.cancel(queue.tenant, task.id).run_sync()
    queue.enqueue("live")
    store.config_resetstat()
    assert queue.claim().spec.payload == "live"
    assert store.info("commandstats")["cmdstat_evalsha"]["calls"] == 5
    assert selectors.queue_stats(queue.tenant, "send").run_sync().ready == 0


@pytest.mark.spec("QUE-4", "A claim reads only the payloads of the tasks that it takes")
def test_a_claim_reads_only_what_it_takes(queue: Queue, store: redis.Redis) -> None:
    queue.enqueue_many(500)
    queue.claim()
    store.config_resetstat()
    queue.claim()
    assert store.info("commandstats")["cmdstat_hmget"]["calls"] == 2  # the queue's state, the task


def test_a_claim_is_one_round_trip(queue: Queue, store: redis.Redis) -> None:
    queue.enqueue_many(3)
    queue.claim()
    store.config_resetstat()
    queue.claim()
    assert store.info("commandstats")["cmdstat_evalsha"]["calls"] == 1


@pytest.mark.spec("CLM-7", "Every claim has a token of its own")
def test_every_claim_has_a_token_of_its_own(queue: Queue, clock: Clock) -> None:
    queue.enqueue()
    first = queue.claim(lease_seconds=1)
    clock.advance(1000)
    queue.try_claim()  # returns the expired task to the queue
    clock.advance(1000)
    assert queue.claim().lease_token != first.lease_token


def test_next_worker_gets_the_error_of_the_failed_attempt(queue: Queue, clock: Clock) -> None:
    queue.enqueue()
    services.nack(queue.tenant, queue.claim().id, "w1", reason="disk full", delay_seconds=0).run_sync()
    again = queue.claim()
    assert (again.error, again.attempts) == ("disk full", 1)


def test_waiting_claim_is_registered_and_the_next_enqueue_publishes(queue: Queue, store: redis.Redis) -> None:
    queue.enqueue("creates the queue")
    queue.claim()
    listener = store.pubsub()
    listener.subscribe(f"codeq:{{{engine().partition_of(queue.tenant.tid)}}}:wake")
    listener.get_message(timeout=1)
    queue.enqueue("no worker waits")
    queue.claim()
    assert listener.get_message(timeout=0.05) is None
    assert queue.try_claim(wait_ms=30_000).tasks == []
    queue.enqueue("a worker waits")
    message = listener.get_message(timeout=1)
    assert message is not None
    assert message["data"] == b"ready acme0001:send"
    listener.close()
