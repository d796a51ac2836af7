"""Files of a request with many items: the pages of documents, and the frames of videos.

Each page of a document becomes an image, with its text beside it. Each frame that is taken from a
video becomes an image, if the model takes no videos. In this module, *page* means either.

A worker lists the pages, and renders those that are not known: one page of a document at a time, so
that a document costs two workers at most. Frames of a video are rendered together, because each one
needs those before it. The features of pages are made while the next ones are rendered. What a page
became is a record of the store: a second request for the document renders nothing. Equal pages of
different documents are one item, because its digest is that of the image.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta, Struct

from afferent import keys
from afferent.admission.gate import Gate
from afferent.errors import (
    AfferentError,
    InvalidMedia,
    MediaNotCached,
    Param,
    PromptTooLong,
    Quarantined,
    StoreFull,
    TooManyItems,
    UnsupportedMedia,
    WorkerDied,
)
from afferent.items.acquire import Maker, handle_of, write_and_seal
from afferent.items.document_files import DocumentFiles, OpenedDocument
from afferent.items.item import ItemSettings
from afferent.items.receive import ItemReader
from afferent.items.request import Detail, DocumentPart, ItemRequest, MediaPart, SeenMedia
from afferent.media.body.raw import PAGE, RawMedia
from afferent.media.decoded import MAX_TEXT_NBYTES
from afferent.media.headers.probe import ImageHeader
from afferent.media.workers.jobs import (
    PLAN_NBYTES,
    ListedPages,
    ListPages,
    RenderPages,
    cost_us,
    pages_decoder,
    pages_nbytes,
    pages_of,
)
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import Claim, Find, Queue
from afferent.store.protocol.results import Owner, existing
from afferent.telemetry.registry import counter
from afferent.telemetry.trace import Trace
from afferent.types import (
    DOCUMENT,
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
"""Runs of one request whose features are made while others are rendered."""
_RUN_NBYTES: Final = 64 << 20
_RUNS_IN_SHARE: Final = 8
"""Frames are rendered together up to the first limit, and to this part of the space for media."""
_MAX_SPANS: Final = 256
_NUM_CHANNELS: Final = 3


class _PageRecord(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Page of a document: the digest of its image, or nothing, and its text."""

    digest: Annotated[bytes, Meta(max_length=32)]
    text: str


PAGES = counter(
    "afferent_document_pages_total",
    "Pages of documents, and frames of videos as images, by outcome: rendered for the request, or "
    "known from an earlier one",
    outcome=("rendered", "known"),
)
_record_decoder = msgspec.msgpack.Decoder(_PageRecord)


@dataclass(frozen=True, slots=True)
class Page:
    """Page of a document, or frame of a video, for the model.

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
    """Document or video whose pages are known: the digest of the file, and its pages in order."""

    digest: bytes
    pages: Sequence[Page]


@dataclass(frozen=True, slots=True)
class _Page:
    """Page that is requested.

    Attributes:
        size: Width and height of its image in pixels; ``None`` for no image.
        has_text: Whether it has its text.
        name: All that determines what it becomes, encoded.
        detail: Detail of its image.
    """

    document: OpenedDocument = field(compare=False)
    number: int
    size: tuple[int, int] | None
    has_text: bool
    name: tuple[bytes, ...]
    detail: Detail

    @property
    def record_key(self) -> ContentKey:
        return keys.frame(_RECORD_TAG, *self.name)

    @property
    def image_nbytes(self) -> int:
        """Most bytes of its image."""
        return _png_nbytes(self.size)

    @property
    def text_nbytes(self) -> int:
        """Most bytes of its text."""
        return MAX_TEXT_NBYTES if self.has_text else 0


class _Beginning:
    """Documents up to the first page whose features are still being made.

    Invariant: all documents but the last one have all their pages.
    """

    def __init__(
        self,
        opened: Sequence[OpenedDocument],
        pages: Sequence[_Page],
        begun: Callable[[Sequence[ReadDocument]], None] | None,
    ) -> None:
        """Begin without any page; see `DocumentReader.read` for ``begun``."""
        self._opened, self._pages, self._begun = opened, pages, begun
        self._ready: dict[_Page, Page] = {}
        self._missing = set(pages)
        self._documents: list[ReadDocument] = []
        self._last: list[Page] = []  # of the last document
        self._num_pages = 0

    def add(self, pages: Mapping[_Page, Page]) -> None:
        """Add pages whose features exist.

        With the last ones the request itself comes: what ``begun`` has got never has all pages.
        """
        if self._begun is None:
            return
        self._ready |= pages
        self._missing.difference_update(pages)
        if not self._missing:
            return
        while (page := self._ready.get(wanted := self._pages[self._num_pages])) is not None:
            while (
                not self._documents or self._opened[len(self._documents) - 1] is not wanted.document
            ):
                self._last = []
                digest = self._opened[len(self._documents)].digest
                self._documents.append(ReadDocument(digest, self._last))
            self._last.append(page)
            self._num_pages += 1
        self._begun(self._documents)


class DocumentReader:
    """Reads documents for one model, over one store."""

    def __init__(
        self,
        store: AsyncDaemonStore,
        gate: Gate,
        maker: Maker,
        items: ItemStage,
        reader: ItemReader,
        settings: ItemSettings,
    ) -> None:
        """Create it.

        Args:
            items: Makes the features of pages.
            reader: Hashes documents and pages, and finds the pages that are known.
        """
        self._store, self._maker, self._items, self._reader = store, maker, items, reader
        self._limits = settings.limits
        self.has_images = settings.limits.document_content != "text"
        """Whether pages of documents become images."""
        self._has_text = settings.limits.document_content != "images"
        self._files = DocumentFiles(store, gate, reader.digester, settings)
        self._numbers = itertools.count()

    def check(self, documents: Sequence[DocumentPart], *, has_features: bool = True) -> None:
        """Check the number of documents, and that the model takes what they become.

        Args:
            has_features: Whether features are made of the pages.

        Raises:
            TooManyItems: There are too many.
            UnsupportedMedia: The model takes no images.
        """
        for kind in (DOCUMENT, Modality.VIDEO):
            most = self._limits.of(kind).max_items
            number = sum(part.modality is kind for part in documents)
            if number > most:
                raise TooManyItems(
                    f"the request has {number} {kind}s; at most {most} are accepted "
                    f"(--max-{kind}s)",
                    param=Param.MESSAGES,
                )
        has_images = self.has_images or any(part.is_video for part in documents)
        if documents and has_features and has_images and not self._items.takes(Modality.IMAGE):
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
        begun: Callable[[Sequence[ReadDocument]], None] | None = None,
    ) -> list[ReadDocument]:
        """Return the pages of documents, whose features then exist, in order.

        Args:
            request: Its id pins what is left pinned; its ``media`` are the other parts.
            keeps_bytes: Whether the pages' images stay pinned, and no features are made.
            max_pixels: As for `MediaPart`.
            max_tokens: Most tokens that all pages may have in a prompt; ``None`` if unknown.
            begun: Called with the documents whose first pages are known, and again when there are
                further pages, until all exist. The last document may lack some of its pages.

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
        self._check_sent(documents)
        opened, handles = await self._files.open(request, documents, trace)
        listed = [await self._list(request, document, trace) for document in opened]
        pages = [
            self._page(request, document, number, size)
            for document, found in zip(opened, listed, strict=True)
            for number, size in found.sizes.items()
        ]
        self._check_number(pages)
        if not keeps_bytes:
            self._check_images(pages, max_pixels, max_tokens)
        inner = Trace(trace.request_id, trace.what)
        known: dict[_Page, Page] = {}
        if not keeps_bytes:
            known = await self._known(request, pages, max_pixels)
        missing = list(dict.fromkeys(page for page in pages if page not in known))
        kept = [page for page in missing if keeps_bytes or page.size is None]
        held = [handle.nbytes for handle in handles]
        for run in self._runs(kept):
            self._maker.check_share(ObjectKind.RAW, [*held, _nbytes_of(run)])
            # A request with pages must not wait for long: it might wait for itself.
            may_wait = len(held) == len(handles)
            done, nbytes = await self._kept(request, run, max_pixels, inner, may_wait=may_wait)
            known |= done
            held += [nbytes] if nbytes else []
        made = [page for page in missing if page not in known]
        beginning = _Beginning(opened, pages, begun)
        beginning.add(known)
        known |= await self._made(request, self._runs(made), max_pixels, inner, beginning)
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

    def _check_sent(self, documents: Sequence[DocumentPart]) -> None:
        """Refuse a file whose bytes were left out of the body, as those of a known item.

        Raises:
            StoreFull: There is one; its bytes are read when the request comes again.
        """
        sent = [part.source for part in documents if isinstance(part.source, RawMedia)]
        digests = [raw.digest for raw in sent if raw.is_left_out and raw.digest is not None]
        if digests:
            self._reader.need(digests)
            raise StoreFull("a file is known as an item of another kind; try again")

    # Lists of pages

    async def _list(
        self, request: ItemRequest, document: OpenedDocument, trace: Trace
    ) -> ListedPages:
        part = document.part
        dpi = part.dpi or self._limits.document_dpi
        first, last = part.pages.first, part.pages.last
        shape = encode((part.is_video, first, last, dpi))
        key = keys.frame(_LIST_TAG, request.tenant.encode(), document.digest, shape)
        if document.file is None:
            return await self._listed_before(request, key)
        handle, where = document.file
        job = ListPages(part.is_video, where, first, last, dpi)
        asked = Queue(key, ObjectKind.RECORDS, PLAN_NBYTES, [handle], encode(job), cost_us(job))
        with _blaming(f"the {part.modality}"):
            (found,) = await self._maker.read_records(
                request.request_id, [asked], pages_decoder, trace, stage="list_pages"
            )
        return found

    async def _listed_before(self, request: ItemRequest, key: ContentKey) -> ListedPages:
        (outcome,) = await self._store.acquire(request.request_id, [Find(key)])
        if (handle := existing(outcome)) is None:
            raise MediaNotCached("a document or video is not cached any more; send it again")
        found = decode(pages_decoder, self._store.block(handle))
        await self._store.release(request.request_id, [handle])
        return found

    def _page(
        self, request: ItemRequest, document: OpenedDocument, number: int, size: tuple[int, int]
    ) -> _Page:
        is_video = document.part.is_video
        wanted = size if self.has_images or is_video else None
        has_text = self._has_text and not is_video
        what = encode((is_video, number, wanted, has_text))
        name = (request.tenant.encode(), document.digest, what)
        return _Page(document, number, wanted, has_text, name, document.part.detail)

    def _check_number(self, pages: Sequence[_Page]) -> None:
        most = self._limits.max_document_pages
        if len(pages) > most:
            raise TooManyItems(
                f"the request has {len(pages)} pages of documents and frames of videos; at most "
                f"{most} are accepted (--max-document-pages)",
                param=Param.MESSAGES,
            )

    def _check_images(
        self, pages: Sequence[_Page], max_pixels: int, max_tokens: int | None
    ) -> None:
        """Refuse documents before a page is rendered."""
        images = [(ImageHeader(*page.size), page.detail) for page in pages if page.size is not None]
        if not images:
            return
        num_tokens = self._items.check_images(images, max_pixels=max_pixels)
        if max_tokens is not None and num_tokens > max_tokens:
            raise PromptTooLong(
                f"the {len(pages)} pages of documents and frames of videos take {num_tokens} "
                f"tokens; the model has room for {max_tokens} beside the texts: choose fewer "
                'pages, such as "pages": "1-3", or fewer frames (--max-sampled-frames)',
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
        here = await self._reader.find_seen(request, images)
        return {
            page: each for page, each in known.items() if each.image is None or each.image in here
        }

    def _runs(self, pages: Sequence[_Page]) -> Iterator[list[_Page]]:
        """Yield the pages that are rendered together: one, or frames of one video, in order."""
        most_nbytes = min(_RUN_NBYTES, self._maker.share_nbytes(ObjectKind.RAW) // _RUNS_IN_SHARE)
        run: list[_Page] = []
        left_nbytes = 0
        for page in pages:
            is_next = bool(run) and page.document is run[0].document
            left_nbytes -= page.image_nbytes
            if not (is_next and page.document.part.is_video and left_nbytes >= 0):
                if run:
                    yield run
                run, left_nbytes = [], most_nbytes - page.image_nbytes
            run.append(page)
        if run:
            yield run

    async def _kept(
        self,
        request: ItemRequest,
        run: Sequence[_Page],
        max_pixels: int,
        trace: Trace,
        *,
        may_wait: bool,
    ) -> tuple[dict[_Page, Page], int]:
        """Render pages whose images stay pinned by the request.

        Returns:
            The pages, and the number of bytes that stay pinned: none for pages without an image.
        """
        rendered = await self._render(request.request_id, run, trace, may_wait=may_wait)
        handle, nbytes = rendered[0][0].handle, 0
        if handle is not None and run[0].size is None:
            await self._store.release(request.request_id, [handle])
        elif handle is not None:
            nbytes = handle.nbytes
        pages = {
            page: _as_page(page, record, max_pixels, raw)
            for page, (raw, record) in zip(run, rendered, strict=True)
        }
        return pages, nbytes

    async def _made(
        self,
        request: ItemRequest,
        runs: Iterable[Sequence[_Page]],
        max_pixels: int,
        trace: Trace,
        beginning: _Beginning,
    ) -> dict[_Page, Page]:
        """Render pages, and make the features of each run while the next one is rendered.

        Each run has a lease of its own: nothing of it stays pinned. So the memory that they take
        at a time is bounded, however many they are.
        """
        made: dict[_Page, Page] = {}
        tasks: list[tuple[Sequence[_Page], asyncio.Task[list[bool]]]] = []
        slots = asyncio.Semaphore(_MADE_AT_ONCE)
        try:
            async with asyncio.TaskGroup() as group:
                for run in runs:
                    await slots.acquire()
                    lease = f"page-{next(self._numbers)}"
                    self._store.introduce(lease, request.share)
                    try:
                        rendered = await self._render(lease, run, trace)
                    except BaseException:
                        self._store.forget(lease)
                        raise
                    images, shown = [], {}
                    for page, (raw, record) in zip(run, rendered, strict=True):
                        images.append(_image(page, record, max_pixels, raw))
                        shown[page] = _as_page(page, record, max_pixels)
                    made |= shown
                    done = partial(beginning.add, shown)
                    making = self._make(request, lease, images, slots, trace, done)
                    task = group.create_task(making)
                    task.add_done_callback(partial(self._forget_unmade, lease))
                    tasks.append((run, task))
        except* AfferentError as errors:
            raise _first(errors) from None
        return {
            page: _marked(made[page], is_new=is_new)
            for run, task in tasks
            for page, is_new in zip(run, task.result(), strict=True)
        }

    def _forget_unmade(self, lease: str, task: asyncio.Task[list[bool]]) -> None:
        """Unpin a run whose task was cancelled, perhaps before its first step."""
        if task.cancelled():
            self._store.forget(lease)

    async def _make(
        self,
        request: ItemRequest,
        lease: str,
        images: Sequence[MediaPart],
        slots: asyncio.Semaphore,
        trace: Trace,
        done: Callable[[], None],
    ) -> list[bool]:
        """Make the features of a run's images; then nothing of its lease is pinned.

        Args:
            done: Called when the features exist.

        Returns:
            Whether those of each image did not exist.
        """
        inner = Trace(trace.request_id, trace.what)
        try:
            made = await self._items.make_ahead(
                ItemRequest(lease, tuple(images), request.share), inner
            )
        finally:
            self._store.forget(lease)
            slots.release()
        trace.add(inner.spans)
        done()
        return made

    async def _render(
        self, lease: str, run: Sequence[_Page], trace: Trace, *, may_wait: bool = True
    ) -> list[tuple[RawMedia, _PageRecord]]:
        """Have the pages of a run rendered; their object is pinned by the lease.

        Args:
            may_wait: As for `Gate.admit`.
        """
        first = run[0]
        kind = first.document.part.modality
        if first.document.file is None:
            raise MediaNotCached(f"a part of a {kind} is not cached any more; send it again")
        handle, where = first.document.file
        job = RenderPages(
            first.document.part.is_video,
            where,
            [(page.number, page.size) for page in run],
            first.has_text,
        )
        key = keys.frame(_PAGE_TAG, *(part for page in run for part in page.name))
        nbytes = _nbytes_of(run)
        asked = Queue(key, ObjectKind.RAW, nbytes, [handle], encode(job), cost_us(job))
        with _blaming(f"page {first.number} of the {kind}" if len(run) == 1 else f"the {kind}"):
            outcomes = await self._maker.acquire(
                *(lease, [asked], trace),
                room=[ReserveItem(ObjectKind.RAW, nbytes)],
                in_turn=False,
                may_wait=may_wait,
            )
            (outcome,) = await self._maker.settle(
                *(lease, [key], outcomes, trace), stage="wait_for_page"
            )
            made = handle_of(outcome)
        block = self._store.block(made)
        found = pages_of(block)
        images = [block[at.start : at.start + at.nbytes] for at, _ in found]
        digests = await self._reader.digester.digest_all(images)
        del images, block
        rendered = []
        for page, (at, text), digest in zip(run, found, digests, strict=True):
            raw = RawMedia(
                *(PAGE, at.nbytes),
                handle=made,
                start=at.start,
                is_sealed=True,
                digest=digest,
            )
            record = _PageRecord(digest if page.size is not None else b"", text)
            await self._write(lease, page.record_key, record)
            rendered.append((raw, record))
        return rendered

    async def _write(self, lease: str, key: ContentKey, record: _PageRecord) -> None:
        """Write a record, unless it exists or there is no space for it."""
        data = encode(record)
        (outcome,) = await self._store.acquire(lease, [Claim(key, ObjectKind.RECORDS, len(data))])
        handle = existing(outcome)
        if isinstance(outcome, Owner):
            (handle,) = await write_and_seal(self._store, lease, [outcome.handle], [data])
        if handle is not None:
            await self._store.release(lease, [handle])


def _as_page(
    page: _Page, record: _PageRecord, max_pixels: int, raw: RawMedia | None = None
) -> Page:
    """Return a page with its image as bytes, or as known features."""
    image = _image(page, record, max_pixels, raw) if page.size is not None else None
    return Page(page.number, image, record.text)


def _image(
    page: _Page, record: _PageRecord, max_pixels: int, raw: RawMedia | None = None
) -> MediaPart:
    source = raw or SeenMedia(record.digest, is_page=True)
    return MediaPart(Modality.IMAGE, source, page.detail, max_pixels=max_pixels)


def _marked(page: Page, *, is_new: bool) -> Page:
    """Return the page with the mark that its features were made, or not."""
    if page.image is None or not isinstance(page.image.source, SeenMedia):
        return page
    source = replace(page.image.source, is_new=is_new)
    return replace(page, image=replace(page.image, source=source))


def _nbytes_of(run: Sequence[_Page]) -> int:
    """Return the most bytes of the object with the pages of a run."""
    return pages_nbytes((page.image_nbytes, page.text_nbytes) for page in run)


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
