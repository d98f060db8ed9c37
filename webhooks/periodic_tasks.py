"""What Celery beat has done about webhooks: deliveries sent, workers told, old things removed."""

from __future__ import annotations

import asyncio

from core.periodic_lock import PeriodicTaskLock
from queues.periodic import periodic_task
from webhooks import notices, services, subscriptions
from webhooks.sender import Sender, utc_now

# A run takes new deliveries for so long; then the next one may begin, while this one's last are under way.
RUN_SECONDS = 20.0


@periodic_task("webhooks.deliver")
def deliver(lock: PeriodicTaskLock) -> str:
    """Send every callback that is due."""
    sender = Sender()
    asyncio.run(sender.run(lock.renew, RUN_SECONDS, on_last=lock.release))
    return f"{sender.delivered} delivered, {sender.failed} failed"


@periodic_task("webhooks.notify", lock_seconds=30.0)
def notify(lock: PeriodicTaskLock) -> str:
    """Tell workers of the queues that have work again."""
    told, tried = notices.notify()
    return f"{told} of {tried} told"


@periodic_task("webhooks.cleanup", lock_seconds=60.0)
def cleanup(lock: PeriodicTaskLock) -> str:
    """Remove expired subscriptions and old deliveries; disable endpoints that have failed for days."""
    now = utc_now()
    expired = subscriptions.remove_expired(now)
    disabled = services.disable_failing(now)
    gone = 0
    while lock.renew():
        went = services.cleanup(now)
        gone += went
        if went < services.CHUNK:
            break
    return f"{expired} subscriptions and {gone} deliveries removed, {disabled} endpoints disabled"
