"""Trees of tensors: exact round trips, views in place, and values that the format refuses."""

from __future__ import annotations

import gc
import os
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from afferent.errors import FormatError
from afferent.store.arena import ArenaMap
from afferent.store.block import codec, layout
from afferent.store.segment import create_segment
from afferent.types import TensorSpec
from tests.examples import examples
from tests.store.trees import DTYPES, address, arrays, random_array, same, store, tensors, trees

_ARENA_NBYTES = 1 << 20


@pytest.fixture(scope="module")
def arena() -> Iterator[ArenaMap]:
    fd = create_segment(_ARENA_NBYTES)
    with ArenaMap(fd, writable=True) as mapped:
        os.close(fd)
        mapped.block(0, _ARENA_NBYTES)[:] = b"\xff" * _ARENA_NBYTES  # as if used before
        yield mapped


@given(tree=trees)
@examples(500, storm=5000)
def test_round_trip(arena: ArenaMap, tree: Any) -> None:
    """A round trip is exact, both through the arena and through plain bytes."""
    nbytes = codec.plan(tree).nbytes
    block = arena.block(4096, nbytes + 64)
    assert codec.write_into(tree, block) == nbytes
    assert same(tree, codec.view(block))
    plain = bytes(block[:nbytes])
    assert same(tree, codec.view(plain))
    assert plain == bytes(store(tree)), "equal trees make equal blocks"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 3)])
def test_every_type_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    array = random_array(dtype, shape, seed=1)
    assert same([array, array], codec.view(store([array, array])))


@given(arrays.filter(lambda array: array.ndim > 1))
@examples(100, storm=1000)
def test_what_is_not_contiguous(array: np.ndarray) -> None:
    for other in (array.T, array[::-1], array[..., ::2], np.broadcast_to(array, (2, *array.shape))):
        assert same(np.ascontiguousarray(other), codec.view(store({"a": other}))["a"])


@pytest.mark.parametrize("dtype", ["int16", "uint64", "float16", "float64"])
def test_another_byte_order_is_swapped(dtype: str) -> None:
    array = np.arange(6).astype(dtype).reshape(2, 3)
    assert same(array, codec.view(store([array.astype(array.dtype.newbyteorder(">"))]))[0])


class Subclass(np.ndarray):
    """A subclass of `np.ndarray`, such as `np.memmap`."""


def test_kinds_of_arrays_and_dictionaries() -> None:
    tree = {
        "scalar": np.float32(1.5),
        "double": np.float64(2.5),
        "subclass": np.array([[1, 2]]).view(Subclass),
        "long": np.arange(3, dtype=np.longlong),
        "ordered": OrderedDict(a=1),
    }
    assert same(
        codec.view(store(tree)),
        {
            "scalar": np.array(1.5, np.float32),
            "double": np.array(2.5),
            "subclass": np.array([[1, 2]]),
            "long": np.arange(3),
            "ordered": {"a": 1},
        },
    )


def test_views_lie_in_the_block_at_aligned_offsets() -> None:
    tree = {"a": np.arange(5, dtype=np.int8), "b": [np.ones((3, 3), np.float32)]}
    block = store(tree)
    viewed: Any = codec.view(block)
    for array in tensors(viewed):
        inside = array.ctypes.data - address(block)
        assert inside % layout.ALIGNMENT == 0
        assert 0 < inside < len(block)
    viewed["a"][0] = 42
    again: Any = codec.view(block)
    assert again["a"][0] == 42


def test_views_of_a_read_only_block_are_read_only() -> None:
    viewed: Any = codec.view(store({"a": np.ones(3)}).toreadonly())
    with pytest.raises(ValueError, match="read-only"):
        viewed["a"][0] = 2.0


def test_private_copies() -> None:
    tree = {"a": np.ones(3), "b": [np.array(7)]}
    block = store(tree)
    copied: Any = codec.view(block.toreadonly(), copy=True)
    assert same(tree, copied)
    copied["a"][0] = 2.0
    assert same(tree, codec.view(block))
    start, end = address(block), address(block) + len(block)
    assert all(not start <= array.ctypes.data < end for array in tensors(copied))


def test_views_keep_the_memory_alive() -> None:
    """The exporter of the block lives as long as any view of it; a pin relies on this."""
    exporter = np.frombuffer(bytes(store([np.ones(3), np.ones(4)])), np.uint8)
    gone = weakref.ref(exporter)
    viewed: Any = codec.view(memoryview(exporter))
    copied = codec.view(memoryview(exporter), copy=True)
    part = viewed[1][2:]
    del exporter, viewed
    gc.collect()
    assert gone() is not None
    del part
    gc.collect()
    assert gone() is None
    assert same(copied, [np.ones(3), np.ones(4)])


def test_a_plan_needs_shapes_only() -> None:
    made = {
        "pixel_values": np.ones((144, 1176), np.float32),
        "embeddings": random_array("bfloat16", (7, 3), seed=2),
        "grid": np.ones((1, 3), np.int64),
    }
    specs = {name: TensorSpec(array.dtype.name, array.shape) for name, array in made.items()}
    planned = codec.plan(specs)
    assert planned == codec.plan(made)
    block = memoryview(bytearray(b"\xff" * planned.nbytes))
    places = codec.lay_out(planned, block)
    for name, array in made.items():
        places[name][...] = array
    assert same(made, codec.view(block))
    assert bytes(block) == bytes(store(made))
    with pytest.raises(FormatError, match="missing"):
        codec.write_into(specs, block)


def test_sides_that_were_computed() -> None:
    sides: Any = (np.int64(2), True, np.uint8(3))
    assert codec.plan(TensorSpec("int8", sides)) == codec.plan(np.zeros((2, 1, 3), np.int8))


class Colour(StrEnum):
    RED = "red"


class Number(IntEnum):
    ONE = 1


def itself() -> list[Any]:
    tree: list[Any] = []
    tree.append(tree)
    return tree


@pytest.mark.parametrize(
    "tree",
    [
        {1: 2},
        {Colour.RED: 1},
        (1, 2),
        {"a": {1, 2}},
        object(),
        Colour.RED,
        Number.ONE,
        np.array(["text"]),
        np.str_("text"),
        np.array([1 + 2j]),
        np.array([None]),
        np.zeros(3, "datetime64[s]"),
        np.zeros(3, "V2"),
        np.zeros(3, [("a", "f4")]),
        np.zeros(3, np.longdouble),
        np.ma.masked_array([1, 2], mask=[True, False]),
        2**64,
        -(2**63) - 1,
        "\ud800",
        {"\ud800": 1},
        bytes(2 << 20),
        TensorSpec("complex64", (1,)),
        TensorSpec("float32", (-1, 2)),
        TensorSpec("float32", (2**62, 2)),
        TensorSpec("float32", (1.5,)),
        TensorSpec("uint8", (1,) * 33),
        itself(),
    ],
)
def test_what_the_format_has_no_place_for(tree: Any) -> None:
    with pytest.raises(FormatError):
        codec.plan(tree)


def test_nesting_has_a_limit() -> None:
    tree: Any = 1
    for _ in range(layout.MAX_DEPTH):
        tree = [tree]
    assert codec.view(store(tree)) == tree
    with pytest.raises(FormatError, match="deeply"):
        codec.plan([tree])


def test_a_block_that_is_too_small() -> None:
    planned = codec.plan({"a": np.ones(100)})
    with pytest.raises(FormatError, match="too small"):
        codec.lay_out(planned, memoryview(bytearray(planned.nbytes - 1)))


def test_memory_of_another_shape() -> None:
    """A memoryview of any shape and dtype is accepted: only its bytes count."""
    tree = [np.arange(9)]
    words = np.zeros((8, 8), np.int64)
    codec.write_into(tree, memoryview(words))
    assert same(tree, codec.view(memoryview(words)))


def test_the_bytes_of_the_specification() -> None:
    """The example of docs/format.md is encoded byte for byte."""
    block = bytes(store({"grid": np.array([1, 26, 46], np.int64), "n": 7}))
    header = bytes.fromhex("82 a4 67726964 c7 09 01 92 a5 696e743634 91 03 a1 6e 07")
    assert block == (
        b"AFFERENT"
        + bytes.fromhex("0100 0000")
        + len(header).to_bytes(4, "little")
        + (64 + 24).to_bytes(8, "little")
        + header.ljust(40, b"\0")
        + bytes.fromhex("0100000000000000 1a00000000000000 2e00000000000000")
    )
