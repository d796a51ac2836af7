"""A collector of OpenTelemetry traces in this process, for OTLP over HTTP."""

from __future__ import annotations

import gzip
import http.server
import threading
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """A collector that stores all spans; ``bodies`` has the request bodies."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self._spans: list[Any] = []
        self._lock = threading.Lock()
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector._take(self.path, body)
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables with which a process sends its spans here, without a long delay."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self._server.server_port}",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    def of_trace(self, trace_id: str) -> list[Any]:
        with self._lock:
            return [span for span in self._spans if span.trace_id.hex() == trace_id]

    def _take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        sent = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            self.bodies.append(body)
            for resource in sent.resource_spans:
                for scope in resource.scope_spans:
                    self._spans += scope.spans

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def attributes_of(span: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found
