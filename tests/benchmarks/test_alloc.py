"""``make bench ARGS=alloc`` measures what its record promises, and its baseline works."""

from __future__ import annotations

import json

from benchmarks import alloc
from benchmarks.peers.lightllm import cache_server, md5
from benchmarks.record import MIN_SAMPLES
from benchmarks.run import BENCHMARKS


def test_the_record_of_alloc_has_its_keys() -> None:
    assert BENCHMARKS["alloc"] is alloc
    samples: list[None] = []
    report = alloc.run(quick=True, after_sample=lambda: samples.append(None), images=(4, 8))
    assert len(samples) * 2 == alloc.num_steps(quick=True)
    record = json.loads(report.as_json())
    assert [(row["images"], row["threads"]) for row in record["rows"]] == [
        (images, threads) for images in (4, 8) for threads in (0, 2)
    ]
    for row in record["rows"]:
        for key in ("rpc_ms", "total_ms", "control_rpc_ms", "control_total_ms"):
            assert row[key] > 0
            assert len(row["samples"][key]) == MIN_SAMPLES
        assert row["control_rpc_ms"] < row["control_total_ms"], "it is a part of that"
        assert set(alloc.COLUMNS) - {"lightllm_total_ms"} <= set(row), "LightLLM was not given"
    assert len(record["goals"]) == 4


def test_alloc_with_one_number_of_threads() -> None:
    report = alloc.run(quick=True, after_sample=lambda: None, images=(4,), alloc_workers=3)
    assert [row.keys["threads"] for row in report.rows] == [3]


def test_the_cache_server_keeps_what_it_was_given() -> None:
    media = [b"one" * 1000, b"two" * 2000]
    digests = [md5(data) for data in media]
    with cache_server() as client:
        records = client.allocate(digests, [10, 20])
        assert [record.num_tokens for record in records] == [10, 20]
        assert records[1].first_token == records[0].first_token + 10
        segments = client.store(records, media)
        assert [segment.read_bytes() for segment in segments] == media
        for segment in segments:
            segment.unlink()
        assert client.allocate(digests, [10, 20]) == records
        assert client.store(records, media) == []
        client.clear()
        assert client.allocate(digests, [10, 20]) != records
