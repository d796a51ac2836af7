"""A tree of tensors to a block and back, without a copy that can be avoided.

    plan = codec.plan({"pixel_values": TensorSpec("float32", (144, 1176))})   # from shapes alone
    block = ...                                                  # plan.nbytes bytes of the arena
    views = codec.lay_out(plan, block)                           # write into these
    tree = codec.view(block)                                     # read-only arrays over the block

A tree is made of dictionaries with string keys, lists, tensors, and the scalars of msgpack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from afferent.errors import FormatError
from afferent.store import layout
from afferent.types import TensorSpec

Array = NDArray[Any]
Tree = Mapping[str, "Tree"] | list["Tree"] | Array | TensorSpec | layout.Scalar
"""What can be planned; a `TensorSpec` stands for a tensor that is not there yet."""
ViewTree = dict[str, "ViewTree"] | list["ViewTree"] | Array | layout.Scalar
"""What comes back."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The exact layout of a tree: ``nbytes`` in all, and its header."""

    nbytes: int
    root: layout.Node
    header: bytes


def plan(tree: Tree) -> Plan:
    """Lay a tree out; reads no tensor's bytes.

    Raises:
        FormatError: A type that the format has no place for.
    """
    # Offsets are part of the header, and a number's length in msgpack depends on its size. So the
    # header is given the room that it needs with the largest offsets, and the rest is padding.
    sized = _Planner(start=2**62)
    probe = msgspec.msgpack.encode(sized.node(tree, depth=0))
    start = layout.align(layout.PRELUDE.size + len(probe))
    planner = _Planner(start=start)
    root = planner.node(tree, depth=0)
    return Plan(planner.end, root, msgspec.msgpack.encode(root))


class _Planner:
    def __init__(self, *, start: int) -> None:
        self._next = start
        self.end = start

    def node(self, value: Tree, *, depth: int) -> layout.Node:
        if depth > layout.MAX_DEPTH:
            raise FormatError("nested too deeply")
        match value:
            case np.ndarray():
                return self._tensor(value.dtype.name, value.shape)
            case TensorSpec():
                return self._tensor(value.dtype, value.shape)
            case Mapping():
                if not all(isinstance(key, str) for key in value):
                    raise FormatError("the keys of a dictionary are strings")
                children = [(k, self.node(v, depth=depth + 1)) for k, v in value.items()]
                return layout.DictNode(children)
            case list():
                return layout.ListNode([self.node(v, depth=depth + 1) for v in value])
            case int() if not -(2**63) <= value < 2**64:
                raise FormatError("an integer of more than 64 bits can't be stored")
            case bytes():
                return layout.BytesNode(value)
            case None | bool() | int() | float() | str():
                return layout.ScalarNode(value)
            case _:
                raise FormatError(f"a {type(value).__name__} can't be stored")

    def _tensor(self, dtype: str, shape: tuple[int, ...]) -> layout.TensorNode:
        nbytes = layout.tensor_nbytes(dtype, shape)
        node = layout.TensorNode(dtype, list(shape), self._next, nbytes)
        self.end = self._next + nbytes
        self._next = layout.align(self.end)
        return node


def lay_out(plan: Plan, block: memoryview) -> ViewTree:
    """Write the header of ``plan`` into ``block``; writable arrays over the payloads."""
    if len(block) < plan.nbytes:
        raise FormatError(f"the block of {len(block)} bytes is too small for {plan.nbytes}")
    prelude = layout.pack_prelude(header_nbytes=len(plan.header), total_nbytes=plan.nbytes)
    block[: len(prelude)] = prelude
    block[len(prelude) : len(prelude) + len(plan.header)] = plan.header
    return _views(plan.root, block)


def write_into(tree: Tree, block: memoryview) -> int:
    """Write a tree, tensors and all; the number of bytes used, from the start of the block."""
    planned = plan(tree)
    _copy(tree, lay_out(planned, block))
    return planned.nbytes


def view(block: memoryview) -> ViewTree:
    """The tree in a block; its arrays are views, read-only where the block is.

    Raises:
        FormatError: The bytes are not a valid block.
    """
    return _views(layout.read_header(block), block)


def _views(node: layout.Node, block: memoryview) -> ViewTree:
    match node:
        case layout.ScalarNode() | layout.BytesNode():
            return node.value
        case layout.ListNode():
            return [_views(child, block) for child in node.nodes]
        case layout.DictNode():
            return {key: _views(child, block) for key, child in node.nodes}
        case layout.TensorNode():
            payload = block[node.offset : node.offset + node.nbytes]
            return np.frombuffer(payload, dtype=node.dtype).reshape(node.shape)


def _copy(source: Tree, target: ViewTree) -> None:
    if isinstance(source, np.ndarray) and isinstance(target, np.ndarray):
        np.copyto(target, source)  # releases the GIL; a slice assignment would hold it
    elif isinstance(source, Mapping) and isinstance(target, dict):
        for key, child in source.items():
            _copy(child, target[key])
    elif isinstance(source, list) and isinstance(target, list):
        for child, place in zip(source, target, strict=True):
            _copy(child, place)
    elif isinstance(source, TensorSpec):
        raise FormatError("a tensor is missing: only its shape is there")
