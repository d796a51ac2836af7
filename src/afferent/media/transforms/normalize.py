"""Normalization of colours, on the device of the engine's worker: until then they stay bytes."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Normalization(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Transformation ``(value * rescale_factor - mean) / std``, for each of red, green and blue.

    The factor is applied to mean and deviation, as torchvision's processors of `transformers` do
    it: so the results have the same bits as theirs.
    """

    rescale_factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def apply(self, values: Any) -> Any:
        """Return bytes ``(..., 3, rows, columns)`` as a float32 tensor on the same device."""
        floats, inverse = values.float(), 1.0 / self.rescale_factor
        mean, std = (floats.new_tensor(each) * inverse for each in (self.mean, self.std))
        return floats.sub_(mean.view(3, 1, 1)).div_(std.view(3, 1, 1))
