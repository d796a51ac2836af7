"""Normalization of colours, on the device of the engine's worker: until then they stay bytes."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Normalization(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Transformation ``(value * rescale_factor - mean) / std``, for each of red, green and blue."""

    rescale_factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def apply(self, values: Any) -> Any:
        """Return bytes ``(..., 3, rows, columns)`` as a float32 tensor on the same device."""
        scaled = values.float() * self.rescale_factor
        mean, std = (scaled.new_tensor(each).view(3, 1, 1) for each in (self.mean, self.std))
        return scaled.sub_(mean).div_(std)
