"""``make bench-ray NAME=batch_job`` runs whole programs, and its record has its keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from afferent.errors import ConfigError
from benchmarks import batch_job
from benchmarks.jobs.run import Ran
from benchmarks.run import BENCHMARKS


@pytest.mark.bench
def test_the_record_has_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that need neither Ray nor torchvision."""
    assert BENCHMARKS["batch_job"] is batch_job
    monkeypatch.setattr(batch_job, "find_spec", lambda _: True)
    monkeypatch.setattr(batch_job, "_SIDES", ("pool", "pool_hf", "pool_left"))
    monkeypatch.setattr(batch_job, "_GOALS", (("pool", "pool_hf", 1.0, ("wall_ms", "cpu_ms")),))
    monkeypatch.setattr(batch_job, "_NUM_PAGES", 200)
    steps: list[None] = []
    report = batch_job.run(quick=True, after_sample=lambda: steps.append(None))
    assert len(steps) == batch_job.num_steps(quick=True)
    rows = json.loads(report.as_json())["rows"]
    assert [row["side"] for row in rows] == ["pool", "pool_hf", "pool_left"] * 2
    for row in rows:
        assert len(row["samples"]["wall_ms"]) == len(row["samples"]["cpu_ms"]) == 1
        assert row["start_s"] > 0
        assert 5 <= row["lines"] <= 9
    assert len(report.goals) == 4


def test_imports_and_starts_do_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program of 1 s, and 10 ms a file; twice that of processor time."""

    def ran(_side: str, _model: Path, _folder: Path, count: int) -> tuple[Ran, float]:
        wall_s = 1 + 0.01 * count
        return Ran(wall_s, count), 2 * wall_s

    monkeypatch.setattr(batch_job, "_ran", ran)
    for number in range(50):
        (tmp_path / str(number)).touch()
    sample = batch_job._sample("pool", tmp_path, tmp_path, lambda: None)
    assert (sample.wall_ms, sample.cpu_ms) == (pytest.approx(10), pytest.approx(20))
    assert (sample.start_s, sample.returned) == (pytest.approx(1.02), 50)


@pytest.mark.parametrize("more_s", [0.0, -0.02])
def test_difference_below_the_clock_counts_as_one_tick(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more_s: float
) -> None:
    def ran(_side: str, _model: Path, _folder: Path, count: int) -> tuple[Ran, float]:
        wall_s = 1 + (more_s if count == 50 else 0)
        return Ran(wall_s, count), wall_s

    monkeypatch.setattr(batch_job, "_ran", ran)
    for number in range(50):
        (tmp_path / str(number)).touch()
    sample = batch_job._sample("pool", tmp_path, tmp_path, lambda: None)
    assert sample.wall_ms == sample.cpu_ms > 0


def test_programs_with_different_features_are_noticed() -> None:
    batch_job._check({"pool": 7, "loader": 7, "pool_left": 2, "loader_left": 2})
    with pytest.raises(RuntimeError, match="different features"):
        batch_job._check({"pool": 7, "loader": 8})
    with pytest.raises(RuntimeError, match="different features"):
        batch_job._check({"pool": 7, "pool_left": 2, "loader_left": 3})


@pytest.mark.bench
def test_a_program_that_fails_is_named(tmp_path: Path) -> None:
    (folder := tmp_path / "files").mkdir()
    (folder / "0.jpg").write_bytes(b"")
    with pytest.raises(ConfigError, match="the program pool failed"):
        batch_job._ran("pool", tmp_path / "no model", folder, 1)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_job, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="torchvision is missing"):
        batch_job.run(quick=True, after_sample=lambda: None)
