"""An OpenTelemetry collector on the loopback that stores the spans it receives."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.waiting import until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


class Collector:
    """Receive spans as OTLP over HTTP and store them in `spans`."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.received = b""
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.received += body
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def list_spans(self, name: str) -> list[Any]:
        """Return the spans of this name."""
        return [span for span in list(self.spans) if span.name == name]

    def wait_for_span(self, name: str) -> Any:
        """Wait for a span of this name, and return it. Fails if there are several."""
        (span,) = until(lambda: self.list_spans(name), 10)
        return span
