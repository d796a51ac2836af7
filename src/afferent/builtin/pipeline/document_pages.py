"""Replacement of a request's documents by their pages, and of its videos by frames. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from msgspec import structs

from afferent.builtin.pipeline.request import GenerateRequest, Message, Part, TextPart
from afferent.errors import MediaNotCached
from afferent.items.documents import Page, ReadDocument
from afferent.items.request import DocumentPart, MediaPart
from afferent.types import Modality


def with_pages(request: GenerateRequest, documents: Sequence[ReadDocument]) -> GenerateRequest:
    """Return the request with the pages of its documents in their place: images and texts."""
    if not documents:
        return request
    left = iter(documents)
    messages = tuple(
        Message(message.role, tuple(_parts(message.parts, left)), message.extra)
        for message in request.messages
    )
    return structs.replace(request, messages=messages)


def beginning(request: GenerateRequest, documents: Sequence[ReadDocument]) -> GenerateRequest:
    """Return the request up to the last page of the given documents.

    Args:
        documents: The first ones of the request, in order; at least one.
    """
    left, messages = len(documents), list[Message]()
    for message in request.messages:
        parts: list[Part] = []
        for part in message.parts:
            if left:
                parts.append(part)
                left -= isinstance(part, DocumentPart)
        messages.append(Message(message.role, tuple(parts), message.extra))
        if not left:
            break
    return with_pages(structs.replace(request, messages=tuple(messages)), documents)


def with_frames(request: GenerateRequest, modalities: Collection[Modality]) -> GenerateRequest:
    """Return the request with its videos as files whose frames become images.

    Args:
        modalities: Modalities of the model. With videos, or without images, nothing changes.

    Raises:
        MediaNotCached: A video came by its name alone.
    """
    if Modality.VIDEO in modalities or Modality.IMAGE not in modalities:
        return request
    if all(part.modality is not Modality.VIDEO for part in request.media):
        return request
    messages = tuple(
        Message(message.role, tuple(map(_as_frames, message.parts)), message.extra)
        for message in request.messages
    )
    return structs.replace(request, messages=messages)


def _as_frames(part: Part) -> Part:
    """Return a video as a file whose frames become images; any other part is unchanged."""
    if not isinstance(part, MediaPart) or part.modality is not Modality.VIDEO:
        return part
    if part.source is None:
        raise MediaNotCached(
            "the model takes no videos, and frames of a video have no name; send its data",
            uuids=(part.uuid,) if part.uuid else (),
        )
    return DocumentPart(part.source, is_video=True)


def digests_of(
    request: GenerateRequest, documents: Sequence[ReadDocument], digests: Sequence[bytes]
) -> tuple[bytes, ...]:
    """Return the digest of each file of a request, in order: of a document, and not of its pages.

    Args:
        request: With its documents.
        digests: Digest of each item, with the pages in place of documents.
    """
    left, items = iter(documents), iter(digests)

    def found() -> Iterator[bytes]:
        for part in (part for message in request.messages for part in message.parts):
            if isinstance(part, MediaPart):
                yield next(items)
            elif isinstance(part, DocumentPart):
                document = next(left)
                yield document.digest
                for _ in filter(lambda page: page.image is not None, document.pages):
                    next(items)

    return tuple(found())


def _parts(parts: Sequence[Part], left: Iterator[ReadDocument]) -> Iterator[Part]:
    for part in parts:
        if isinstance(part, DocumentPart):
            for page in next(left).pages:
                yield from _of_page(page)
        else:
            yield part


def _of_page(page: Page) -> Iterator[Part]:
    if page.image is not None:
        yield page.image
    if page.text:
        yield TextPart(f"{page.text}\n")
