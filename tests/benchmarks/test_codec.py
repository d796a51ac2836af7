from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import codec, run
from benchmarks.controls import tensor_message

KEYS = (
    "memcpy_ms",
    "ratio",
    "one_thread_ratio",
    "engine_ratio",
    "oob_ratio",
    "pickle_ratio",
    "msgpack_ratio",
    "torch_ratio",
    "safetensors_ratio",
    "us_per_leaf",
)


@pytest.mark.bench
def test_the_record_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small run checks the record, not the measured values."""
    monkeypatch.setattr(codec, "IMAGES", (1, 2))
    monkeypatch.setattr(codec, "_PATCHES", 50)
    file = tmp_path / "record.json"
    assert run.main(["codec", "--quick", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert (record["benchmark"], record["version"]) == ("codec", 1)
    assert {"cpu", "vectors", "cores", "memory_gib", "kernel"} <= set(record["machine"])
    assert record["busy_cores_elsewhere"] >= 0
    assert [row["images"] for row in record["rows"]] == [1, 2, 0]
    assert [row["leaves"] for row in record["rows"]] == [2, 4, 50]
    for row in record["rows"]:
        for name in KEYS:
            samples = row["samples"][name]
            assert len(samples) >= 7
            assert min(samples) <= row[name] <= max(samples)
            assert row[name] > 0
    assert len(record["goals"]) == 5
    table = capsys.readouterr().out
    for word in ("the engines' encoder", "pickle_ratio", "copy with one", "Medians of 7 samples"):
        assert word in table
    assert table.count("met") + table.count("missed") >= 3


def test_tensors_travel_out_of_band() -> None:
    large, small = np.arange(300, dtype=np.float32).reshape(3, 100), np.array([1, 2], np.int64)
    tree = {"id": "a", "images": [{"pixels": large, "grid": small}, {"empty": small[:0]}]}
    head, *buffers = tensor_message.encode(tree)
    assert [len(buffer) for buffer in buffers] == [large.nbytes]
    assert np.shares_memory(np.frombuffer(buffers[0], np.float32), large)
    np.testing.assert_equal(tensor_message.decode([head, *buffers]), tree)
    with pytest.raises(TypeError, match="no tensor"):
        tensor_message.encode({"no": object()})


def test_an_unknown_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["nonsense"])
    assert "codec" in capsys.readouterr().err
