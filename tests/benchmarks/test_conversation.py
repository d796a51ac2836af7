"""``make bench ARGS=conversation`` measures what its record promises."""

from __future__ import annotations

import json

import pytest

from benchmarks import conversation
from benchmarks.record import MIN_SAMPLES
from benchmarks.run import BENCHMARKS


@pytest.mark.bench
@pytest.mark.timeout(240)
def test_the_record_has_its_keys() -> None:
    assert BENCHMARKS["conversation"] is conversation
    samples: list[None] = []
    report = conversation.run(quick=True, after_sample=lambda: samples.append(None), turns=2)
    assert len(samples) == conversation.num_steps(quick=True)
    record = json.loads(report.as_json())
    assert [row["side"] for row in record["rows"]] == ["again", "by id", "uncached"]
    for row in record["rows"]:
        for name in conversation.COLUMNS[1:]:
            assert row[name] != 0
            assert len(row["samples"][name]) == MIN_SAMPLES
    assert len(record["goals"]) == 3
