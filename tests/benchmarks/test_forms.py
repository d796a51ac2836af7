"""``make bench ARGS=forms`` measures what its record promises."""

from __future__ import annotations

import json

import pytest

from benchmarks import forms
from benchmarks.record import MIN_SAMPLES
from benchmarks.run import BENCHMARKS


@pytest.mark.bench
def test_the_record_has_its_keys() -> None:
    assert BENCHMARKS["forms"] is forms
    samples: list[None] = []
    report = forms.run(quick=True, after_sample=lambda: samples.append(None), steps=3)
    assert len(samples) == forms.num_steps(quick=True)
    record = json.loads(report.as_json())
    assert record["benchmark"] == "forms"
    plain, *formed = record["rows"]
    assert plain["form"] == "plain"
    assert plain["ratio"] == 1
    for row in formed:
        for name in ("tokens_per_s", "ratio", "tried_ms"):
            assert row[name] > 0
            assert len(row["samples"][name]) == MIN_SAMPLES
    assert len(record["goals"]) == len(formed) == 3
