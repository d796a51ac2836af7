"""``make bench ARGS=placement`` measures what its record promises."""

from __future__ import annotations

import json

import pytest

from benchmarks import placement
from benchmarks.run import BENCHMARKS

SIDES = ("by events", "round robin")


@pytest.mark.bench
@pytest.mark.timeout(240)
def test_the_record_has_its_keys() -> None:
    assert BENCHMARKS["placement"] is placement
    samples: list[None] = []
    report = placement.run(quick=True, sides=SIDES, after_sample=lambda: samples.append(None))
    assert len(samples) == placement.num_steps(quick=True, sides=SIDES)
    record = json.loads(report.as_json())
    oracle, events, others = record["rows"]
    assert [row["side"] for row in (oracle, events, others)] == ["oracle", *SIDES]
    assert oracle["of_oracle"] == 1
    assert events["hits"] > 0.8 * oracle["hits"], "the oracle is greedy, and not the best"
    assert events["hits"] > 1.5 * others["hits"] > 0
    assert len(record["goals"]) == 1
