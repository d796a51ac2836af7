"""Trees of tensors as msgpack, with the tensors out of band.

vLLM's processes communicate in this format (`MsgpackEncoder`, and TokenSpeed's after it): a header,
in which a tensor is an extension with its type, its shape and the number of a buffer, followed by
the buffers, which are sent without a copy. The header contains tensors of fewer than 256 bytes.
This baseline uses numpy arrays instead of torch tensors, which avoids a conversion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

Buffer = bytes | memoryview

_TENSOR = 4
_INLINE_NBYTES = 256
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder()


def encode(tree: Any) -> list[Buffer]:
    """Return the header and the buffers, which are views of the tree's arrays."""
    parts: list[Buffer] = [b""]

    def pack(value: Any) -> msgspec.msgpack.Ext:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"no tensor: {type(value).__name__}")
        where: bytes | int
        if value.nbytes < _INLINE_NBYTES:
            where = value.tobytes()
        else:
            parts.append(value.reshape(-1).view(np.uint8).data)
            where = len(parts) - 1
        described = _encoder.encode((value.dtype.str, value.shape, where))
        return msgspec.msgpack.Ext(_TENSOR, described)

    parts[0] = msgspec.msgpack.encode(tree, enc_hook=pack)
    return parts


def decode(parts: Sequence[Buffer]) -> Any:
    """Return the tree; its arrays are views of the buffers."""

    def unpack(code: int, data: memoryview) -> Any:
        if code != _TENSOR:
            raise TypeError(f"unknown extension {code}")
        dtype, shape, where = _decoder.decode(data)
        buffer = where if isinstance(where, bytes) else parts[where]
        return np.ndarray(shape, dtype, buffer)

    return msgspec.msgpack.decode(parts[0], ext_hook=unpack)
