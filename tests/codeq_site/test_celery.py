"""What Celery takes off its broker."""

from __future__ import annotations

import pickle
import ssl
from typing import Any

import pytest
from kombu import Connection
from kombu.exceptions import ContentDisallowed
from kombu.serialization import loads, registry

from codeq_site.celery import app, kombu_url

EXECUTED: list[str] = []


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return EXECUTED.append, ("executed",)


@pytest.mark.spec("BEA-1", "Nothing but JSON is taken off the broker: whoever can write to it can execute nothing")
@pytest.mark.parametrize("kind", sorted(set(registry.type_to_name) - {"application/json"}))
def test_only_json_is_read_from_the_broker(kind: str) -> None:
    assert app.conf.task_serializer == "json"
    with pytest.raises(ContentDisallowed):
        loads(pickle.dumps(Bomb()), kind, "binary", accept=app.conf.accept_content)
    assert EXECUTED == []


@pytest.mark.parametrize("query", ["", "?ssl_ca_certs=/etc/ssl/own.pem", "?ssl_cert_reqs=required"])
def test_a_broker_that_speaks_tls_is_verified(query: str) -> None:
    plain = "rediss://broker.example.com:6379/0"
    # Left alone, kombu takes whoever answers for the broker.
    assert _asked_of_the_broker(plain) == ssl.CERT_NONE
    assert _asked_of_the_broker(kombu_url(plain + query)) == ssl.CERT_REQUIRED


def _asked_of_the_broker(url: str) -> Any:
    tls = Connection(url).ssl
    assert isinstance(tls, dict)
    return tls["ssl_cert_reqs"]
