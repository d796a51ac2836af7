"""Rounds count only if no other process was busy; a record names the measured code."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec
import pytest

from benchmarks import record
from benchmarks.record import Report, code, quiet_rounds
from benchmarks.run import main
from tools import remeasure
from tools.measured_code import changed
from tools.records_page import FOLDER


def rounds_of(monkeypatch: pytest.MonkeyPatch, busy: list[float], number: int) -> Report:
    """Run rounds with this load of other processes; the rows are the numbers of counted rounds."""
    made, left = [], iter(busy)

    class Meter:
        def busy_cores_elsewhere(self) -> float:
            return next(left)

    def one_round() -> int:
        made.append(len(made))
        return made[-1]

    monkeypatch.setattr(record, "BusyMeter", Meter)
    report = Report("test", "")
    report.rows = quiet_rounds(one_round, number=number, report=report, what="misses")  # type: ignore[assignment]
    assert len(made) == len(busy), "no more rounds than need be"
    return report


def test_quiet_rounds_all_count(monkeypatch: pytest.MonkeyPatch) -> None:
    report = rounds_of(monkeypatch, [0.0, 0.15, 0.1], 3)
    assert (report.rows, report.notes) == ([0, 1, 2], [])


def test_noisy_rounds_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    report = rounds_of(monkeypatch, [0.0, 0.9, 0.1, 0.2, 0.0], 3)
    assert report.rows == [0, 2, 4]
    assert report.notes == [
        "misses: 2 of 5 rounds thrown away, with up to 0.90 cores busy elsewhere"
    ]


def test_where_it_is_never_quiet_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    report = rounds_of(monkeypatch, [0.5, 0.3, 0.9, 0.1], 2)
    assert report.rows == [1, 3]
    assert report.notes[1:] == [
        "misses: 1 of 2 rounds count with up to 0.30 cores busy elsewhere, for want of quieter ones"
    ]


def test_a_record_names_the_packages_that_have_changed_since(tmp_path: Path) -> None:
    for name in ("store/arena.py", "store/state/machine.py", "media/native/sums.h", "keys.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    before = {"code": code(tmp_path)}
    assert set(before["code"]) == {"store", "media", tmp_path.name}
    assert changed(before, code(tmp_path)) == []
    (tmp_path / "media" / "figures.txt").write_text("no code")
    assert changed(before, code(tmp_path)) == []
    (tmp_path / "media" / "native" / "sums.h").write_text("another")
    (tmp_path / "store" / "state" / "machine.py").rename(tmp_path / "store" / "machine.py")
    (tmp_path / "gate").mkdir()
    (tmp_path / "gate" / "gate.py").write_text("new")
    assert changed(before, code(tmp_path)) == ["gate", "media", "store"]
    assert changed({}, code(tmp_path)) is None


def test_a_record_has_the_code_of_this_package() -> None:
    found = msgspec.json.decode(Report("test", "").as_json())
    assert changed(found, code()) == []
    assert {"store", "media", "proxy", "afferent"} <= set(found["code"])


def test_each_record_can_be_measured_again_or_has_a_reason_why_not() -> None:
    measured = [each.record for each in remeasure.MEASUREMENTS]
    assert len(set(measured)) == len(measured)
    assert not set(measured) & remeasure.NOT_AGAIN.keys()
    there = {path.stem.removeprefix("2026-11-") for path in FOLDER.glob("*.json")}
    assert there <= {*measured, *remeasure.NOT_AGAIN}
    assert remeasure.NOT_AGAIN.keys() <= there


@pytest.mark.parametrize("record", remeasure.MEASUREMENTS, ids=lambda each: each.record)
def test_the_command_of_a_record_is_one_of_the_benchmarks(
    record: remeasure.Measurement, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:  # it parses all words before it prints the help
        main([*shlex.split(record.arguments), "--help"])
    assert ended.value.code == 0
    assert "usage: benchmarks" in capsys.readouterr().out
