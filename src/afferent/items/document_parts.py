"""Documents in requests: their pages and resolution, as clients choose them.

Keys of a part choose both (``"pages": "2-5", "dpi": 100``), or the fragment of a URL
(``#page=2-5&dpi=100``), as readers of PDFs understand it. Official clients send either.
"""

from __future__ import annotations

import re
from typing import Annotated, Final
from urllib.parse import parse_qsl

from msgspec import Meta

from afferent.errors import InvalidRequest
from afferent.files.stored_file import StoredFile
from afferent.items.request import ALL_PAGES, Detail, DocumentPart, PageRange, SeenMedia
from afferent.media.body.raw import RawMedia

_MOST: Final = 1_000_000
_RANGE: Final = re.compile(r"([1-9][0-9]{0,5})(?:(-)([1-9][0-9]{0,5})?)?")
LEAST_DPI, MOST_DPI = 18, 1200

Pages = Annotated[int, Meta(ge=1, le=_MOST)] | Annotated[str, Meta(max_length=16)]
"""One page, or a range such as ``"2-5"`` or ``"2-"``."""
Dpi = Annotated[int, Meta(ge=LEAST_DPI, le=MOST_DPI)]


def document(
    source: str | RawMedia | SeenMedia | StoredFile,
    where: str,
    *,
    pages: Pages | None = None,
    dpi: Dpi | None = None,
    detail: Detail | None = None,
) -> DocumentPart:
    """Return a document with the pages that a client has chosen.

    Args:
        source: Its bytes, their digest, a stored file, or its URL, whose fragment may choose them.
        where: Location of the part in the request.

    Raises:
        InvalidRequest: The pages are no range, or the dots per inch are out of bounds.
    """
    chosen: dict[str, str] = {}
    if isinstance(source, str) and source[:5].lower() != "data:":
        source, _, fragment = source.partition("#")
        chosen = dict(parse_qsl(fragment))
    if pages is None:
        pages = chosen.get("page")
    if dpi is None and (text := chosen.get("dpi")) is not None:
        dpi = int(text) if text.isdecimal() and len(text) <= 4 else 0
        if not LEAST_DPI <= dpi <= MOST_DPI:
            raise InvalidRequest(
                f"{where}: dpi is {text!r}; it must be {LEAST_DPI} to {MOST_DPI}", param=where
            )
    return DocumentPart(source, page_range(pages, where), dpi or 0, detail or "auto")


def page_range(pages: Pages | None, where: str) -> PageRange:
    """Return the range that a client has written.

    Raises:
        InvalidRequest: It is no range.
    """
    if pages is None:
        return ALL_PAGES
    found = _RANGE.fullmatch(str(pages).strip())
    first = int(found[1]) if found else 0
    last = first if found and not found[2] else int(found[3] or 0) if found else 0
    if not found or 0 < last < first:
        raise InvalidRequest(
            f'{where}: pages is {pages!r}; it must be a page or a range, such as 3, "2-5" or "2-"',
            param=where,
        )
    return PageRange(first, last)
