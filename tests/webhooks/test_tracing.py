"""A callback and a notification belong to the trace of the task they are about."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from core import tracing
from core.conf import Tracing, conf
from queues import periodic_tasks, services
from queues.domain import NewTask
from tenants.models import Tenant as TenantRow
from tenants.tenant import Tenant
from tests.collector import PARENT, SAMPLED, TRACE, Collector
from tests.webhooks.receiver import Receiver
from webhooks import notices, subscriptions
from webhooks.sender import Sender, utc_now

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture
def on(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Traces are on in this process."""
    wanted = msgspec.structs.replace(conf(), tracing=Tracing(endpoint=collector.url))
    monkeypatch.setattr(tracing, "conf", lambda: wanted)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    tracing.tracer.cache_clear()
    yield
    found = tracing.tracer()
    assert found is not None
    found.span_processor.shutdown()  # type: ignore[attr-defined]
    tracing.tracer.cache_clear()


@pytest.fixture
def tenant(acme: TenantRow) -> Tenant:
    return Tenant(tid=acme.tid, slug=acme.slug)


def ended(tenant: Tenant, url: str) -> None:
    """A task with a webhook that was put in by the trace, and has ended."""
    new = NewTask(command="TRACED", payload="1", webhook=url, trace_parent=SAMPLED, trace_state="k=v")
    [item] = services.enqueue(tenant, [new]).run_sync()
    services.cancel(tenant, item.task.id).run_sync()
    periodic_tasks.run_drain(lambda: True)


@pytest.mark.spec("OBS-2", "A callback is a span of the trace that put the task in, and carries it on")
@pytest.mark.usefixtures("on")
def test_a_callback_is_a_span_of_the_tasks_trace(tenant: Tenant, receiver: Receiver, collector: Collector) -> None:
    ended(tenant, receiver.url())
    asyncio.run(Sender().run(lambda: True, 5))
    (request,) = receiver.requests
    span = collector.one("codeq/deliver")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert request.headers["traceparent"] == f"00-{TRACE}-{span.span_id.hex()}-01"
    assert request.headers["tracestate"] == "k=v"


@pytest.mark.spec("OBS-2", "A notification carries the trace of the task that is next in line, with traces off as well")
@pytest.mark.parametrize("state", ["on", "off"])
def test_a_notification_carries_the_trace_of_the_next_task(
    tenant: Tenant, receiver: Receiver, collector: Collector, request: pytest.FixtureRequest, state: str
) -> None:
    if state == "on":
        request.getfixturevalue("on")
    subscriptions.subscribe(tenant, "w-1", receiver.url(), ["TRACED"], now=utc_now(), ttl_seconds=60)
    services.enqueue(tenant, [NewTask(command="TRACED", payload="1", trace_parent=SAMPLED)]).run_sync()
    assert notices.notify() == (1, 1)
    (told,) = receiver.requests
    if state == "off":
        assert told.headers["traceparent"] == SAMPLED
        assert collector.spans == []
    else:
        span = collector.one("codeq/notify")
        assert span.parent_span_id.hex() == PARENT
        assert told.headers["traceparent"] == f"00-{TRACE}-{span.span_id.hex()}-01"
