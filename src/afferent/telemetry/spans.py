"""Export of requests as OpenTelemetry traces.

A request is one span, with a span below it for each stage of any process. Spans contain digests of
media, never their bytes.

It is active if OpenTelemetry's own variables are set, such as ``OTEL_EXPORTER_OTLP_ENDPOINT``, and
the extra ``otel`` is installed. Otherwise nothing of it is imported.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from afferent.errors import ConfigError
from afferent.telemetry.trace import Trace

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OVER_HTTP = "http/protobuf"
_CLOSE_TIMEOUT_S = 3.0
_CONTEXT = ("traceparent", "tracestate")
_OPERATIONS = {
    "openai_chat": "chat",
    "openai_responses": "chat",
    "anthropic_messages": "chat",
    "openai_completions": "text_completion",
}
"""Operation names of the semantic conventions for generative AI."""

Headers = list[tuple[bytes, bytes]]


def is_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment names a collector, and does not disable traces."""
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    is_off |= environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp"
    return not is_off and any(environ.get(name) for name in _ENDPOINTS)


def check(environ: Mapping[str, str] = os.environ) -> None:
    """Check that traces can be sent, if the environment requests them.

    Raises:
        ConfigError: The extra ``otel`` is not installed, or the protocol is not supported.
    """
    if not is_wanted(environ):
        return
    name = next(name for name in _ENDPOINTS if environ.get(name))
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter") is None:
        raise ConfigError(f"{name} is set: to send traces install the extra otel")
    for protocol in _PROTOCOLS:
        if environ.get(protocol, _OVER_HTTP) != _OVER_HTTP:
            raise ConfigError(f"{protocol}={environ[protocol]}: must be {_OVER_HTTP}")


class Tracing:
    """Exporter of ended requests in a thread of its own, set up by the standard variables."""

    def __init__(self, provider: TracerProvider, *, model_name: str) -> None:
        self._provider, self._model_name = provider, model_name
        self._tracer = provider.get_tracer("afferent")

    @classmethod
    def of_environment(cls, *, model_name: str) -> Tracing | None:
        """Return the exporter that the environment requests, or ``None``."""
        if not is_wanted():
            return None
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        os.environ.setdefault("OTEL_SERVICE_NAME", "afferent")
        provider = TracerProvider(resource=Resource.create())
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider, model_name=model_name)

    def begin(self, trace: Trace, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Begin the span of a request, below the one that its headers name, if any."""
        from opentelemetry.trace import SpanKind

        known = {name.decode("latin-1").lower(): value for name, value in headers}
        carrier = {name: known[name].decode("latin-1") for name in _CONTEXT if name in known}
        method, _, path = trace.what.partition(" ")
        span = self._tracer.start_span(
            trace.what,
            context=_propagator().extract(carrier),
            kind=SpanKind.SERVER,
            start_time=trace.start_ns + _since_epoch_ns(),
            attributes={"http.request.method": method, "url.path": path},
        )
        trace.root = RequestSpan(self._tracer, span, self._model_name)

    def close(self) -> None:
        """Send the remaining spans, within a timeout."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)


class RequestSpan:
    """Span of one request."""

    def __init__(self, tracer: Tracer, span: Span, model_name: str) -> None:
        self._tracer, self._span, self._model_name = tracer, span, model_name

    def carried(self, headers: Headers) -> Headers:
        """Return the headers for a backend: this span is the parent of its spans."""
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        _propagator().inject(carrier, set_span_in_context(self._span))
        kept = [(name, value) for name, value in headers if name.lower().decode() not in _CONTEXT]
        return [*kept, *((name.encode(), value.encode()) for name, value in carrier.items())]

    def end(self, trace: Trace, *, api: str, outcome: str) -> None:
        """End the span; the request's stages become spans below it."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        offset_ns, inside = _since_epoch_ns(), set_span_in_context(self._span)
        for stage in trace.spans if self._span.is_recording() else ():
            attributes: dict[str, str | int] = {
                "afferent.process": stage.process,
                "process.pid": stage.pid,
                "afferent.copied_bytes": stage.copied_nbytes,
            }
            self._tracer.start_span(
                stage.stage,
                context=inside,
                start_time=stage.start_ns + offset_ns,
                attributes=attributes,
            ).end(stage.end_ns + offset_ns)
        if operation := _OPERATIONS.get(api):
            self._span.update_name(f"{operation} {self._model_name}")
            self._span.set_attribute("gen_ai.operation.name", operation)
        self._span.set_attributes(
            {
                "gen_ai.provider.name": "afferent",
                "gen_ai.request.model": self._model_name,
                "gen_ai.response.id": trace.request_id,
                "gen_ai.usage.input_tokens": trace.num_prompt_tokens,
                "gen_ai.usage.output_tokens": trace.num_answer_tokens,
                "afferent.api": api,
                "afferent.outcome": outcome,
                "afferent.media": trace.media,
                "afferent.item_digests": trace.digests,
            }
        )
        if outcome != "ok":
            self._span.set_attribute("error.type", outcome)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


def _propagator() -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()


def _since_epoch_ns() -> int:
    """Return the difference between Unix time and `time.monotonic_ns`, which stages use."""
    return time.time_ns() - time.monotonic_ns()
