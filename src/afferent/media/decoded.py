"""Decoded media: input of a family's `process`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from afferent.media.headers.probe import AudioHeader, ImageHeader, VideoHeader

Array = NDArray[Any]
Pixels = NDArray[np.uint8]
"""``(height, width, 3)``, RGB, contiguous."""
MAX_TEXT_NBYTES: Final = 256 << 10
"""Most bytes of the text of a document's page, which is UTF-8."""


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """Image as people see it: upright, transparency over white."""

    pixels: Pixels

    @property
    def header(self) -> ImageHeader:
        return ImageHeader(self.pixels.shape[1], self.pixels.shape[0])


@dataclass(frozen=True, slots=True)
class DecodedAudio:
    """Audio clip; ``samples`` is mono, ``(num_frames,)`` float32, within about -1 and 1."""

    samples: NDArray[np.float32]
    sample_rate_hz: int

    @property
    def header(self) -> AudioHeader:
        return AudioHeader(self.sample_rate_hz, 1, len(self.samples))


@runtime_checkable
class Video(Protocol):
    """Video whose packets have been counted; its frames are decoded on request."""

    @property
    def header(self) -> VideoHeader:
        """Header with a counted ``num_frames``."""

    def frames(self, indices: Sequence[int]) -> Iterator[Pixels]:
        """Yield the frames with these indices, in ascending order; a repeated one comes again.

        Raises:
            InvalidMedia: One can't be decoded.
        """


Media = DecodedImage | DecodedAudio | Video
