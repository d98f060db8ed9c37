"""The schedule of Celery beat: every periodic task and its interval."""

from __future__ import annotations

# Label -> (name of the Celery task, interval in seconds).
PERIODIC_TASKS: dict[str, tuple[str, float]] = {
    "drain": ("queues.drain", 1.0),
    "repair": ("queues.repair", 1.0),
    "bulk": ("queues.bulk", 1.0),
    "cleanup": ("queues.cleanup", 60.0),
    "policies": ("queues.policies", 60.0),
    "ranked": ("queues.ranked", 5.0),
    "pipeline": ("pipeline.run", 3600.0),
    "sample": ("queues.sample", 60.0),
    "deliver": ("webhooks.deliver", 1.0),
    "notify": ("webhooks.notify", 1.0),
    "webhooks-cleanup": ("webhooks.cleanup", 60.0),
}
