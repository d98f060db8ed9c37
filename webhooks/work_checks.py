"""Checks whether a periodic task of webhooks has work (see `queues/work_checks.py`)."""

from __future__ import annotations

from django.db.models import Q

from core.redis.connections import client, reachable_partitions
from queues.engine import keys
from webhooks.models import Delivery, Subscription


def has_deliveries() -> bool:
    """Whether a delivery has not ended. Its next attempt may be later."""
    return Delivery.objects.filter(status=Delivery.Status.PENDING).exists()


def has_notifications() -> bool:
    """Whether a queue turned non-empty, or a notification was deferred."""
    with client().pipeline(transaction=False) as pipe:
        for partition in reachable_partitions():
            pipe.exists(keys.of_partition(partition).woken)
        if any(pipe.execute()):
            return True
    return Subscription.objects.filter(~Q(deferred_commands=[])).exists()
