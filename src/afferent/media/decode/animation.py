"""Animated GIF and WebP files as videos: Pillow composes their frames.

A frame has a duration of its own, and the models' rules for sampling count frames of equal length.
So such a video has a grid of times, as fine as the durations require, and the frame of a time is
the one that a viewer shows then.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from afferent.config import Limits
from afferent.errors import InvalidMedia, UnsupportedMedia
from afferent.media.decode.pillow import as_broken, copy_rgb, open_image
from afferent.media.decode.reading import Bytes
from afferent.media.decode.video_limits import (
    check_decoded,
    check_length,
    check_pixels,
    too_many,
)
from afferent.media.decoded import Pixels
from afferent.media.headers.header import read_header
from afferent.media.headers.image_format import ImageFormat, format_of
from afferent.media.headers.probe import VideoHeader

_FORMATS: Final = (ImageFormat.GIF, ImageFormat.WEBP)
_LEAST_MS, _DEFAULT_MS = 10, 100
"""Browsers and FFmpeg show a frame with at most the first for as long as the second."""
_LEAST_SIDE: Final = 2
_MOST_BLOCKS: Final = 1 << 22
"""Blocks of a file; a GIF file of 512 MiB in full blocks has half as many."""
_BROKEN: Final = "the video can't be decoded: its data are truncated or corrupt"
_GIF_HEADER_NBYTES: Final = 13


def is_animation(data: Bytes) -> bool:
    """Whether the first bytes are those of a GIF or WebP file; it may have a single frame."""
    try:
        return format_of(data) in _FORMATS
    except UnsupportedMedia:
        return False


def open_animation(data: Bytes, limits: Limits) -> Animation:
    """Read the durations of all frames; frames are decoded on request.

    All frames count as decoded, because each one is drawn over those before it.

    Raises:
        InvalidMedia: The file is broken, or a frame lies outside of its canvas.
        MediaTooLarge: Longer, larger or of more frames than the limits allow.
    """
    kind, view = format_of(data), memoryview(data)
    try:
        read = _read_gif if kind is ImageFormat.GIF else _read_webp
        found = read(view, limits)
    except (IndexError, struct.error) as error:
        raise InvalidMedia(_BROKEN) from error
    if min(found.width, found.height) < _LEAST_SIDE:
        raise InvalidMedia(
            f"the video is {found.width} x {found.height} pixels; a side needs at least "
            f"{_LEAST_SIDE}"
        )
    shown_ms = [each if each > _LEAST_MS else _DEFAULT_MS for each in found.durations_ms]
    ends_ms = np.cumsum(shown_ms, dtype=np.int64)
    duration_ms = int(ends_ms[-1])
    check_length(len(shown_ms), duration_ms / 1000, limits)
    check_pixels(found.width, found.height, limits)
    check_decoded(len(shown_ms), found.width, found.height, limits)
    num_times = min(duration_ms // math.gcd(*shown_ms), limits.max_video_frames)
    header = VideoHeader(found.width, found.height, num_times, num_times * 1000 / duration_ms)
    return Animation(header, kind, found, ends_ms)


@dataclass(frozen=True, slots=True)
class _Found:
    """Content of a file.

    Attributes:
        durations_ms: Duration of each frame, as written there.
        pieces: Parts of the file from which Pillow decodes the same frames: without comments and
            the like, on which it could spend any time.
    """

    width: int
    height: int
    durations_ms: Sequence[int]
    pieces: Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class Animation:
    """Implement `afferent.media.decoded.Video`; a frame of ``header`` is a time of the grid."""

    header: VideoHeader
    _kind: ImageFormat
    _found: _Found
    _ends_ms: NDArray[np.int64]

    def shown_at(self, indices: Sequence[int]) -> list[int]:
        """Return the number of the file's own frame at each time of the grid, from 0 on."""
        times = np.asarray(indices, np.int64) * int(self._ends_ms[-1])
        ends = self._ends_ms * self.header.num_frames
        shown: list[int] = np.searchsorted(ends, times, side="right").tolist()
        return shown

    def frames(self, indices: Sequence[int]) -> Iterator[Pixels]:
        """Implement `afferent.media.decoded.Video.frames`."""
        size = self.header.width, self.header.height
        file = b"".join(self._found.pieces)
        with as_broken(self._kind, "video"), open_image(file, self._kind) as image:
            last = None
            for number in self.shown_at(indices):
                if number != last:
                    image.seek(number)
                    image.load()
                    if image.size != size:
                        raise InvalidMedia("the video's frames change their size")
                    pixels: Pixels = np.empty((size[1], size[0], 3), np.uint8)
                    copy_rgb(image, pixels)
                    last = number
                yield pixels


def _read_gif(data: memoryview, limits: Limits) -> _Found:
    """Read a GIF file up to its end mark, or to its end between two blocks."""
    width, height = struct.unpack_from("<HH", data, 6)
    at = _GIF_HEADER_NBYTES + _palette_nbytes(data[10])
    pieces = [data[:at]]
    durations: list[int] = []
    duration_ms, left = 0, _MOST_BLOCKS
    while at < len(data) and data[at] != 0x3B:
        start = at
        if data[at] == 0x2C:
            x, y, across, down, flags = struct.unpack_from("<4HB", data, at + 1)
            if not durations:  # as in Pillow, the canvas has space for the first frame
                width, height = max(width, x + across), max(height, y + down)
            if x + across > width or y + down > height:
                raise InvalidMedia("a frame lies outside of the video")
            at, left = _behind_blocks(data, at + 11 + _palette_nbytes(flags), left)
            pieces.append(data[start:at])
            durations.append(duration_ms)
            duration_ms = 0
            if len(durations) > limits.max_video_frames:
                raise too_many(limits)
        elif data[at] == 0x21:
            is_control = data[at + 1] == 0xF9
            at, left = _behind_blocks(data, at + 2, left)
            if is_control:
                (delay,) = struct.unpack_from("<H", data, start + 4)
                duration_ms = 10 * delay
                pieces.append(data[start:at])
        else:
            raise InvalidMedia(_BROKEN)
    if not durations:
        raise InvalidMedia("the video has no frames")
    return _Found(width, height, durations, pieces)


def _palette_nbytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _behind_blocks(data: memoryview, at: int, left: int) -> tuple[int, int]:
    """Return the offset behind a series of blocks, and the number of blocks that are left."""
    while length := data[at]:
        at += length + 1
        left = _one_less(left)
    return at + 1, left


def _read_webp(data: memoryview, limits: Limits) -> _Found:
    """Read a WebP file; one that is no animation has one frame."""
    if bytes(data[12:16]) == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
    else:
        stored = read_header(data)
        width, height = stored.width, stored.height
    durations: list[int] = []
    end = min(len(data), 8 + struct.unpack_from("<I", data, 4)[0])
    at, left = 12, _MOST_BLOCKS
    while at + 8 <= end:
        name, nbytes = struct.unpack_from("<4sI", data, at)
        left = _one_less(left)
        if at + 8 + nbytes > len(data):
            raise InvalidMedia(_BROKEN)
        if name == b"ANMF":
            durations.append(int.from_bytes(data[at + 20 : at + 23], "little"))
            if len(durations) > limits.max_video_frames:
                raise too_many(limits)
        at += 8 + nbytes + nbytes % 2
    return _Found(width, height, durations or [0], [data])


def _one_less(left: int) -> int:
    if not left:
        raise InvalidMedia("the video has too many blocks")
    return left - 1
