"""``make bench ARGS=node`` predicts as it says, and its record has its rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import node
from benchmarks.run import BENCHMARKS

RECORD = Path(__file__).parents[2] / "docs/benchmarks/2026-11-node.json"


def test_slowest_kind_of_process_or_all_cores_are_the_limit() -> None:
    costs_ms = {"frontend": 2.0, "store": 1.0, "dispatcher": 0.0, "worker": 7.0, "rest": 0.0}
    counts = {"frontend": 4, "store": 1, "dispatcher": 1, "worker": 20}
    found = node.limits(costs_ms, counts, num_cores=8)
    assert found == pytest.approx(
        {"frontend": 2000, "store": 1000, "worker": 20e3 / 7, "cores": 800}
    )


def test_record_predicts_what_was_measured() -> None:
    assert BENCHMARKS["node"] is node
    record = json.loads(RECORD.read_text())
    assert {(row["case"], row["cores"], row["c"]) for row in record["rows"]} == {
        (f"{size}, {case}", cores, c)
        for size, case, c in (
            ("page", "filling", 8),
            ("page", "filling", 1),
            ("page", "misses", 1),
            ("page", "misses", 8),
            ("page", "hits", 8),
            ("small", "misses", 8),
            ("small", "hits", 8),
        )
        for cores in (1, 2)
    }
    predicted = [goal["met"] for goal in record["goals"] if "predicted" in goal["what"]]
    assert predicted == [True] * 10
