"""Tensors of torch, to and from numpy arrays over the same bytes.

torch is looked up where a process has imported it, or imported when its tensors are asked for: the
store must not need it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from afferent.errors import FormatError
from afferent.store.block import layout

Array = NDArray[Any]


class TorchTensor(Protocol):
    """As much of ``torch.Tensor`` as tells a type checker what is meant."""

    @property
    def requires_grad(self) -> bool: ...
    def data_ptr(self) -> int: ...
    def detach(self) -> TorchTensor: ...


# numpy has no bfloat16 or float8 of its own to exchange with torch; integers of the same size do.
_BITS = {
    dtype: np.dtype(f"uint{8 * dtype.itemsize}")
    for dtype in (layout.DTYPES[name] for name in layout.ML_NAMES)
}


def is_tensor(value: object) -> bool:
    """Whether ``value`` is a tensor of torch; never imports it."""
    cls = getattr(sys.modules.get("torch"), "Tensor", None)
    return cls is not None and isinstance(value, cls)


def as_array(tensor: Any) -> Array:
    """The tensor's own bytes as an array, strides and all; gradients are left behind.

    Raises:
        FormatError: Not a plain tensor in this machine's memory, or of a type without a place.
    """
    torch: Any = sys.modules["torch"]
    if tensor.device.type != "cpu":
        raise FormatError(f"a tensor on {tensor.device.type}: bring it to the CPU first")
    if tensor.layout is not torch.strided:
        raise FormatError("a sparse tensor can't be stored")
    dtype = layout.dtype_named(str(tensor.dtype).removeprefix("torch."))
    plain = tensor.detach().resolve_neg()
    bits = _BITS.get(dtype)
    try:
        if bits is None:
            array: Array = plain.numpy()
        else:
            array = plain.view(getattr(torch, bits.name)).numpy().view(dtype)
    except (RuntimeError, TypeError):
        raise FormatError("a tensor without bytes of its own can't be stored") from None
    return array


def as_tensor(array: Array) -> Any:
    """A tensor over the bytes of ``array``, read-only memory included.

    It goes through DLPack: ``torch.from_numpy`` warns of arrays that can't be written.

    Raises:
        FormatError: torch has no such type, or the memory is not aligned as torch assumes.
    """
    torch: Any = importlib.import_module("torch")
    if not array.flags.aligned:
        raise FormatError("the block is not aligned in memory, as torch needs it; copy the tensors")
    bits = _BITS.get(array.dtype)
    try:
        if array.size == 0:  # nothing to share, and DLPack would give it odd strides
            return torch.empty(array.shape, dtype=getattr(torch, array.dtype.name))
        if bits is None:
            return torch.from_dlpack(array)
        return torch.from_dlpack(array.view(bits)).view(getattr(torch, array.dtype.name))
    except (AttributeError, BufferError, RuntimeError):
        raise FormatError(f"this torch has no tensors of {array.dtype.name}") from None
