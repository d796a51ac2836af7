"""``make bench ARGS=probes`` measures what its record promises."""

from __future__ import annotations

import json

import pytest

from benchmarks import probes
from benchmarks.run import BENCHMARKS


@pytest.mark.bench
def test_the_record_has_its_keys() -> None:
    assert BENCHMARKS["probes"] is probes
    samples: list[None] = []
    case = "kept open"
    report = probes.run(quick=True, case=case, after_sample=lambda: samples.append(None))
    assert len(samples) == probes.num_steps(quick=True, case=case) == 3
    record = json.loads(report.as_json())
    for row in record["rows"]:
        assert row["case"] == case
        assert 0 < row["p50_ms"] <= row["p99_ms"] <= row["longest_ms"]
        assert 0 < row["per_s"] < 210  # at most 200 requests a second are sent
    assert [row["path"] for row in record["rows"]] == ["/health", "/ready", "/metrics"]
    assert len(record["goals"]) == 3
