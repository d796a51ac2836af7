"""``make bench ARGS=rollouts`` measures what its record promises, and notices other features."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import rollouts
from benchmarks.peers import ray_store
from benchmarks.preprocess import write_model
from benchmarks.rollout_holder import Held
from benchmarks.run import BENCHMARKS

NUM_IMAGES = 12


@pytest.fixture(autouse=True)
def _few_and_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_store, "is_installed", lambda: False)
    monkeypatch.setattr(rollouts, "_QUICK_NUM_IMAGES", NUM_IMAGES)
    monkeypatch.setattr(rollouts, "_NUM_PROCESSES", 2)
    monkeypatch.setattr(rollouts, "_NUM_ROLLOUTS", 4)


@pytest.mark.bench
def test_the_record_has_its_keys() -> None:
    """The sides by value have a copy for each process, and for each rollout."""
    assert BENCHMARKS["rollouts"] is rollouts
    steps: list[None] = []
    report = rollouts.run(quick=True, after_sample=lambda: steps.append(None))
    assert len(steps) == rollouts.num_steps(quick=True)
    rows = {row["side"]: row for row in json.loads(report.as_json())["rows"]}
    assert list(rows) == ["afferent", "copies", "value"]
    assert rows["afferent"]["open_ms"] > 0
    features_mib = NUM_IMAGES * 0.87
    assert rows["afferent"]["shared_mib"] >= features_mib - 1  # page tables are filled by the MiB
    # Each heap may have some MiB from before; a copy less would be below these bounds.
    assert rows["copies"]["private_mib"] >= 1.5 * features_mib
    assert rows["value"]["private_mib"] >= 3 * features_mib
    assert len(report.goals) == 2
    assert report.notes[0] == ray_store.MISSING


def test_other_features_are_noticed(tmp_path: Path) -> None:
    write_model(tmp_path)
    measured = rollouts._Measured(tmp_path, rollouts._files(1))
    with pytest.raises(RuntimeError, match="other features"):
        measured._check([Held(total=measured._total + 1)], num_times=1)
