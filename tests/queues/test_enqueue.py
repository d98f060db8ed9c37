from __future__ import annotations

import msgspec
import pytest
import redis

from core import errors
from queues import selectors, services
from queues.domain import Location, NewTask, TaskStatus
from tenants.domain import TenantSnapshot
from tests.fixtures.queues import Clock, Queue


@pytest.mark.spec("ENQ-1", "A task is stored as requested, its payload to the byte")
def test_task_is_stored_as_requested(queue: Queue, clock: Clock) -> None:
    payload = '{"n":1.10,"big":9007199254740993,"empty":[],"text":"\\u0000é"}'
    task = queue.enqueue(
        payload, priority=7, max_attempts=3, webhook="https://example.com/cb", trace_parent="00-a-b-01"
    )
    stored = selectors.task(queue.tenant, task.id).run_sync()
    assert stored == task
    assert stored.spec.payload == payload
    assert (stored.priority, stored.max_attempts, stored.status) == (7, 3, TaskStatus.PENDING)
    assert stored.spec.webhook == "https://example.com/cb"
    assert (stored.created_ms, stored.visible_ms) == (clock.now_ms, clock.now_ms)


@pytest.mark.spec("ENQ-4", "Tenant and trace context are stored with the task")
def test_tenant_and_trace_context_are_stored_with_the_task(queue: Queue) -> None:
    task = queue.enqueue(trace_parent="00-a-b-01", trace_state="vendor=1")
    spec = selectors.task(queue.tenant, task.id).run_sync().spec
    assert (spec.tenant, spec.trace_parent, spec.trace_state) == ("acme", "00-a-b-01", "vendor=1")


@pytest.mark.spec("ENQ-2", "Record, index, retention and idempotency mapping appear in one step")
def test_enqueue_is_one_script_call(queue: Queue, store: redis.Redis) -> None:
    queue.enqueue()  # loads the script
    store.config_resetstat()
    queue.enqueue(idempotency_key="once")
    stats = store.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] == 1
    assert "cmdstat_get" in stats  # the script reads the key itself, without another round trip


@pytest.mark.spec("ENQ-3", "Items of a batch are independent: an invalid one has its own error, the others are stored")
def test_invalid_item_of_a_batch_does_not_affect_the_others(queue: Queue) -> None:
    new = [
        NewTask(command="send", payload="1"),
        NewTask(command="send", payload='"\ud800"'),
        NewTask(command="mail", payload="3", delay_ms=10**15),
        NewTask(command="mail", payload="4", priority=9),
    ]
    first, second, third, fourth = services.enqueue(queue.tenant, new).run_sync()
    assert isinstance(second, errors.InvalidRequest)
    assert isinstance(third, errors.InvalidRequest)
    assert not isinstance(first, Exception)
    assert first.task.spec.payload == "1"
    assert not isinstance(fourth, Exception)
    assert fourth.task.spec.payload == "4"
    assert queue.claim_payloads(commands=["send", "mail"]) == ["4", "1"]


@pytest.mark.spec("QUE-3", "Tasks of one priority are claimed in the order they were enqueued")
def test_a_batch_keeps_its_order(queue: Queue) -> None:
    queue.enqueue_many(250)
    assert queue.claim_payloads() == [str(n) for n in range(250)]


@pytest.mark.spec("SCH-1", "A delayed task is invisible until it is due, regardless of its priority")
@pytest.mark.parametrize(
    "when",
    [{"delay_ms": 30_000}, {"run_at_ms": 1_900_000_030_000}, {"run_at_ms": 1_900_000_030_000, "delay_ms": 5}],
)
def test_a_delayed_task_is_invisible_until_it_is_due(queue: Queue, clock: Clock, when: dict[str, int]) -> None:
    task = queue.enqueue("late", priority=9, **when)
    queue.enqueue("now", priority=0)
    assert task.location is Location.DELAYED_ZSET
    assert queue.claim_payloads() == ["now"]
    clock.advance(29.999)
    assert queue.claim_payloads() == []
    clock.advance(0.001)
    assert queue.claim_payloads() == ["late"]


@pytest.mark.spec("SCH-5", "A task due in two weeks runs in two weeks")
def test_a_task_due_in_two_weeks_runs_in_two_weeks(queue: Queue, clock: Clock) -> None:
    queue.enqueue("later", delay_ms=14 * 86_400_000)
    clock.advance(14 * 86_400 - 1)
    assert queue.claim_payloads() == []
    clock.advance(1)
    assert queue.claim_payloads() == ["later"]


def test_task_with_a_run_time_in_the_past_is_ready_at_once(queue: Queue, clock: Clock) -> None:
    task = queue.enqueue(run_at_ms=clock.now_ms - 1)
    assert (task.location, task.visible_ms) == (Location.PENDING_LIST, clock.now_ms)


@pytest.mark.spec("IDM-1", "During the retention, the same key of a tenant returns the same task")
def test_idempotency_key_identifies_one_task(queue: Queue, other_queue: Queue) -> None:
    first = queue.enqueue("1", idempotency_key="k")
    again = services.enqueue(queue.tenant, [NewTask(command="send", payload="1", idempotency_key="k")]).run_sync()[0]
    assert not isinstance(again, Exception)
    assert (again.task, again.is_repeated, again.is_mismatch) == (first, True, False)
    assert other_queue.enqueue("1", idempotency_key="k").id != first.id
    assert queue.try_claim(count=10).tasks[0].id == first.id
    assert queue.claim_payloads() == []


def test_repeated_key_returns_the_current_task(queue: Queue) -> None:
    queue.enqueue("1", idempotency_key="k")
    queue.complete(queue.claim())
    assert queue.enqueue("1", idempotency_key="k").status is TaskStatus.COMPLETED


def test_key_used_for_another_request_is_reported(queue: Queue, tenant: TenantSnapshot) -> None:
    first = queue.enqueue("1", idempotency_key="k")
    other = NewTask(command="send", payload="2", idempotency_key="k")
    item = services.enqueue(tenant, [other]).run_sync()[0]
    assert not isinstance(item, Exception)
    assert (item.task.id, item.is_repeated, item.is_mismatch) == (first.id, True, True)
    strict = msgspec.structs.replace(tenant, is_idempotency_strict=True)
    assert isinstance(services.enqueue(strict, [other]).run_sync()[0], errors.IdempotencyMismatch)


def test_key_used_twice_in_a_batch_creates_one_task(queue: Queue) -> None:
    new = [NewTask(command="send", payload="1", idempotency_key="k", priority=p) for p in (0, 0, 5)]
    items = services.enqueue(queue.tenant, new).run_sync()
    assert len({item.task.id for item in items if not isinstance(item, Exception)}) == 1
    assert len(queue.try_claim(count=10).tasks) == 1


def test_key_can_be_used_again_when_its_task_is_removed(queue: Queue, store: redis.Redis) -> None:
    first = queue.enqueue("1", idempotency_key="k")
    store.delete(*store.keys("*task:*"))
    second = queue.enqueue("1", idempotency_key="k")
    assert second.id != first.id
    assert queue.enqueue("1", idempotency_key="k").id == second.id


BAD: dict[str, tuple[dict[str, object], type[errors.CodeqError]]] = {
    "delay beyond the limit": ({"delay_ms": 10**15}, errors.InvalidRequest),
    "run time beyond the limit": ({"run_at_ms": 253_402_300_799_000}, errors.InvalidRequest),
    "run time beyond the year 9999": ({"run_at_ms": 10**18}, errors.InvalidRequest),
    "payload too large": ({"payload": "1" * (256 * 1024 + 1)}, errors.PayloadTooLarge),
    "payload with half a surrogate pair": ({"payload": '"\ud800"'}, errors.InvalidRequest),
}


@pytest.mark.parametrize(("fields", "error"), BAD.values(), ids=BAD.keys())
def test_invalid_field_is_a_specific_error_and_writes_nothing(
    queue: Queue, store: redis.Redis, fields: dict[str, object], error: type[errors.CodeqError]
) -> None:
    new = NewTask(**{"command": "send", "payload": "{}", **fields})  # type: ignore[arg-type]
    assert type(services.enqueue(queue.tenant, [new]).run_sync()[0]) is error
    assert store.dbsize() == 0


@pytest.mark.spec("TEN-5", "A suspended tenant cannot enqueue or claim, but can finish claimed tasks")
def test_suspended_tenant_can_only_finish_claimed_tasks(queue: Queue, tenant: TenantSnapshot) -> None:
    queue.enqueue()
    task = queue.claim()
    queue.tenant = msgspec.structs.replace(tenant, is_suspended=True)
    with pytest.raises(errors.TenantSuspended):
        queue.enqueue()
    with pytest.raises(errors.TenantSuspended):
        queue.try_claim()
    assert queue.complete(task).status is TaskStatus.COMPLETED
