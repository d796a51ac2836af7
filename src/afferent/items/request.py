"""Request for items: what a body or a URL has, before anything of it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from afferent.admission.shares import NAMELESS, Share
from afferent.files.stored_file import StoredFile
from afferent.media.body.raw import PAGE, RawMedia
from afferent.types import DOCUMENT, FileKind, Modality

Detail = Literal["auto", "low", "high"]


@dataclass(frozen=True, slots=True)
class SeenMedia:
    """Item whose features were made before, known by the digest of its encoded bytes.

    Attributes:
        is_page: Whether this request found or made them, as it read a document or a video.
        is_new: Whether they were made then.
    """

    digest: bytes
    is_page: bool = False
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class MediaPart:
    """Image, audio clip or video: from the body, by URL, or a file of the tenant."""

    modality: Modality
    source: str | RawMedia | SeenMedia | StoredFile | None
    """``None`` for an earlier item, known by its ``uuid``."""
    detail: Detail = "auto"
    uuid: str | None = None
    max_pixels: int = 0
    """Maximum of pixels for an image, if it is less than the model's own; 0 for the default."""

    @property
    def is_page(self) -> bool:
        """Whether it is a page of a document or a frame of a video, not counted as an image."""
        match self.source:
            case RawMedia(origin=origin):
                return origin == PAGE
            case SeenMedia(is_page=is_page):
                return is_page
        return False


@dataclass(frozen=True, slots=True)
class PageRange:
    """Pages of a document, from 1 on; ``last`` is 0 for the last page of the document."""

    first: int = 1
    last: int = 0

    def __str__(self) -> str:
        """Return the range as clients write it."""
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last or ''}"


ALL_PAGES: Final = PageRange()


@dataclass(frozen=True, slots=True)
class DocumentPart:
    """Document, or video for a model without video: from the body, by URL, or a file of the tenant.
    Its pages or frames become items.
    """

    source: str | RawMedia | SeenMedia | StoredFile
    pages: PageRange = ALL_PAGES
    dpi: int = 0
    """Dots per inch of the pages' images; 0 for the server's."""
    detail: Detail = "auto"
    """Detail of the pages' images."""
    is_video: bool = False

    @property
    def modality(self) -> FileKind:
        """Kind of the file."""
        return Modality.VIDEO if self.is_video else DOCUMENT


@dataclass(frozen=True, slots=True)
class ItemRequest:
    """Media of one request, in prompt order.

    ``request_id`` pins their objects. One tenant's cached items never hit for another.
    """

    request_id: str
    media: tuple[MediaPart, ...]
    share: Share = NAMELESS

    @property
    def tenant(self) -> str:
        """Name of the tenant."""
        return self.share.tenant
