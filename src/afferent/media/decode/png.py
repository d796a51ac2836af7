"""PNG: grey, RGB and RGBA of 8 bits, the common kinds: libdeflate inflates them, and the compiled
part undoes their filters.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final
from zlib import crc32

import numpy as np
from imagecodecs import DeflateError, deflate_decode
from PIL import Image

from afferent.media import native
from afferent.media.decode.pillow import copy_rgb
from afferent.media.decoded import Pixels
from afferent.media.headers.header import png_chunks

_MODES: Final = {0: "L", 2: "RGB", 6: "RGBA"}
_HARMLESS: Final[dict[bytes, int | None]] = {
    b"IHDR": 13,
    b"gAMA": 4,
    b"cHRM": 32,
    b"sRGB": 1,
    b"pHYs": 9,
    **dict.fromkeys((b"PLTE", b"sBIT", b"bKGD", b"hIST", b"tIME")),
}
"""Chunks without effect on the pixels, and the length with which Pillow accepts each."""
_LAST_CHUNK: Final = b"\0\0\0\0IEND\xaeB`\x82"
_BEHIND_NBYTES: Final = 3
"""Bytes behind the last row that the compiled part reads."""
# No effect on the pixels of the first frame, and each can grow: decoders have allocated 700 MB for
# a profile of 0.7 MB.
_METADATA: Final = frozenset(
    {b"iCCP", b"zTXt", b"iTXt", b"tEXt", b"eXIf", b"sPLT", b"acTL", b"fcTL", b"fdAT"}
)


def decode(data: memoryview, height: int, width: int) -> Pixels | None:
    """Return the pixels; ``None`` for other kinds, or if only Pillow can decide."""
    bits, colours, *methods = data[24:29]
    mode = _MODES.get(colours)
    if native.compiled is None or bits != 8 or mode is None or any(methods):
        return None
    if (compressed := _compressed(data)) is None:
        return None
    pixels = np.empty((height, width, len(mode)), np.uint8)
    rows = np.empty(pixels.size + height + _BEHIND_NBYTES, np.uint8)
    try:
        inflated = deflate_decode(compressed, out=rows)  # type: ignore[arg-type]  # any buffer
        if len(inflated) != pixels.size + height:
            return None
        native.compiled.unfilter(rows, pixels, native.variant)
    except (DeflateError, ValueError):  # a row with an unknown filter
        return None
    if mode == "RGB":
        return pixels
    del rows, inflated
    made: Pixels = np.empty((height, width, 3), np.uint8)
    copy_rgb(Image.frombuffer(mode, (width, height), pixels, "raw", mode, 0, 1), made)
    return made


def _compressed(data: memoryview) -> bytearray | None:
    """Return what the pixels are inflated from; ``None`` if only Pillow can decide."""
    end, seen = 33, set()
    for kind, start, length in [(b"IHDR", 16, 13), *png_chunks(data)]:
        end = start + length + 4
        if kind in _METADATA:
            continue
        is_first, expected = kind not in seen, _HARMLESS.get(kind, -1)
        is_intact = bytes(data[end - 4 : end]) == crc32(data[start - 4 : end - 4]).to_bytes(4)
        if expected not in (None, length) or not (is_first and is_intact):
            return None
        seen.add(kind)
    compressed = bytearray()
    for start, length in _chunks_of_pixels(data, end):
        compressed += data[start : start + length]
    return compressed


def _chunks_of_pixels(data: memoryview, at: int) -> Iterator[tuple[int, int]]:
    """Yield ``(start of its data, length)`` of each chunk of pixels, of which the first is at
    ``at``.
    """
    while bytes(data[at + 4 : at + 8]) == b"IDAT":
        (length,) = struct.unpack_from(">I", data, at)
        yield at + 8, length
        at += length + 12


def without_metadata(data: memoryview) -> bytes | memoryview:
    """Return the file unchanged if it has nothing to remove, else a copy.

    The copy has no texts, profiles, EXIF, animation or data after the pixels.
    """
    kept: list[bytes | memoryview] = [data[:33]]
    end = pixels_start = 33
    for kind, start, length in png_chunks(data):
        end = pixels_start = start + length + 4
        if kind not in _METADATA:
            kept.append(data[start - 8 : end])
    for start, length in _chunks_of_pixels(data, end):
        end = start + length + 4
    kept.append(data[pixels_start:end])
    if end < len(data):
        kept.append(_LAST_CHUNK)
    is_same = sum(map(len, kept)) == len(data) and bytes(data[end:]) in (b"", _LAST_CHUNK)
    return data if is_same else b"".join(kept)
