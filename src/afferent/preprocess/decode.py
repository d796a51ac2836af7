"""From the bytes of an image file to RGB pixels, as a person sees them. Runs in workers only."""

from __future__ import annotations

import io

from PIL import Image, ImageOps, UnidentifiedImageError

from afferent.errors import InvalidMedia
from afferent.ingest.probe import FORMATS

Image.MAX_IMAGE_PIXELS = None  # the header was checked against our own limits


def decode_image(data: memoryview, *, width: int, height: int) -> Image.Image:
    """Decode the first frame; orientation applied, transparency composited over white.

    Args:
        data: The file.
        width: What `afferent.ingest.probe` read from the header, in pixels.
        height: Likewise.

    Raises:
        InvalidMedia: The data are truncated or corrupt, or differ from their header.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            image.load()
            upright = ImageOps.exif_transpose(image)
            pixels = _to_rgb(upright)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError) as error:
        raise InvalidMedia(
            "the image can't be decoded: its data are truncated or corrupt"
        ) from error
    if pixels.size != (width, height):
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
