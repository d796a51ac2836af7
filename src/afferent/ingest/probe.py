"""What an image's header says, before anything is decoded."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Final

from PIL import Image, UnidentifiedImageError
from PIL.ExifTags import Base

from afferent.config import Limits
from afferent.errors import InvalidMedia, MediaTooLarge, UnsupportedMedia

FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF")
_MAGIC: Final = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
}
_MIN_SIDE: Final = 2
_TRANSPOSED: Final = (5, 6, 7, 8)  # EXIF orientations that swap the sides

# Our own limit is checked on the header; Pillow's would only warn.
Image.MAX_IMAGE_PIXELS = None


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """``width`` and ``height`` in pixels, as a person sees the image: ``orientation`` applied.

    ``orientation`` is EXIF's, 1 to 8.
    """

    width: int
    height: int
    orientation: int = 1


def probe_image(data: bytes | memoryview, limits: Limits) -> ImageHeader:
    """What the header says; no pixel is decoded.

    Raises:
        UnsupportedMedia: The first bytes are not those of a format that we read.
        InvalidMedia: The header is broken, or a side is shorter than two pixels.
        MediaTooLarge: Too many pixels, too long a side, or too extreme an aspect ratio.
    """
    if len(data) > limits.max_image_nbytes:
        raise MediaTooLarge(
            f"the image has {len(data)} bytes; at most {limits.max_image_nbytes} are accepted"
        )
    format = _format_of(bytes(data[:16]))
    try:
        with Image.open(io.BytesIO(data), formats=(format,)) as image:
            width, height = image.size
            orientation = _orientation(image)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError) as error:
        raise InvalidMedia(f"the image's {format} header is broken") from error
    check_size(width, height, limits)
    if orientation in _TRANSPOSED:
        width, height = height, width
    return ImageHeader(width, height, orientation)


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation as far as the header has it.

    Pillow's `getexif` would decode a whole PNG to look behind its pixels.
    """
    exif = Image.Exif()
    if isinstance(stored := image.info.get("exif"), bytes):
        exif.load(stored)
    found = exif.get(Base.Orientation, 1)
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def check_size(width: int, height: int, limits: Limits) -> None:
    """Refuse sizes that no decoder should see."""
    if min(width, height) < _MIN_SIDE:
        raise InvalidMedia(f"the image is {width} x {height} pixels; a side needs at least 2")
    if width * height > limits.max_image_pixels:
        raise MediaTooLarge(
            f"the image is {width} x {height} pixels; at most {limits.max_image_pixels} "
            "in all are accepted"
        )
    if max(width, height) > limits.max_image_side:
        raise MediaTooLarge(
            f"the image is {width} x {height} pixels; a side may have {limits.max_image_side}"
        )
    if max(width, height) > limits.max_image_aspect * min(width, height):
        raise MediaTooLarge(
            f"the image is {width} x {height} pixels; its sides may differ by a factor of "
            f"{limits.max_image_aspect}"
        )


def _format_of(head: bytes) -> str:
    for magic, format in _MAGIC.items():
        if head.startswith(magic):
            return format
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    raise UnsupportedMedia("the bytes are not those of a JPEG, PNG, WebP or GIF image")
