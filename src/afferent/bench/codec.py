"""How much does a tree of tensors cost on its way to another process, beside one memcpy?

The tree is what a processor makes of pictures: for each a ``pixel_values`` of 644 x 364 pixels
(1196 x 1176 float32, 5.6 MB) and its grid. A sample is the whole way there and back: encode into
warm memory, and decode to arrays. The floor is one memcpy of the same bytes between warm buffers.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from afferent.bench.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, alternate
from afferent.store import codec, layout
from afferent.store.arena import ArenaMap, create_segment

QUESTION = "What does a tree of tensors cost on its way to another process, beside one memcpy?"
IMAGES = (1, 10, 100)
COLUMNS = ("images", "nbytes", "memcpy_ms", "ratio", "pickle_ratio", "msgpack_ratio")

_GOAL = 1.3


def num_steps(*, quick: bool) -> int:
    return 4 * (_num_samples(quick=quick) + 1) * len(IMAGES)


def run(*, quick: bool, after_sample: Callable[[], None]) -> Report:
    report = Report("codec", QUESTION)
    meter = BusyMeter()
    for images in IMAGES:
        report.rows.append(_row(images, _num_samples(quick=quick), after_sample))
        ratio = report.rows[-1].median("ratio")
        goal = Goal(f"ratio at {images} images <= {_GOAL}", ratio <= _GOAL, ratio)
        report.goals.append(goal)
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    return report


def _num_samples(*, quick: bool) -> int:
    return MIN_SAMPLES if quick else 3 * MIN_SAMPLES


def _make_tree(images: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    pixels = rng.random((1196, 1176), dtype=np.float32)
    grid = np.array([[1, 26, 46]], dtype=np.int64)
    made = [{"pixel_values": pixels.copy(), "image_grid_thw": grid.copy()} for _ in range(images)]
    return {"request": "bench", "images": made}


def _row(images: int, num_samples: int, after_sample: Callable[[], None]) -> Row:
    tree = _make_tree(images)
    arrays = [array for image in tree["images"] for array in image.values()]
    nbytes = sum(array.nbytes for array in arrays)
    fd = create_segment(codec.plan(tree).nbytes + layout.ALIGNMENT + nbytes)
    with ArenaMap(fd, writable=True) as arena:
        os.close(fd)
        samples = _measure(tree, arena, num_samples, after_sample)
    floor = samples["memcpy"]

    def ratios(name: str) -> list[float]:
        return [value / base for value, base in zip(samples[name], floor, strict=True)]

    return Row(
        {"images": images, "nbytes": nbytes},
        {
            "memcpy_ms": [value * 1e3 for value in floor],
            "ratio": ratios("afferent"),
            "pickle_ratio": ratios("pickle"),
            "msgpack_ratio": ratios("msgpack"),
        },
    )


def _measure(
    tree: dict[str, Any], arena: ArenaMap, num_samples: int, after_sample: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of each side; all of them read the same arrays and write to warm memory."""
    arrays = [array for image in tree["images"] for array in image.values()]
    planned_nbytes = codec.plan(tree).nbytes
    block = arena.block(0, planned_nbytes)
    start = layout.align(planned_nbytes)
    flat = np.frombuffer(arena.block(start, sum(a.nbytes for a in arrays)), dtype=np.uint8)

    def memcpy() -> float:
        began, offset = time.perf_counter(), 0
        for array in arrays:
            source = array.reshape(-1).view(np.uint8)
            np.copyto(flat[offset : offset + array.nbytes], source)
            offset += array.nbytes
        return time.perf_counter() - began

    def afferent() -> float:
        began = time.perf_counter()
        codec.write_into(tree, block)
        codec.view(block)
        return time.perf_counter() - began

    return alternate(
        {
            "memcpy": memcpy,
            "afferent": afferent,
            "pickle": lambda: _pickle(tree),
            "msgpack": lambda: _msgpack(tree),
        },
        num_samples=num_samples,
        after_sample=after_sample,
    )


def _pickle(tree: dict[str, Any]) -> float:
    """Control: in-band pickle, as engines send feature trees over pipes and queues."""
    start = time.perf_counter()
    pickle.loads(pickle.dumps(tree, protocol=5))  # noqa: S301  (our own bytes)
    return time.perf_counter() - start


def _msgpack(tree: dict[str, Any]) -> float:
    """Control: tensors as msgpack bytes inside the message, as engines send them over ZMQ."""
    start = time.perf_counter()
    packed = msgspec.msgpack.encode(tree, enc_hook=_pack_array)
    unpacked = msgspec.msgpack.decode(packed)
    for image in unpacked["images"]:
        for dtype, shape, data in image.values():
            np.frombuffer(data, dtype=dtype).reshape(shape)
    return time.perf_counter() - start


def _pack_array(value: Any) -> Any:
    return [value.dtype.str, value.shape, value.tobytes()]
