"""``make bench ARGS=gateway_memory`` measures a gateway that holds bodies, and all are answered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gateway_memory
from benchmarks.run import BENCHMARKS

RECORD = Path(__file__).parents[2] / "docs/benchmarks/2026-11-gateway-memory.json"


@pytest.mark.bench
def test_the_record_has_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BENCHMARKS["gateway_memory"] is gateway_memory
    monkeypatch.setattr(gateway_memory, "_NUM_BODIES", 100)
    monkeypatch.setattr(gateway_memory, "_STILL_S", 1.0)
    report = gateway_memory.run(quick=True, after_sample=lambda: None)
    (row,) = json.loads(report.as_json())["rows"]
    (recorded,) = json.loads(RECORD.read_text())["rows"]
    assert row.keys() == recorded.keys()
    assert row["ok"] == row["bodies"] == 4
    assert recorded["ok"] == recorded["bodies"] == 500
