"""``make bench ARGS=live`` measures what its record promises."""

from __future__ import annotations

import json

import pytest

from benchmarks import live
from benchmarks.run import BENCHMARKS

NAMES = {
    "window": live.COLUMNS[2:9],
    "request": live.COLUMNS[2:5],
    "resume": ("created_ms", "answer_ms"),
}
SIDES = tuple(NAMES)


@pytest.mark.bench
@pytest.mark.timeout(240)
def test_the_record_has_its_keys() -> None:
    assert BENCHMARKS["live"] is live
    samples: list[None] = []
    given = {"quick": True, "sides": SIDES, "numbers": [60, 130], "minutes": 0.1}
    report = live.run(**given, after_sample=lambda: samples.append(None))
    assert len(samples) == live.num_steps(**given)
    record = json.loads(report.as_json())
    found = [(row["side"], row["number"]) for row in record["rows"]]
    assert found == [(side, number) for side in SIDES for number in (60, 130)]
    for row in record["rows"]:
        names = NAMES[row["side"]]
        assert all(row[name] > 0 for name in names)
    assert len(record["goals"]) == 4
