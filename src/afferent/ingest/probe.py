"""What an image's header says, before anything is decoded, and whether that is acceptable."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from afferent.config import Limits
from afferent.errors import InvalidMedia, MediaTooLarge
from afferent.ingest.header import read_header

_MIN_SIDE: Final = 2
_TRANSPOSED: Final = (5, 6, 7, 8)  # EXIF orientations that swap the sides


class ImageHeader(Struct, tag="image", frozen=True, array_like=True, forbid_unknown_fields=True):
    """``width`` and ``height`` in pixels, as a person sees the image: ``orientation`` applied.

    ``orientation`` is EXIF's, 1 to 8. It travels to the worker as the payload of the image's job.
    """

    width: int
    height: int
    orientation: int = 1


class VideoHeader(Struct, tag="video", frozen=True, array_like=True, forbid_unknown_fields=True):
    """``width`` and ``height`` in pixels as a person sees a frame, ``frames_per_s`` on average.

    A container claims its ``num_frames``; once it has been walked, they were counted.
    """

    width: int
    height: int
    num_frames: int
    frames_per_s: float


class AudioHeader(Struct, tag="audio", frozen=True, array_like=True, forbid_unknown_fields=True):
    """``num_frames`` samples of each channel; claimed by the file, or counted once decoded."""

    sample_rate_hz: int
    num_channels: int
    num_frames: int

    @property
    def duration_s(self) -> float:
        return self.num_frames / self.sample_rate_hz


MediaHeader = ImageHeader | VideoHeader | AudioHeader


def probe_image(data: bytes | memoryview, limits: Limits) -> ImageHeader:
    """What the header says; no pixel is decoded.

    Raises:
        UnsupportedMedia: The first bytes are not those of a format that we read.
        InvalidMedia: The header is broken, or a side is shorter than two pixels.
        MediaTooLarge: Too many pixels, too long a side, or too extreme an aspect ratio.
    """
    if len(data) > limits.max_image_nbytes:
        raise MediaTooLarge(
            f"the image has {len(data)} bytes; at most {limits.max_image_nbytes} are accepted"
        )
    stored = read_header(data)
    check_size(stored.width, stored.height, limits)
    if stored.orientation in _TRANSPOSED:
        return ImageHeader(stored.height, stored.width, stored.orientation)
    return ImageHeader(stored.width, stored.height, stored.orientation)


def check_size(width: int, height: int, limits: Limits) -> None:
    """Refuse sizes that no decoder should see."""
    if min(width, height) < _MIN_SIDE:
        raise InvalidMedia(f"the image is {width} x {height} pixels; a side needs at least 2")
    if width * height > limits.max_image_pixels:
        raise MediaTooLarge(
            f"the image is {width} x {height} pixels; at most {limits.max_image_pixels} "
            "in all are accepted"
        )
    if max(width, height) > limits.max_image_side:
        raise MediaTooLarge(
            f"the image is {width} x {height} pixels; a side may have {limits.max_image_side}"
        )
    if max(width, height) > limits.max_image_aspect * min(width, height):
        raise MediaTooLarge(
            f"the image is {width} x {height} pixels; its sides may differ by a factor of "
            f"{limits.max_image_aspect}"
        )
