"""Estimate of an engine's memory for media that it processes itself. Pure."""

from __future__ import annotations

from typing import Final

from afferent.items.item import ReceivedItem
from afferent.media.headers.probe import ForwardedHeader, ImageBound, ImageHeader
from afferent.types import Modality

_NBYTES_A_PIXEL: Final = 3 * 4
"""Three channels of float32, before an image is resized to the model's size."""
_GROWTH: Final = {Modality.IMAGE: 32, Modality.VIDEO: 64, Modality.AUDIO: 16}
"""Ratio of tensor bytes to file bytes if no header gives more: JPEG, 32 frames of H.264, MP3."""


def tensor_nbytes(item: ReceivedItem) -> int:
    """Estimate the bytes of the tensors that an engine makes of an item.

    For an image with known sides, and for a video of such images, it is the maximum; for other
    items it follows from the file size.
    """
    match item.header:
        case ImageHeader(width=width, height=height):
            return width * height * _NBYTES_A_PIXEL
        case ImageBound(num_pixels) | ForwardedHeader(num_pixels) if num_pixels:
            return num_pixels * _NBYTES_A_PIXEL
    return _GROWTH[item.modality] * (item.raw.nbytes if item.raw is not None else 0)
