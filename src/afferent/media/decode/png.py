"""PNG: RGB and RGBA of 8 bits, the common kinds, decoded by the Rust crate `png`."""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
from kornia_rs.io import decode_image_png_u8
from PIL import Image

from afferent.media.decode.pillow import copy_rgb
from afferent.media.decoded import Pixels
from afferent.media.headers.header import png_chunks

_RGB, _RGBA = 2, 6
_TRANSPARENT: Final = b"tRNS"
_LAST_CHUNK: Final = b"\0\0\0\0IEND\xaeB`\x82"
# No effect on the pixels of the first frame, and each can grow: decoders have allocated 700 MB for
# a profile of 0.7 MB.
_METADATA: Final = frozenset(
    {b"iCCP", b"zTXt", b"iTXt", b"tEXt", b"eXIf", b"sPLT", b"acTL", b"fcTL", b"fdAT"}
)


def decode(data: memoryview, height: int, width: int) -> Pixels | None:
    """Return the pixels; ``None`` for other kinds, or if only Pillow can decide."""
    bits, colours = data[24], data[25]
    if bits != 8 or colours not in (_RGB, _RGBA):
        return None
    if any(kind == _TRANSPARENT for kind, _, _ in png_chunks(data)):
        return None
    mode = "rgb" if colours == _RGB else "rgba"
    try:
        # The decoder refuses another size than the file's own.
        out: Pixels = decode_image_png_u8(bytes(without_metadata(data)), (height, width), mode)
    except Exception:  # it has no exception type of its own
        return None
    if mode == "rgb":
        return out
    pixels = np.empty((height, width, 3), np.uint8)
    copy_rgb(Image.frombuffer("RGBA", (width, height), out, "raw", "RGBA", 0, 1), pixels)
    return pixels


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
    while bytes(data[end + 4 : end + 8]) == b"IDAT":
        (length,) = struct.unpack_from(">I", data, end)
        end += length + 12
    kept.append(data[pixels_start:end])
    if end < len(data):
        kept.append(_LAST_CHUNK)
    return data if sum(map(len, kept)) == len(data) else b"".join(kept)
