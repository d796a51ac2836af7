"""The metrics of several upstream servers on one page."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from afferent.proxy.metrics import joined

PAGE = b"""\
# HELP vllm:running Running.
# TYPE vllm:running gauge
vllm:running{engine="0"} 2.0
# HELP vllm:seconds Seconds.
# TYPE vllm:seconds histogram
vllm:seconds_bucket{le="1.0"} 1.0
vllm:seconds_bucket{le="+Inf"} 3.0
vllm:seconds_count 3.0
vllm:seconds_sum 4.5
# HELP vllm:done_total Done.
# TYPE vllm:done_total counter
vllm:done_total 7.0
"""


def test_one_page_is_as_it_is() -> None:
    assert joined([]) == b""
    assert joined([("unix:/a", PAGE)]) == PAGE


def test_of_several_each_sample_says_whose_it_is() -> None:
    page = joined([("unix:/a", PAGE), ("unix:/b", PAGE.replace(b" 2.0", b" 5.0"))]).decode()
    assert 'vllm:running{engine="0",upstream="unix:/b"} 5.0' in page
    assert 'vllm:seconds_bucket{le="+Inf",upstream="unix:/a"} 3.0' in page
    assert page.count("# TYPE vllm:done_total counter") == 1
    families = list(text_string_to_metric_families(page))
    assert {family.name for family in families} == {"vllm:running", "vllm:seconds", "vllm:done"}
    assert sum(len(family.samples) for family in families) == 2 * 6
