"""Pillow decoder: all modes of all formats, and the reference for the fast decoders."""

from __future__ import annotations

import io
import logging
from typing import Final

import numpy as np
from PIL import Image
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from afferent.errors import AfferentError, InvalidMedia
from afferent.media.decoded import Pixels
from afferent.media.headers.header import ImageFormat

log = logging.getLogger(__name__)

Image.MAX_IMAGE_PIXELS = None  # the header was checked against our own limits

# By name, not by `Image.open`: no search, and no import of all the other formats in a worker.
_FILES: Final[dict[ImageFormat, type[ImageFile]]] = {
    ImageFormat.JPEG: JpegImageFile,
    ImageFormat.PNG: PngImageFile,
    ImageFormat.WEBP: WebPImageFile,
    ImageFormat.GIF: GifImageFile,
}

_BAND: Final = 256  # rows


def decode_into(data: bytes | memoryview, kind: ImageFormat, pixels: Pixels) -> None:
    """Fill ``pixels`` with the first frame.

    Raises:
        InvalidMedia: The data are truncated or corrupt, or of another size.
    """
    try:
        _decode_into(data, kind, pixels)
    except (AfferentError, MemoryError):
        raise
    except Exception as error:  # decoders raise a dozen types, and new versions add some
        log.info("an image is broken", extra={"format": kind, "error": type(error).__name__})
        raise InvalidMedia(
            "the image can't be decoded: its data are truncated or corrupt"
        ) from error


def _decode_into(data: bytes | memoryview, kind: ImageFormat, pixels: Pixels) -> None:
    height, width, _ = pixels.shape
    with _FILES[kind](io.BytesIO(data)) as image:
        if image.size != (width, height):
            raise InvalidMedia("the image's size is not what its header says")
        image.load()
        copy_rgb(image, pixels)


def copy_rgb(image: Image.Image, pixels: Pixels) -> None:
    """Copy an image of any mode as RGB over white, in bands: no second image is allocated."""
    for top in range(0, image.height, _BAND):
        bottom = min(top + _BAND, image.height)
        band = image.crop((0, top, image.width, bottom))
        if band.mode.startswith("I;16"):
            _copy_grey16(band, pixels[top:bottom])
        else:
            pixels[top:bottom] = np.asarray(_over_white(band))


def _over_white(image: Image.Image) -> Image.Image:
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        if layer.getchannel("A").getextrema() != (255, 255):
            canvas = Image.new("RGBA", layer.size, (255, 255, 255, 255))
            canvas.alpha_composite(layer)
            layer = canvas
        image = layer
    return image if image.mode == "RGB" else image.convert("RGB")


def _copy_grey16(image: Image.Image, pixels: Pixels) -> None:
    """Copy the upper byte, as for 16-bit RGB.

    Pillow's own conversion clips all values above 255, which makes an image white.
    """
    values = np.asarray(image)
    grey = (values >> 8).astype(np.uint8)
    if "transparency" in image.info:
        grey[values == image.info["transparency"]] = 255
    pixels[...] = grey[..., None]
