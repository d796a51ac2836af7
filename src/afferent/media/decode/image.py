"""Image decoder: a file to upright RGB pixels.

JPEG, PNG and WebP have fast decoders for their common files. Pillow decodes all other files, and
all that a fast decoder does not support or refuses; it defines the right result of the fast
decoders (`docs/adr/0009`).

Copies, with ``n`` the bytes of the file and ``p`` those of the pixels (3 a pixel):

=================================  =================================================================
JPEG; WebP without transparency    nothing: decoded from the arena into the pixels
PNG, RGB of 8 bits                 ``n``, and ``p`` of filtered rows
PNG, grey or RGBA of 8 bits        the same, and ``p`` from grey, or from RGBA over white
WebP, transparent or with EXIF     ``p`` from RGBA over white
all else                           ``n`` for Pillow (``3 n`` of WebP), ``p`` out of its own memory
an orientation to be applied       ``p`` more
=================================  =================================================================

Peak memory, in addition to the file and, where it is copied, its copies: 13 bytes a pixel, the
pixels included; 17 for AVIF, 20 for the first frame of an animated WebP file, and 28 for JPEG 2000.
A test measures it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import numpy as np

from afferent.config import Limits
from afferent.errors import AfferentError, InvalidMedia
from afferent.media.decode import jpeg, pillow, png, webp
from afferent.media.decoded import DecodedImage, Pixels
from afferent.media.headers.header import is_exact, read_header
from afferent.media.headers.image_format import Data, ImageFormat, format_of
from afferent.media.headers.probe import TRANSPOSED, ImageHeader, check_size, probe_image

log = logging.getLogger(__name__)

_FAST: Final[dict[ImageFormat, Callable[[memoryview, int, int], Pixels | None]]] = {
    ImageFormat.JPEG: jpeg.decode,
    ImageFormat.PNG: png.decode,
    ImageFormat.WEBP: webp.decode,
}
_LEAN: Final[dict[ImageFormat, Callable[[memoryview], bytes | memoryview]]] = {
    ImageFormat.JPEG: jpeg.without_metadata,
    ImageFormat.PNG: png.without_metadata,
}


def read_image_header(data: Data, limits: Limits) -> ImageHeader:
    """Return the exact header of an image; Pillow reads those of which only it can.

    Raises:
        UnsupportedMedia: The first bytes belong to no known format.
        InvalidMedia: The header is broken, or a side is shorter than two pixels.
        MediaTooLarge: It exceeds the limits.
    """
    found = probe_image(data, limits)
    return found if isinstance(found, ImageHeader) else pillow.read_header(data, limits)


def decode_image(data: memoryview, header: ImageHeader, limits: Limits) -> DecodedImage:
    """Decode the first frame; orientation applied, transparency over white.

    No memory is allocated before the file's own header has been compared with ``header``, and each
    decoder's own reading of the header is compared before it allocates pixels.

    Args:
        data: The file; may be read-only.
        header: Header by `read_image_header`.

    Raises:
        InvalidMedia: The data are truncated or corrupt, or differ from their header.
        MediaTooLarge: More pixels than the limits allow.
    """
    check_size(header.width, header.height, limits)
    kind, width, height = format_of(data), header.width, header.height
    if header.orientation in TRANSPOSED:
        width, height = height, width
    if is_exact(kind):
        stored = read_header(data)
        is_same = (stored.width, stored.height) == (width, height)
        if not is_same or stored.orientation not in (header.orientation, None):
            raise InvalidMedia("the image is not what its header says")
    pixels = _decode_fast(data, kind, height, width)
    if pixels is None:
        pixels, lean = np.empty((height, width, 3), np.uint8), _LEAN.get(kind)
        pillow.decode_into(lean(data) if lean else data, kind, pixels)
    return DecodedImage(_upright(pixels, header.orientation))


def _decode_fast(data: memoryview, kind: ImageFormat, height: int, width: int) -> Pixels | None:
    """Decode with the fast decoder; ``None``, also on unexpected errors, leaves it to Pillow.

    Raises:
        InvalidMedia: Pillow would take too long.
    """
    if (fast := _FAST.get(kind)) is None:
        return None
    try:
        return fast(data, height, width)
    except (AfferentError, MemoryError):
        raise
    except Exception as error:
        log.warning("a decoder failed", extra={"format": kind, "error": type(error).__name__})
        return None


def _upright(pixels: Pixels, orientation: int) -> Pixels:
    """Return the pixels, turned and flipped by EXIF's ``orientation``."""
    if orientation == 1:
        return pixels
    # Whole pixels are moved: numpy takes half the time of single bytes.
    turned = pixels.view("V3")[..., 0]
    if orientation in TRANSPOSED:
        turned = turned.T
    if orientation in (2, 3, 6, 7):
        turned = turned[:, ::-1]
    if orientation in (3, 4, 7, 8):
        turned = turned[::-1]
    return np.ascontiguousarray(turned)[..., None].view(np.uint8)
