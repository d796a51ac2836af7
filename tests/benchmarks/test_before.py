"""``make bench ARGS=before`` compares two trees, and notices that one is slower."""

from __future__ import annotations

import json

import pytest

from afferent.errors import ConfigError
from benchmarks import before
from benchmarks.run import BENCHMARKS


@pytest.mark.bench
def test_the_record_has_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with few requests."""
    assert BENCHMARKS["before"] is before
    monkeypatch.setattr(before, "_NUM_KNOWN", 2)
    monkeypatch.setattr(before, "_QUICK_PART", 50)
    samples: list[None] = []
    report = before.run(quick=True, revision="HEAD", after_sample=lambda: samples.append(None))
    assert len(samples) == before.num_steps(quick=True, revision="HEAD")
    record = json.loads(report.as_json())
    for row in record["rows"]:
        for name in before.COLUMNS[2:]:
            assert len(row["samples"][name]) == 3
        assert row["before_per_s"] > 0
    assert len(record["goals"]) == len(record["rows"]) == 4


def test_a_revision_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="--revision nobody's: fatal: "):
        before.run(quick=True, revision="nobody's", after_sample=lambda: None)


def test_an_interval_has_what_is_the_same_and_not_what_is_slower() -> None:
    middle, least, most = before.interval([0.97, 1.05, 0.99, 1.02, 1.0, 0.98, 1.01])
    assert least < 1 < most
    assert middle == pytest.approx(1, abs=0.01)
    assert before.interval([0.9, 0.93, 0.91, 0.94, 0.89, 0.97, 0.95])[2] < 1
