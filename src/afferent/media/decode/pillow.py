"""Pillow decoder: all modes of all formats, and the reference for the fast decoders.

Of a file with several images, it decodes the first frame or page, the largest image of an icon, or
the primary image of a HEIC file, as Pillow does.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
from PIL import AvifImagePlugin, ExifTags, Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.IcoImagePlugin import IcoImageFile
from PIL.ImageFile import ImageFile
from PIL.Jpeg2KImagePlugin import Jpeg2KImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.PpmImagePlugin import PpmImageFile
from PIL.TgaImagePlugin import TgaImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from afferent.config import Limits
from afferent.errors import AfferentError, InvalidMedia, UnsupportedMedia
from afferent.media.decoded import Pixels
from afferent.media.headers.image_format import Data, ImageFormat, format_of
from afferent.media.headers.probe import TRANSPOSED, ImageHeader, check_size, upright_header

try:
    import pillow_heif
except ImportError:  # its wheels contain a library under the GPL, so some leave it out
    pillow_heif = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

Image.MAX_IMAGE_PIXELS = None  # the header was checked against our own limits

# By name, not by `Image.open`: no search, no import of all the other formats in a worker, and no
# registration of HEIC for the user's own process.
_FILES: Final[dict[ImageFormat, type[ImageFile]]] = {
    ImageFormat.JPEG: JpegImageFile,
    ImageFormat.PNG: PngImageFile,
    ImageFormat.WEBP: WebPImageFile,
    ImageFormat.GIF: GifImageFile,
    ImageFormat.AVIF: AvifImagePlugin.AvifImageFile,
    ImageFormat.TIFF: TiffImageFile,
    ImageFormat.BMP: BmpImageFile,
    ImageFormat.ICO: IcoImageFile,
    ImageFormat.JPEG2000: Jpeg2KImageFile,
    ImageFormat.PNM: PpmImageFile,
    ImageFormat.TGA: TgaImageFile,
}
if pillow_heif is not None:
    _FILES[ImageFormat.HEIC] = pillow_heif.HeifImageFile

_BAND: Final = 256  # rows


def prepare_worker() -> None:
    """Let libraries log nothing, and decode in one thread: there is a worker for each core."""
    logging.getLogger("PIL").setLevel(logging.CRITICAL + 1)
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    if pillow_heif is not None:
        options = pillow_heif.options
        options.DECODE_THREADS = 1
        options.THUMBNAILS = options.DEPTH_IMAGES = options.AUX_IMAGES = False


def open_image(data: Data, kind: ImageFormat) -> ImageFile:
    """Open a file of this format; no pixel is decoded.

    Raises:
        UnsupportedMedia: The library for it is not installed.
        Exception: Of any other type: the file is broken.
    """
    if kind not in _FILES:
        raise UnsupportedMedia(f"{kind} images are not read here: pillow-heif is not installed")
    return _FILES[kind](io.BytesIO(data))


def read_header(data: Data, limits: Limits) -> ImageHeader:
    """Return the header of an image as Pillow reads it.

    Raises:
        UnsupportedMedia: The first bytes belong to no known format.
        InvalidMedia: The header is broken, or a side is shorter than two pixels.
        MediaTooLarge: It exceeds the limits.
    """
    with as_broken(kind := format_of(data)), open_image(data, kind) as image:
        check_size(*image.size, limits)
        if isinstance(image, PngImageFile):
            image.load()  # the orientation may be behind the pixels
        orientation = _orientation_of(image)
        if isinstance(image, TiffImageFile):  # it is turned while it is loaded
            is_swapped = ExifTags.Base.Orientation in image.tag_v2
            size = image.size[:: 1 if is_swapped or orientation not in TRANSPOSED else -1]
            return ImageHeader(*size)
        return upright_header(*image.size, orientation)


def _orientation_of(image: ImageFile) -> int:
    """Return EXIF's orientation, 1 to 8; it may be of any type and value in the file."""
    try:
        found = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # Pillow, and vLLM, then show the image as it is
        return 1
    return next((each for each in range(2, 9) if each == found), 1)


def decode_into(data: Data, kind: ImageFormat, pixels: Pixels) -> None:
    """Fill ``pixels`` with the first frame.

    Raises:
        InvalidMedia: The data are truncated or corrupt, or of another size.
    """
    height, width, _ = pixels.shape
    with as_broken(kind), open_image(data, kind) as image:
        # A TIFF file gets its final sides while it is loaded.
        if sorted(image.size) != sorted((width, height)):
            raise InvalidMedia(_OTHER_SIZE)
        image.load()
        if image.size != (width, height):
            raise InvalidMedia(_OTHER_SIZE)
        copy_rgb(image, pixels)


_OTHER_SIZE: Final = "the image's size is not what its header says"


@contextmanager
def as_broken(kind: ImageFormat, what: str = "image") -> Iterator[None]:
    """Raise `InvalidMedia` for any error of a decoder; ``what`` names the medium."""
    try:
        yield
    except (AfferentError, MemoryError):
        raise
    except Exception as error:  # decoders raise a dozen types, and new versions add some
        log.info("an image is broken", extra={"format": kind, "error": type(error).__name__})
        raise InvalidMedia(
            f"the {what} can't be decoded: its data are truncated or corrupt"
        ) from error


def is_grey16(image: Image.Image) -> bool:
    """Return whether an image has 16 bits of grey; of a PNM file, Pillow makes 32."""
    return image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PPM")


def copy_rgb(image: Image.Image, pixels: Pixels) -> None:
    """Copy an image of any mode as RGB over white, in bands: no second image is allocated."""
    is_deep = is_grey16(image)
    for top in range(0, image.height, _BAND):
        bottom = min(top + _BAND, image.height)
        band = image.crop((0, top, image.width, bottom))
        if is_deep:
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
