"""Statistics from the metrics pages of one vLLM server, and of several."""

from __future__ import annotations

import pytest

from afferent.engines.upstream import UpstreamStats
from afferent.engines.vllm.traits import stats_of

_PAGE = b"""\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 9345.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="shapes, \\"{"} 2.0
vllm:num_requests_running{engine="1",model_name="shapes, \\"{"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="shapes"} 4.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="shapes",reason="capacity"} 4.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="shapes"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="shapes"} 0.5
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="shapes"} 1.234e+06
vllm:prompt_tokens_created{engine="0",model_name="shapes"} 1.7e+09
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="shapes"} 77.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="shapes"} 3.0
"""


def test_a_page_is_read() -> None:
    wanted = UpstreamStats(
        num_running=3, num_waiting=4, kv_in_use=0.5, num_prompt_tokens=1_234_000, num_tokens=77
    )
    assert stats_of([_PAGE]) == wanted


def test_several_are_one() -> None:
    other = b"vllm:num_requests_running 1.0\nvllm:kv_cache_usage_perc 0.75\n"
    found = stats_of([_PAGE, other])
    assert found is not None
    assert (found.num_running, found.num_waiting, found.kv_in_use) == (4, 4, 0.75)


@pytest.mark.parametrize(
    "page",
    [
        *(b"", b"\xff\x00", b"<html>no</html>"),
        *(b"vllm:num_requests_running{", b"vllm:num_requests_running NaN\n"),
    ],
)
def test_what_says_nothing_says_nothing(page: bytes) -> None:
    assert stats_of([page]) is None
    assert stats_of([]) is None
