"""Preparation of GIF files for Pillow."""

from __future__ import annotations

import struct
from typing import Final

from afferent.errors import InvalidMedia

_MAX_BLOCKS: Final = 1 << 16
_IMAGE, _EXTENSION, _END = 0x2C, 0x21, 0x3B
_CONTROL: Final = 0xF9


def without_metadata(data: memoryview) -> bytes:
    """Return a copy without comments and the like: Pillow makes an object of each of their blocks.

    Raises:
        InvalidMedia: The header is broken, or the first frame is larger than the image.
    """
    try:
        at = screen_end = 13 + _table_nbytes(data[10])
        control = data[:0]
        for _ in range(_MAX_BLOCKS):
            if data[at] == _IMAGE:
                _check_frame(data, at)
                return b"".join((data[:screen_end], control, data[at:]))
            if data[at] == _END:
                break
            if data[at] != _EXTENSION:
                at += 1  # as Pillow does
                continue
            start, at = at, _end_of_extension(data, at)
            if data[start + 1] == _CONTROL:
                control = data[start:at]
    except (struct.error, IndexError) as error:
        raise InvalidMedia("the image's header is cut off") from error
    raise InvalidMedia("the image's GIF file has no frame")


def _table_nbytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _end_of_extension(data: memoryview, start: int) -> int:
    at = start + 2
    for _ in range(_MAX_BLOCKS):
        if data[at] == 0:
            return at + 1
        at += data[at] + 1
    raise InvalidMedia("the image's GIF header has too many blocks")


def _check_frame(data: memoryview, at: int) -> None:
    """Refuse a frame larger than the image: Pillow would allocate its size at once."""
    width, height = struct.unpack_from("<HH", data, 6)
    left, top, frame_width, frame_height = struct.unpack_from("<4H", data, at + 1)
    if left + frame_width > width or top + frame_height > height:
        raise InvalidMedia("the image's first frame is larger than the image")
