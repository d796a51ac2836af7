"""Decoder of PDFs: the sizes of pages, their images and their texts, by pdfium."""

from __future__ import annotations

import ctypes
import functools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from afferent.config import Limits
from afferent.errors import InvalidMedia, MediaTooLarge, UnsupportedMedia
from afferent.media.decode.page import RenderedPage, chosen, fitted, png
from afferent.media.decoded import MAX_TEXT_NBYTES

try:
    import pypdfium2
    from pypdfium2 import raw as pdfium
except ImportError:  # offline vLLM and training jobs render no pages
    pypdfium2 = pdfium = None

_POINTS_PER_INCH: Final = 72
_NO_TEXT: Final = dict.fromkeys([*range(9), *range(11, 32), 127, 0xFFFE, 0xFFFF])
"""Characters that no text has, such as pdfium's mark of a hyphen at the end of a line."""


class _Deadline:
    """Time limit of this process's rendering, which pdfium asks for between a page's objects."""

    def __init__(self) -> None:
        self._until_s = math.inf
        # Created once, before a worker is confined: it is executable memory.
        ask = type(pdfium.IFSDK_PAUSE().NeedToPauseNow)
        self.pause = pdfium.IFSDK_PAUSE(version=1, NeedToPauseNow=ask(self._is_over))

    def set(self, seconds: float) -> None:
        """Allow so much time of this thread's processor from now on."""
        self._until_s = time.thread_time() + seconds

    def _is_over(self, _pause: object) -> bool:
        return time.thread_time() > self._until_s


@functools.cache
def _deadline() -> _Deadline:
    return _Deadline()


def prepare_worker() -> None:
    """Load what a confined worker can't load, if the library for PDFs is installed."""
    if pdfium is not None:
        _deadline()


def page_sizes(
    data: memoryview, *, first: int, last: int, dpi: int, limits: Limits
) -> tuple[int, list[tuple[int, int]]]:
    """Return the number of pages in a PDF, and the size of some of them as images.

    Args:
        first: Number of the first of these pages, from 1 on.
        last: Number of the last one; 0, or a number beyond the end, for the last page.
        dpi: Dots per inch of the images.

    Returns:
        The number of pages, and ``(width, height)`` in pixels of each page from first to last.

    Raises:
        UnsupportedMedia: It is no PDF, or encrypted.
        InvalidMedia: It is broken, or has no such page.
        TooManyItems: These are more pages than a request may have.
    """
    with _opened(data) as document:
        num_pages = len(document)
        numbers = chosen(num_pages, first, last, limits)
        points = [_points(document, number) for number in numbers]
    scale = dpi / _POINTS_PER_INCH
    return num_pages, [fitted(*each, scale, limits) for each in points]


def render_page(
    data: memoryview,
    number: int,
    size: tuple[int, int] | None,
    *,
    has_text: bool,
    limits: Limits,
) -> RenderedPage:
    """Render a page of a PDF; the same page gives the same bytes.

    Args:
        number: Number of the page, from 1 on.
        size: Width and height of its image in pixels; ``None`` for no image.
        has_text: Whether its text is returned.

    Raises:
        UnsupportedMedia, InvalidMedia: As from `page_sizes`.
        MediaTooLarge: It takes too much time, or has too much text.
    """
    deadline = _deadline()
    deadline.set(limits.max_page_s)
    with _opened(data) as document:
        document.init_forms()
        page = document.get_page(number - 1)
        try:
            image = b"" if size is None else png(_drawn(document, page, number, size, limits), size)
            text = _text(page, number) if has_text else b""
        finally:
            page.close()
    return RenderedPage(image, text)


@contextmanager
def _opened(data: memoryview) -> Iterator[Any]:
    """Open a document, and explain the errors of pdfium."""
    if pdfium is None:
        raise UnsupportedMedia("PDFs are not read here: pypdfium2 is not installed")
    start = np.frombuffer(data, np.uint8).ctypes.data_as(ctypes.c_void_p)
    handle = pdfium.FPDF_LoadMemDocument64(start, len(data), None)
    if not handle:
        raise _refusal(pdfium.FPDF_GetLastError())
    document = pypdfium2.PdfDocument(handle)
    try:
        yield document
    except pypdfium2.PdfiumError as error:
        raise InvalidMedia("a page of the PDF is broken") from error
    finally:
        document.close()


def _refusal(code: int) -> InvalidMedia:
    if code in (pdfium.FPDF_ERR_PASSWORD, pdfium.FPDF_ERR_SECURITY):
        return UnsupportedMedia("the PDF is encrypted; send one that opens without a password")
    return InvalidMedia("the PDF is broken")


def _points(document: Any, number: int) -> tuple[float, float]:
    """Return the sides of a page in points."""
    size = pdfium.FS_SIZEF()
    if not pdfium.FPDF_GetPageSizeByIndexF(document, number - 1, size):
        raise InvalidMedia(f"page {number} of the PDF is broken")
    width, height = float(size.width), float(size.height)
    if not (0 < width < math.inf and 0 < height < math.inf):
        raise InvalidMedia(f"page {number} of the PDF has no size")
    return width, height


def _drawn(
    document: Any, page: Any, number: int, size: tuple[int, int], limits: Limits
) -> NDArray[np.uint8]:
    """Return the pixels of a page on white, ``(height, width, 3)`` in RGB."""
    width, height = size
    pixels = np.full((height, width, 3), 255, np.uint8)
    bitmap = pypdfium2.PdfBitmap.new_native(
        *(width, height, pdfium.FPDFBitmap_BGR),
        rev_byteorder=True,
        buffer=(ctypes.c_ubyte * pixels.nbytes).from_buffer(pixels.data),
        stride=3 * width,
    )
    flags = pdfium.FPDF_ANNOT | pdfium.FPDF_REVERSE_BYTE_ORDER
    area = (0, 0, width, height, 0, flags)
    try:
        state = pdfium.FPDF_RenderPageBitmap_Start(bitmap, page, *area, _deadline().pause)
        pdfium.FPDF_RenderPage_Close(page)
        if state == pdfium.FPDF_RENDER_TOBECONTINUED:
            raise MediaTooLarge(
                f"page {number} of the document takes more than {limits.max_page_s:g} s to render "
                "(--max-page-s)"
            )
        if state != pdfium.FPDF_RENDER_DONE:
            raise InvalidMedia(f"page {number} of the PDF can't be rendered")
        if document.formenv:
            pdfium.FPDF_FFLDraw(document.formenv, bitmap, page, *area)
    finally:
        bitmap.close()
    return pixels


def _text(page: Any, number: int) -> bytes:
    """Return the text of a page, in the order of the file, as UTF-8."""
    content = page.get_textpage()
    try:
        if content.count_chars() > MAX_TEXT_NBYTES:
            raise _too_much_text(number)
        said: str = content.get_text_bounded()
    finally:
        content.close()
    text = said.replace("\r\n", "\n").translate(_NO_TEXT).strip().encode(errors="ignore")
    if len(text) > MAX_TEXT_NBYTES:
        raise _too_much_text(number)
    return text


def _too_much_text(number: int) -> MediaTooLarge:
    return MediaTooLarge(
        f"page {number} of the document has more than {MAX_TEXT_NBYTES} bytes of text"
    )
