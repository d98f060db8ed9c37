"""Policies of queues: versions, and the effect on producers, workers and ended tasks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connection, connections

from core import errors
from core.redis.connections import client
from queues import periodic_tasks, policies, selectors, services
from queues.current_engine import engine
from queues.domain import Location, NewResult, NewTask, TaskStatus
from queues.engine import keys, maintenance_commands
from queues.models import AuditedResult, QueuePolicy
from queues.policies import Policy
from tenants.cache import TenantCache, tenant_cache
from tenants.domain import TenantSnapshot
from tests.factories import TenantFactory
from tests.fixtures.queues import Clock, Queue
from tests.waiting import until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("stop_tenant_cache")]
DAY = 86_400


@pytest.fixture
def tenant() -> TenantSnapshot:
    TenantFactory(tid="acme0001", slug="acme")
    snapshot = tenant_cache.find("acme")
    assert snapshot is not None
    return snapshot


@pytest.fixture
def other_tenant() -> TenantSnapshot:
    TenantFactory(tid="zeta0002", slug="zeta")
    snapshot = tenant_cache.find("zeta")
    assert snapshot is not None
    return snapshot


def put(tenant: TenantSnapshot, command: str = "send", **fields: Any) -> QueuePolicy:
    return policies.put(tenant, command, Policy(**fields), actor="root")[0]


def stats(tenant: TenantSnapshot, command: str = "send") -> tuple[int, int, int]:
    queue_stats = selectors.queue_stats(tenant, command).run_sync()
    return queue_stats.ready, queue_stats.in_progress, queue_stats.dlq


@pytest.mark.spec("ADM-5", "A policy is created, changed and read; only a change increases its version")
def test_only_a_change_increases_the_version(tenant: TenantSnapshot) -> None:
    row, is_new = policies.put(tenant, "send", Policy(max_attempts=3, priority_tiers=(5, 0)), actor="root")
    assert (is_new, row.version, row.priority_tiers, row.changed_by) == (True, 1, [0, 5], "root")
    row, is_new = policies.put(tenant, "send", Policy(max_attempts=3, priority_tiers=(0, 5)), actor="ada")
    assert (is_new, row.version, row.changed_by) == (False, 1, "root")
    row, is_new = policies.put(tenant, "send", Policy(max_attempts=4), actor="ada")
    assert (is_new, row.version, row.priority_tiers, row.changed_by) == (False, 2, None, "ada")
    assert policies.find(tenant, "send").version == 2
    assert [row.command for row in policies.list_rows(tenant)] == ["send"]
    policies.delete(tenant, "send")
    for missing in (policies.find, policies.delete):
        with pytest.raises(errors.NotFound):
            missing(tenant, "send")
    assert policies.for_tenant(tenant) == {}


def test_concurrent_requests_create_one_policy(tenant: TenantSnapshot) -> None:
    def make(number: int) -> int:
        try:
            return put(tenant, max_attempts=number).version
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as threads:
        versions = list(threads.map(make, range(1, 9)))
    assert sorted(versions) == list(range(1, 9))
    assert QueuePolicy.objects.get().version == 8


@pytest.mark.spec("TEN-3", "A policy applies to one tenant's queue; another tenant cannot see it and is not affected")
def test_policy_applies_to_its_tenant_only(tenant: TenantSnapshot, other_tenant: TenantSnapshot) -> None:
    put(tenant, max_attempts=1, priority_tiers=(7,), max_consumers=1, backoff="fixed")
    with pytest.raises(errors.NotFound):
        policies.find(other_tenant, "send")
    queue = Queue(other_tenant)
    assert queue.enqueue().max_attempts == 5
    queue.enqueue()
    assert len(queue.try_claim(count=5).tasks) == 2
    with pytest.raises(errors.NotFound):
        policies.delete(other_tenant, "send")
    assert policies.find(tenant, "send").max_attempts == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"max_attempts": 0},
        {"max_attempts": 1001},
        {"priority_tiers": ()},
        {"priority_tiers": (10,)},
        {"priority_tiers": (-1,)},
        {"priority_tiers": (1, 1)},
        {"retention_seconds": 59},
        {"retention_seconds": policies.MAX_RETENTION_SECONDS + 1},
        {"max_consumers": 0},
        {"max_consumers": policies.MAX_CONSUMERS + 1},
        {"dead_letter_topic": "send"},
        {"dead_letter_topic": "no way"},
        {"dead_letter_topic": "x" * 129},
        {"backoff": "now and then"},
        {"backoff_base_seconds": -1.0},
        {"backoff_cap_seconds": float("nan")},
        {"backoff_cap_seconds": float("inf")},
    ],
    ids=str,
)
def test_invalid_policy_is_refused_and_nothing_changes(tenant: TenantSnapshot, fields: dict[str, Any]) -> None:
    put(tenant, max_attempts=2)
    with pytest.raises(errors.InvalidRequest):
        put(tenant, **fields)
    assert (policies.find(tenant, "send").version, policies.for_tenant(tenant)["send"].max_attempts) == (1, 2)


@pytest.mark.parametrize("command", ["", "a b", "x" * 129, "a\n", "ü", "a:b"])
def test_invalid_command_cannot_have_a_policy(tenant: TenantSnapshot, command: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="name"):
        put(tenant, command)


@pytest.mark.spec("ADM-5", "A policy's maxAttempts is the default of its tasks, and its priorityTiers limit every task")
def test_policy_applies_to_enqueued_tasks(tenant: TenantSnapshot) -> None:
    put(tenant, max_attempts=2, priority_tiers=(0, 5))
    queue = Queue(tenant)
    assert queue.enqueue().max_attempts == 2
    assert queue.enqueue(max_attempts=7, priority=5).max_attempts == 7
    with pytest.raises(errors.InvalidRequest, match="send accepts only 0, 5"):
        queue.enqueue(priority=4)
    assert Queue(tenant, "other").enqueue(priority=4).max_attempts == 5
    assert stats(tenant) == (2, 0, 0)


@pytest.mark.spec("ADM-5", "A task without a priority gets the lowest of its queue's priorityTiers")
def test_task_without_a_priority_gets_the_lowest_tier(tenant: TenantSnapshot) -> None:
    put(tenant, priority_tiers=(9, 3, 5))
    without_priority = NewTask(command="send", payload="1", has_priority=False)
    other = NewTask(command="other", payload="1", has_priority=False)
    refused = NewTask(command="send", payload="1")
    lowest_tier, default, invalid = services.enqueue(tenant, [without_priority, other, refused]).run_sync()
    assert (lowest_tier.task.priority, default.task.priority) == (3, 0)
    assert isinstance(invalid, errors.InvalidRequest)
    assert "send accepts only 3, 5, 9" in invalid.detail


@pytest.mark.parametrize("policy", [{"max_attempts": 2}, {"priority_tiers": (4, 5)}], ids=str)
def test_a_repeated_key_is_the_same_request_under_another_policy(
    tenant: TenantSnapshot, policy: dict[str, Any]
) -> None:
    new = NewTask(command="send", payload="1", idempotency_key="k", has_priority=False)
    [first] = services.enqueue(tenant, [new]).run_sync()
    put(tenant, **policy)
    [again] = services.enqueue(tenant, [new]).run_sync()
    assert (again.is_repeated, again.is_mismatch, again.task.id) == (True, False, first.task.id)


@pytest.mark.spec("ADM-5", "A policy's retentionSeconds is the retention of the queue's ended tasks")
@pytest.mark.parametrize("ending", ["completed", "cancelled"])
def test_ended_tasks_have_the_retention_of_the_policy(tenant: TenantSnapshot, clock: Clock, ending: str) -> None:
    put(tenant, "send.v-1", retention_seconds=3600)
    put(tenant, "send", retention_seconds=7 * DAY)
    put(tenant, "v-1", retention_seconds=60)
    queues = [Queue(tenant, command) for command in ("send.v-1", "send", "plain")]
    for queue in queues:
        task = queue.enqueue(idempotency_key=queue.command)
        if ending == "completed":
            queue.complete(queue.claim())
        else:
            services.cancel(tenant, task.id).run_sync()
    removed = []
    for seconds in (3600 - 1, 1, DAY - 3600 - 1, 1, 6 * DAY - 1, 1):
        clock.advance(seconds)
        removed.append(services.cleanup(tenant.tid).run_sync())
    assert removed == [0, 1, 0, 1, 0, 1]


@pytest.mark.spec("ADM-5", "maxConsumers limits the tasks in progress in a queue, regardless of how they are claimed")
def test_max_consumers_limits_the_tasks_in_progress(tenant: TenantSnapshot, clock: Clock) -> None:
    put(tenant, max_consumers=3)
    queue = Queue(tenant)
    queue.enqueue_many(10)
    first = queue.try_claim(count=2).tasks
    second = queue.try_claim("w2", count=5)
    assert (len(first), len(second.tasks)) == (2, 1)
    full = queue.try_claim("w3", wait_ms=1000)
    assert full.tasks == []
    # No message reports that a task has ended, so a long poll repeats its claim soon.
    assert full.next_due_ms is not None
    assert full.next_due_ms <= clock.now_ms + 500
    queue.complete(first[0])
    services.nack(tenant, first[1].id, "w1", delay_seconds=0).run_sync()
    assert len(queue.try_claim("w3", count=5).tasks) == 2
    clock.advance(10_000)  # all leases have expired: a claim returns these tasks and takes three others
    assert len(queue.try_claim("w4", count=10).tasks) == 3
    assert stats(tenant)[1] == 3


def test_queue_at_its_limit_does_not_stop_a_claim_from_the_others(tenant: TenantSnapshot, clock: Clock) -> None:
    put(tenant, "few", max_consumers=2)
    put(tenant, "one", max_consumers=1)
    for command, priority in (("few", 9), ("one", 5), ("many", 1)):
        Queue(tenant, command).enqueue_many(5, priority=priority)
    taken = services.claim(tenant, ["one", "many", "few"], "w", count=10).run_sync().tasks
    assert [task.spec.command for task in taken] == ["few", "few", "one", "many", "many", "many", "many", "many"]
    assert services.claim(tenant, ["one", "few"], "w", count=10).run_sync().tasks == []
    assert [stats(tenant, command)[1] for command in ("few", "one", "many")] == [2, 1, 5]


def test_cancelled_tasks_do_not_count_as_in_progress(tenant: TenantSnapshot, clock: Clock) -> None:
    put(tenant, max_consumers=2)
    queue = Queue(tenant)
    tasks = queue.enqueue_many(5)
    for task in tasks[:3]:
        services.cancel(tenant, task.id).run_sync()
    assert [task.id for task in queue.try_claim(count=5).tasks] == [task.id for task in tasks[3:]]


def test_concurrent_claims_do_not_exceed_max_consumers(tenant: TenantSnapshot) -> None:
    put(tenant, max_consumers=7)
    queue = Queue(tenant)
    queue.enqueue_many(100)

    def work(number: int) -> int:
        return len(queue.try_claim(f"w{number}", count=3).tasks)

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(work, range(40))) == 7
    assert stats(tenant) == (93, 7, 0)


@pytest.mark.spec("ADM-5", "A claim from a queue without maxConsumers runs no additional Redis command")
def test_claim_counts_the_consumers_only_if_they_are_limited(tenant: TenantSnapshot, clock: Clock) -> None:
    def calls(command: str) -> int:
        Queue(tenant, command).enqueue()
        client().config_resetstat()
        assert len(Queue(tenant, command).try_claim().tasks) == 1
        return sum(stat["calls"] for name, stat in client().info("commandstats").items() if "config" not in name)

    calls("free")  # loads the scripts; the queue has no lease yet
    free = calls("free")
    put(tenant, "free", max_attempts=9, priority_tiers=(0, 1), retention_seconds=60)
    assert calls("free") == free
    put(tenant, "bound", max_consumers=5)
    calls("bound")
    assert calls("bound") == free + 1


def test_pause_and_resume_keep_max_consumers(tenant: TenantSnapshot, clock: Clock) -> None:
    put(tenant, max_consumers=2)
    queue = Queue(tenant)
    queue.enqueue_many(5)
    services.pause(tenant, "send").run_sync()
    assert selectors.queue_stats(tenant, "send").run_sync().is_paused
    assert queue.try_claim(count=5).tasks == []
    put(tenant, max_consumers=3)
    assert selectors.queue_stats(tenant, "send").run_sync().is_paused
    services.resume(tenant, "send").run_sync()
    assert not selectors.queue_stats(tenant, "send").run_sync().is_paused
    assert len(queue.try_claim(count=5).tasks) == 3
    policies.delete(tenant, "send")
    assert len(queue.try_claim(count=5).tasks) == 2


@pytest.mark.spec("RET-1", "A queue's policy has a backoff of its own")
def test_backoff_of_the_policy_delays_retries(tenant: TenantSnapshot, clock: Clock) -> None:
    queue = Queue(tenant)

    def backoff() -> int:
        queue.enqueue()
        return services.nack(tenant, queue.claim().id, "w1").run_sync().delay_ms

    put(tenant, backoff="fixed", backoff_base_seconds=7.5)
    assert backoff() == 7500
    put(tenant, backoff="linear", backoff_base_seconds=100.0, backoff_cap_seconds=50.0)
    assert backoff() == 50_000
    policies.delete(tenant, "send")
    assert 0 <= backoff() <= 5000


@pytest.mark.spec(
    "ADM-5",
    "A task whose attempts have failed moves to its queue's dead-letter topic; there it can become a dead letter",
)
@pytest.mark.parametrize("way", ["nack", "abandon", "reap"])
def test_task_without_attempts_left_moves_to_the_dead_letter_topic(
    tenant: TenantSnapshot, clock: Clock, way: str
) -> None:
    queue, failed = Queue(tenant), Queue(tenant, "failed")
    task = queue.enqueue('{"x":1}', max_attempts=2, priority=6, webhook="https://example.org/hook")

    def fail(of: Queue) -> None:
        held = of.claim(lease_seconds=10)
        assert held.id == task.id
        if way == "nack":
            services.nack(tenant, task.id, "w1", reason="boom", delay_seconds=0).run_sync()
        elif way == "abandon":
            services.abandon(tenant, task.id, "w1").run_sync()
        else:
            clock.advance(11)
            maintenance_commands.reap(engine(), tenant.tid, of.command).run_sync()

    put(tenant, backoff="fixed", backoff_base_seconds=0.0, dead_letter_topic="failed")
    # The dead-letter topic has a dead-letter topic itself, which is not used.
    put(tenant, "failed", backoff="fixed", backoff_base_seconds=0.0, dead_letter_topic="send")
    for _ in range(2):
        assert (stats(tenant), stats(tenant, "failed")) == ((1, 0, 0), (0, 0, 0))
        fail(queue)
        clock.advance(1)
    assert (stats(tenant), stats(tenant, "failed")) == ((0, 0, 0), (1, 0, 0))
    moved = selectors.task(tenant, task.id).run_sync()
    assert (moved.status, moved.location, moved.attempts) == (TaskStatus.PENDING, Location.PENDING_LIST, 0)
    assert (moved.priority, moved.spec.payload, moved.spec.command) == (6, '{"x":1}', "send")
    assert moved.error == {"nack": "boom", "abandon": "MAX_ATTEMPTS", "reap": "LEASE_EXPIRED"}[way]
    for _ in range(2):
        fail(failed)
        clock.advance(1)
    assert (stats(tenant), stats(tenant, "failed")) == ((0, 0, 0), (0, 0, 1))
    events = [(entry["queue"][9:], entry["attempt"], entry["status"]) for entry in queue.read_events()]
    assert events == [
        ("send", "1", "PENDING"), ("send", "2", "PENDING"), ("failed", "3", "PENDING"), ("failed", "4", "FAILED"),
    ]  # fmt: skip
    periodic_tasks.run_drain(lambda: True)
    row = AuditedResult.objects.get(pk=task.id)
    assert (row.command, row.is_dead, row.deliveries) == ("failed", True, 4)


def test_a_task_of_the_dead_letter_topic_can_be_completed(tenant: TenantSnapshot, clock: Clock) -> None:
    put(tenant, dead_letter_topic="failed")
    queue, failed = Queue(tenant), Queue(tenant, "failed")
    task = queue.enqueue(max_attempts=1)
    stale = queue.claim()
    services.nack(tenant, task.id, "w1").run_sync()
    with pytest.raises(errors.LeaseLost):
        services.heartbeat(tenant, task.id, "w1", token=stale.lease_token).run_sync()
    held = failed.claim("w2")
    [done] = services.submit(
        tenant, "w2", [NewResult(task_id=task.id, status=TaskStatus.COMPLETED, result=b"{}")]
    ).run_sync()
    assert (held.id, done.status) == (task.id, TaskStatus.COMPLETED)
    assert [stats.command for stats in selectors.queues(tenant).run_sync()] == ["failed", "send"]


@pytest.mark.real_time
@pytest.mark.spec("ADM-5", "A changed policy applies in every process within 5 s")
def test_changed_policy_applies_in_another_process_within_seconds(tenant: TenantSnapshot) -> None:
    other_cache = TenantCache()
    other_cache.register_loader("policies", policies.load)
    try:
        snapshot = other_cache.find("acme")
        assert snapshot is not None
        assert other_cache.get_related("policies", snapshot) is None
        put(tenant, max_attempts=3)
        until(lambda: other_cache.get_related("policies", snapshot), 5)
        put(tenant, max_attempts=4)
        until(lambda: other_cache.get_related("policies", snapshot)["send"].max_attempts == 4, 5)
        policies.delete(tenant, "send")
        until(lambda: other_cache.get_related("policies", snapshot) is None, 5)
    finally:
        other_cache.stop()


def test_change_by_sql_applies_too(tenant: TenantSnapshot) -> None:
    put(tenant, max_attempts=3)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE queues_queuepolicy SET max_attempts = 9")
    until(lambda: policies.for_tenant(tenant)["send"].max_attempts == 9, 5)


@pytest.mark.spec("ADM-5", "After Redis was emptied or unavailable, beat writes the policies again within a minute")
def test_lost_policies_are_written_to_redis_again(tenant: TenantSnapshot) -> None:
    put(tenant, max_consumers=2, backoff="fixed", backoff_base_seconds=1.0, dead_letter_topic="failed")
    root = keys.of_partition(engine().partition_of(tenant.tid)).root
    names = keys.of_tenant(root, tenant.tid)
    expected = {b"send": b"fixed 1000 900000 failed"}
    assert client().hgetall(names.policies) == expected
    client().flushdb()
    assert periodic_tasks.sync_policies() == "1 written"
    assert client().hgetall(names.policies) == expected
    assert client().hgetall(names.queues) == {b"send": b"active 2", b"failed": b"active"}


def test_policy_without_values_for_the_scripts_is_not_written_to_redis(tenant: TenantSnapshot) -> None:
    put(tenant, max_attempts=2)
    root = keys.of_partition(engine().partition_of(tenant.tid)).root
    assert client().hgetall(keys.of_tenant(root, tenant.tid).policies) == {}


def test_number_of_policies_of_a_tenant_is_limited(tenant: TenantSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "MAX_POLICIES", 2)
    put(tenant, "a")
    put(tenant, "b")
    with pytest.raises(errors.Conflict):
        put(tenant, "c")
    put(tenant, "b", max_attempts=2)
