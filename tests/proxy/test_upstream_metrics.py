"""The page of this server's metrics, and the metrics of several upstream servers on one page."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from afferent.proxy import metrics
from afferent.proxy.metrics import joined, written
from afferent.telemetry.exposition import render, with_zeros
from afferent.telemetry.registry import REGISTRY

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


SERVERS = [("unix:/a", PAGE), ("unix:/b", PAGE.replace(b" 2.0", b" 5.0"))]


def test_one_page_is_as_it_is() -> None:
    assert asyncio.run(joined([])) == b""
    assert asyncio.run(joined([("unix:/a", PAGE)])) == PAGE


def test_of_several_each_sample_says_whose_it_is() -> None:
    page = asyncio.run(joined(SERVERS)).decode()
    assert 'vllm:running{engine="0",upstream="unix:/b"} 5.0' in page
    assert 'vllm:seconds_bucket{le="+Inf",upstream="unix:/a"} 3.0' in page
    assert page.count("# TYPE vllm:done_total counter") == 1
    families = list(text_string_to_metric_families(page))
    assert {family.name for family in families} == {"vllm:running", "vllm:seconds", "vllm:done"}
    assert sum(len(family.samples) for family in families) == 2 * 6


def test_other_tasks_run_between_the_metrics_of_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_SLICE_S", 0.0)

    async def main() -> tuple[bytes, int, int]:
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(count_turns())
        page = await written(REGISTRY.readings())
        turns_of_page, turns = turns, 0
        await joined(SERVERS)
        other.cancel()
        return page, turns_of_page, turns

    counted = with_zeros(REGISTRY.readings(), REGISTRY.zeros())
    page, turns, turns_of_joined = asyncio.run(main())
    assert page == render(counted)
    assert turns == len(counted)
    assert turns_of_joined == 2 * 3 + 3  # the families of two pages, and those of the joined one
