"""Pages of TIFF files."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence

import numpy as np
import pytest
from PIL import Image

from afferent.config import Limits
from afferent.errors import InvalidMedia, MediaTooLarge, TooManyItems, UnsupportedMedia
from afferent.media.decode import tiff
from afferent.media.headers.document_format import DocumentFormat, document_format_of
from tests.images import photo

LIMITS = Limits()


def tiff_of(pages: Sequence[Image.Image], **options: object) -> bytes:
    out = io.BytesIO()
    first, *others = (page.copy() for page in pages)
    first.save(out, "TIFF", save_all=True, append_images=others, **options)
    return out.getvalue()


def sizes(data: bytes, *, first: int = 1, last: int = 0, limits: Limits = LIMITS) -> object:
    return tiff.page_sizes(memoryview(data), first=first, last=last, dpi=72, limits=limits)


def pixels(data: bytes, number: int, size: tuple[int, int]) -> np.ndarray:
    page = tiff.render_page(memoryview(data), number, size, has_text=True, limits=LIMITS)
    assert page.text == b""
    return np.asarray(Image.open(io.BytesIO(page.image)))


def test_pages_have_their_own_pixels() -> None:
    pages = [photo(60, 40, 1), photo(30, 50, 2).convert("L"), photo(20, 20, 3).convert("1")]
    data = tiff_of(pages)
    assert sizes(data) == (3, [(60, 40), (30, 50), (20, 20)])
    assert sizes(data, first=2, last=2) == (3, [(30, 50)])
    for number, page in enumerate(pages, 1):
        found = pixels(data, number, page.size)
        np.testing.assert_array_equal(found, np.asarray(page.convert("RGB")))


def test_large_page_is_made_smaller() -> None:
    data = tiff_of([photo(400, 200)], compression="tiff_deflate")
    assert sizes(data, limits=Limits(max_page_pixels=20_000)) == (1, [(200, 100)])
    assert pixels(data, 1, (200, 100)).shape == (100, 200, 3)


def test_pages_beyond_limits_are_refused() -> None:
    data = tiff_of([Image.new("1", (8, 8))] * 6)
    with pytest.raises(TooManyItems, match="6 pages"):
        sizes(data, limits=Limits(max_document_pages=5))
    with pytest.raises(InvalidMedia, match="no page 7"):
        sizes(data, first=7)
    with pytest.raises(MediaTooLarge, match="--max-image-pixels"):
        sizes(tiff_of([Image.new("1", (400, 400))]), limits=Limits(max_image_pixels=100_000))


def test_page_that_follows_itself_ends() -> None:
    data = bytearray(tiff_of([Image.new("L", (8, 8))]))
    (at,) = struct.unpack_from("<I", data, 4)
    (num_entries,) = struct.unpack_from("<H", data, at)
    struct.pack_into("<I", data, at + 2 + 12 * num_entries, at)
    try:
        num_pages, _ = tiff.page_sizes(
            memoryview(bytes(data)), first=1, last=1, dpi=72, limits=LIMITS
        )
    except InvalidMedia:
        return
    assert num_pages <= 2


@pytest.mark.parametrize("cut", [4, 9, 60])
def test_broken_file_is_refused(cut: int) -> None:
    with pytest.raises(InvalidMedia):
        sizes(tiff_of([photo(20, 20)])[:cut])


def test_format_follows_from_the_first_bytes() -> None:
    assert document_format_of(tiff_of([photo(8, 8)])) is DocumentFormat.TIFF
    assert document_format_of(b"\n\n%PDF-1.7") is DocumentFormat.PDF
    for data in (b"", b"II", b"PK\3\4", b" " * 1024 + b"%PDF-1.7"):
        with pytest.raises(UnsupportedMedia, match="no PDF and no TIFF"):
            document_format_of(data)
