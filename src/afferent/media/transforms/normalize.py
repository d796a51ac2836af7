"""Normalization of colours, on the device of the engine's worker: until then they stay bytes."""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from afferent.media.decoded import Array

Arithmetic = Literal["fused", "stepwise", "rescaled"]
"""Arithmetic of a model's own processor, to the last bit.

- ``fused``: torchvision's: ``(value - mean / factor) / (std / factor)`` in float32
- ``stepwise``: Pillow's: rescaled in float64 and rounded, then ``(value - mean) / std`` in float32
- ``rescaled``: torchvision's, of a processor that does not normalize: one product in float32
"""


NO_MEAN, NO_STD = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


class Normalization(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Transformation ``(value * rescale_factor - mean) / std``, for each of red, green and blue.

    The factor is applied to mean and deviation, as torchvision's processors of `transformers` do
    it: so the results have the same bits as theirs. With `NO_MEAN` and `NO_STD` it is the product
    of a processor that does not normalize.
    """

    rescale_factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def apply(self, values: Any) -> Any:
        """Return bytes ``(..., 3, rows, columns)`` as a float32 tensor on the same device."""
        floats = values.float()
        if (self.mean, self.std) == (NO_MEAN, NO_STD):
            return floats.mul_(self.rescale_factor)
        mean, std = self.constants(floats, 1.0 / self.rescale_factor)
        return floats.sub_(mean).div_(std)

    def constants(self, like: Any, factor: float = 1.0) -> tuple[Any, Any]:
        """Return mean and deviation times the factor, ``(3, 1, 1)``, on the device of a tensor and
        in its type.

        They are made once: each copy to a GPU would wait for all of its work.
        """
        key = self, factor, str(like.device), str(like.dtype)
        if (found := _constants.get(key)) is None:
            mean, std = (like.new_tensor(each) * factor for each in (self.mean, self.std))
            found = _constants[key] = mean.view(3, 1, 1), std.view(3, 1, 1)
        return found

    def floats(self, values: Array, arithmetic: Arithmetic) -> NDArray[np.float32]:
        """Return bytes ``(..., 3, rows, columns)`` as float32, as a model's own processor does.

        `apply` is for tensors on any device, and equal to ``fused``; without a normalization, to
        ``rescaled``.
        """
        if arithmetic == "fused":  # 256 values for each colour, but this is faster than a table
            mean, std = _fused(self)
            floats: NDArray[np.float32] = values.astype(np.float32)
            floats -= mean[:, None, None]
            floats /= std[:, None, None]
            return floats
        table, out = _table(self, arithmetic), np.empty(values.shape, np.float32)
        for colour, row in enumerate(table):
            out[..., colour, :, :] = row.take(values[..., colour, :, :])
        return out


_constants: dict[tuple[Normalization, float, str, str], tuple[Any, Any]] = {}


@functools.lru_cache(maxsize=16)
def _fused(of: Normalization) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    inverse = np.float32(1.0 / of.rescale_factor)
    return np.array(of.mean, np.float32) * inverse, np.array(of.std, np.float32) * inverse


@functools.lru_cache(maxsize=16)
def _table(of: Normalization, arithmetic: Arithmetic) -> NDArray[np.float32]:
    """Return the float of each byte, ``(3, 256)``."""
    if arithmetic == "rescaled":
        row = np.arange(256, dtype=np.float32) * np.float32(of.rescale_factor)
        return np.stack([row] * 3)
    row = (np.arange(256, dtype=np.float64) * of.rescale_factor).astype(np.float32)
    mean, std = np.array(of.mean, np.float32), np.array(of.std, np.float32)
    return (row - mean[:, None]) / std[:, None]
