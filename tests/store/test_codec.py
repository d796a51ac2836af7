"""Trees of tensors: exact round trips, views in place, and blocks that lie."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from afferent.errors import FormatError
from afferent.store import codec, layout
from afferent.types import TensorSpec

DTYPES = sorted(layout.DTYPES)


def store(tree: Any) -> memoryview:
    block = memoryview(bytearray(codec.plan(tree).nbytes))
    assert codec.write_into(tree, block) == len(block)
    return block


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray)
            and a.shape == b.shape
            and a.dtype.name == b.dtype.name
            and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        )
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(
        dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
    )
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
trees = st.recursive(
    scalars | arrays,
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4)
    ),
    max_leaves=12,
)


@given(trees)
@settings(max_examples=400, deadline=None)
def test_round_trip(tree: Any) -> None:
    assert same(tree, codec.view(store(tree)))


@given(arrays.filter(lambda array: array.ndim > 1))
@settings(deadline=None)
def test_what_is_not_contiguous_or_in_another_byte_order(array: np.ndarray) -> None:
    for other in (
        array.T,
        array[::-1],
        array[..., ::2],
        array.astype(array.dtype.newbyteorder(">")),
    ):
        assert same(
            np.ascontiguousarray(other).astype(array.dtype), codec.view(store({"a": other}))["a"]
        )


def test_views_lie_in_the_block_at_aligned_offsets() -> None:
    tree = {"a": np.arange(5, dtype=np.int8), "b": [np.ones((3, 3), np.float32)]}
    block = store(tree)
    base = np.frombuffer(block, np.uint8).ctypes.data
    viewed = codec.view(block)
    for array in (viewed["a"], viewed["b"][0]):
        assert (array.ctypes.data - base) % layout.ALIGNMENT == 0
        assert 0 < array.ctypes.data - base < len(block)
    viewed["a"][0] = 42
    assert codec.view(block)["a"][0] == 42


def test_views_of_a_read_only_block_are_read_only() -> None:
    viewed = codec.view(store({"a": np.ones(3)}).toreadonly())
    with pytest.raises(ValueError, match="read-only"):
        viewed["a"][0] = 2.0


def test_a_plan_needs_shapes_only() -> None:
    specs = {
        "pixel_values": TensorSpec("float32", (144, 1176)),
        "grid": TensorSpec("int64", (1, 3)),
    }
    made = {"pixel_values": np.ones((144, 1176), np.float32), "grid": np.ones((1, 3), np.int64)}
    planned = codec.plan(specs)
    assert planned == codec.plan(made)
    block = memoryview(bytearray(planned.nbytes))
    places = codec.lay_out(planned, block)
    for name, array in made.items():
        places[name][...] = array
    assert same(made, codec.view(block))


@pytest.mark.parametrize(
    "tree",
    [
        {1: 2},
        (1, 2),
        {"a": {1, 2}},
        object(),
        np.array(["text"]),
        np.array([1 + 2j]),
        np.array([None]),
        np.zeros(3, "datetime64[s]"),
        2**64,
        TensorSpec("complex64", (1,)),
    ],
)
def test_what_the_format_has_no_place_for(tree: Any) -> None:
    with pytest.raises(FormatError):
        codec.plan(tree)


def test_nesting_has_a_limit() -> None:
    tree: Any = 1
    for _ in range(layout.MAX_DEPTH + 2):
        tree = [tree]
    with pytest.raises(FormatError, match="deeply"):
        codec.plan(tree)


def test_a_block_that_is_too_small() -> None:
    planned = codec.plan({"a": np.ones(100)})
    with pytest.raises(FormatError, match="too small"):
        codec.lay_out(planned, memoryview(bytearray(planned.nbytes - 1)))


def forge(root: Any, payload: bytes = bytes(256), *, total: int | None = None) -> memoryview:
    """A block whose header says whatever ``root`` says."""
    header = msgspec.msgpack.encode(root)
    start = layout.align(layout.PRELUDE.size + len(header))
    nbytes = start + len(payload)
    prelude = layout.pack_prelude(header_nbytes=len(header), total_nbytes=total or nbytes)
    return memoryview((prelude + header).ljust(start, b"\0") + payload)


def tensor(offset: int, nbytes: int, shape: list[int], dtype: str = "uint8") -> Any:
    return [3, dtype, shape, offset, nbytes]


@pytest.mark.parametrize(
    "root",
    [
        pytest.param(tensor(64, 512, [512]), id="past the end"),
        pytest.param(tensor(2**62, 64, [64]), id="far past the end"),
        pytest.param(tensor(65, 64, [64]), id="misaligned"),
        pytest.param(tensor(0, 64, [64]), id="over the header"),
        pytest.param(tensor(64, 64, [63]), id="length and shape differ"),
        pytest.param(tensor(64, 64, [64], "float8"), id="unknown type"),
        pytest.param(tensor(64, 8, [1], "object"), id="pointers"),
        pytest.param(tensor(64, 0, [2**62, 2**62, 0, 4]), id="a huge shape of no bytes"),
        pytest.param(tensor(64, 64, [-64]), id="a negative side"),
        pytest.param([1, [tensor(64, 64, [64]), tensor(64, 64, [64])]], id="overlap"),
        pytest.param([1, [tensor(128, 64, [64]), tensor(64, 64, [64])]], id="wrong order"),
        pytest.param([2, [["a", [0, 1]], ["a", [0, 2]]]], id="a key twice"),
        pytest.param([9, 1], id="an unknown node"),
        pytest.param([0], id="a missing field"),
        pytest.param("text", id="not a node"),
    ],
)
def test_headers_that_lie(root: Any) -> None:
    block = forge(root)
    with pytest.raises(FormatError):
        codec.view(block)


def test_preludes_that_lie() -> None:
    good = bytes(store({"a": np.ones(9)}))
    assert codec.view(memoryview(good))
    for wrong in (
        b"",
        good[:10],
        good[:-1],
        b"X" + good[1:],
        good[:8] + b"\x02" + good[9:],
        good[:10] + b"\x01" + good[11:],
        good[:12] + b"\xff\xff\xff\x7f" + good[16:],
        good[:16] + b"\xff" * 8 + good[24:],
        forge([0, 1], total=2**40),
        forge(nested(100)),
        forge(nested(100_000)),
    ):
        with pytest.raises(FormatError):
            codec.view(memoryview(wrong))


def nested(depth: int) -> Any:
    return msgspec.Raw(b"\x92\x01\x91" * depth + b"\x92\x00\x01")


def test_flipped_bits_give_views_inside_the_block_or_an_error() -> None:
    """Ten thousand damaged headers: never another exception, never a byte from outside."""
    rng = random.Random(7)
    tree = {"a": np.arange(40, dtype=np.float32), "b": [np.ones((2, 3), np.int64), "x", 1.5, None]}
    good = bytes(store(tree))
    end = layout.PRELUDE.size + layout.PRELUDE.unpack_from(good)[3]
    for _ in range(10_000):
        block = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            block[rng.randrange(end)] ^= 1 << rng.randrange(8)
        view = memoryview(block)
        base = np.frombuffer(view, np.uint8).ctypes.data
        try:
            found = codec.view(view)
        except FormatError:
            continue
        for array in tensors(found):
            inside = array.ctypes.data - base
            assert array.nbytes == 0 or 0 < inside <= len(block) - array.nbytes


def tensors(tree: Any) -> list[np.ndarray]:
    if isinstance(tree, np.ndarray):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [array for child in children for array in tensors(child)]
