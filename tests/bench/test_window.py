"""``afferent bench window`` measures what its record promises."""

from __future__ import annotations

import json

from afferent.bench import window
from afferent.bench.record import MIN_SAMPLES
from afferent.bench.run import BENCHMARKS

KEYS = (
    "window_us",
    "scattered_us",
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
    assert len(record["goals"]) == 9
    assert set(window.COLUMNS) <= set(record["rows"][0])
    by_size = [row["message_nbytes"] for row in record["rows"]]
    assert by_size[1] - by_size[0] <= 8
