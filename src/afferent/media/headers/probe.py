"""Checks of an image's header against the limits, before the image is decoded."""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import pybase64
from msgspec import Struct

from afferent.config import Limits
from afferent.errors import InvalidMedia, MediaTooLarge, UnsupportedMedia
from afferent.media.headers.header import is_exact, read_header
from afferent.media.headers.image_format import Data, format_of
from afferent.media.headers.image_sizes import Size, read_sizes

_MIN_SIDE: Final = 2
TRANSPOSED: Final = (5, 6, 7, 8)
"""EXIF orientations that swap the sides."""


class ImageHeader(Struct, tag="image", frozen=True, array_like=True, forbid_unknown_fields=True):
    """``width`` and ``height`` in pixels, as a person sees the image: ``orientation`` applied.

    ``orientation`` is EXIF's, 1 to 8. It travels to the worker as the payload of the image's job.
    """

    width: int
    height: int
    orientation: int = 1


class VideoHeader(Struct, tag="video", frozen=True, array_like=True, forbid_unknown_fields=True):
    """``width`` and ``height`` in pixels as a person sees a frame, ``frames_per_s`` on average.

    ``num_frames`` is the container's claim, or the real count once the container has been walked.
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

    def num_samples(self, rate_hz: int) -> int:
        """Return the number of samples at another rate."""
        return -(-self.num_frames * rate_hz // self.sample_rate_hz)


@dataclass(frozen=True, slots=True)
class ImageBound:
    """Image whose exact header a worker reads. ``num_pixels`` are those of the largest image in the
    file.
    """

    num_pixels: int


@dataclass(frozen=True, slots=True)
class ForwardedHeader:
    """File that a server behind this one decodes. ``num_pixels`` are those of its largest image, or
    those of all frames of a video that came as images; 0: unknown.
    """

    num_pixels: int = 0


MediaHeader = ImageHeader | VideoHeader | AudioHeader


class Accepted(StrEnum):
    """Image files that a request may have."""

    DECODED = "decoded"
    """Files that are decoded here."""
    MEASURED = "measured"
    """Files of which the size alone is needed: also images with a side of one pixel."""
    KNOWN = "known"
    """Also images of these formats with a side of one pixel: a server behind this one decodes them.
    """
    ALL = "all"
    """Any file: a server behind this one decodes it, or refuses it."""


def probe_image(
    data: Data, limits: Limits, *, min_side: int = _MIN_SIDE
) -> ImageHeader | ImageBound:
    """Return the header of an image, or a bound for it; no pixel is decoded.

    Raises:
        UnsupportedMedia: The first bytes belong to no known format.
        InvalidMedia: The header is broken, or a side is shorter than ``min_side`` pixels.
        MediaTooLarge: Too many pixels, too long a side, or too extreme an aspect ratio.
    """
    _check_nbytes(data, limits)
    if not is_exact(format_of(data)):
        sizes = read_sizes(data)
        for size in sizes:
            check_size(*size, limits, min_side=min_side)
        return ImageBound(max(width * height for width, height in sizes))
    stored = read_header(data)
    check_size(stored.width, stored.height, limits, min_side=min_side)
    if stored.orientation is None:
        return ImageBound(stored.width * stored.height)
    return upright_header(stored.width, stored.height, stored.orientation)


def upright_header(width: int, height: int, orientation: int) -> ImageHeader:
    """Return the header of an image that is stored with these sides and this orientation."""
    if orientation in TRANSPOSED:
        width, height = height, width
    return ImageHeader(width, height, orientation)


def probe_accepted(
    data: Data, limits: Limits, accepted: Accepted
) -> ImageHeader | ImageBound | ForwardedHeader:
    """Return the header of an image: a `ForwardedHeader` if the file is forwarded unchanged.

    The size is within the limits as far as it is known.

    Raises:
        UnsupportedMedia: Its format is not accepted.
        InvalidMedia: The header is broken.
        MediaTooLarge: Too many pixels, too long a side, or too extreme an aspect ratio.
    """
    if accepted is Accepted.DECODED:
        return probe_image(data, limits)
    if accepted is Accepted.MEASURED:
        return probe_image(data, limits, min_side=1)
    _check_nbytes(data, limits)
    try:
        sizes = _sizes_of(data)
    except MediaTooLarge:
        raise
    except InvalidMedia:
        if accepted is Accepted.ALL:
            return ForwardedHeader()
        raise
    for size in sizes:
        _check_most(*size, limits)
    if min(map(min, sizes)) < _MIN_SIDE:
        return ForwardedHeader(max(width * height for width, height in sizes))
    return probe_image(data, limits)


def _sizes_of(data: Data) -> list[Size]:
    try:
        kind = format_of(data)
    except UnsupportedMedia as error:
        raise UnsupportedMedia(
            f"{error.message}; others are passed on with --media-formats all"
        ) from error
    if not is_exact(kind):
        return read_sizes(data)
    stored = read_header(data)
    if min(stored.width, stored.height) < 1:
        raise InvalidMedia(f"the image is {stored.width} x {stored.height} pixels")
    return [(stored.width, stored.height)]


_COMMA: Final = re.compile(rb",")


def probe_frames(text: Data, limits: Limits) -> Iterator[Size]:
    """Yield the size of each frame of a video that came as images in base64, with commas between
    them, as in ``data:video/jpeg;base64,A,B``.

    Raises:
        InvalidMedia: A frame is no image with a known size.
        MediaTooLarge: There are more frames, or more pixels, than a video may have.
    """
    view, start, num_frames, num_pixels = memoryview(text), 0, 0, 0
    max_frame_chars = limits.max_image_nbytes * 4 // 3 + 4
    while start <= len(view):
        num_frames += 1
        if num_frames > limits.max_sampled_frames:
            raise MediaTooLarge(
                f"the video has more than {limits.max_sampled_frames} frames (--max-sampled-frames)"
            )
        comma = _COMMA.search(view, start, start + max_frame_chars)
        end = comma.start() if comma else len(view)
        if end - start > max_frame_chars:
            raise MediaTooLarge(
                f"a frame of the video has more than {limits.max_image_nbytes} bytes "
                "(--max-image-nbytes)"
            )
        try:
            frame = pybase64.b64decode(view[start:end], validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidMedia("the base64 of a frame of the video is malformed") from error
        start = end + 1
        size = max(_sizes_of(frame), key=lambda each: each[0] * each[1])
        num_pixels += size[0] * size[1]
        if size[0] * size[1] > limits.max_frame_pixels:
            raise MediaTooLarge(
                f"a frame of the video is {size[0]} x {size[1]} pixels; at most "
                f"{limits.max_frame_pixels} in all are accepted (--max-frame-pixels)"
            )
        if 3 * num_pixels > limits.max_video_decoded_nbytes:
            raise MediaTooLarge(
                f"the video's frames have more than {limits.max_video_decoded_nbytes} bytes as RGB "
                "(--max-video-decoded-nbytes)"
            )
        yield size


def _check_nbytes(data: Data, limits: Limits) -> None:
    if len(data) > limits.max_image_nbytes:
        raise MediaTooLarge(
            f"the image has {len(data)} bytes; at most {limits.max_image_nbytes} are accepted "
            "(--max-image-nbytes)"
        )


def check_size(width: int, height: int, limits: Limits, *, min_side: int = _MIN_SIDE) -> None:
    """Refuse sizes that no decoder should see."""
    if min(width, height) < min_side:
        raise InvalidMedia(
            f"the image is {width} x {height} pixels; a side needs at least {min_side}"
        )
    _check_most(width, height, limits)


def _check_most(width: int, height: int, limits: Limits) -> None:
    if width * height > limits.max_image_pixels:
        raise MediaTooLarge(
            f"the image is {width} x {height} pixels; at most {limits.max_image_pixels} "
            "in all are accepted (--max-image-pixels)"
        )
    if max(width, height) > limits.max_image_side:
        raise MediaTooLarge(
            f"the image is {width} x {height} pixels; a side may have {limits.max_image_side} "
            "(--max-image-side)"
        )
    if max(width, height) > limits.max_image_aspect * min(width, height):
        raise MediaTooLarge(
            f"the image is {width} x {height} pixels; its sides may differ by a factor of "
            f"{limits.max_image_aspect} (--max-image-aspect)"
        )
