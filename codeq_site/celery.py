"""The Celery application.

The state of the work is in Redis and PostgreSQL, not in Celery's messages. A message only starts a periodic task, so a
lost or repeated message changes nothing.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os

import redis
from celery import Celery
from celery.signals import beat_init, worker_init
from kombu import Exchange, Queue

from core.errors import ConfigError

log = logging.getLogger(__name__)

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "codeq_site.settings")

CELERY_QUEUES = ("celery", "pipeline")

app = Celery("codeq")


def kombu_url(url: str) -> str:
    """Return a Redis URL in kombu's notation.

    kombu writes `unix:///path?db=1` differently. It does not verify the certificate of a `rediss://` URL unless the URL
    requires it, so an attacker on the network could act as the broker.
    """
    if url.startswith("rediss://") and "ssl_cert_reqs=" not in url:
        url += f"{'&' if '?' in url else '?'}ssl_cert_reqs=required"
    return url.replace("unix://", "redis+socket://", 1).replace("?db=", "?virtual_host=", 1)


def configure() -> None:
    """Configure Celery from codeQ's settings. Celery calls this when it first reads its own."""
    from django.conf import settings

    from core.conf import conf

    broker = kombu_url(conf().broker_url) or "redis://127.0.0.1:6379/1"
    app.conf.update(
        # Set all three. Otherwise Celery reads CELERY_BROKER_URL itself, and it does not support `unix://`.
        broker_url=broker,
        broker_read_url=broker,
        broker_write_url=broker,
        task_ignore_result=True,
        accept_content=["json"],
        task_serializer="json",
        timezone="UTC",
        worker_hijack_root_logger=False,
        worker_prefetch_multiplier=1,
        beat_scheduler="codeq_site.beat:Scheduler",
        broker_connection_retry_on_startup=True,
        # A worker with Spark takes the runs of the pipeline with `--queues=pipeline`. A worker without that option
        # takes messages from both queues.
        task_queues=[Queue(name, Exchange(name), routing_key=name) for name in CELERY_QUEUES],
        task_routes={"pipeline.run": {"queue": "pipeline", "routing_key": "pipeline"}},
        # A message that has waited this long expires: the next run does its work.
        beat_schedule={
            name: {"task": task, "schedule": seconds, "options": {"expires": max(2 * seconds, 5)}}
            for name, (task, seconds) in settings.PERIODIC_TASKS.items()
        },
    )


def check_redis(**_: object) -> None:
    """Check the broker and the number of partitions when a worker or beat starts.

    Exits if one of them is wrong. If Redis is unavailable, the process starts nevertheless.
    """
    from core.conf import conf
    from core.redis import connections as store

    try:
        _check_broker(conf().broker_url)
        store.settle_partitions(store.client())
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    except (redis.RedisError, OSError):
        log.warning("Redis does not answer")
    # The processes that are forked from this one must not inherit the connection.
    store.client().close()


def _check_broker(url: str) -> None:
    """Raise ConfigError if the broker is a cluster node.

    A cluster node would accept only some of Celery's messages.
    """
    from core.redis.connections import is_clustered

    if not url.startswith(("redis://", "rediss://", "unix://")):
        return
    # Celery itself reports a broker that is unavailable or that denies INFO.
    with contextlib.suppress(redis.RedisError, OSError), redis.Redis.from_url(url, socket_timeout=5) as broker:
        if is_clustered(broker):
            raise ConfigError(
                "CELERY_BROKER_URL names a node of a Redis Cluster, but Celery does not support clusters: "
                "use a separate server."
            )


def freeze_imported_objects(**_: object) -> None:
    """Exclude the objects that the imports created from garbage collection.

    A collection writes to each object. The pool's processes would then copy the memory that they share with this one.
    """
    gc.collect()
    gc.freeze()


for start_signal in (worker_init, beat_init):
    start_signal.connect(check_redis, weak=False)
worker_init.connect(freeze_imported_objects, weak=False)
app.on_configure.connect(lambda **_: configure(), weak=False)
app.autodiscover_tasks(["queues", "ranked", "webhooks", "pipeline"], related_name="periodic_tasks")
