"""Replacement of a request's documents by their pages. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import structs

from afferent.builtin.pipeline.request import GenerateRequest, Message, Part, TextPart
from afferent.items.documents import Page, ReadDocument
from afferent.items.request import DocumentPart, MediaPart


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
