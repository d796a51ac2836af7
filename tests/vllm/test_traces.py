"""OpenTelemetry traces: vLLM's span of a request is a child of Afferent's."""

from __future__ import annotations

import httpx2 as httpx
import numpy as np
import pytest

from afferent.conformance.images import draw_image
from tests.server import ask, data_url, wait_until
from tests.telemetry.collector import Collector
from tests.vllm.servers import supervised

pytestmark = pytest.mark.vllm

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_vllms_span_is_below_that_of_the_request(rng: np.random.Generator) -> None:
    with Collector() as collector:
        sends = {**collector.environ, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
        endpoint = f"{sends['OTEL_EXPORTER_OTLP_ENDPOINT']}/v1/traces"
        with supervised(vllm=("--otlp-traces-endpoint", endpoint), env=sends) as server:
            body = ask([data_url(draw_image(rng))], "What is in the picture?", max_tokens=4)
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            url = f"{server.url}/v1/chat/completions"
            assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200
            wait_until(lambda: {"llm_request"} <= {each.name for each in collector.of_trace(TRACE)})
            spans = collector.of_trace(TRACE)
    (root,) = [each for each in spans if each.parent_span_id.hex() == PARENT]
    parents = {each.name: each.parent_span_id for each in spans}
    assert parents["llm_request"] == root.span_id
    assert {"read_body", "decode", "process"} <= parents.keys(), "the stages before it"
    assert len({each.trace_id for each in spans}) == 1
