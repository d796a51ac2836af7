"""``make bench ARGS=fleet`` measures what its record promises."""

from __future__ import annotations

import base64
import io
import json

import pytest
from PIL import Image

from benchmarks import fleet
from benchmarks.record import Row
from benchmarks.run import BENCHMARKS
from tests.tier.servers import server_program


@pytest.mark.storm
@pytest.mark.timeout(1200)
def test_the_record_has_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with few requests, over the links that are possible here."""
    server_program()
    assert BENCHMARKS["fleet"] is fleet
    monkeypatch.setattr(fleet, "_NUM_QUICK", 4)
    monkeypatch.setattr(fleet, "_NUM_PAIRS", 2)
    monkeypatch.setattr(fleet, "_PER_TURN", 4)
    steps: list[None] = []
    report = fleet.run(quick=True, after_sample=lambda: steps.append(None))
    record = json.loads(report.as_json())
    cases = [(row["case"], row["what"]) for row in record["rows"]]
    assert [what for case, what in cases if case == "broken"] == ["hangs", "is slow"]
    links = [what for case, what in cases if case == "p99 known"]
    assert len(links) in (1, 3), "shaped where that may be"
    assert len(steps) == 2 * len(links) + 2 * 2
    assert len(record["goals"]) == len(cases)
    for row in record["rows"]:
        for side in ("without", "with_tier"):
            assert len(row["samples"][side]) == (2 if row["case"] == "broken" else 4)
            assert min(row["samples"][side]) > 0
        assert row["case"] == "broken" or row["with_p99"] >= row["with_tier"]


def test_no_two_photographs_are_the_same_file_and_all_are_the_same_image() -> None:
    files = [base64.b64decode(url.partition(",")[2]) for url in fleet._PHOTOS.some(3)]
    assert len(set(files)) == 3
    pictures = {Image.open(io.BytesIO(file)).tobytes() for file in files}
    assert len(pictures) == 1


def test_an_interval_of_a_ratio() -> None:
    low, middle, high = fleet.interval([9.0, 10.0, 11.0, 10.0] * 2, [10.0] * 8)
    assert low < middle < high
    assert middle == pytest.approx(0.995, abs=0.01)
    low, _, high = fleet.interval([5.0, 5.0, 5.0], [10.0, 10.0, 10.0])
    assert low == pytest.approx(0.5)
    assert high == pytest.approx(0.5)


def test_goals_say_what_was_missed() -> None:
    def p99(ours: float) -> bool:
        keys = {"case": "p99 new", "what": "x", "without_p99": 100.0, "with_p99": ours}
        return fleet._p99_goal(Row(keys, {})).met

    def broken(*ours: float) -> bool:
        samples = {"with_tier": list(ours), "without": [10.0] * len(ours)}
        return fleet._broken_goal(Row({"case": "broken", "what": "hangs"}, samples)).met

    assert p99(109.0)
    assert not p99(111.0)
    assert broken(9.9, 10.2, 9.8)
    assert not broken(9.0, 9.1, 9.0)
