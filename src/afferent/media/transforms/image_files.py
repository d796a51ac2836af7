"""Encoders of image files; workers only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import simplejpeg  # type: ignore[import-untyped]
from imagecodecs import png_encode

from afferent.media.decoded import Pixels

_PNG_LEVEL: Final = 1
_JPEG: Final = {"quality": 95, "colorspace": "RGB", "colorsubsampling": "444"}

ENCODERS: Final[Mapping[str, Callable[[Pixels], bytes | bytearray]]] = {
    "png": partial(png_encode, level=_PNG_LEVEL),
    "jpeg": partial(simplejpeg.encode_jpeg, **_JPEG),
}
"""Functions from contiguous pixels to a file, by its format."""
