"""What Celery beat has done about webhooks: deliveries sent, workers told, old things removed."""

from __future__ import annotations

import asyncio

from codeq_site.jobs import Turn, job
from webhooks import notices, services, subscriptions
from webhooks.sender import Sender, utc_now

# A run takes new deliveries for so long; then the next one may begin, while this one's last are under way.
RUN_SECONDS = 20.0


@job("webhooks.deliver")
def deliver(turn: Turn) -> str:
    """Send every callback that is due."""
    sender = Sender()
    asyncio.run(sender.run(turn.renew, RUN_SECONDS, on_last=turn.pass_on))
    return f"{sender.delivered} delivered, {sender.failed} failed"


@job("webhooks.notify", turn_seconds=30.0)
def notify(turn: Turn) -> str:
    """Tell workers of the queues that have work again."""
    told, tried = notices.notify()
    return f"{told} of {tried} told"


@job("webhooks.cleanup", turn_seconds=60.0)
def cleanup(turn: Turn) -> str:
    """Remove expired subscriptions and old deliveries; disable endpoints that have failed for days."""
    now = utc_now()
    expired = subscriptions.remove_expired(now)
    disabled = services.disable_failing(now)
    gone = 0
    while turn.renew():
        went = services.cleanup(now)
        gone += went
        if went < services.CHUNK:
            break
    return f"{expired} subscriptions and {gone} deliveries removed, {disabled} endpoints disabled"
