"""JPEG: decoded by libjpeg-turbo directly into the pixels, unless it warns."""

from __future__ import annotations

import re
import struct
from typing import Final

import numpy as np
import simplejpeg  # type: ignore[import-untyped]

from afferent.errors import InvalidMedia
from afferent.media.decoded import Pixels
from afferent.media.headers.header import jpeg_segments

_MAX_SCANS: Final = 100
_MAX_SCANNED_PIXELS: Final = 1_000_000_000
"""Limit of scans times pixels.

Encoders write a dozen scans. One of 10 bytes costs up to 80 ms in an image of 64 million pixels, so
that a file of a kilobyte could take seconds.
"""
_MAX_SEGMENTS: Final = 4096

# All bytes between two markers are data, including fill bytes, stuffed bytes and restarts.
_MARKER: Final = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")
_END, _SCAN, _COMMENT = 0xD9, 0xDA, 0xFE
# Not JFIF's and Adobe's segments, which define the colours.
_METADATA: Final = frozenset({_COMMENT, *range(0xE1, 0xEE), 0xEF})


def decode(data: memoryview, height: int, width: int) -> Pixels | None:
    """Return the pixels; ``None`` leaves the file to Pillow.

    Raises:
        InvalidMedia: More scans than any honest file has, for its size.
    """
    _check_scans(data, height * width)
    try:
        *size, colours, _ = simplejpeg.decode_jpeg_header(data)
        if size != [height, width] or colours not in ("Gray", "RGB", "YCbCr"):
            return None
        pixels = np.empty((height, width, 3), np.uint8)
        # Strict: libjpeg's warnings, as of a truncated file, are errors.
        simplejpeg.decode_jpeg(data, "RGB", buffer=pixels, strict=True)
    except (ValueError, RuntimeError):
        return None
    return pixels


def without_metadata(data: memoryview) -> bytes:
    """Return a copy without EXIF, profiles, thumbnails and comments, which are slow in Pillow."""
    kept: list[bytes | memoryview] = [data[:2]]
    end = 2
    for marker, start, length in jpeg_segments(data):
        end = start + length
        if marker not in _METADATA:
            kept.append(data[start - 4 : end])
    return b"".join((*kept, data[end:]))


def _check_scans(data: memoryview, num_pixels: int) -> None:
    at, num_scans = 2, 0
    for _ in range(_MAX_SEGMENTS):
        found = _MARKER.search(data, at)
        if found is None or found.end() + 2 > len(data):
            return
        marker = data[found.end() - 1]
        if marker == _END:
            return
        num_scans += marker == _SCAN
        if num_scans > _MAX_SCANS or num_scans * num_pixels > _MAX_SCANNED_PIXELS:
            raise InvalidMedia(f"the image is written in too many scans ({num_scans}) for its size")
        (length,) = struct.unpack_from(">H", data, found.end())
        at = found.end() + length
    raise InvalidMedia(f"the image's JPEG file has more than {_MAX_SEGMENTS} segments")
