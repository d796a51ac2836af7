"""``make bench ARGS=handoff`` measures what its record promises."""

from __future__ import annotations

import json
import sys

import pytest

from afferent.errors import ConfigError
from benchmarks import handoff
from benchmarks.record import MIN_SAMPLES
from benchmarks.run import BENCHMARKS


@pytest.mark.bench
def test_the_record_has_its_keys() -> None:
    assert BENCHMARKS["handoff"] is handoff
    samples: list[None] = []
    report = handoff.run(
        quick=True,
        after_sample=lambda: samples.append(None),
        sizes_nbytes=(100_000, 2_000_000),
        num_workers=(1, 2),
    )
    assert len(samples) == 4 * 5 * (MIN_SAMPLES + 1)
    record = json.loads(report.as_json())
    assert [(row["workers"], row["nbytes"]) for row in record["rows"]] == [
        (1, 100_000),
        (1, 2_000_000),
        (2, 100_000),
        (2, 2_000_000),
    ]
    for row in record["rows"]:
        assert set(handoff.COLUMNS) <= set(row)
        for key in handoff._SIDES:
            assert row[key] > 0
            assert len(row["samples"][key]) == MIN_SAMPLES
    assert len(record["goals"]) == 2


def test_without_its_extra_it_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"\.\[bench\]"):
        handoff.run(quick=True, after_sample=lambda: None, sizes_nbytes=(1000,), num_workers=(1,))


@pytest.mark.parametrize("quick", [True, False])
def test_the_steps_are_counted(quick: bool) -> None:
    assert handoff.num_steps(quick=quick) == (160 if quick else 1200)
