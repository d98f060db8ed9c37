"""Traces of a web process with a local collector, and of one with tracing off."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from django.conf import settings

from core import tracing
from core.conf import Tracing, conf
from tests.collector import PARENT, SAMPLED, TRACE, UNSAMPLED, Collector
from tests.queues.api.conftest import NORTH, TASKS, make_token
from tests.queues.api.web_process import WebProcess


def attributes_of(span: Any) -> dict[str, Any]:
    return {attribute.key: attribute.value.string_value or attribute.value.int_value for attribute in span.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def web(collector: Collector, _database: None) -> Iterator[Callable[..., WebProcess]]:
    started: list[WebProcess] = []

    def start(**environment: str) -> WebProcess:
        environment = {"CODEQ_TRACING_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "100"} | environment
        started.append(WebProcess(**environment))
        return started[-1]

    yield start
    for process in started:
        process.stop()


@pytest.mark.spec(
    "OBS-2", "A request is a span HTTP <METHOD> <ROUTE> with its operation inside, and the task keeps the inner one"
)
def test_request_and_operation_are_nested_spans(web: Callable[..., WebProcess], collector: Collector) -> None:
    web_process = web()
    producer, worker = make_token("producer"), make_token("worker")
    body = {"command": "TRACED", "payload": "payload-canary", "idempotencyKey": "a key of the tracing tests"}
    task = web_process.json("POST", TASKS, body, producer, traceparent=SAMPLED, tracestate="vendor=1")
    request, verb = collector.wait_for_span(f"HTTP POST {TASKS}"), collector.wait_for_span("codeq/enqueue")
    assert request.trace_id.hex() == verb.trace_id.hex() == TRACE
    assert (request.parent_span_id.hex(), verb.parent_span_id) == (PARENT, request.span_id)
    assert attributes_of(request) == {
        "http.request.method": "POST", "http.route": TASKS, "http.response.status_code": 202,
    }  # fmt: skip
    assert attributes_of(verb) == {"codeq.tenant": NORTH, "codeq.queue": "TRACED"}
    # The trace of its worker continues from there.
    assert task["traceParent"] == f"00-{TRACE}-{verb.span_id.hex()}-01"
    assert task["traceState"] == "vendor=1"
    claimed = web_process.json("POST", f"{TASKS}/claim", {"commands": ["TRACED"]}, worker)
    assert claimed["traceParent"] == task["traceParent"]
    done = {"status": "COMPLETED", "result": {"canary": "result-canary"}}
    web_process.json("POST", f"{TASKS}/{task['id']}/result", done, worker, traceparent=claimed["traceParent"])
    submitted = collector.wait_for_span("codeq/submit")
    assert submitted.trace_id.hex() == TRACE
    assert attributes_of(submitted)["codeq.task"] == task["id"]
    assert collector.wait_for_span(f"HTTP POST {TASKS}/{{task_id}}/result").parent_span_id == verb.span_id
    # A request with the same key in another trace returns the same task.
    again = web_process.json("POST", TASKS, body, producer)
    assert again["id"] == task["id"]
    assert web_process.request("GET", f"{TASKS}/nothing", None, producer)[0] == 404
    assert collector.wait_for_span(f"HTTP GET {TASKS}/{{task_id}}").status.code == 0
    web_process.request("GET", "/v1/codeq/no/such/path", None, producer)
    assert collector.wait_for_span("HTTP GET unknown")
    for canary in (b"payload-canary", b"result-canary", producer.encode(), worker.encode()):
        assert canary not in collector.received


def is_sampled(task: dict[str, Any]) -> bool:
    return bool(int(task["traceParent"][-2:], 16) & 1)


@pytest.mark.spec("OBS-2", "A caller decides whether its trace is sampled; the ratio applies to traces that start here")
def test_sampling_of_traces(web: Callable[..., WebProcess], collector: Collector) -> None:
    web_process = web(CODEQ_TRACING_RATIO="0")
    producer = make_token("producer")
    unwanted = web_process.json("POST", TASKS, {"command": "T", "payload": 1}, producer, traceparent=UNSAMPLED)
    # The trace continues at the worker, which is also asked not to sample it.
    assert unwanted["traceParent"].startswith(f"00-{TRACE}-")
    assert not is_sampled(unwanted)
    begun_here = web_process.json("POST", TASKS, {"command": "T", "payload": 1}, producer)
    assert not is_sampled(begun_here)
    malformed = web_process.json("POST", TASKS, {"command": "T", "payload": 1}, producer, traceparent="00-zz-1")
    assert malformed["traceParent"] != "00-zz-1"
    wanted = web_process.json(
        "POST", f"{TASKS}/batch", {"tasks": [{"command": "T", "payload": 1}]}, producer, traceparent=SAMPLED
    )
    kept = collector.wait_for_span("codeq/enqueue_batch")
    assert wanted["results"][0]["task"]["traceParent"] == f"00-{TRACE}-{kept.span_id.hex()}-01"
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert len(collector.spans) == 2


@pytest.mark.spec("OBS-2", "An unavailable collector affects no request")
def test_unavailable_collector_affects_no_request(web: Callable[..., WebProcess]) -> None:
    web_process = web(CODEQ_TRACING_ENDPOINT="http://127.0.0.1:9/v1/traces")
    for _ in range(50):
        assert web_process.request("POST", TASKS, {"command": "T", "payload": 1}, make_token("producer"))[0] == 202
    web_process.stop()


OFF = """
import sys
from codeq_site.asgi import application
from core.http.router import Router
import webhooks.periodic_tasks, queues.periodic_tasks
assert type(application) is Router, application
# Other packages may import OpenTelemetry's API if it is installed, but no exporter.
assert not [name for name in sys.modules if name.startswith("opentelemetry.exporter")]
"""


@pytest.mark.spec("OBS-2", "Tracing is off by default: no exporter is imported, and no middleware is added")
def test_tracing_is_off_by_default() -> None:
    environment = {
        "SECRET_KEY": "x",
        "CODEQ_HOME": settings.CODEQ["home"],
        "DJANGO_SETTINGS_MODULE": "codeq_site.settings",
    }
    subprocess.run([sys.executable, "-c", OFF], cwd=settings.BASE_DIR, env=environment, check=True, timeout=60)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "conf", lambda: msgspec.structs.replace(conf(), tracing=Tracing(endpoint="http://x/")))
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    tracing.tracer.cache_clear()
    with pytest.raises(tracing.ConfigError, match=r"codeq-server\[tracing\]"):
        tracing.tracer()
    tracing.tracer.cache_clear()
