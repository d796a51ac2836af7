"""Pages of documents and frames of videos, as images: their choice, sizes and files."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from PIL import Image, PngImagePlugin

from afferent.config import Limits
from afferent.errors import InvalidMedia, MediaTooLarge, TooManyItems
from afferent.media.decoded import Pixels

_PNG_LEVEL: Final = 1
"""Higher levels take several times as long, for a tenth of the bytes of a page of text."""
_LEAST_SIDE: Final = 2


@dataclass(frozen=True, slots=True)
class RenderedPage:
    """Page of a document: a PNG file and UTF-8; each is empty if it was not requested.

    A frame of a video has no text.
    """

    image: bytes
    text: bytes


def prepare_worker() -> None:
    """Load what `png` needs."""
    PngImagePlugin.PngImageFile  # noqa: B018 imported for `Image.save`


def chosen(num_pages: int, first: int, last: int, limits: Limits) -> range:
    """Return the numbers of the requested pages, from 1 on.

    Args:
        num_pages: Number of pages in the document.
        first: Number of the first page.
        last: Number of the last one; 0, or a number beyond the end, for the last page.

    Raises:
        InvalidMedia: There is no such page.
        TooManyItems: These are more pages than a request may have.
    """
    if num_pages < 1:
        raise InvalidMedia("the document has no pages")
    if first > num_pages:
        raise InvalidMedia(f"the document has {num_pages} pages, and no page {first}")
    end = min(last or num_pages, num_pages)
    if end - first >= limits.max_document_pages:
        raise TooManyItems(
            f"the document has {num_pages} pages, of which {end - first + 1} are requested; at "
            f"most {limits.max_document_pages} are accepted (--max-document-pages): choose "
            'some, such as "pages": "1-10"'
        )
    return range(first, end + 1)


def fitted(width: float, height: float, scale: float, limits: Limits) -> tuple[int, int]:
    """Return the sides of a page's image in pixels: scaled, and smaller if the limits require it.

    Raises:
        MediaTooLarge: The page is too long for its width, or too wide.
    """
    most_pixels = min(limits.max_page_pixels, limits.max_image_pixels)
    scale = min(scale, math.sqrt(most_pixels) / math.sqrt(width) / math.sqrt(height))
    scale = min(scale, limits.max_image_side / max(width, height))
    # Rounded down, so that the limits hold.
    across, down = (max(_LEAST_SIDE, int(side * scale)) for side in (width, height))
    if max(across, down) > limits.max_image_aspect * min(across, down):
        raise MediaTooLarge(
            f"a page or frame has the sides {width:.0f} x {height:.0f}; they may differ by "
            f"a factor of {limits.max_image_aspect} (--max-image-aspect)"
        )
    return across, down


def png(pixels: Pixels, size: tuple[int, int]) -> bytes:
    """Return the file of an image of this width and height; the same pixels give the same bytes."""
    if (pixels.shape[1], pixels.shape[0]) != size:
        pixels = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=_PNG_LEVEL)
    return file.getvalue()
