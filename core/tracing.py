"""OpenTelemetry traces, off unless CODEQ_TRACING_ENDPOINT is set.

While they are off, no code of this module runs in a request and OpenTelemetry is not imported; a task's trace context
still reaches its worker and its callback. While they are on, an API request is a span `HTTP <METHOD> <ROUTE>` with one
span `codeq/<operation>` inside, a task belongs to the trace of its producer, and its callback is a span of that trace.
Span attributes name the operation, tenant, queue and task, never a payload or a token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
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
# In these operations the parent span of the task is the one created here, not the caller's.
ENQUEUE_OPERATIONS = ("enqueue", "enqueue_batch")


@cache
def tracer() -> Tracer | None:
    """Return the tracer of this process, or None while traces are off.

    It is made on first use, because its thread does not survive a fork.
    """
    settings = conf().tracing
    if not settings.endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError as error:
        raise ConfigError("CODEQ_TRACING_ENDPOINT is set: install codeq-server[tracing].") from error
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.ratio)),
        resource=Resource.create({"service.name": "codeq"}),
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.endpoint)))
    return provider.get_tracer("codeq")


def traced(router: Router) -> Application:
    """Wrap the router in an application that records a span for each request.

    Return the router itself if traces are off.
    """
    active_tracer = tracer()
    if active_tracer is None:
        return router
    for view in _api_views():
        for method, (operation, handler) in list(view.operations.items()):
            view.operations[method] = (operation, _traced_handler(active_tracer, operation.name, handler))
    return _traced_requests(active_tracer, router)


@contextmanager
def span(name: str, parent: str, state: str) -> Iterator[tuple[str, str]]:
    """Record an outgoing call as a span of its task's trace. Yield the trace context to send."""
    active_tracer = tracer()
    if active_tracer is None:
        yield parent, state
        return
    from opentelemetry.trace import SpanKind

    headers = {"traceparent": parent, "tracestate": state}
    with active_tracer.start_as_current_span(name, context=_extract_context(headers), kind=SpanKind.CLIENT):
        context = _inject_context()
        yield context.get("traceparent", ""), context.get("tracestate", "")


def _traced_requests(active_tracer: Tracer, router: Router) -> Application:
    from opentelemetry.trace import SpanKind, Status, StatusCode

    from core.http.router import API_PREFIX

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(API_PREFIX):
            await router(scope, receive, send)
            return
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in HEADERS}
        route = _route(scope["path"])
        with active_tracer.start_as_current_span(
            f"HTTP {scope['method'][:16]} {route}",
            context=_extract_context(headers),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": scope["method"][:16], "http.route": route},
        ) as current:

            async def send_and_record(message: Message) -> None:
                if "status" in message:  # the start of a response, or a whole one
                    current.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        current.set_status(Status(StatusCode.ERROR))
                await send(message)

            await router(scope, receive, send_and_record)

    return application


def _traced_handler(active_tracer: Tracer, name: str, handler: Any) -> Any:
    @wraps(handler)
    async def run(view: Any, caller: Any, **arguments: Any) -> Any:
        attributes = {"codeq.tenant": caller.tenant.slug}
        for attribute, value in (
            ("codeq.task", arguments.get("task_id")),
            ("codeq.queue", arguments.get("command") or getattr(arguments.get("body"), "command", None)),
        ):
            if isinstance(value, str):
                attributes[attribute] = value[:128]
        # A rejected request is not an error of the service. The span of the HTTP request records the service's errors.
        with active_tracer.start_as_current_span(
            f"codeq/{name}", attributes=attributes, record_exception=False, set_status_on_exception=False
        ):
            if name in ENQUEUE_OPERATIONS:
                context = _inject_context()
                for header in HEADERS:
                    view.request.raw_headers[header] = context.get(header.decode(), "").encode()
            return await handler(view, caller, **arguments)

    return run


def _extract_context(headers: Mapping[str, str]) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(headers, Context())


def _inject_context() -> dict[str, str]:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(context)
    return context


def _route(path: str) -> str:
    """Return the route of a path: with the path itself, every id would be a new span name."""
    try:
        return "/" + get_resolver().resolve(path).route.replace("<str:", "{").replace(">", "}")
    except Resolver404:
        return "unknown"


def _api_views() -> list[Any]:
    """Return the views of all apps' routes under the API's prefix, each once."""
    from core.http.router import API_PREFIX

    resolvers: list[Any] = [
        resolver for resolver in get_resolver().url_patterns if f"/{resolver.pattern}" == API_PREFIX
    ]
    return list(dict.fromkeys(route.callback.cls for resolver in resolvers for route in resolver.url_patterns))
