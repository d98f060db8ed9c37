"""Traces by OpenTelemetry: off until CODEQ_TRACING_ENDPOINT says where they go.

While they are off, nothing of this runs in a request and OpenTelemetry is not asked for; a task's trace context is
carried to its worker and its callback all the same. While they are on, a request of the API is a span
`HTTP <METHOD> <ROUTE>` with one `codeq/<verb>` inside, a task belongs to the trace it was put in by, and its callback
goes out as a span of that trace. Spans say which operation, tenant, queue and task; never a payload or a token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

from django.urls import Resolver404, get_resolver

from core.conf import conf
from core.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from core.http.handler import Message, Receive, Scope, Send
    from core.http.router import Router

    Application = Callable[[Scope, Receive, Send], Awaitable[None]]

HEADERS = (b"traceparent", b"tracestate")
# The task then keeps our span as its parent, and not the one that called us.
PUTS_IN_TASKS = ("enqueue", "enqueue_batch")


@cache
def tracer() -> Tracer | None:
    """This process's tracer; None while traces are off. Made on first use: the thread it starts survives no fork."""
    wanted = conf().tracing
    if not wanted.endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError as error:
        raise ConfigError("CODEQ_TRACING_ENDPOINT is set: install codeq[tracing].") from error
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(wanted.ratio)),
        resource=Resource.create({"service.name": "codeq"}),
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=wanted.endpoint)))
    return provider.get_tracer("codeq")


def traced(front: Router, views: Iterable[Any]) -> Application:
    """The application as it is served: with a span around each request of the API, if there are to be any."""
    found = tracer()
    if found is None:
        return front
    for declared_in in views:
        for method, (declared, handler) in declared_in.operations.items():
            declared_in.operations[method] = (declared, _verb(found, declared.name, handler))
    return _requests(found, front)


@contextmanager
def span(name: str, parent: str, state: str) -> Iterator[tuple[str, str]]:
    """A call made for a task, as a span of the task's trace; the trace context it goes out with."""
    found = tracer()
    if found is None:
        yield parent, state
        return
    from opentelemetry.trace import SpanKind

    sent = {"traceparent": parent, "tracestate": state}
    with found.start_as_current_span(name, context=_context(sent), kind=SpanKind.CLIENT):
        own = _current()
        yield own.get("traceparent", ""), own.get("tracestate", "")


def _requests(found: Tracer, front: Router) -> Application:
    from opentelemetry.trace import SpanKind, Status, StatusCode

    from core.http.router import API_PREFIX

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(API_PREFIX):
            await front(scope, receive, send)
            return
        sent = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in HEADERS}
        route = _route(scope["path"])
        with found.start_as_current_span(
            f"HTTP {scope['method'][:16]} {route}",
            context=_context(sent),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": scope["method"][:16], "http.route": route},
        ) as current:

            async def send_and_note(message: Message) -> None:
                if message["type"] == "http.response.start":
                    current.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        current.set_status(Status(StatusCode.ERROR))
                await send(message)

            await front(scope, receive, send_and_note)

    return application


def _verb(found: Tracer, name: str, handler: Any) -> Any:
    @wraps(handler)
    async def run(view: Any, caller: Any, **arguments: Any) -> Any:
        said = {"codeq.tenant": caller.tenant.slug}
        for attribute, value in (
            ("codeq.task", arguments.get("task_id")),
            ("codeq.queue", arguments.get("command") or getattr(arguments.get("body"), "command", None)),
        ):
            if isinstance(value, str):
                said[attribute] = value[:128]
        # What is refused is no error of ours; the request's span says when something is.
        with found.start_as_current_span(
            f"codeq/{name}", attributes=said, record_exception=False, set_status_on_exception=False
        ):
            if name in PUTS_IN_TASKS:
                own = _current()
                for header in HEADERS:
                    view.request.received[header] = own.get(header.decode(), "").encode()
            return await handler(view, caller, **arguments)

    return run


def _context(sent: Mapping[str, str]) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(sent, Context())


def _current() -> dict[str, str]:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    own: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(own)
    return own


def _route(path: str) -> str:
    """The path as the API's documents have it: ids would make a name of their own for each."""
    try:
        return "/" + get_resolver().resolve(path).route.replace("<str:", "{").replace(">", "}")
    except Resolver404:
        return "unknown"
