"""OpenTelemetry traces, with a collector in this process."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from afferent.errors import ConfigError
from afferent.proxy.request_scope import access_fields
from afferent.telemetry import spans
from afferent.telemetry.spans import Tracing
from afferent.telemetry.trace import Trace
from afferent.types import Span
from tests.telemetry.collector import Collector, attributes_of

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = [(b"traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01".encode()), (b"tracestate", b"a=b")]


def ended() -> Trace:
    now_ns = time.monotonic_ns()
    trace = Trace("chatcmpl-1", "POST /v1/chat/completions", start_ns=now_ns - 9_000_000)
    trace.add([Span("core", 7, "prefill", now_ns - 5_000_000, now_ns - 1_000_000, 12, "a note")])
    trace.media, trace.num_prompt_tokens, trace.num_answer_tokens = "image", 11, 3
    trace.digests = ["ab" * 32]
    return trace


def test_a_request_and_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector() as collector:
        for name, value in collector.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "tested")
        tracing = Tracing.of_environment(model_name="shapes")
        assert tracing is not None
        trace = ended()
        tracing.begin(trace, HEADERS)
        assert trace.root is not None
        carried = dict(trace.root.carried([*HEADERS, (b"x", b"y")]))
        trace.root.end(trace, api="openai_chat", outcome="ok")
        failed = ended()
        tracing.begin(failed, HEADERS)
        assert failed.root is not None
        failed.root.end(failed, api="upstream", outcome="store_full")
        tracing.close()
        stage, root, _, second = collector.of_trace(TRACE_ID)
        assert b"tested" in collector.bodies[0]
    assert (root.name, root.parent_span_id.hex()) == ("chat shapes", PARENT_ID)
    assert (stage.name, stage.parent_span_id) == ("prefill", root.span_id)
    assert carried[b"traceparent"] == f"00-{TRACE_ID}-{root.span_id.hex()}-01".encode()
    assert (carried[b"tracestate"], carried[b"x"]) == (b"a=b", b"y")
    assert stage.end_time_unix_nano - stage.start_time_unix_nano == pytest.approx(4e6, abs=1e3)
    assert root.start_time_unix_nano < stage.start_time_unix_nano
    assert stage.end_time_unix_nano < root.end_time_unix_nano
    assert attributes_of(stage) == {
        "afferent.process": "core",
        "process.pid": 7,
        "afferent.copied_bytes": 12,
    }
    said = attributes_of(root)
    assert said["gen_ai.operation.name"] == "chat"
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (11, 3)
    assert said["afferent.item_digests"] == ["ab" * 32]
    assert "error.type" not in said
    assert second.name == "POST /v1/chat/completions", "of an endpoint that is not ours"
    assert attributes_of(second)["error.type"] == "store_full"


def test_a_client_that_sends_nonsense_has_a_trace_of_its_own() -> None:
    from opentelemetry.sdk.trace import TracerProvider

    tracing = Tracing(TracerProvider(), model_name="shapes")
    trace = ended()
    tracing.begin(trace, [(b"traceparent", b"\xff" * 99), (b"tracestate", b"=,=")])
    assert trace.root is not None
    ((_, value),) = trace.root.carried([])
    assert len(value) == 55


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL=grpc"),
        ({}, ""),
    ],
)
def test_an_environment_that_can_not_be_served(environ: dict[str, str], words: str) -> None:
    wanted = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", **environ}
    assert spans.is_wanted(wanted)
    assert not spans.is_wanted(environ)
    assert not spans.is_wanted({**wanted, "OTEL_SDK_DISABLED": "true"})
    assert not spans.is_wanted({**wanted, "OTEL_TRACES_EXPORTER": "none"})
    if words:
        with pytest.raises(ConfigError, match=words):
            spans.check(wanted)
        return
    spans.check(wanted)


def test_nothing_of_it_is_imported_unless_it_is_wanted() -> None:
    program = (
        "import sys; from afferent.telemetry.spans import Tracing; "
        "assert Tracing.of_environment(model_name='m') is None; "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_the_access_log_has_what_its_page_says() -> None:
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    _, _, rest = page.partition("## The access log")
    table = rest.partition("## Traces")[0]
    listed = [row.split("`")[1] for row in table.splitlines() if row.startswith("| `")]
    fields = access_fields(ended(), api="openai_chat", outcome="ok", seconds=0.25)
    assert listed == list(fields)
    assert (fields["ms"], fields["where"], fields["copied_bytes"]) == (250.0, "", 12)
