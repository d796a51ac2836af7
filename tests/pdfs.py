"""PDF files, written by the tests."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence

from PIL import Image

DPI = 144


def of_images(images: Sequence[Image.Image]) -> bytes:
    """Return a PDF with an image on each page, as large as the page at `DPI`."""
    out = io.BytesIO()
    first, *others = (image.copy() for image in images)  # Pillow leaves options in an image
    first.save(out, "PDF", save_all=True, append_images=others, resolution=DPI)
    return out.getvalue()


def written(objects: Sequence[bytes], *, trailer: bytes = b"") -> bytes:
    """Return a PDF with these objects, numbered from 1; the first is its catalogue."""
    out = io.BytesIO()
    out.write(b"%PDF-1.7\n")
    places = []
    for number, each in enumerate(objects, 1):
        places.append(out.tell())
        out.write(b"%d 0 obj\n%b\nendobj\n" % (number, each))
    table = out.tell()
    out.write(b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1))
    out.writelines(b"%010d 00000 n \n" % place for place in places)
    out.write(
        b"trailer\n<</Size %d/Root 1 0 R%b>>\nstartxref\n%d\n%%%%EOF\n"
        % (len(objects) + 1, trailer, table)
    )
    return out.getvalue()


def stream(data: bytes, entries: bytes = b"", *, is_packed: bool = False) -> bytes:
    """Return a stream object."""
    if is_packed:
        data, entries = zlib.compress(data), entries + b"/Filter/FlateDecode"
    return b"<<%b/Length %d>>stream\n%b\nendstream" % (entries, len(data), data)


def of_contents(
    contents: Sequence[bytes], *, box: bytes = b"[0 0 200 200]", is_packed: bool = False
) -> bytes:
    """Return a PDF with a page for each content stream, and a font ``/F``.

    Args:
        box: Box of each page, in points.
        is_packed: Whether the streams are compressed.
    """
    first = 4  # after the catalogue, the pages and the font
    kids = b" ".join(b"%d 0 R" % (first + 2 * index) for index in range(len(contents)))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[%b]/Count %d>>" % (kids, len(contents)),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>",
    ]
    for index, content in enumerate(contents):
        objects += [
            b"<</Type/Page/Parent 2 0 R/MediaBox%b/Resources<</Font<</F 3 0 R>>>>/Contents %d 0 R>>"
            % (box, first + 2 * index + 1),
            stream(content, is_packed=is_packed),
        ]
    return written(objects)


def of_texts(texts: Sequence[str], *, box: bytes = b"[0 0 200 200]") -> bytes:
    """Return a PDF with a text on each page."""
    return of_contents(
        [b"BT /F 18 Tf 20 100 Td (%b) Tj ET" % text.encode("latin-1") for text in texts], box=box
    )


def of_one_image(image: Image.Image, *, num_pages: int) -> bytes:
    """Return a PDF whose pages have one image, each with a square at another place."""
    width, height = (side * 72 / DPI for side in image.size)
    kind = b"/Type/XObject/Subtype/Image/Width %d/Height %d/BitsPerComponent 8" % image.size
    first = 4
    kids = b" ".join(b"%d 0 R" % (first + 2 * index) for index in range(num_pages))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[%b]/Count %d>>" % (kids, num_pages),
        stream(image.tobytes(), kind + b"/ColorSpace/DeviceRGB"),
    ]
    for index in range(num_pages):
        box = b"[0 0 %.1f %.1f]" % (width, height)
        objects.append(
            b"<</Type/Page/Parent 2 0 R/MediaBox%b/Resources<</XObject<</X 3 0 R>>>>"
            b"/Contents %d 0 R>>" % (box, first + 2 * index + 1)
        )
        square = b"%d %d 2 2 re f" % (2 * (index % 20), 2 * (index // 20))
        objects.append(stream(b"q %.1f 0 0 %.1f 0 0 cm /X Do Q %b" % (width, height, square)))
    return written(objects)


def encrypted() -> bytes:
    """Return a PDF that opens with a password only."""
    secret = b"<%b>" % (b"5a" * 32)
    lock = b"/Encrypt<</Filter/Standard/V 1/R 2/O%b/U%b/P -4>>/ID[<00><00>]" % (secret, secret)
    page = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 200]>>"
    pages = b"<</Type/Pages/Kids[3 0 R]/Count 1>>"
    return written([b"<</Type/Catalog/Pages 2 0 R>>", pages, page], trailer=lock)
