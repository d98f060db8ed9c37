"""The Celery application.

Nothing here is truth. The events stream and the database rows are; a message only wakes somebody, so a lost
or doubled one changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os

import redis
from celery import Celery
from celery.signals import beat_init, worker_init

from core.errors import ConfigError

log = logging.getLogger(__name__)

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "codeq_site.settings")

app = Celery("codeq")


def kombu_url(url: str) -> str:
    """kombu has its own way to write a unix socket; everybody else reads `unix:///path?db=1`.

    And of a `rediss://` that does not ask for it kombu verifies no certificate: anybody on the way could be the broker.
    """
    if url.startswith("rediss://") and "ssl_cert_reqs=" not in url:
        url += f"{'&' if '?' in url else '?'}ssl_cert_reqs=required"
    return url.replace("unix://", "redis+socket://", 1).replace("?db=", "?virtual_host=", 1)


def configure() -> None:
    from django.conf import settings

    from core.conf import conf

    broker = kombu_url(conf().broker_url) or "redis://127.0.0.1:6379/1"
    app.conf.update(
        # All three: Celery itself reads CELERY_BROKER_URL in place of the first, and knows no `unix://`.
        broker_url=broker,
        broker_read_url=broker,
        broker_write_url=broker,
        task_ignore_result=True,
        accept_content=["json"],
        task_serializer="json",
        timezone="UTC",
        worker_hijack_root_logger=False,
        worker_prefetch_multiplier=1,
        broker_connection_retry_on_startup=True,
        # A tick that has waited this long is worth nothing: the next one does its work.
        beat_schedule={
            name: {"task": task, "schedule": seconds, "options": {"expires": max(2 * seconds, 5)}}
            for name, (task, seconds) in settings.PERIODIC_TASKS.items()
        },
    )


def settle_partitions(**_: object) -> None:
    """At the start of a worker or a beat, before it touches a queue. With Redis away it starts nevertheless."""
    from core.conf import conf
    from core.redis import connections as store

    try:
        _check_broker(conf().broker_url)
        store.settle_partitions(store.client())
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    except (redis.RedisError, OSError):
        log.warning("Redis does not answer")
    # Not to be inherited by the processes that are forked from this one.
    store.client().close()


def _check_broker(url: str) -> None:
    """A cluster's node takes Celery's first messages and refuses others: better not to begin."""
    from core.redis.connections import is_clustered

    if not url.startswith(("redis://", "rediss://", "unix://")):
        return
    # One that is away, or does not let us ask, is Celery's to complain of.
    with contextlib.suppress(redis.RedisError, OSError), redis.Redis.from_url(url, socket_timeout=5) as broker:
        if is_clustered(broker):
            raise ConfigError(
                "CELERY_BROKER_URL names a node of a Redis Cluster, which Celery does not speak to: "
                "give it a server of its own."
            )


for started in (worker_init, beat_init):
    started.connect(settle_partitions, weak=False)
app.on_configure.connect(lambda **_: configure(), weak=False)
app.autodiscover_tasks(["queues", "ranked", "webhooks", "pipeline"], related_name="periodic_tasks")
