"""Weights of neighbours in resizing: Pillow's, and torch's, in whole numbers.

Both use the same filters at the same positions. Pillow keeps 22 bits of each weight; torch as many
as let the largest fit in 16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Rule = Literal["pillow", "torchvision"]
"""Library whose weights are used."""

Table = tuple[NDArray[np.int32] | None, NDArray[np.int32] | None, int]
"""Table of weights; ``None``: nothing is weighed.

Its parts are the first neighbour of each output, ``(size,)``; their weights, ``(size, taps)``; and
the number of fraction bits.
"""

_Values = NDArray[np.float64]
_PILLOWS_BITS: Final = 22
_MOST_BITS: Final = 22
_LARGEST: Final = 1 << 15
_KEPT: Final = 64
AS_IT_IS: Final[Table] = (None, None, 0)


def _bilinear(at: _Values) -> _Values:
    return np.maximum(1.0 - np.abs(at), 0.0)


def _bicubic(at: _Values) -> _Values:
    x, a = np.abs(at), -0.5
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos(at: _Values) -> _Values:
    return np.where((at >= -3.0) & (at < 3.0), np.sinc(at) * np.sinc(at / 3.0), 0.0)


FILTERS: Final[dict[int, tuple[float, Callable[[_Values], _Values]]]] = {
    int(Image.Resampling.BILINEAR): (1.0, _bilinear),
    int(Image.Resampling.BICUBIC): (2.0, _bicubic),
    int(Image.Resampling.LANCZOS): (3.0, _lanczos),
}
"""Reach of each filter at its own size, and its function, by Pillow's number."""


@functools.lru_cache(maxsize=_KEPT)
def table(length: int, size: int, filter: int, rule: Rule) -> Table:
    """Return the table for ``size`` outputs of ``length`` inputs.

    Args:
        filter: Pillow's number: bilinear, bicubic or Lanczos.
        rule: Library whose weights are used.
    """
    if length == size:
        return AS_IT_IS
    reach, shape = FILTERS[filter]
    scale = length / size
    widened = max(scale, 1.0)
    centers = (np.arange(size) + 0.5) * scale
    starts = np.maximum((centers - reach * widened + 0.5).astype(np.int64), 0)
    ends = np.minimum((centers + reach * widened + 0.5).astype(np.int64), length)
    taps = int((ends - starts).max())
    places = starts[:, None] + np.arange(taps)
    weights = shape((places - centers[:, None] + 0.5) * (1.0 / widened))
    weights[places >= ends[:, None]] = 0.0
    # One after another, as both libraries add.
    weights /= np.add.accumulate(weights, axis=1)[:, -1:]
    bits = _PILLOWS_BITS if rule == "pillow" else _bits_of_16(float(weights.max()))
    whole = np.trunc(weights * (1 << bits) + np.copysign(0.5, weights)).astype(np.int32)
    return _within(starts, whole, length, bits)


def _bits_of_16(largest: float) -> int:
    """Return the largest number of fraction bits that lets the largest weight fit in 16 bits."""
    for bits in range(_MOST_BITS):
        if int(0.5 + largest * (1 << (bits + 1))) >= _LARGEST:
            return bits
    return _MOST_BITS


def _within(starts: NDArray[np.int64], weights: NDArray[np.int32], length: int, bits: int) -> Table:
    """Shift the neighbours at the end to lie within the input, with weights of 0."""
    taps = weights.shape[1]
    begin = np.minimum(starts, length - taps)
    shifts = (starts - begin)[:, None]
    places = np.arange(taps) - shifts
    moved = np.where(places >= 0, np.take_along_axis(weights, np.maximum(places, 0), 1), 0)
    return begin.astype(np.int32), np.ascontiguousarray(moved, np.int32), bits
