"""Sizes, images and texts of the pages of PDFs."""

from __future__ import annotations

import io
import time

import numpy as np
import pytest
from PIL import Image

from afferent.config import Limits
from afferent.errors import InvalidMedia, MediaTooLarge, TooManyItems, UnsupportedMedia
from afferent.media.decode import pdf
from afferent.media.decode.page import RenderedPage
from afferent.media.decoded import MAX_TEXT_NBYTES
from tests import pdfs
from tests.images import photo
from tests.media.confined import in_child

LIMITS = Limits()


def sizes(data: bytes, *, first: int = 1, last: int = 0, limits: Limits = LIMITS) -> list[object]:
    _, found = pdf.page_sizes(memoryview(data), first=first, last=last, dpi=pdfs.DPI, limits=limits)
    return list(found)


def render(data: bytes, number: int = 1, *, limits: Limits = LIMITS) -> RenderedPage:
    view = memoryview(data)
    _, (size,) = pdf.page_sizes(view, first=number, last=number, dpi=pdfs.DPI, limits=limits)
    return pdf.render_page(view, number, size, has_text=True, limits=limits)


def pixels(page: RenderedPage) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(page.image)))


def test_page_of_an_image_renders_as_this_image() -> None:
    images = [photo(160, 120, seed) for seed in range(3)]
    data = pdfs.of_images(images)
    assert sizes(data) == [(160, 120)] * 3
    assert sizes(data, first=2, last=99) == [(160, 120)] * 2
    for number, image in enumerate(images, 1):
        found = pixels(render(data, number)).astype(int)
        assert found.shape == (120, 160, 3)
        assert np.abs(found - np.asarray(image)).mean() < 8


def test_same_page_in_two_documents_renders_to_the_same_bytes() -> None:
    one, other = photo(160, 120, 1), photo(160, 120, 2)
    first = render(pdfs.of_images([one, other]), 1)
    assert first == render(pdfs.of_images([other, one]), 2)
    assert first == render(pdfs.of_images([one, other]), 1)
    assert first != render(pdfs.of_images([one, other]), 2)


def test_text_of_a_page_is_its_own() -> None:
    data = pdfs.of_texts(["Tea costs 3 euros.", "Caf\xe9 closed"])
    assert [render(data, number).text for number in (1, 2)] == [
        b"Tea costs 3 euros.",
        "Caf\xe9 closed".encode(),
    ]
    assert pixels(render(data)).min() == 0
    only_text = pdf.render_page(memoryview(data), 1, None, has_text=True, limits=LIMITS)
    assert only_text == RenderedPage(b"", b"Tea costs 3 euros.")


@pytest.mark.parametrize(
    ("box", "size"),
    [
        (b"[0 0 200 100]", (400, 200)),
        (b"[-50 -50 50 150]", (200, 400)),
        (b"[0 0 14400 14400]", (2000, 2000)),
        (b"[0 0 99999999 99999999]", (2000, 2000)),
        (b"[0 0 0 0]", (1224, 1584)),  # as readers show it: a letter
    ],
)
def test_size_of_a_page_follows_its_box(box: bytes, size: tuple[int, int]) -> None:
    assert sizes(pdfs.of_texts(["a"], box=box)) == [size]


def test_page_that_is_too_long_is_refused() -> None:
    with pytest.raises(MediaTooLarge, match="--max-image-aspect"):
        sizes(pdfs.of_texts(["a"], box=b"[0 0 10 9000]"))


def test_encrypted_document_is_refused() -> None:
    with pytest.raises(UnsupportedMedia, match="encrypted"):
        sizes(pdfs.encrypted())


@pytest.mark.parametrize("data", [b"%PDF-1.7\n", b"%PDF-1.7 nothing else" * 100])
def test_broken_document_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidMedia):
        sizes(data)


def test_pages_beyond_limits_are_refused_before_they_are_rendered() -> None:
    data = pdfs.of_texts(["a"] * 20)
    few = Limits(max_document_pages=5)
    with pytest.raises(TooManyItems, match=r"20 pages.*--max-document-pages"):
        sizes(data, limits=few)
    assert len(sizes(data, first=3, last=7, limits=few)) == 5
    with pytest.raises(InvalidMedia, match="20 pages, and no page 21"):
        sizes(data, first=21)


def test_page_that_takes_long_ends_in_time() -> None:
    circles = b"".join(
        b"0.5 g %d %d m 0 900 900 0 %d %d c b*\n" % (i % 97, i % 89, i % 83, i % 79)
        for i in range(30_000)
    )
    data = pdfs.of_contents([circles], box=b"[0 0 1000 1000]")
    start_s = time.thread_time()
    with pytest.raises(MediaTooLarge, match=r"page 1 .* 0\.2 s .*--max-page-s"):
        render(data, limits=Limits(max_page_s=0.2))
    assert time.thread_time() - start_s < 3.0


def test_page_with_too_much_text_is_refused() -> None:
    line = b"(%b) Tj " % (b"word " * 20)
    content = b"BT /F 1 Tf 20 100 Td %b ET" % (line * (MAX_TEXT_NBYTES // 100 + 10))
    with pytest.raises(MediaTooLarge, match="of text"):
        render(pdfs.of_contents([content], is_packed=True))


def test_confined_worker_renders_the_same() -> None:
    data = pdfs.of_texts(["Tea costs 3 euros."])
    pdf.prepare_worker()
    expected = render(data)
    found = in_child(lambda: str(render(data) == expected), memory_nbytes=256 << 20)
    assert found == "True"
