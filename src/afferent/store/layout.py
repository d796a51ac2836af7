"""The byte format of a block, version 1: a small header, then tensors at aligned offsets.

    0   magic           8 bytes   b"AFFERENT"
    8   version         u16       1
    10  flags           u16       0
    12  header_nbytes   u32       length of the header that follows
    16  total_nbytes    u64       length of the whole block
    24  header          msgpack   a node of the tree
    ... zero padding to a multiple of 64
    ... payloads, each at a multiple of 64, little-endian, C order

All integers are little-endian. A header is read as hostile input: it is decoded by schema, and
every offset, shape and length is checked against the block before anything is viewed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

import msgspec
import numpy as np
from msgspec import Struct

from afferent.errors import FormatError
from afferent.types import NonNegative, decode

MAGIC = b"AFFERENT"
VERSION = 1
ALIGNMENT = 64
PRELUDE = struct.Struct("<8sHHIQ")
MAX_HEADER_NBYTES = 16 << 20
MAX_DEPTH = 64
MAX_DIMS = 32

DTYPES = frozenset(
    {
        *("bool", "float16", "float32", "float64"),
        *("int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64"),
    }
)
"""The element types of version 1, by their numpy names."""

Scalar = None | bool | int | float | str | bytes


class ScalarNode(Struct, array_like=True, tag=0, frozen=True, forbid_unknown_fields=True):
    value: bool | int | float | str | None


class BytesNode(Struct, array_like=True, tag=4, frozen=True, forbid_unknown_fields=True):
    value: bytes


class ListNode(Struct, array_like=True, tag=1, frozen=True, forbid_unknown_fields=True):
    nodes: list[Node]


class DictNode(Struct, array_like=True, tag=2, frozen=True, forbid_unknown_fields=True):
    """Keys are unique strings, in the order of the dictionary."""

    nodes: list[tuple[str, Node]]


class TensorNode(Struct, array_like=True, tag=3, frozen=True, forbid_unknown_fields=True):
    """``offset`` counts from the start of the block."""

    dtype: str
    shape: list[NonNegative]
    offset: NonNegative
    nbytes: NonNegative


Node = ScalarNode | BytesNode | ListNode | DictNode | TensorNode

_decoder = msgspec.msgpack.Decoder(Node)


def align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def tensor_nbytes(dtype: str, shape: list[int] | tuple[int, ...]) -> int:
    """The payload of a tensor, in bytes.

    Raises:
        FormatError: Version 1 has no such element type, or no room for such a shape.
    """
    if dtype not in DTYPES:
        raise FormatError(f"a tensor of {dtype} can't be stored")
    itemsize = np.dtype(dtype).itemsize
    if len(shape) > MAX_DIMS or math.prod(max(side, 1) for side in shape) * itemsize >= 2**62:
        raise FormatError("a tensor has too many dimensions, or sides too long to count its bytes")
    return math.prod(shape) * itemsize


def pack_prelude(*, header_nbytes: int, total_nbytes: int) -> bytes:
    return PRELUDE.pack(MAGIC, VERSION, 0, header_nbytes, total_nbytes)


def read_header(block: memoryview) -> Node:
    """The checked header of a block.

    Raises:
        FormatError: The bytes are not a block of version 1, or point outside of it.
    """
    if len(block) < PRELUDE.size:
        raise FormatError("shorter than a block can be")
    magic, version, flags, header_nbytes, total_nbytes = PRELUDE.unpack_from(block)
    if magic != MAGIC:
        raise FormatError("not a block: its first bytes are wrong")
    if version != VERSION or flags != 0:
        raise FormatError(f"version {version} with flags {flags} is not known here")
    if header_nbytes > MAX_HEADER_NBYTES or PRELUDE.size + header_nbytes > total_nbytes:
        raise FormatError("the header is longer than it may be")
    if total_nbytes > len(block):
        raise FormatError("the block is longer than its memory")
    root: Node = decode(_decoder, block[PRELUDE.size : PRELUDE.size + header_nbytes])
    end = align(PRELUDE.size + header_nbytes)
    for node in _tensors(root, depth=0):
        if node.nbytes != tensor_nbytes(node.dtype, node.shape):
            raise FormatError("a tensor's length is not that of its shape")
        if node.offset % ALIGNMENT or node.offset < end:
            raise FormatError("a tensor's offset is misaligned, or overlaps what is before it")
        end = node.offset + node.nbytes
        if end > total_nbytes:
            raise FormatError("a tensor ends outside of the block")
    return root


def _tensors(node: Node, *, depth: int) -> Iterator[TensorNode]:
    """The tensors of a tree in the order of their payloads."""
    if depth > MAX_DEPTH:
        raise FormatError("nested too deeply")
    match node:
        case TensorNode():
            yield node
        case ListNode():
            for child in node.nodes:
                yield from _tensors(child, depth=depth + 1)
        case DictNode():
            if len({key for key, _ in node.nodes}) != len(node.nodes):
                raise FormatError("a dictionary has a key twice")
            for _, child in node.nodes:
                yield from _tensors(child, depth=depth + 1)
        case ScalarNode() | BytesNode():
            pass
