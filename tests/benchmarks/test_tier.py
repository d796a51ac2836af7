"""``make bench ARGS=tier`` measures what its record promises."""

from __future__ import annotations

import json

import pytest

from afferent.types import MiB
from benchmarks import tier
from benchmarks.peers import ray_nodes
from benchmarks.record import MIN_SAMPLES, Row
from benchmarks.run import BENCHMARKS
from tests.tier.servers import server_program

SIDES = {"floor_ms", "ours_ms", "ours_raw_ms", "plain_ms", "py_ms"}


@pytest.mark.timeout(180)
def test_the_record_has_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with smaller values, over the links that are possible here."""
    server_program()
    assert BENCHMARKS["tier"] is tier
    for module in (tier, ray_nodes):
        monkeypatch.setattr(module, "is_installed", lambda: False)
    monkeypatch.setattr(tier, "_VALUE_NBYTES", MiB + 100)
    monkeypatch.setattr(tier, "_ALL_NBYTES", 4 * (MiB + 100))
    steps: list[None] = []
    report = tier.run(quick=True, after_sample=lambda: steps.append(None))
    links = len(report.rows) // 2
    assert links in (1, 3), "shaped where that may be"
    assert 3 * len(steps) == links * tier.num_steps(quick=True)
    record = json.loads(report.as_json())
    assert len(record["goals"]) == len(record["rows"]) == 2 * links
    for row in record["rows"]:
        looks_up = row["case"] == "look up 64"
        assert set(row["samples"]) == ({"floor_ms", "ours_ms"} if looks_up else SIDES)
        assert all(len(samples) == MIN_SAMPLES for samples in row["samples"].values())
        assert all(value > 0 for samples in row["samples"].values() for value in samples)
    assert "ray" in record["notes"][1], "it says why a column is empty"


def test_goals_say_what_was_missed() -> None:
    def met(case: str, *, is_shaped: bool, **ms: float) -> bool:
        samples = {f"{name}_ms": [value] for name, value in ms.items()}
        return tier._goal(Row({"case": case, "link": "x"}, samples), is_shaped=is_shaped).met

    assert met("fetch", is_shaped=True, floor=100, ours=119, plain=100)
    assert not met("fetch", is_shaped=True, floor=100, ours=121, plain=200)
    assert met("fetch", is_shaped=False, floor=10, ours=109, plain=100)
    assert not met("fetch", is_shaped=False, floor=10, ours=112, plain=100)
    assert met("look up", is_shaped=False, floor=0.2, ours=0.49)
    assert not met("look up", is_shaped=False, floor=0.2, ours=0.51)
