"""Periodic tasks of webhooks: send callbacks, notify workers, remove expired rows."""

from __future__ import annotations

import asyncio

from core.periodic_lock import PeriodicTaskLock
from queues.periodic import periodic_task
from webhooks import notifications, services, subscriptions, work_checks
from webhooks.sender import Sender, utc_now

# A run starts new deliveries for this long. Then the next run may begin while the last attempts of this one finish.
RUN_SECONDS = 20.0


@periodic_task("webhooks.deliver", has_work=work_checks.has_deliveries)
def deliver(lock: PeriodicTaskLock) -> str:
    """Send the callbacks that are due."""
    sender = Sender()
    asyncio.run(sender.run(lock.renew, RUN_SECONDS, on_reserving_ended=lock.release))
    return f"{sender.delivered} delivered, {sender.failed} failed"


@periodic_task("webhooks.notify", lock_seconds=30.0, has_work=work_checks.has_notifications)
def notify(lock: PeriodicTaskLock) -> str:
    """Notify workers of queues that have work again."""
    delivered, attempted = notifications.notify()
    return f"{delivered} of {attempted} notifications delivered"


@periodic_task("webhooks.cleanup", lock_seconds=60.0)
def cleanup(lock: PeriodicTaskLock) -> str:
    """Delete expired subscriptions and old deliveries; disable failing endpoints."""
    now = utc_now()
    expired = subscriptions.remove_expired(now)
    disabled = services.disable_failing(now)
    deleted = 0
    while lock.renew():
        chunk = services.cleanup(now)
        deleted += chunk
        if chunk < services.CHUNK:
            break
    return f"{expired} subscriptions and {deleted} deliveries deleted, {disabled} endpoints disabled"
