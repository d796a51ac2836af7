"""From the bytes of an image file to RGB pixels, as a person sees them. Runs in workers only."""

from __future__ import annotations

import io
import struct

from PIL import Image

from afferent.errors import InvalidMedia
from afferent.ingest.probe import FORMATS, ImageHeader

Image.MAX_IMAGE_PIXELS = None  # the header was checked against our own limits


# What Pillow's decoders raise on bytes that are not what they should be.
_BROKEN = (
    *(OSError, ValueError, SyntaxError, EOFError, struct.error, IndexError, KeyError, TypeError),
    *(OverflowError, ZeroDivisionError, AttributeError, Image.DecompressionBombError),
)

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What brings an image of each EXIF orientation upright."""


def decode_image(data: memoryview, header: ImageHeader) -> Image.Image:
    """Decode the first frame; orientation applied, transparency composited over white.

    Args:
        data: The file.
        header: What `afferent.ingest.probe` read from it.

    Raises:
        InvalidMedia: The data are truncated or corrupt, or differ from their header.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            image.load()
            pixels = _to_rgb(image)
    except _BROKEN as error:
        raise InvalidMedia(
            "the image can't be decoded: its data are truncated or corrupt"
        ) from error
    if header.orientation in _TURNS:
        pixels = pixels.transpose(_TURNS[header.orientation])
    if pixels.size != (header.width, header.height):
        raise InvalidMedia("the image's size is not what its header says")
    return pixels


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        image = image.point(lambda value: value / 256.0, "L")
    if image.mode in ("LA", "PA", "RGBA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        canvas = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        canvas.alpha_composite(layer)
        image = canvas
    return image if image.mode == "RGB" else image.convert("RGB")
