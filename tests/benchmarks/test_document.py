"""``make bench ARGS=document`` measures what its record promises."""

from __future__ import annotations

import json

import pytest

from benchmarks import document
from benchmarks.record import MIN_SAMPLES
from benchmarks.run import BENCHMARKS


@pytest.mark.bench
@pytest.mark.timeout(240)
def test_the_record_has_its_keys() -> None:
    assert BENCHMARKS["document"] is document
    samples: list[None] = []
    report = document.run(quick=True, after_sample=lambda: samples.append(None))
    assert len(samples) == document.num_steps(quick=True)
    record = json.loads(report.as_json())
    assert [row["side"] for row in record["rows"]] == ["ahead", "afterwards"]
    for row in record["rows"]:
        for name in document.COLUMNS[3:]:
            assert row[name] > 0
            assert len(row["samples"][name]) == MIN_SAMPLES
    assert len(record["goals"]) == 3
