"""Images as files again, for an engine that reads fewer formats or smaller images."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import numpy as np

from afferent.media.decoded import Array, Media
from afferent.media.families.family import MediaTokens
from afferent.media.families.images import decoded_image, image_header
from afferent.media.families.plain import PlainFamily
from afferent.media.families.plan import FeaturePlan
from afferent.media.headers.probe import MediaHeader
from afferent.media.transforms.resize import Resampling
from afferent.types import Modality, TensorSpec

FILE: Final = "file"
"""Name of the bytes among the features."""
FileFormat = Literal["png", "jpeg"]

_LANCZOS: Final = 1
"""Pillow's number of it."""
_HEAD_NBYTES: Final = 4096


class ReencodedFamily(PlainFamily, tag="reencoded", frozen=True, kw_only=True):
    """Family whose features are a file: the image upright, as RGB, transparency over white.

    Attributes:
        format: Format of the file. A PNG has the pixels of the image; a JPEG has a quality of 95
            and full colour resolution.
        max_pixels: Larger images are made smaller, with the same ratio of their sides; 0: none.
    """

    format: FileFormat = "png"
    max_pixels: int = 0
    resampling: Resampling = Resampling(_LANCZOS)

    @property
    def tokens(self) -> Mapping[Modality, MediaTokens]:
        return {Modality.IMAGE: MediaTokens(marker=0, embed=0)}

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of the file's image, in pixels."""
        if not self.max_pixels or width * height <= self.max_pixels:
            return width, height
        part = math.sqrt(self.max_pixels / (width * height))
        return max(math.floor(width * part), 1), max(math.floor(height * part), 1)

    def plan(self, header: MediaHeader) -> FeaturePlan:
        """Return an upper bound: the size of a file is known when it is written."""
        image = image_header(header)
        width, height = self.size(image.width, image.height)
        pixels_nbytes = 3 * width * height
        if self.format == "png":  # a byte more a row; deflate and its chunks add 0.2 %
            return _plan(_HEAD_NBYTES + (pixels_nbytes + height) * 257 // 256)
        return _plan(_HEAD_NBYTES + pixels_nbytes * 4 // 3)  # noise at this quality: 1.07 times

    def load(self) -> None:
        super().load()
        _encoders()

    def making(self, media: Media) -> tuple[FeaturePlan, Callable[[Mapping[str, Array]], None]]:
        """Encode an image; return the exact plan, and the function that writes the features."""
        pixels = decoded_image(media).pixels
        height, width = pixels.shape[:2]
        resized = self.resampling.resize(pixels, *self.size(width, height))
        file = np.frombuffer(_encoders()[self.format](np.ascontiguousarray(resized)), np.uint8)

        def write(out: Mapping[str, Array]) -> None:
            np.copyto(out[FILE], file)

        return _plan(len(file)), write

    def process(self, media: Media, out: Mapping[str, Array]) -> None:
        _, write = self.making(media)
        write(out)


def _plan(nbytes: int) -> FeaturePlan:
    return FeaturePlan({FILE: TensorSpec("uint8", (nbytes,))}, ())


def _encoders() -> Mapping[str, Callable[[Array], bytes | bytearray]]:
    # Imported here and by name: frontends and the supervisor have this module, and encode nothing.
    module: Any = importlib.import_module("afferent.media.transforms.image_files")
    encoders: Mapping[str, Callable[[Array], bytes | bytearray]] = module.ENCODERS
    return encoders
