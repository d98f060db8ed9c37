"""Messages that Celery accepts from its broker, and the broker's TLS certificate."""

from __future__ import annotations

import pickle
import ssl
from typing import Any

import pytest
import redis
from django.conf import settings
from kombu import Connection
from kombu.exceptions import ContentDisallowed
from kombu.serialization import loads, registry

from codeq_site.celery import CELERY_QUEUES, app, kombu_url

EXECUTED: list[str] = []


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return EXECUTED.append, ("executed",)


@pytest.mark.spec("BEA-1", "Only JSON is accepted from the broker: writing to it does not execute code")
@pytest.mark.parametrize("kind", sorted(set(registry.type_to_name) - {"application/json"}))
def test_only_json_is_accepted_from_the_broker(kind: str) -> None:
    assert app.conf.task_serializer == "json"
    with pytest.raises(ContentDisallowed):
        loads(pickle.dumps(Bomb()), kind, "binary", accept=app.conf.accept_content)
    assert EXECUTED == []


@pytest.mark.parametrize("query", ["", "?ssl_ca_certs=/etc/ssl/own.pem", "?ssl_cert_reqs=required"])
def test_certificate_of_the_broker_is_verified(query: str) -> None:
    plain = "rediss://broker.example.com:6379/0"
    # By default kombu does not verify the certificate.
    assert _certificate_requirement(plain) == ssl.CERT_NONE
    assert _certificate_requirement(kombu_url(plain + query)) == ssl.CERT_REQUIRED


def _certificate_requirement(url: str) -> Any:
    tls = Connection(url).ssl
    assert isinstance(tls, dict)
    return tls["ssl_cert_reqs"]


@pytest.mark.usefixtures("valkey")
def test_pipeline_runs_have_a_celery_queue_of_their_own() -> None:
    assert set(app.amqp.queues) == set(CELERY_QUEUES)  # those of a worker without --queues
    for task in ("pipeline.run", "queues.drain", "queues.repair"):
        app.send_task(task)
    with redis.Redis.from_url(settings.CODEQ["broker_url"]) as broker:
        assert [broker.llen(name) for name in ("celery", "pipeline")] == [2, 1]
