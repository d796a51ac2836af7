"""``make bench ARGS=store`` measures what its record promises, and its baselines work."""

from __future__ import annotations

import json
import os
import threading

import numpy as np
import pytest

from benchmarks import store
from benchmarks.controls import tensor_message
from benchmarks.controls.ring import Ring, RingReader
from benchmarks.peers import ray_store
from benchmarks.record import MIN_SAMPLES
from benchmarks.run import BENCHMARKS

ALWAYS = ("memcpy_ms", "put_ratio", "control_segment_ms", "get_us", "read_ms")
RING = ("control_ring_put_ratio", "control_ring_get_us", "control_ring_read_ms")


@pytest.mark.bench
def test_the_record_has_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BENCHMARKS["store"] is store
    monkeypatch.setattr(ray_store, "is_installed", lambda: False)
    monkeypatch.setattr(store, "_QUICK_GETS_NBYTES", 2_000_000)
    monkeypatch.setattr(store, "MAX_RING_NBYTES", 11_000_000)
    samples: list[None] = []
    report = store.run(
        quick=True,
        after_sample=lambda: samples.append(None),
        sizes_nbytes=(100_000, 10_000_000, 12_000_000),
        num_readers=(1, 2),
    )
    # puts: memcpy, one thread, two threads, segment and ring; gets: ours and the ring's
    assert len(samples) == ((4 + 5 + 4) + 2 * (2 + 2 + 1)) * (MIN_SAMPLES + 1)
    record = json.loads(report.as_json())
    assert [(row["nbytes"], row["readers"], row["threads"]) for row in record["rows"]] == [
        (100_000, 1, 1),
        (100_000, 2, 1),
        *(
            (nbytes, *rest)
            for nbytes in (10_000_000, 12_000_000)
            for rest in ((1, 1), (1, 2), (2, 2))
        ),
    ]
    for row in record["rows"]:
        for key in (*ALWAYS, *RING) if row["nbytes"] < 11_000_000 else ALWAYS:
            assert row[key] > 0
            assert len(row["samples"][key]) == MIN_SAMPLES
        assert not any(key.startswith("ray") for key in row)
    assert {goal["what"].split(" at ")[0] for goal in record["goals"]} >= {"put_extra_us"}
    assert record["notes"][1:] == [
        "ring: none beyond 128 MiB, as in vLLM's cache",
        ray_store.MISSING,
    ]


@pytest.mark.parametrize("quick", [True, False])
def test_the_steps_are_counted(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_store, "is_installed", lambda: False)
    # for each size: puts, and gets for each number of readers
    expected = (4 + 5 + 2 * 4) * 8 if quick else (4 + 4 + 5 + 4 + 4 * (2 + 2 + 2 + 1)) * 22
    assert store.num_steps(quick=quick) == expected


def test_every_reader_of_a_ring_gets_every_message() -> None:
    fd = os.memfd_create("ring")
    trees = [{"n": n, "a": np.full(300 + n, n, np.int32), "b": np.ones(3)} for n in range(5)]
    found: dict[int, list[object]] = {0: [], 1: []}

    def read(index: int) -> None:
        ring = Ring(fd, num_chunks=2, chunk_nbytes=4096, num_readers=2)
        reader = RingReader(ring, index)
        for _ in trees:
            tree = tensor_message.decode(reader.read())
            found[index].append({**tree, "a": tree["a"].copy()})

    writer = Ring(fd, num_chunks=2, chunk_nbytes=4096, num_readers=2)
    readers = [threading.Thread(target=read, args=[index]) for index in found]
    for thread in readers:
        thread.start()
    for tree in trees:  # more than there are chunks: the writer waits for the readers
        writer.write(tensor_message.encode(tree))
    for thread in readers:
        thread.join()
    os.close(fd)
    for got in found.values():
        np.testing.assert_equal(got, trees)
