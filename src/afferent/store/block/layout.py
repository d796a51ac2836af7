"""Byte format of a block, version 1: a small header, then tensors at aligned offsets.

    0   magic           8 bytes   b"AFFERENT"
    8   version         u16       1
    10  flags           u16       0
    12  header_nbytes   u32       length of the header that follows
    16  total_nbytes    u64       length of the whole block
    24  header          msgpack   the tree, each tensor an extension that says its type and shape
    ... zero padding to a multiple of 64
    ... payloads in the order of the header, each at the next multiple of 64

A header holds no offsets: they follow from the shapes. So payloads that overlap, are misaligned or
are in another order can't be expressed. `docs/format.md` is the full specification.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
from msgspec.msgpack import Ext

from afferent.errors import FormatError
from afferent.types import TensorSpec, decode, encode

MAGIC = b"AFFERENT"
VERSION = 1
ALIGNMENT = 64
PRELUDE = struct.Struct("<8sHHIQ")
# A megabyte of empty lists is about 60 MB of Python objects; larger data belong in a tensor.
MAX_HEADER_NBYTES = 1 << 20
MAX_DEPTH = 64
MAX_DIMS = 32
TENSOR_CODE = 1
"""Code of the msgpack extension for tensors."""

_NUMPY_NAMES = (
    *("bool", "float16", "float32", "float64"),
    *("int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
)
ML_NAMES = (
    *("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)

DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in _NUMPY_NAMES},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in ML_NAMES},
}
"""Element types of version 1, by their names in numpy and ml_dtypes."""

# The name of a dtype takes microseconds to compute, and 40 ns to look up here.
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Scalar = None | bool | int | float | str | bytes

_spec_decoder = msgspec.msgpack.Decoder(TensorSpec)
_tree_decoder = msgspec.msgpack.Decoder()


class TensorLayout(NamedTuple):
    """Payload of one tensor; native byte order, C order."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int


class Header(NamedTuple):
    """Decoded header; ``tree`` has msgpack's own types, its tensors are still `Ext`, unread."""

    tree: Any
    start: int
    """Offset of the first payload."""
    total_nbytes: int


def align(offset: int) -> int:
    return (offset + ALIGNMENT - 1) & -ALIGNMENT


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the element type with this name.

    Raises:
        FormatError: Version 1 has no such element type.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise FormatError(f"a tensor of {name[:40]} can't be stored") from None


# Trees repeat few shapes, and decoding one costs as much as the rest of a view.
@lru_cache(maxsize=1024)
def pack_tensor(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[Ext, TensorLayout]:
    """Return the header's node of a tensor, and the layout of its payload.

    Raises:
        FormatError: Version 1 does not support the element type or the shape.
    """
    native = dtype.newbyteorder("=")
    name = _NAMES.get(native)
    if name is None:
        raise FormatError(f"a tensor of {str(dtype)[:40]} can't be stored")
    layout = TensorLayout(DTYPES[name], shape, _nbytes(native.itemsize, shape))
    return Ext(TENSOR_CODE, encode(TensorSpec(name, shape))), layout


@lru_cache(maxsize=1024)
def read_tensor(code: int, data: bytes) -> TensorLayout:
    """Return the layout of a tensor from its extension in a header.

    Raises:
        FormatError: Not a tensor of version 1.
    """
    if code != TENSOR_CODE:
        raise FormatError(f"extension {code} is not known here")
    spec = decode(_spec_decoder, data)
    if encode(spec) != data:
        raise FormatError("a tensor is not spelled in the one way that it should be")
    dtype = dtype_named(spec.dtype)
    return TensorLayout(dtype, spec.shape, _nbytes(dtype.itemsize, spec.shape))


def _nbytes(itemsize: int, shape: Sequence[int]) -> int:
    if len(shape) > MAX_DIMS or min(shape, default=0) < 0:
        raise FormatError("a tensor has too many dimensions, or a negative side")
    # Sides beside a zero count too: numpy can't make a view whose strides overflow.
    if math.prod(max(side, 1) for side in shape) * itemsize >= 2**62:
        raise FormatError("a tensor's sides are too long to count its bytes")
    return math.prod(shape) * itemsize


def pack_header(
    tree: Any, *, payloads_nbytes: int, max_header_nbytes: int = MAX_HEADER_NBYTES
) -> tuple[bytes, int]:
    """Return prelude, header and padding up to the first payload; and the length of the block.

    Raises:
        FormatError: The header is over its limit, or a string is not Unicode.
    """
    try:
        header = encode(tree)
    except UnicodeEncodeError:
        raise FormatError("a string that is not valid Unicode can't be stored") from None
    if len(header) > max_header_nbytes:
        raise FormatError(
            f"more than max_header_nbytes={max_header_nbytes} bytes besides tensors: store large "
            "bytes as uint8, or allow more for many tensors, here and where the tree is read"
        )
    start = align(PRELUDE.size + len(header))
    total_nbytes = start + payloads_nbytes
    prelude = PRELUDE.pack(MAGIC, VERSION, 0, len(header), total_nbytes)
    return (prelude + header).ljust(start, b"\0"), total_nbytes


def read_header(block: memoryview, *, max_header_nbytes: int = MAX_HEADER_NBYTES) -> Header:
    """Return the header of a block; the caller checks the nodes of its tree.

    Raises:
        FormatError: The bytes are not a block of version 1.
    """
    if len(block) < PRELUDE.size:
        raise FormatError("the bytes are no tree of tensors: a block is longer")
    magic, version, flags, header_nbytes, total_nbytes = PRELUDE.unpack_from(block)
    if magic != MAGIC:
        raise FormatError("the bytes are no tree of tensors: a block begins otherwise")
    if version != VERSION or flags != 0:
        raise FormatError(f"version {version} with flags {flags} is not known here")
    if header_nbytes > max_header_nbytes or PRELUDE.size + header_nbytes > total_nbytes:
        raise FormatError(
            f"the header of {header_nbytes} bytes is longer than it may be: for many tensors, read "
            f"with more than max_header_nbytes={max_header_nbytes}"
        )
    if total_nbytes > len(block):
        raise FormatError("the block is longer than its memory")
    # A private copy: the block is shared memory, and may change between two reads.
    header = bytes(block[PRELUDE.size : PRELUDE.size + header_nbytes])
    tree = decode(_tree_decoder, header)
    if not _is_spelling_of(tree, header):
        raise FormatError("a header is not spelled in the one way that it should be")
    return Header(tree, align(PRELUDE.size + header_nbytes), total_nbytes)


def _is_spelling_of(tree: Any, header: bytes) -> bool:
    """Whether ``tree`` encodes to ``header``; finds hidden differences such as duplicate keys."""
    try:
        return encode(tree) == header
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):
        return False  # decoded, but no tree: a dictionary with a list as key, for example
