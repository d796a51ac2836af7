"""The header of an image file: its size and orientation, in bounded time.

A general decoder walks a header to its end, however many segments an attacker puts there; this runs
on an event loop, so it gives up early instead. It decodes nothing and allocates next to nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from PIL import Image
from PIL.ExifTags import Base

from afferent.errors import InvalidMedia, UnsupportedMedia

_MAX_SEGMENTS: Final = 2048
_MAX_FILL_NBYTES: Final = 16
_MAX_EXIF_NBYTES: Final = 64 << 10

# Start-of-frame markers: C0 to CF without DHT, JPG and DAC.
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ALONE: Final = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length
_END_OF_HEADER: Final = frozenset({0xD9, 0xDA})


@dataclass(frozen=True, slots=True)
class StoredSize:
    """``width`` and ``height`` in pixels as stored; ``orientation`` is EXIF's, 1 to 8."""

    width: int
    height: int
    orientation: int = 1


def read_header(data: bytes) -> StoredSize:
    """The header of a JPEG, PNG, WebP or GIF file.

    Raises:
        UnsupportedMedia: The first bytes are those of none of them.
        InvalidMedia: The header is broken, or longer than any honest one.
    """
    try:
        if data.startswith(b"\xff\xd8\xff"):
            return _read_jpeg(data)
        if data.startswith(b"\x89PNG\r\n\x1a\n"):
            return _read_png(data)
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return _read_webp(data)
        if data.startswith((b"GIF87a", b"GIF89a")):
            return StoredSize(*struct.unpack_from("<HH", data, 6))
    except (struct.error, IndexError) as error:
        raise InvalidMedia("the image's header is cut off") from error
    raise UnsupportedMedia("the bytes are not those of a JPEG, PNG, WebP or GIF image")


def _read_jpeg(data: bytes) -> StoredSize:
    orientation = 1
    for marker, start, length in _jpeg_segments(data):
        if marker == 0xE1 and data[start : start + 6] == b"Exif\0\0":
            orientation = _orientation(data[start + 6 : start + length])
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, start + 1)
            return StoredSize(width, height, orientation)
    raise InvalidMedia("the image's JPEG header names no size")


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """``(marker, start of its data, length)`` of each segment before the pixels."""
    at = 2
    for _ in range(_MAX_SEGMENTS):
        if data[at] != 0xFF:
            raise InvalidMedia("the image's JPEG header is broken")
        fill = 1
        while data[at + fill] == 0xFF:
            fill += 1
            if fill > _MAX_FILL_NBYTES:
                raise InvalidMedia("the image's JPEG header is padded beyond reason")
        marker = data[at + fill]
        at += fill + 1
        if marker in _END_OF_HEADER:
            return
        if marker in _ALONE:
            continue
        (length,) = struct.unpack_from(">H", data, at)
        if length < 2:
            raise InvalidMedia("the image's JPEG header is broken")
        yield marker, at + 2, length - 2
        at += length
    raise InvalidMedia("the image's JPEG header has too many segments")


def _read_png(data: bytes) -> StoredSize:
    (length,) = struct.unpack_from(">I", data, 8)
    if data[12:16] != b"IHDR" or length != 13:
        raise InvalidMedia("the image's PNG header is broken")
    width, height = struct.unpack_from(">II", data, 16)
    return StoredSize(width, height, _png_orientation(data))


def _png_orientation(data: bytes) -> int:
    """Of the ``eXIf`` chunk, which stands before the pixels where there is one."""
    at = 33
    for _ in range(_MAX_SEGMENTS):
        (length,) = struct.unpack_from(">I", data, at)
        kind = data[at + 4 : at + 8]
        if kind == b"eXIf":
            return _orientation(data[at + 8 : at + 8 + length])
        if kind in (b"IDAT", b"IEND"):
            return 1
        at += length + 12
    raise InvalidMedia("the image's PNG header has too many chunks")


def _read_webp(data: bytes) -> StoredSize:
    kind = data[12:16]
    if kind == b"VP8 ":
        if data[23:26] != b"\x9d\x01\x2a":
            raise InvalidMedia("the image's WebP header is broken")
        width, height = struct.unpack_from("<HH", data, 26)
        return StoredSize(width & 0x3FFF, height & 0x3FFF)
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        if data[20] != 0x2F:
            raise InvalidMedia("the image's WebP header is broken")
        return StoredSize((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8X":
        if len(data) < 30:
            raise InvalidMedia("the image's header is cut off")
        width = int.from_bytes(data[24:27], "little") + 1
        height = int.from_bytes(data[27:30], "little") + 1
        has_exif = bool(data[20] & 0x08)
        return StoredSize(width, height, _webp_orientation(data) if has_exif else 1)
    raise InvalidMedia("the image's WebP header is broken")


def _webp_orientation(data: bytes) -> int:
    """Of the ``EXIF`` chunk, which stands behind the pixels; chunks are skipped by their length."""
    at = 12
    for _ in range(_MAX_SEGMENTS):
        if at + 8 > len(data):
            return 1
        (length,) = struct.unpack_from("<I", data, at + 4)
        if data[at : at + 4] == b"EXIF":
            return _orientation(data[at + 8 : at + 8 + length].removeprefix(b"Exif\0\0"))
        at += 8 + length + length % 2
    raise InvalidMedia("the image's WebP header has too many chunks")


def _orientation(exif: bytes) -> int:
    """EXIF's orientation; 1 where there is none, or none that makes sense."""
    if len(exif) > _MAX_EXIF_NBYTES:
        return 1
    parsed = Image.Exif()
    try:
        parsed.load(b"Exif\0\0" + exif)
        found = parsed.get(Base.Orientation, 1)
    except Exception:  # the parser raises whatever the bytes lead it to
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1
