"""The baseline of bench.http: a plain async Django view with one EVALSHA.

    python -m bench.plain      serves POST /v1/codeq/plain on CODEQ_PORT

It runs on the same router and server, without authentication, tenants, validation or metrics.
"""

from __future__ import annotations

import uuid
from hashlib import sha1
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.urls import path

# The minimal work of an enqueue: store the task, and add its id to the queue.
SCRIPT = """#!lua
redis.call('HSET', KEYS[1], 'spec', ARGV[1])
redis.call('LPUSH', KEYS[2], ARGV[2])
return 1
"""
SHA = sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
_connection: Any = None


async def enqueue_plain(request: HttpRequest) -> HttpResponse:
    global _connection
    if _connection is None:
        from core.conf import conf
        from core.redis.multiplexed_connection import MultiplexedConnection

        _connection = MultiplexedConnection(conf().redis_url)
        await _connection.send([("SCRIPT", "LOAD", SCRIPT)])
    body = await request.read_body(10**6)  # type: ignore[attr-defined]
    task_id = str(uuid.uuid4())
    (reply,) = await _connection.send([("EVALSHA", SHA, 2, f"plain:{{0}}:{task_id}", "plain:{0}:queue", body, task_id)])
    assert reply == 1
    return HttpResponse(b'{"id":"%s"}' % task_id.encode(), status=202, content_type="application/json")


urlpatterns = [path("v1/codeq/plain", enqueue_plain)]


if __name__ == "__main__":
    import django
    from django.conf import settings

    django.setup()
    settings.ROOT_URLCONF = "bench.plain"
    from codeq_site import web

    web.main()
