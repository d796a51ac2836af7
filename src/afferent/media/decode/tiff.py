"""Decoder of TIFF files with several pages, such as scans and faxes, by Pillow."""

from __future__ import annotations

from typing import Final

import numpy as np
from PIL.ImageFile import ImageFile

from afferent.config import Limits
from afferent.errors import InvalidMedia, MediaTooLarge
from afferent.media.decode.page import RenderedPage, chosen, fitted, png
from afferent.media.decode.pillow import as_broken, copy_rgb, open_image
from afferent.media.headers.image_format import ImageFormat
from afferent.media.headers.probe import check_size

_MOST_PAGES: Final = 10_000
"""Most pages of a file: each one is read to find the next."""


def page_sizes(
    data: memoryview, *, first: int, last: int, dpi: int, limits: Limits
) -> tuple[int, list[tuple[int, int]]]:
    """Return the number of pages, and the size of some of them; see `afferent.media.decode.pdf`.

    Pages have their own pixels: ``dpi`` has no effect.
    """
    sizes: list[tuple[int, int]] = []
    with as_broken(ImageFormat.TIFF), open_image(data, ImageFormat.TIFF) as image:
        while _seek(image, len(sizes)):
            sizes.append(image.size)
            if len(sizes) > _MOST_PAGES:
                raise MediaTooLarge(f"the document has more than {_MOST_PAGES} pages")
    numbers = chosen(len(sizes), first, last, limits)
    found = [sizes[number - 1] for number in numbers]
    for size in found:
        check_size(*size, limits)
    return len(sizes), [fitted(*size, 1.0, limits) for size in found]


def render_page(
    data: memoryview,
    number: int,
    size: tuple[int, int] | None,
    *,
    has_text: bool,
    limits: Limits,
) -> RenderedPage:
    """Return a page as an image; it has no text. See `afferent.media.decode.pdf`."""
    if size is None:
        return RenderedPage(b"", b"")
    with as_broken(ImageFormat.TIFF), open_image(data, ImageFormat.TIFF) as image:
        if not _seek(image, number - 1):
            raise InvalidMedia(f"the document has no page {number}")
        check_size(*image.size, limits)
        image.load()
        pixels = np.empty((image.height, image.width, 3), np.uint8)
        copy_rgb(image, pixels)
    return RenderedPage(png(pixels, size), b"")


def _seek(image: ImageFile, index: int) -> bool:
    """Open a page; return whether it exists."""
    try:
        image.seek(index)
    except EOFError:
        return False
    return True
