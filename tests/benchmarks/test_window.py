"""``make bench ARGS=window`` measures what its record promises."""

from __future__ import annotations

import json

from afferent.schedule.step import EncoderInput
from afferent.schedule.window import WindowIndex
from afferent.types import Placeholder
from benchmarks import window
from benchmarks.controls.item_list import items_in_window
from benchmarks.record import MIN_SAMPLES
from benchmarks.run import BENCHMARKS

KEYS = (
    "window_us",
    "scattered_us",
    "bisect_us",
    "scan_us",
    "step_us",
    "release_us",
    "abort_us",
    "after_abort_us",
    "message_nbytes",
    "session_cpu_s",
)


def test_the_record_has_its_keys() -> None:
    assert BENCHMARKS["window"] is window
    samples: list[None] = []
    report = window.run(quick=True, after_sample=lambda: samples.append(None), items=(100, 200))
    assert len(samples) * len(window.ITEMS) == window.num_steps(quick=True) * 2
    record = json.loads(report.as_json())
    assert record["benchmark"] == "window"
    assert [row["items"] for row in record["rows"]] == [100, 200]
    for row in record["rows"]:
        for key in KEYS:
            assert row[key] > 0
            assert len(row["samples"][key]) == MIN_SAMPLES
        assert row["scan_us"] > row["window_us"]
    assert len(record["goals"]) == 10
    assert set(window.COLUMNS) <= set(record["rows"][0])
    by_size = [row["message_nbytes"] for row in record["rows"]]
    assert by_size[1] - by_size[0] <= 8


def test_the_control_finds_the_same_items() -> None:
    items = [EncoderInput(bytes(32), Placeholder(7 * n, 3), 1) for n in range(20)]
    index = WindowIndex((item.placeholder, item) for item in items)
    for start in range(150):
        for end in range(start + 1, start + 25):
            assert items_in_window(items, start, end) == list(index.in_window(start, end))
