"""``make bench ARGS=churn`` measures what its record promises."""

from __future__ import annotations

import json

import pytest

from benchmarks import churn
from benchmarks.record import MIN_SAMPLES
from benchmarks.run import BENCHMARKS


def test_the_record_has_its_keys() -> None:
    assert BENCHMARKS["churn"] is churn
    samples: list[None] = []
    report = churn.run(
        quick=True, after_sample=lambda: samples.append(None), num_operations=8 * 400
    )
    assert len(samples) == churn.num_steps(quick=True)
    record = json.loads(report.as_json())
    assert record["benchmark"] == "churn"
    assert [row["side"] for row in record["rows"]] == ["afferent", "control"]
    for row in record["rows"]:
        assert {*churn.COLUMNS, "evictions", "worst_us"} <= set(row)
        assert row["violations"] == 0
        assert 0 < row["hit_rate"] < 1
        assert 0.5 < row["utilisation"] <= 1
        assert 0 <= row["fragmentation"] < 1
        assert row["worst_us"] >= row["worst_evict_us"] > row["allocate_us"]
        assert len(row["samples"]["hit_rate"]) == MIN_SAMPLES
    no_violation, _, _ = record["goals"]
    assert no_violation["met"]


def test_an_allocation_that_fails_though_there_is_a_run_is_counted() -> None:
    class Lazy(churn._Control):
        def allocate(self, number: int, nbytes: int, who: int) -> bool:
            return nbytes < 1_000_000 and super().allocate(number, nbytes, who)

    recorder = churn._Recorder("lazy", Lazy(), 100)
    recorder.sample()
    assert recorder.num_violations > 10


@pytest.mark.parametrize("side", [churn._Afferent, churn._Control])
def test_both_sides_are_caches(side: type[churn.Side]) -> None:
    cache = side()
    assert not cache.pin(1, 10)
    half = cache.capacity_nbytes // 2
    assert cache.allocate(1, half, 11)
    assert cache.allocate(2, half, 12)
    assert not cache.allocate(3, 64, 13)
    cache.unpin(13)
    assert cache.pin(1, 14)
    cache.unpin(11)
    cache.unpin(12)
    assert cache.allocate(3, half, 15)
    assert cache.used_nbytes == cache.capacity_nbytes
    assert cache.num_evicted == 1
    assert not cache.pin(2, 16)
    assert sorted(cache.blocks()) == [(0, half, True), (half, half, True)]
