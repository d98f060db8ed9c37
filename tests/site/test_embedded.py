"""The embedded servers: what they promise about files, sockets and ends."""

from __future__ import annotations

import pytest
import redis
from django.db import connection

from tests.conftest import ValkeyFactory


def test_an_acknowledged_write_survives_a_kill(valkey_server: ValkeyFactory) -> None:
    server = valkey_server()
    with redis.Redis.from_url(server.url) as client:
        client.set("task", "kept")
    server.kill()
    server.start()
    with redis.Redis.from_url(server.url) as client:
        assert client.get("task") == b"kept"


@pytest.mark.django_db
def test_the_database_of_the_tests_is_a_real_postgresql() -> None:
    assert connection.vendor == "postgresql"
