"""``afferent bench store`` and ``alloc`` measure what their records promise."""

from __future__ import annotations

import json

import pytest

from afferent.bench import alloc, store
from afferent.bench.record import MIN_SAMPLES
from afferent.bench.run import BENCHMARKS

READERS = (1, 2)


def test_the_record_of_store_has_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BENCHMARKS["store"] is store
    monkeypatch.setattr(store, "_READERS", READERS)
    monkeypatch.setattr(store, "_NUM_GETS", 20)
    samples: list[None] = []
    sizes = (100_000, 1_000_000)
    report = store.run(quick=True, after_sample=lambda: samples.append(None), sizes_nbytes=sizes)
    assert len(samples) * 4 == store.num_steps(quick=True) * len(sizes)
    record = json.loads(report.as_json())
    rows = record["rows"]
    assert [(row["nbytes"], row["readers"]) for row in rows] == [
        (nbytes, readers) for nbytes in sizes for readers in READERS
    ]
    for row in rows:
        for key in ("put_ratio", "get_us", "control_segment_ms", "control_pickle_ms", "memcpy_ms"):
            assert row[key] > 0
            assert len(row["samples"][key]) == MIN_SAMPLES
        assert set(store.COLUMNS) <= set(row)
    assert {goal["what"].split(" at ")[0] for goal in record["goals"]} >= {"put_extra_us"}


def test_the_record_of_alloc_has_its_keys() -> None:
    assert BENCHMARKS["alloc"] is alloc
    samples: list[None] = []
    report = alloc.run(quick=True, after_sample=lambda: samples.append(None), images=(4, 8))
    assert len(samples) * 2 == alloc.num_steps(quick=True)
    record = json.loads(report.as_json())
    assert [(row["images"], row["threads"]) for row in record["rows"]] == [
        (images, threads) for images in (4, 8) for threads in (0, 1, 2)
    ]
    for row in record["rows"]:
        for key in ("rpc_ms", "total_ms", "control_rpc_ms", "control_total_ms"):
            assert row[key] > 0
            assert len(row["samples"][key]) == MIN_SAMPLES
        assert row["rpc_ms"] < row["total_ms"]
        assert set(alloc.COLUMNS) <= set(row)
    assert len(record["goals"]) == 4


def test_alloc_with_one_number_of_threads() -> None:
    report = alloc.run(quick=True, after_sample=lambda: None, images=(4,), alloc_workers=3)
    assert [row.keys["threads"] for row in report.rows] == [3]
