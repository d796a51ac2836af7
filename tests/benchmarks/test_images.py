"""``make bench ARGS=images`` measures what its record promises, and its sides do the same work."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from afferent.config import ServeConfig
from afferent.media.families.registry import describe
from afferent.store.block import codec
from afferent.store.daemon.server import StoreServer
from afferent.types import MiB
from benchmarks import images, preprocess
from benchmarks.controls.heap_frontend import HeapFrontend
from benchmarks.images_frontend import Frontend, chat_body
from benchmarks.record import MIN_SAMPLES
from benchmarks.run import BENCHMARKS


@pytest.mark.bench
def test_the_record_has_its_keys() -> None:
    assert BENCHMARKS["images"] is images
    samples: list[None] = []
    report = images.run(quick=True, after_sample=lambda: samples.append(None), images=(1, 2))
    assert len(samples) * 3 == images.num_steps(quick=True) * 2
    record = json.loads(report.as_json())
    assert [(row["images"], row["workers"]) for row in record["rows"]] == [(1, 2), (2, 2)]
    for row in record["rows"]:
        for key in images.COLUMNS[2:]:
            assert row[key] > 0
            assert len(row["samples"][key]) == MIN_SAMPLES
    handed_on, whole = (goal["what"].split(" at ")[0] for goal in record["goals"])
    assert handed_on in ("control_ms / afferent_ms", "control_zmq_ms / afferent_ms")
    assert whole == "control_whole_ms / (whole_ms + cut_ms)"
    assert "threads" in record["notes"][0]


def test_both_sides_make_the_same_features(tmp_path: Path) -> None:
    preprocess.write_model(tmp_path)
    family = describe(tmp_path)
    assert family is not None
    config = ServeConfig(arena_nbytes=32 * MiB, raw_share=0.2)
    control = HeapFrontend(family, num_threads=2)

    async def ours(address: str, body: bytes) -> tuple[list[Any], list[Any]]:
        frontend = await Frontend.connect(address, config, tmp_path, family)
        try:
            made = await frontend.features(body)
            blocks = [frontend._store.block(handle) for handle in made.handles]
            first = [codec.view(block, copy=True) for block in blocks]
            del blocks
            await frontend.clear(made)
            again = await frontend.features(body)
        finally:
            await frontend.close()
        return first, again.handles

    with (
        StoreServer(config.arena_nbytes, shares=config.shares) as server,
        preprocess.workers(server.address, family),
    ):
        # One body that stays on the heap while it arrives, and one in the arena.
        for body in (chat_body(1), chat_body(8)):
            found, handles = asyncio.run(ours(server.address, body))
            expected = asyncio.run(control.features(body))
            assert len(found) == len(expected) == len(handles)
            for tree, features in zip(found, expected, strict=True):
                for name, array in features.items():
                    assert np.array_equal(tree[name], array)
    control.close()
