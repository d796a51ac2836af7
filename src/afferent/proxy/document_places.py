"""Documents in a request's JSON, videos that become frames, and the parts in their place. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from afferent.errors import UnsupportedParameter
from afferent.files.stored_file import StoredFile
from afferent.items import document_parts
from afferent.items.documents import Page
from afferent.items.request import Detail, DocumentPart, SeenMedia
from afferent.media.body.raw import RawMedia
from afferent.types import Modality

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Place:
    """One item of media in a body.

    Attributes:
        modality: Modality of the item.
        source: A URL, the marker of one that was cut out, or a stored file; the image of a
            document's page; ``None`` if known by its ``uuid``.
        uuid: Client's name of the item.
        is_bare: Whether only the base64 of the item is written there, and no URL.
        is_nameable: Whether the item's name may stand there alone.
    """

    modality: Modality
    source: str | RawMedia | SeenMedia | StoredFile | None
    uuid: str | None = None
    is_bare: bool = False
    is_nameable: bool = False


@dataclass(frozen=True, slots=True)
class MediaType:
    """Media type of an item, beside its base64."""

    place: Place


@dataclass(slots=True, eq=False)
class DocumentPlace:
    """A document (a PDF, for example) in a body. Its pages take its place, or it stays unchanged.

    So do the frames of a video, for an upstream that takes no videos.

    Attributes:
        part: The document or video; its source is a URL, the marker of one that was cut out, or a
            stored file.
        form: Form of the parts of its pages: that of the part that they replace.
        nodes: What is written in its place.
        media_type: Media type beside it, if there is one.
        name: Name of its file.
        before: Parts of its title and its context.
        places: Locations of its pages' images, in order.
    """

    part: DocumentPart
    form: Form
    nodes: list[object]
    media_type: str = ""
    name: str = ""
    before: Sequence[object] = ()
    places: list[Place] = field(default_factory=list)

    @property
    def source(self) -> str | StoredFile:
        """URL of the document, or its marker; or the stored file."""
        return self.part.source if isinstance(self.part.source, str | StoredFile) else ""

    def show(self, pages: Sequence[Page]) -> None:
        """Put the pages in the place of the document, as images and texts."""
        self.nodes = [*self.before]
        for page in pages:
            if page.image is not None:
                place = Place(Modality.IMAGE, page.image.source, is_bare=self.form.is_bare)
                self.places.append(place)
                self.nodes.append(self.form.image(place))
            if page.text:
                self.nodes.append(self.form.text(page.text))


@dataclass(frozen=True, slots=True)
class Blocks:
    """Document of Anthropic's API that is no file: blocks in its place.

    Attributes:
        before: Parts of its title and its context, and of its text.
        content: JSON of a list of further blocks.
    """

    before: list[object]
    content: bytes = b"[]"


@dataclass(frozen=True, slots=True)
class Form:
    """Form of the parts of one API.

    Attributes:
        text_type: Type of a part with text, as JSON.
        image: Returns the part of an image.
        is_bare: As for `Place`.
    """

    text_type: bytes
    image: Callable[[Place], object]
    is_bare: bool = False

    def text(self, text: str) -> bytes:
        """Return the part of a text, as JSON."""
        return b'{"type":%b,"text":%b}' % (self.text_type, msgspec.json.encode(text))


def image_source(place: Place) -> dict[str, object]:
    """Return the source of an image in Anthropic's API: a URL, or base64."""
    if not place.is_bare:
        return {"type": b'"url"', "url": place}
    return {"type": b'"base64"', "media_type": MediaType(place), "data": place}


CHAT_FORM: Final = Form(
    b'"text"', lambda place: {"type": b'"image_url"', "image_url": {"url": place}}
)
RESPONSES_FORM: Final = Form(
    b'"input_text"',
    lambda place: {"type": b'"input_image"', "image_url": place, "detail": b'"auto"'},
)


class _File(Struct):
    """File in a part of OpenAI's APIs."""

    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None
    detail: Detail | None = None
    pages: document_parts.Pages | None = None
    dpi: document_parts.Dpi | None = None


class _Source(Struct):
    """Source of a document in Anthropic's API."""

    type: str
    data: str | None = None
    url: str | None = None
    media_type: str | None = None
    content: msgspec.Raw = msgspec.Raw(b"null")


class _Citations(Struct):
    enabled: bool | None = None


class _DocumentBlock(Struct):
    """Document in Anthropic's API."""

    source: _Source
    title: str | None = None
    context: str | None = None
    citations: _Citations | None = None
    pages: document_parts.Pages | None = None
    dpi: document_parts.Dpi | None = None


_file = msgspec.json.Decoder(_File)
_block = msgspec.json.Decoder(_DocumentBlock)
_string = msgspec.json.Decoder(str)


def file_place(
    file: bytes | Mapping[str, bytes],
    form: Form,
    part: dict[str, object],
    *,
    stored: StoredFile | None = None,
) -> DocumentPlace | None:
    """Return the location of a file in a part of OpenAI's APIs; ``None`` if it has no bytes.

    Args:
        file: JSON of the file, or its members.
        part: The part, which may stay unchanged.
        stored: The stored file that it names.

    Raises:
        InvalidRequest: Its pages are no range.
    """
    found = _read(_file, file)
    if found is None or (source := stored or found.file_data or found.file_url) is None:
        return None
    document = document_parts.document(
        *(source, "a file"), pages=found.pages, dpi=found.dpi, detail=found.detail
    )
    return DocumentPlace(document, form, [part], name=found.filename or "")


def block_place(
    members: Mapping[str, bytes],
    part: dict[str, object],
    *,
    keeps_form: bool,
    stored: StoredFile | None = None,
) -> DocumentPlace | Blocks | None:
    """Return the location of a document of Anthropic's API; ``None`` if it is data.

    Args:
        members: The block's.
        part: The block, which may stay unchanged.
        keeps_form: Whether images are base64, and not URLs.
        stored: The stored file that it names.

    Raises:
        UnsupportedParameter: Citations are requested.
        InvalidRequest: Its pages are no range.
    """
    block = _read(_block, members)
    if block is None:
        return None
    if block.citations is not None and block.citations.enabled:
        raise UnsupportedParameter("citations of documents are not supported here")
    form = Form(
        b'"text"',
        lambda place: {"type": b'"image"', "source": image_source(place)},
        is_bare=keeps_form,
    )
    before: list[object] = [form.text(text) for text in (block.title, block.context) if text]
    source, media_type = block.source, block.source.media_type or ""
    content = bytes(source.content)
    url: str | StoredFile
    match source.type:
        case "text" if source.data is not None:
            return Blocks([*before, form.text(source.data)])
        case "content" if content[:1] == b'"':
            return Blocks([*before, form.text(_string.decode(content))])
        case "content" if content[:1] == b"[":
            return Blocks(before, content)
        case "base64" if source.data is not None:
            # Cut data are named by their marker; shorter data become a URL.
            is_marker = ":" in source.data
            url = source.data if is_marker else f"data:{media_type};base64,{source.data}"
        case "url" if source.url is not None:
            media_type, url = "", source.url
        case "file" if stored is not None:
            url = stored
        case _:
            return None
    document = document_parts.document(url, "a document", pages=block.pages, dpi=block.dpi)
    return DocumentPlace(document, form, [part], media_type, before=before)


def video_place(source: str | StoredFile, part: dict[str, object], form: Form) -> DocumentPlace:
    """Return the location of a video whose frames become images.

    Args:
        source: Its URL, or its marker; or the stored file.
        part: The part.
        form: Form of the parts of its frames.
    """
    return DocumentPlace(DocumentPart(source, is_video=True), form, [part])


def _read(decoder: msgspec.json.Decoder[T], found: bytes | Mapping[str, bytes]) -> T | None:
    """Return a part that follows its schema; ``None`` for one that the upstream may refuse."""
    if not isinstance(found, bytes):
        found = msgspec.json.encode({key: msgspec.Raw(value) for key, value in found.items()})
    try:
        return decoder.decode(found)
    except msgspec.ValidationError:
        return None
