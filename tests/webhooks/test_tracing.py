"""Callbacks and notifications belong to the trace of their task."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from core import tracing
from core.conf import Tracing, conf
from queues import periodic_tasks, services
from queues.domain import NewTask
from tenants.domain import TenantSnapshot
from tenants.models import Tenant
from tests.collector import PARENT, SAMPLED, TRACE, Collector
from tests.webhooks.receiver import Receiver
from webhooks import notifications, subscriptions
from webhooks.sender import Sender, utc_now

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def tracing_on(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Enable tracing in this process."""
    configured = msgspec.structs.replace(conf(), tracing=Tracing(endpoint=collector.url))
    monkeypatch.setattr(tracing, "conf", lambda: configured)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    tracing.tracer.cache_clear()
    yield
    tracer = tracing.tracer()
    assert tracer is not None
    tracer.span_processor.shutdown()  # type: ignore[attr-defined]
    tracing.tracer.cache_clear()


@pytest.fixture
def tenant(acme: Tenant) -> TenantSnapshot:
    return TenantSnapshot(tid=acme.tid, slug=acme.slug)


def end_traced_task(tenant: TenantSnapshot, url: str) -> None:
    """Enqueue a task with a webhook and a trace context, end it and audit it."""
    new = NewTask(command="TRACED", payload="1", webhook=url, trace_parent=SAMPLED, trace_state="k=v")
    [item] = services.enqueue(tenant, [new]).run_sync()
    services.cancel(tenant, item.task.id).run_sync()
    periodic_tasks.run_drain(lambda: True)


@pytest.mark.spec("OBS-2", "A callback is a span of its task's trace, and passes the trace on")
@pytest.mark.usefixtures("tracing_on")
def test_callback_is_a_span_of_the_tasks_trace(
    tenant: TenantSnapshot, receiver: Receiver, collector: Collector
) -> None:
    end_traced_task(tenant, receiver.url())
    asyncio.run(Sender().run(lambda: True, 5))
    (request,) = receiver.requests
    span = collector.wait_for_span("codeq/deliver")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert request.headers["traceparent"] == f"00-{TRACE}-{span.span_id.hex()}-01"
    assert request.headers["tracestate"] == "k=v"


@pytest.mark.spec("OBS-2", "A notification carries the trace of the next task, also if codeQ's own traces are off")
@pytest.mark.parametrize("state", ["on", "off"])
def test_notification_carries_the_trace_of_the_next_task(
    tenant: TenantSnapshot, receiver: Receiver, collector: Collector, request: pytest.FixtureRequest, state: str
) -> None:
    if state == "on":
        request.getfixturevalue("tracing_on")
    subscriptions.subscribe(tenant, "w-1", receiver.url(), ["TRACED"], now=utc_now(), ttl_seconds=60)
    services.enqueue(tenant, [NewTask(command="TRACED", payload="1", trace_parent=SAMPLED)]).run_sync()
    assert notifications.notify() == (1, 1)
    (notification,) = receiver.requests
    if state == "off":
        assert notification.headers["traceparent"] == SAMPLED
        assert collector.spans == []
    else:
        span = collector.wait_for_span("codeq/notify")
        assert span.parent_span_id.hex() == PARENT
        assert notification.headers["traceparent"] == f"00-{TRACE}-{span.span_id.hex()}-01"
