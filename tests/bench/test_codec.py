from __future__ import annotations

import json
from pathlib import Path

import pytest

from afferent import cli
from afferent.bench import codec

KEYS = (
    "memcpy_ms",
    "ratio",
    "one_thread_ratio",
    "pickle_ratio",
    "oob_ratio",
    "msgpack_ratio",
    "torch_ratio",
    "safetensors_ratio",
    "us_per_leaf",
)


def test_the_record_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small run: what it measured on this busy machine is not judged, what it writes is."""
    monkeypatch.setattr(codec, "IMAGES", (1, 2))
    monkeypatch.setattr(codec, "_PATCHES", 50)
    file = tmp_path / "record.json"
    assert cli.main(["bench", "codec", "--quick", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert (record["benchmark"], record["version"]) == ("codec", 1)
    assert {"cpu", "cores", "memory_gib", "kernel"} <= set(record["machine"])
    assert record["busy_cores_elsewhere"] >= 0
    assert [row["images"] for row in record["rows"]] == [1, 2, 0]
    assert [row["leaves"] for row in record["rows"]] == [2, 4, 50]
    for row in record["rows"]:
        for name in KEYS:
            samples = row["samples"][name]
            assert len(samples) >= 7
            assert min(samples) <= row[name] <= max(samples)
            assert row[name] > 0
    assert len(record["goals"]) == 3
    table = capsys.readouterr().out
    for word in (codec.QUESTION, "pickle_ratio", "Medians of 7 samples"):
        assert word in table
    assert table.count("met") + table.count("missed") >= 3


def test_an_unknown_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "nonsense"])
    assert "codec" in capsys.readouterr().err
