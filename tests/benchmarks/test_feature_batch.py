"""``make bench ARGS=feature_batch`` measures what its record promises."""

from __future__ import annotations

import json

import pytest

from benchmarks import feature_batch
from benchmarks.record import MIN_SAMPLES
from benchmarks.run import BENCHMARKS


@pytest.mark.bench
def test_the_record_has_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with few and small images."""
    monkeypatch.setattr(feature_batch, "_WIDTH", 160)
    monkeypatch.setattr(feature_batch, "_HEIGHT", 120)
    monkeypatch.setattr(feature_batch, "_QUICK_NUM_IMAGES", 6)
    assert BENCHMARKS["feature_batch"] is feature_batch
    steps: list[None] = []
    report = feature_batch.run(quick=True, after_sample=lambda: steps.append(None))
    assert len(steps) == feature_batch.num_steps(quick=True)
    record = json.loads(report.as_json())
    assert [row["path"] for row in record["rows"]] == list(feature_batch._PATHS)
    for row in record["rows"]:
        assert set(feature_batch.COLUMNS) <= set(row)
        assert row["cpu_ms"] > 0
        assert len(row["samples"]["cpu_ms"]) == MIN_SAMPLES
    assert len(record["goals"]) == 3
    assert "backend" in record["notes"][0]
