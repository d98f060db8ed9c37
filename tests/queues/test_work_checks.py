"""The checks by which Celery beat finds out whether a periodic task has work."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.conf import settings
from django.utils.module_loading import autodiscover_modules

from queues import periodic, periodic_tasks, work_checks
from ranked.services import has_waiting_entries
from tenants.cache import tenant_cache
from tests.factories import BulkJobFactory, DeliveryFactory, RankedEntryFactory, SubscriptionFactory
from tests.fixtures.queues import Clock, Queue
from webhooks import nonempty_queues
from webhooks.models import Delivery
from webhooks.sender import utc_now
from webhooks.work_checks import has_deliveries, has_notifications

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]
FREQUENT_SECONDS = 5.0


@pytest.fixture(autouse=True)
def _stop_tenant_cache() -> Iterator[None]:
    """Stop the tenant cache's thread, which would keep the test database open."""
    yield
    tenant_cache.stop()


def test_every_frequent_periodic_task_has_a_check() -> None:
    autodiscover_modules("periodic_tasks")
    frequent = {name for name, seconds in settings.PERIODIC_TASKS.values() if seconds <= FREQUENT_SECONDS}
    assert set(periodic.work_checks) == frequent


def test_drain_has_work_while_an_event_is_not_stored(queue: Queue) -> None:
    queue.enqueue()
    task = queue.claim()
    assert not work_checks.has_events()
    queue.complete(task)
    assert work_checks.has_events()
    periodic_tasks.drain()
    assert not work_checks.has_events()


def test_drain_has_work_while_an_entry_was_read_and_not_stored(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.enqueue()
    queue.complete(queue.claim())
    with monkeypatch.context() as patch:
        patch.setattr(periodic_tasks.audit_drain, "store", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            periodic_tasks.run_drain(lambda: True)
    assert work_checks.has_events()


@pytest.mark.parametrize("is_leased", [False, True])
def test_repair_has_work_from_the_moment_at_which_a_task_is_due(queue: Queue, clock: Clock, is_leased: bool) -> None:
    if is_leased:
        queue.enqueue(max_attempts=9)
        queue.claim(lease_seconds=2)
    else:
        queue.enqueue(delay_ms=2000)
    clock.advance(1.999)
    assert not work_checks.has_due_tasks()
    clock.advance(0.001)
    assert work_checks.has_due_tasks()
    periodic_tasks.repair()
    assert not work_checks.has_due_tasks()


def test_bulk_has_work_until_every_job_has_ended() -> None:
    assert not work_checks.has_bulk_jobs()
    job = BulkJobFactory(ended_at=None)
    assert work_checks.has_bulk_jobs()
    job.ended_at = utc_now()
    job.save()
    assert not work_checks.has_bulk_jobs()


def test_ranked_has_work_while_its_table_has_entries() -> None:
    assert not has_waiting_entries()
    RankedEntryFactory()
    assert has_waiting_entries()


def test_deliver_has_work_until_every_delivery_has_ended() -> None:
    assert not has_deliveries()
    delivery = DeliveryFactory(due_at=utc_now() + timedelta(hours=1))
    assert has_deliveries()
    delivery.status = Delivery.Status.DELIVERED
    delivery.save()
    assert not has_deliveries()


def test_notify_has_work_for_queues_that_turned_non_empty_and_for_deferred_notifications(queue: Queue) -> None:
    assert not has_notifications()
    queue.enqueue()
    assert has_notifications()
    nonempty_queues.take()
    assert not has_notifications()
    SubscriptionFactory(deferred_commands=["send"])
    assert has_notifications()
