"""Conversion between torch tensors and numpy arrays over the same bytes.

torch is used if a process has imported it, and imported only if its tensors are requested: the
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
    """Minimal interface of ``torch.Tensor``, for type checkers."""

    @property
    def requires_grad(self) -> bool: ...
    def data_ptr(self) -> int: ...
    def detach(self) -> TorchTensor: ...


# numpy has no bfloat16 or float8 to exchange with torch; integers of the same size do.
_BITS = {
    dtype: np.dtype(f"uint{8 * dtype.itemsize}")
    for dtype in (layout.DTYPES[name] for name in layout.ML_NAMES)
}


def is_tensor(value: object) -> bool:
    """Whether ``value`` is a torch tensor; never imports torch."""
    cls = getattr(sys.modules.get("torch"), "Tensor", None)
    return cls is not None and isinstance(value, cls)


def in_torch(value: Any) -> Any:
    """Return a tensor unchanged, and an array as by `as_tensor`."""
    return value if is_tensor(value) else as_tensor(value)


def as_array(tensor: Any) -> Array:
    """Return the tensor's own bytes as an array, with its strides and without its gradient.

    Raises:
        FormatError: Not a plain tensor in this machine's memory, or of an unsupported type.
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
    """Return a tensor over the bytes of ``array``, read-only memory included.

    It uses DLPack: ``torch.from_numpy`` warns about read-only arrays.

    Raises:
        FormatError: torch has no such type, or the memory is not aligned as torch requires.
    """
    torch: Any = importlib.import_module("torch")
    if not array.flags.aligned:
        raise FormatError("the block is not aligned in memory, as torch needs it; copy the tensors")
    bits = _BITS.get(array.dtype)
    try:
        if array.size == 0:  # empty: DLPack would give it odd strides
            return torch.empty(array.shape, dtype=getattr(torch, array.dtype.name))
        if bits is None:
            return torch.from_dlpack(array)
        return torch.from_dlpack(array.view(bits)).view(getattr(torch, array.dtype.name))
    except (AttributeError, BufferError, RuntimeError):
        raise FormatError(f"this torch has no tensors of {array.dtype.name}") from None
