"""Replacement of the documents in a body by their pages, and of its videos by their frames, for an
upstream that reads images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from afferent.files.stored_file import StoredFile
from afferent.items.file_kinds import kind_of_file, kind_of_name
from afferent.items.request import ItemRequest
from afferent.items.stage import ItemStage
from afferent.media.body.raw import RawMedia
from afferent.media.body.received import ReceivedBody
from afferent.proxy.document_places import DocumentPlace
from afferent.proxy.media_locations import Document
from afferent.proxy.request_scope import RequestScope
from afferent.types import DOCUMENT


def documents_in(document: Document, body: ReceivedBody) -> list[DocumentPlace]:
    """Return the documents in a body, by the media types and names of its files; also the videos
    whose frames become images.
    """
    return [place for place in document.documents if _is_document(place, body)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageUse:
    """Use of pages.

    Attributes:
        keeps_bytes: Whether the upstream or a later stage reads the images of the pages; if not,
            their features are made.
        max_pixels: As for `MediaPart`.
    """

    keeps_bytes: bool
    max_pixels: int = 0


async def show(
    items: ItemStage,
    own: RequestScope,
    document: Document,
    places: Sequence[DocumentPlace],
    media: dict[str, RawMedia],
    use: PageUse,
) -> None:
    """Put the pages of documents in their places.

    Args:
        media: Media that were cut out of the body; those of the documents are removed.

    Raises:
        InvalidMedia: A document can't be read.
        TooManyItems: There are too many documents or pages.
        Unavailable: Try again.
    """
    parts = [
        replace(place.part, source=media.pop(place.source, place.source))
        if isinstance(place.source, str)
        else place.part
        for place in places
    ]
    items.documents.check(parts, has_features=not use.keeps_bytes)
    others = ItemRequest(own.id, document.parts(dict(media)), own.share)
    found = await items.documents.read(
        *(others, parts, own.trace), keeps_bytes=use.keeps_bytes, max_pixels=use.max_pixels
    )
    for place, each in zip(places, found, strict=True):
        place.show(each.pages)


def _is_document(place: DocumentPlace, body: ReceivedBody) -> bool:
    source, name = place.source, place.name
    if isinstance(source, StoredFile) or place.part.is_video:
        return True
    cut = body.cut.get(source)
    if cut is not None:
        return kind_of_file(cut.media_type or place.media_type, name) is DOCUMENT
    if source[:5].lower() == "data:":
        media_type = source[5:].partition(",")[0].partition(";")[0]
        return kind_of_file(media_type or place.media_type, name) is DOCUMENT
    # Many URLs of PDFs have no suffix, and the bytes decide.
    return (kind_of_name(name) or kind_of_name(source) or DOCUMENT) is DOCUMENT
