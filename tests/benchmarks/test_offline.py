"""``make bench ARGS=offline``: the rows with an engine that only waits, which need no vLLM."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from afferent.errors import ConfigError
from benchmarks.peers import offline
from benchmarks.run import BENCHMARKS


@pytest.mark.bench
def test_the_record_has_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BENCHMARKS["offline"] is offline
    monkeypatch.setattr(offline, "_SIDES", ())
    monkeypatch.setattr(offline, "_WAITS_MS", (20.0,))
    monkeypatch.setattr(offline, "_QUICK_NUM_IMAGES", 10)
    steps: list[None] = []
    python = Path(sys.executable)
    report = offline.run(quick=True, python=python, after_sample=lambda: steps.append(None))
    assert len(steps) == offline.num_steps(quick=True, python=python)
    (row,) = json.loads(report.as_json())["rows"]
    assert row["engine_s"] >= 10 * 0.02
    assert row["wall_s"] >= 10 * 0.02, "the engine waits for each image"
    assert row["ratio"] == pytest.approx(row["wall_s"] / max(row["engine_s"], row["pool_s"]))
    assert len(report.goals) == 1


def test_an_environment_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make setup-vllm"):
        offline.run(quick=True, python=tmp_path / "python", after_sample=lambda: None)
