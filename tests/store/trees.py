"""Generated trees of tensors, and their comparison."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st

from afferent.store.block import codec, layout

DTYPES = sorted(layout.DTYPES)


def random_array(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return an array of random bits: all kinds of NaN, infinities, and negative zeros."""
    kind = layout.DTYPES[dtype]
    num_bytes = int(np.prod(shape)) * kind.itemsize
    bits = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
    return (bits % 2 if dtype == "bool" else bits).view(kind).reshape(shape)


arrays = st.builds(
    random_array,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.integers(0, 2**32),
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
    arrays | scalars,
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4)
    ),
    max_leaves=8,
)


def store(tree: Any) -> memoryview:
    block = memoryview(bytearray(codec.plan(tree).nbytes))
    assert codec.write_into(tree, block) == len(block)
    return block


def same(a: Any, b: Any) -> bool:
    """Return whether two trees are equal bit for bit, including types and the order of keys."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def tensors(tree: Any) -> Iterator[Any]:
    """Yield the arrays or tensors of a tree, in order."""
    if hasattr(tree, "__dlpack__"):
        yield tree
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    for child in children:
        yield from tensors(child)


def address(block: memoryview) -> int:
    return np.frombuffer(block, np.uint8).ctypes.data
