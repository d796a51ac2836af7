"""Documents of a request: each page becomes an item, with its text beside it.

A worker lists the pages, and renders those that are not known: one page of a document at a time, so
that a document costs two workers at most. The features of a page are made while the next page is
rendered. What a page became is a record of the store: a second request for the document renders
nothing. Equal pages of different documents are one item, because its digest is that of the image.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta, Struct

from afferent import keys
from afferent.admission.gate import Gate
from afferent.config import RequestLimits
from afferent.errors import (
    AfferentError,
    InvalidMedia,
    MediaNotCached,
    Param,
    PromptTooLong,
    Quarantined,
    TooManyItems,
    UnsupportedMedia,
    WorkerDied,
)
from afferent.files.file_store import FileStore
from afferent.items.acquire import Maker, handle_of
from afferent.items.document_files import DocumentFiles, OpenedDocument
from afferent.items.request import Detail, DocumentPart, ItemRequest, MediaPart, SeenMedia
from afferent.media.body.digest import Digester
from afferent.media.body.raw import PAGE, RawMedia
from afferent.media.decoded import MAX_TEXT_NBYTES
from afferent.media.headers.probe import ImageHeader
from afferent.media.workers.jobs import (
    PLAN_NBYTES,
    DocumentPages,
    ListPages,
    RenderPage,
    cost_us,
    page_nbytes,
    page_of,
    pages_decoder,
)
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import Claim, Find, Queue, SealItem
from afferent.store.protocol.results import Owner, existing
from afferent.telemetry.registry import counter
from afferent.telemetry.trace import Trace
from afferent.types import (
    ContentKey,
    Modality,
    ObjectKind,
    ReserveItem,
    decode,
    encode,
)

if TYPE_CHECKING:
    from afferent.items.stage import ItemStage

_LIST_TAG: Final = b"afferent/document-pages/v1"
_PAGE_TAG: Final = b"afferent/rendered-page/v1"
_RECORD_TAG: Final = b"afferent/page/v1"
_MADE_AT_ONCE: Final = 4
"""Pages of one request whose features are made while others are rendered."""
_MAX_SPANS: Final = 256
_NUM_CHANNELS: Final = 3


class _PageRecord(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Page of a document: the digest of its image, or nothing, and its text."""

    digest: Annotated[bytes, Meta(max_length=32)]
    text: str


PAGES = counter(
    "afferent_document_pages_total",
    "Pages of documents by outcome: rendered for the request, or known from an earlier one",
    outcome=("rendered", "known"),
)
_record_decoder = msgspec.msgpack.Decoder(_PageRecord)


@dataclass(frozen=True, slots=True)
class Page:
    """Page of a document for the model.

    Attributes:
        number: From 1 on.
        image: Item of the page; ``None`` if the model gets text alone.
        text: Text of the page; empty if it has none, or the model gets images alone.
    """

    number: int
    image: MediaPart | None
    text: str


@dataclass(frozen=True, slots=True)
class ReadDocument:
    """Document whose pages are known: the digest of the file, and its pages in order."""

    digest: bytes
    pages: Sequence[Page]


@dataclass(frozen=True, slots=True)
class _Page:
    """Page that is requested.

    Attributes:
        size: Width and height of its image in pixels; ``None`` for no image.
        name: All that determines what it becomes, encoded.
        detail: Detail of its image.
    """

    document: OpenedDocument = field(compare=False)
    number: int
    size: tuple[int, int] | None
    name: tuple[bytes, ...]
    detail: Detail

    @property
    def record_key(self) -> ContentKey:
        return keys.frame(_RECORD_TAG, *self.name)

    @property
    def rendered_key(self) -> ContentKey:
        return keys.frame(_PAGE_TAG, *self.name)


class DocumentReader:
    """Reads documents for one model, over one store."""

    def __init__(
        self,
        store: AsyncDaemonStore,
        gate: Gate,
        maker: Maker,
        items: ItemStage,
        *,
        limits: RequestLimits,
        num_workers: int,
        files: FileStore | None = None,
    ) -> None:
        """Create it.

        Args:
            files: Store of the files that parts name, if there is one.
            items: Makes the features of pages.
            num_workers: Threads that read and hash documents and pages.
        """
        self._store, self._maker, self._items = store, maker, items
        self._limits = limits
        self.has_images = limits.document_content != "text"
        """Whether pages become images."""
        self._has_text = limits.document_content != "images"
        self._digester = Digester(num_workers)
        self._files = DocumentFiles(
            *(store, gate, self._digester, limits), num_workers=num_workers, files=files
        )
        self._numbers = itertools.count()

    def check(self, documents: Sequence[DocumentPart], *, has_features: bool = True) -> None:
        """Check the number of documents, and that the model takes what they become.

        Args:
            has_features: Whether features are made of the pages.

        Raises:
            TooManyItems: There are too many.
            UnsupportedMedia: The model takes no images.
        """
        most = self._limits.max_documents
        if len(documents) > most:
            raise TooManyItems(
                f"the request has {len(documents)} documents; at most {most} are accepted "
                "(--max-documents)",
                param=Param.MESSAGES,
            )
        if documents and has_features and self.has_images and not self._items.takes(Modality.IMAGE):
            raise UnsupportedMedia(
                "the model takes no images, so no pages of documents; with --document-content text "
                "it gets their text",
                param=Param.MESSAGES,
            )

    async def read(
        self,
        request: ItemRequest,
        documents: Sequence[DocumentPart],
        trace: Trace,
        *,
        keeps_bytes: bool = False,
        max_pixels: int = 0,
        max_tokens: int | None = None,
    ) -> list[ReadDocument]:
        """Return the pages of documents, whose features then exist, in order.

        Args:
            request: Its id pins what is left pinned; its ``media`` are the other parts.
            keeps_bytes: Whether the pages' images stay pinned, and no features are made.
            max_pixels: As for `MediaPart`.
            max_tokens: Most tokens that all pages may have in a prompt; ``None`` if unknown.

        Raises:
            InvalidMedia: A document is no PDF, encrypted, broken, or beyond a limit.
            TooManyItems: There are too many pages.
            PromptTooLong: The images alone have more than ``max_tokens``.
            MediaNotCached: A document came by its digest alone, and is not known any more.
            Unavailable: Try again.
        """
        if not documents:
            return []
        start_ns = time.monotonic_ns()
        opened, handles = await self._files.open(request, documents, trace)
        listed = [await self._list(request, document, trace) for document in opened]
        pages = [
            self._page(request, document, number, size)
            for document, found in zip(opened, listed, strict=True)
            for number, size in enumerate(found.sizes, document.part.pages.first)
        ]
        self._check_pages(pages, makes_features=not keeps_bytes, max_tokens=max_tokens)
        inner = Trace(trace.request_id, trace.what)
        known: dict[_Page, Page] = {}
        if not keeps_bytes:
            known = await self._known(request, pages, max_pixels)
        missing = list(dict.fromkeys(page for page in pages if page not in known))
        if keeps_bytes or not self.has_images:
            for page in missing:
                known[page] = await self._kept(request, page, max_pixels, inner)
        else:
            known |= await self._made(request, missing, max_pixels, inner)
        if handles:
            await self._store.release(request.request_id, handles)
        PAGES.labels("rendered").inc(len(missing))
        PAGES.labels("known").inc(len(pages) - len(missing))
        trace.add(inner.spans[:_MAX_SPANS])
        note = f"{len(pages)} pages, {len(missing)} rendered"
        trace.stage(start_ns, "documents", note=note)
        found = iter(pages)
        return [
            ReadDocument(each.digest, [known[next(found)] for _ in said.sizes])
            for each, said in zip(opened, listed, strict=True)
        ]

    async def close(self) -> None:
        await self._files.close()
        self._digester.close()

    # Lists of pages

    async def _list(
        self, request: ItemRequest, document: OpenedDocument, trace: Trace
    ) -> DocumentPages:
        part = document.part
        dpi = part.dpi or self._limits.document_dpi
        first, last = part.pages.first, part.pages.last
        shape = encode((first, last, dpi))
        key = keys.frame(_LIST_TAG, request.tenant.encode(), document.digest, shape)
        if document.file is None:
            return await self._listed_before(request, key)
        handle, where = document.file
        job = ListPages(where, first, last, dpi)
        asked = Queue(key, ObjectKind.RECORDS, PLAN_NBYTES, [handle], encode(job), cost_us(job))
        with _blaming("the document"):
            (found,) = await self._maker.read_records(
                request.request_id, [asked], pages_decoder, trace, stage="list_pages"
            )
        return found

    async def _listed_before(self, request: ItemRequest, key: ContentKey) -> DocumentPages:
        (outcome,) = await self._store.acquire(request.request_id, [Find(key)])
        if (handle := existing(outcome)) is None:
            raise MediaNotCached("a document is not cached any more; send it again")
        found = decode(pages_decoder, self._store.block(handle))
        await self._store.release(request.request_id, [handle])
        return found

    def _page(
        self, request: ItemRequest, document: OpenedDocument, number: int, size: tuple[int, int]
    ) -> _Page:
        wanted = size if self.has_images else None
        what = encode((number, wanted, self._has_text))
        name = (request.tenant.encode(), document.digest, what)
        return _Page(document, number, wanted, name, document.part.detail)

    def _check_pages(
        self, pages: Sequence[_Page], *, makes_features: bool, max_tokens: int | None
    ) -> None:
        """Refuse documents before a page is rendered."""
        most = self._limits.max_document_pages
        if len(pages) > most:
            raise TooManyItems(
                f"the request has {len(pages)} pages of documents; at most {most} are accepted "
                "(--max-document-pages)",
                param=Param.MESSAGES,
            )
        headers = [ImageHeader(*page.size) for page in pages if page.size is not None]
        if not makes_features or not headers:
            return
        num_tokens = self._items.check_images(headers)
        if max_tokens is not None and num_tokens > max_tokens:
            raise PromptTooLong(
                f"the {len(pages)} pages of documents take {num_tokens} tokens; the model has room "
                f'for {max_tokens} in all: choose fewer pages, such as "pages": "1-3"',
                param=Param.MESSAGES,
            )

    # Pages

    async def _known(
        self, request: ItemRequest, pages: Sequence[_Page], max_pixels: int
    ) -> dict[_Page, Page]:
        """Return the pages with records and features."""
        outcomes = await self._store.acquire(
            request.request_id, [Find(page.record_key) for page in pages]
        )
        found = {
            page: handle
            for page, outcome in zip(pages, outcomes, strict=True)
            if (handle := existing(outcome)) is not None
        }
        records = {
            page: decode(_record_decoder, self._store.block(handle))
            for page, handle in found.items()
        }
        if found:
            await self._store.release(request.request_id, list(found.values()))
        known = {page: _as_page(page, record, max_pixels) for page, record in records.items()}
        images = [page.image for page in known.values() if page.image is not None]
        here = await self._items.find_seen(request, images)
        return {
            page: each for page, each in known.items() if each.image is None or each.image in here
        }

    async def _kept(self, request: ItemRequest, page: _Page, max_pixels: int, trace: Trace) -> Page:
        """Render a page whose image stays pinned by the request."""
        raw, record = await self._render(request.request_id, page, trace)
        if page.size is None and raw.handle is not None:
            await self._store.release(request.request_id, [raw.handle])
        return _as_page(page, record, max_pixels, raw)

    async def _made(
        self, request: ItemRequest, pages: Sequence[_Page], max_pixels: int, trace: Trace
    ) -> dict[_Page, Page]:
        """Render pages, and make the features of each while the next one is rendered.

        Each page has a lease of its own: nothing of it stays pinned. So the memory that they take
        at a time is bounded, however many they are.
        """
        made: dict[_Page, Page] = {}
        tasks: dict[_Page, asyncio.Task[bool]] = {}
        slots = asyncio.Semaphore(_MADE_AT_ONCE)
        try:
            async with asyncio.TaskGroup() as group:
                for page in pages:
                    await slots.acquire()
                    lease = f"page-{next(self._numbers)}"
                    self._store.introduce(lease, request.share)
                    try:
                        raw, record = await self._render(lease, page, trace)
                    except BaseException:
                        self._store.forget(lease)
                        raise
                    image = _as_page(page, record, max_pixels, raw).image
                    made[page] = _as_page(page, record, max_pixels)
                    tasks[page] = group.create_task(self._make(request, lease, image, slots, trace))
        except* AfferentError as errors:
            raise _first(errors) from None
        return {page: _marked(made[page], is_new=tasks[page].result()) for page in pages}

    async def _make(
        self,
        request: ItemRequest,
        lease: str,
        image: MediaPart | None,
        slots: asyncio.Semaphore,
        trace: Trace,
    ) -> bool:
        """Make the features of a page; then nothing of its lease is pinned.

        Returns:
            Whether they did not exist.
        """
        inner = Trace(trace.request_id, trace.what)
        try:
            if image is not None:
                await self._items.make_ahead(ItemRequest(lease, (image,), request.share), inner)
        finally:
            self._store.forget(lease)
            slots.release()
        trace.add(inner.spans)
        return not inner.outcomes["hit"]

    async def _render(self, lease: str, page: _Page, trace: Trace) -> tuple[RawMedia, _PageRecord]:
        """Have a page rendered; its object is pinned by the lease."""
        if page.document.file is None:
            raise MediaNotCached("a page of a document is not cached any more; send it again")
        handle, where = page.document.file
        job = RenderPage(where, page.number, page.size, self._has_text)
        nbytes = page_nbytes(_png_nbytes(page.size), MAX_TEXT_NBYTES if self._has_text else 0)
        asked = Queue(
            *(page.rendered_key, ObjectKind.RAW, nbytes, [handle], encode(job), cost_us(job))
        )
        with _blaming(f"page {page.number} of the document"):
            outcomes = await self._maker.acquire(
                *(lease, [asked], trace),
                room=[ReserveItem(ObjectKind.RAW, nbytes)],
                in_turn=False,
            )
            (outcome,) = await self._maker.settle(
                *(lease, [page.rendered_key], outcomes, trace), stage="wait_for_page"
            )
            made = handle_of(outcome)
        image, text = page_of(self._store.block(made))
        (digest,) = await self._digester.digest_all([image]) if page.size is not None else (b"",)
        raw = RawMedia(PAGE, len(image), handle=made, is_sealed=True, digest=digest)
        record = _PageRecord(digest, text)
        del image
        await self._write(lease, page.record_key, record)
        return raw, record

    async def _write(self, lease: str, key: ContentKey, record: _PageRecord) -> None:
        """Write a record, unless it exists or there is no space for it."""
        data = encode(record)
        (outcome,) = await self._store.acquire(lease, [Claim(key, ObjectKind.RECORDS, len(data))])
        handle = existing(outcome)
        if isinstance(outcome, Owner):
            block = np.frombuffer(self._store.block(outcome.handle), np.uint8)
            np.copyto(block[: len(data)], np.frombuffer(data, np.uint8))
            del block
            (handle,) = await self._store.seal(lease, [SealItem(outcome.handle, len(data))])
        if handle is not None:
            await self._store.release(lease, [handle])


def _as_page(
    page: _Page, record: _PageRecord, max_pixels: int, raw: RawMedia | None = None
) -> Page:
    """Return a page with its image as bytes, or as known features."""
    if page.size is None:
        return Page(page.number, None, record.text)
    source = raw or SeenMedia(record.digest, is_page=True)
    return Page(
        page.number,
        MediaPart(Modality.IMAGE, source, page.detail, max_pixels=max_pixels),
        record.text,
    )


def _marked(page: Page, *, is_new: bool) -> Page:
    """Return the page with the mark that its features were made, or not."""
    if page.image is None or not isinstance(page.image.source, SeenMedia):
        return page
    source = replace(page.image.source, is_new=is_new)
    return replace(page, image=replace(page.image, source=source))


def _png_nbytes(size: tuple[int, int] | None) -> int:
    """Return the most bytes of a PNG file of an RGB image."""
    if size is None:
        return 0
    width, height = size
    plain = height * (1 + _NUM_CHANNELS * width)
    return plain + plain // 512 + (4 << 10)


@contextmanager
def _blaming(what: str) -> Iterator[None]:
    """Blame a document that two workers have failed at.

    Raises:
        InvalidMedia: They have.
    """
    try:
        yield
    except (WorkerDied, Quarantined) as error:  # the second death, and a repeat within a minute
        raise InvalidMedia(
            f"{what} can't be rendered: two processes have failed at it, for too much time or "
            "memory, or a fault of the file (--max-page-s, --preprocess-memory-nbytes)"
        ) from error


def _first(errors: BaseExceptionGroup[AfferentError]) -> AfferentError:
    """Return the first error of a group, which may hold groups."""
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
