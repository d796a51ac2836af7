"""``make bench ARGS=early`` measures what its record promises."""

from __future__ import annotations

import json

import pytest

from benchmarks import early
from benchmarks.record import MIN_SAMPLES
from benchmarks.run import BENCHMARKS


@pytest.mark.bench
@pytest.mark.timeout(240)
def test_the_record_has_its_keys() -> None:
    assert BENCHMARKS["early"] is early
    samples: list[None] = []
    report = early.run(quick=True, after_sample=lambda: samples.append(None), height=600)
    assert len(samples) == early.num_steps(quick=True)
    record = json.loads(report.as_json())
    rows = {(row["side"], row["mb_per_s"]) for row in record["rows"]}
    assert rows == {(side, rate) for side in ("early", "at the end") for rate in (20, 100, 1000)}
    for row in record["rows"]:
        for name in early.COLUMNS[2:]:
            assert row[name] > 0
            assert len(row["samples"][name]) == MIN_SAMPLES
    assert len(record["goals"]) == 4
