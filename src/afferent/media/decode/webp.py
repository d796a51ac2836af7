"""WebP: still images by libwebp; without transparency directly into the pixels."""

from __future__ import annotations

from typing import Final

import numpy as np
from imagecodecs import webp_decode
from PIL import Image

from afferent.media.decode.pillow import copy_rgb
from afferent.media.decoded import Pixels

_ANIMATED: Final = 0x02  # in the flags of `VP8X`
_TRANSPARENT: Final = 0x10  # in the fifth byte of `VP8L`


def decode(data: memoryview, height: int, width: int) -> Pixels | None:
    """Return the pixels; ``None`` if the file is animated, or only Pillow can decide."""
    kind = bytes(data[12:16])
    if kind == b"VP8X" and data[20] & _ANIMATED:
        return None
    # `VP8X` has a flag for transparency too, but its content may differ.
    has_alpha = kind == b"VP8X" or (kind == b"VP8L" and bool(data[24] & _TRANSPARENT))
    pixels: Pixels = np.empty((height, width, 3), np.uint8)
    out = np.empty((height, width, 4), np.uint8) if has_alpha else pixels
    try:
        # Any buffer is accepted, but not an array of another size than the frame.
        webp_decode(data, hasalpha=has_alpha, out=out)  # type: ignore[arg-type]
    except (ValueError, RuntimeError):
        return None
    if has_alpha:
        copy_rgb(Image.frombuffer("RGBA", (width, height), out, "raw", "RGBA", 0, 1), pixels)
    return pixels
