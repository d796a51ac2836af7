"""Measure the cost of sending a tree of tensors to another process, compared with one memcpy.

The tree is the output of an image processor: for each image a ``pixel_values`` of 644 x 364 pixels
(1196 x 1176 float32, 5.6 MB) and its grid. The last row is the other extreme, 50 tensors of 100
bytes. A sample is the whole way: encode into warm memory, and decode to arrays. The lower bound is
one memcpy of the same bytes, by one thread, between warm buffers. With ``--quick`` a hundred images
are a quarter as large, because the baselines take seconds for them.

`ratio` is Afferent's codec as it is, with two threads from 10 MB on; `one_thread_ratio` is the
codec with one thread. Compare the latter with the baselines, which all copy with one thread:

- `engine_ratio`: msgpack with the tensors out of band (the encoder of vLLM and TokenSpeed between
  processes). Nothing is copied to send them, and the receiver copies once, into warm memory.
- `oob_ratio`: pickle 5 with its buffers out of band, copied into warm shared memory (Ray).
- `pickle_ratio`: in-band pickle (SGLang over ZMQ, multiprocessing queues).
- `msgpack_ratio`: tensors as bytes inside of the message.
- `torch_ratio` and `safetensors_ratio`: the formats for tensors over HTTP.

The last four allocate new memory for each message, which is expensive on small virtual machines.

Expected before the measurement: with one thread, ours ties with pickle out of band and with the
engines' encoder: 1.0 to 1.1 from 10 images on, because all are one memcpy; two threads 0.7. At one
image 1.0 to 1.2. On small trees the engines' encoder is 1.5 to 2.5 times cheaper than ours: it
inlines tensors of fewer than 256 bytes, and aligns nothing.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import msgspec
import numpy as np

from afferent.store.arena import ArenaMap
from afferent.store.block import codec
from afferent.store.block.copying import SPLIT_NBYTES
from afferent.store.segment import create_segment
from benchmarks.controls import tensor_message
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, alternate

QUESTION = (
    "What does a tree of tensors cost on its way to another process, beside one memcpy, the "
    "engines' encoder (vLLM) and pickle out of band (Ray)?"
)
IMAGES = (1, 10, 100)
_PATCHES = 1196
_RATIO_GOAL, _TIE_GOAL = 1.3, 1.1
_US_PER_LEAF_GOAL = 5.0
_SMALL_LEAVES, _SMALL_SHAPE = 50, (25,)  # 100 bytes each


@dataclass(frozen=True, slots=True)
class _Case:
    """A tree, and warm memory for it; a sample repeats its work ``rounds`` times."""

    keys: dict[str, Any]
    tree: dict[str, Any]
    arrays: list[np.ndarray]
    block: memoryview
    rounds: int


def _memcpy(case: _Case) -> None:
    """Copy all arrays once: the lower bound."""
    offset = 0
    for array in case.arrays:
        np.copyto(np.frombuffer(case.block, array.dtype, array.size, offset), array.reshape(-1))
        offset += array.nbytes


def _afferent(case: _Case) -> None:
    codec.write_into(case.tree, case.block)
    codec.view(case.block)


def _one_thread(case: _Case) -> None:
    codec.write_into(case.tree, case.block, num_threads=1)
    codec.view(case.block)


def _engine(case: _Case) -> None:
    """Encode as `controls/tensor_message.py`; the copy stands for that of the receiver's socket."""
    head, *buffers = tensor_message.encode(case.tree)
    received: list[tensor_message.Buffer] = [head]
    offset = 0
    for buffer in buffers:
        place = case.block[offset : offset + len(buffer)]
        np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(buffer, np.uint8))
        received.append(place)
        offset += len(buffer)
    tensor_message.decode(received)


def _pickle(case: _Case) -> None:
    """Use in-band pickle, as SGLang's processes do over ZMQ."""
    pickle.loads(pickle.dumps(case.tree, protocol=5))  # noqa: S301  (our own bytes)


def _out_of_band(case: _Case) -> None:
    """Use pickle 5 with buffers out of band in shared memory, as Ray does."""
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(case.tree, protocol=5, buffer_callback=buffers.append)
    placed, offset = [], 0
    for buffer in buffers:
        raw = buffer.raw()
        place = case.block[offset : offset + raw.nbytes]
        np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(raw, np.uint8))
        placed.append(place)
        offset += raw.nbytes
    pickle.loads(message, buffers=placed)  # noqa: S301  (our own bytes)


def _msgpack(case: _Case) -> None:
    """Encode tensors as bytes inside of a message, as msgpack-numpy does."""
    packed = msgspec.msgpack.encode(case.tree, enc_hook=_pack_array)
    for node in _leaves(msgspec.msgpack.decode(packed)):
        if isinstance(node, list):
            dtype, shape, data = node
            np.frombuffer(data, dtype=dtype).reshape(shape)


def _pack_array(value: Any) -> Any:
    return [value.dtype.str, value.shape, value.tobytes()]


def _torch(case: _Case) -> None:
    """Use ``torch.save``, as vLLM does for prompt embeddings over HTTP."""
    torch: Any = importlib.import_module("torch")
    made = _mapped(case.tree, lambda array: torch.from_numpy(array))
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    torch.load(file, weights_only=True)


def _safetensors(case: _Case) -> None:
    """Use one flat safetensors file in memory, as for tensors over HTTP."""
    safetensors: Any = importlib.import_module("safetensors.numpy")
    packed = safetensors.save({str(number): array for number, array in enumerate(case.arrays)})
    safetensors.load(packed)


_SIDES: dict[str, Callable[[_Case], None]] = {
    "memcpy": _memcpy,
    "afferent": _afferent,
    "one_thread": _one_thread,
    "engine": _engine,
    "oob": _out_of_band,
    "pickle": _pickle,
    "msgpack": _msgpack,
    **({"torch": _torch} if find_spec("torch") else {}),
    **({"safetensors": _safetensors} if find_spec("safetensors") else {}),
}
_RATIOS = {name: f"{name}_ratio" for name in _SIDES if name != "memcpy"} | {"afferent": "ratio"}
COLUMNS = ("tree", "threads", *_RATIOS.values())


def num_steps(*, quick: bool) -> int:
    return len(_SIDES) * (_num_samples(quick=quick) + 1) * (len(IMAGES) + 1)


def run(*, quick: bool, after_sample: Callable[[], None]) -> Report:
    for missing in {"torch", "safetensors"} - set(_SIDES):
        print(
            f"{missing}: its library is not installed, so its column is left out", file=sys.stderr
        )
    report = Report("codec", QUESTION)
    report.notes.append(
        "threads: those that copy for ratio; one_thread_ratio and all controls copy with one"
    )
    meter = BusyMeter()
    num_samples = _num_samples(quick=quick)
    for images in IMAGES:
        tree = _image_tree(
            images, num_patches=_PATCHES // 4 if quick and images >= 100 else _PATCHES
        )
        keys = {"tree": f"{images} images", "images": images}
        # One image is copied too fast to be timed alone.
        row = _row(tree, keys, num_samples, after_sample, rounds=max(1, 10 // images))
        ratio = row.median("ratio")
        what = f"ratio at {images} images <= {_RATIO_GOAL}"
        report.goals.append(Goal(what, ratio <= _RATIO_GOAL, ratio))
        tie = row.median("one_thread_ratio") / min(map(row.median, ("engine_ratio", "oob_ratio")))
        what = f"one thread / the best control at {images} images <= {_TIE_GOAL}"
        report.goals.append(Goal(what, tie <= _TIE_GOAL, tie))
        report.rows.append(row)
    keys = {"tree": f"{_SMALL_LEAVES} x 100 B", "images": 0}
    row = _row(_small_tree(), keys, num_samples, after_sample, rounds=20)
    us_per_leaf = row.median("us_per_leaf")
    what = f"us per leaf of a small tree <= {_US_PER_LEAF_GOAL:g}"
    report.goals.append(Goal(what, us_per_leaf <= _US_PER_LEAF_GOAL, us_per_leaf))
    report.rows.append(row)
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    return report


def _num_samples(*, quick: bool) -> int:
    return MIN_SAMPLES if quick else 3 * MIN_SAMPLES


def _image_tree(images: int, *, num_patches: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    pixels = rng.random((num_patches, 1176), dtype=np.float32)
    grid = np.array([[1, 26, 46]], dtype=np.int64)
    made = [{"pixel_values": pixels.copy(), "image_grid_thw": grid.copy()} for _ in range(images)]
    return {"request": "bench", "images": made}


def _small_tree() -> dict[str, Any]:
    return {
        f"leaf{number}": np.full(_SMALL_SHAPE, number, np.float32)
        for number in range(_SMALL_LEAVES)
    }


def _row(
    tree: dict[str, Any],
    keys: dict[str, Any],
    num_samples: int,
    after_sample: Callable[[], None],
    *,
    rounds: int,
) -> Row:
    arrays = [leaf for leaf in _leaves(tree) if isinstance(leaf, np.ndarray)]
    nbytes = sum(array.nbytes for array in arrays)
    threads = 2 if nbytes >= SPLIT_NBYTES else 1
    keys = {**keys, "threads": threads, "leaves": len(arrays), "nbytes": nbytes}
    fd = create_segment(codec.plan(tree).nbytes)
    with ArenaMap(fd, writable=True) as arena:
        os.close(fd)
        case = _Case(keys, tree, arrays, arena.block(0, arena.nbytes), rounds)
        samples = alternate(
            {name: _timed(side, case) for name, side in _SIDES.items()},
            num_samples=num_samples,
            after_sample=after_sample,
        )
        case.block.release()
    floor = samples["memcpy"]
    ratios = {
        key: [value / base for value, base in zip(samples[name], floor, strict=True)]
        for name, key in _RATIOS.items()
    }
    return Row(
        keys,
        {
            "memcpy_ms": [value * 1e3 for value in floor],
            **ratios,
            "us_per_leaf": [value * 1e6 / len(arrays) for value in samples["afferent"]],
        },
    )


def _timed(side: Callable[[_Case], None], case: _Case) -> Callable[[], float]:
    def seconds() -> float:
        _memcpy(case)  # the same state of the caches for all sides
        start = time.perf_counter()
        for _ in range(case.rounds):
            side(case)
        return (time.perf_counter() - start) / case.rounds

    return seconds


def _leaves(tree: Any) -> Iterator[Any]:
    """Yield all values in the dictionaries of a tree, and in its lists of dictionaries."""
    if isinstance(tree, dict):
        for child in tree.values():
            yield from _leaves(child)
    elif isinstance(tree, list) and tree and isinstance(tree[0], dict):
        for child in tree:
            yield from _leaves(child)
    else:
        yield tree


def _mapped(tree: Any, make: Callable[[np.ndarray], Any]) -> Any:
    """Return the tree with its arrays replaced."""
    if isinstance(tree, dict):
        return {key: _mapped(child, make) for key, child in tree.items()}
    if isinstance(tree, list):
        return [_mapped(child, make) for child in tree]
    return make(tree) if isinstance(tree, np.ndarray) else tree
