"""Bytes of a request's documents, and of videos whose frames become images, in the arena."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from afferent.admission.gate import Gate
from afferent.errors import InvalidMedia, MediaTooLarge, UnsupportedMedia
from afferent.files.stored_file import StoredFile
from afferent.items.item import File, ItemSettings
from afferent.items.receive import MEDIA_BYTES, NO_FRAMES
from afferent.items.request import DocumentPart, ItemRequest, SeenMedia
from afferent.items.urls import UrlReader
from afferent.media.body.digest import Digester
from afferent.media.body.raw import RawMedia
from afferent.media.headers.document_format import document_format_of
from afferent.media.workers.jobs import InputRange
from afferent.runtime.tasks import in_thread
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import SealItem
from afferent.telemetry.trace import Trace
from afferent.types import CreateItem, Handle, ObjectKind


@dataclass(frozen=True, slots=True)
class OpenedDocument:
    """Document whose bytes are in the arena, or known by their digest alone."""

    part: DocumentPart
    digest: bytes
    file: File | None


class DocumentFiles:
    """Brings documents into the arena, over one store."""

    def __init__(
        self,
        store: AsyncDaemonStore,
        gate: Gate,
        digester: Digester,
        settings: ItemSettings,
    ) -> None:
        self._store, self._gate, self._limits = store, gate, settings.limits
        self._digester = digester
        self._urls = UrlReader(store, settings, has_tier=False)

    async def open(
        self, request: ItemRequest, documents: Sequence[DocumentPart], trace: Trace
    ) -> tuple[list[OpenedDocument], list[Handle]]:
        """Bring the bytes of documents into the arena.

        Returns:
            The documents, and the sealed objects that the request has pinned for them.
        """
        urls = [each for each in documents if isinstance(each.source, str | StoredFile)]
        fetched = iter(await self._urls.read(request, urls, trace) if urls else ())
        media = [
            next(fetched) if isinstance(part.source, str | StoredFile) else part.source
            for part in documents
        ]
        sent = [raw for raw in media if isinstance(raw, RawMedia)]
        views = [
            self._checked(part, raw)
            for part, raw in zip(documents, media, strict=True)
            if isinstance(raw, RawMedia)
        ]
        digests = iter(await self._digester.digest_all(views))
        files, handles = await self._placed(request, sent, views)
        del views
        placed = iter(files)
        opened = [
            OpenedDocument(part, raw.digest, None)
            if isinstance(raw, SeenMedia)
            else OpenedDocument(part, next(digests), next(placed))
            for part, raw in zip(documents, media, strict=True)
        ]
        return opened, handles

    def _checked(self, part: DocumentPart, raw: RawMedia) -> memoryview:
        """Return the bytes of a document or video, and count them.

        Raises:
            MediaTooLarge: There are too many.
            UnsupportedMedia: They have no format of documents.
        """
        kind = part.modality
        MEDIA_BYTES.labels(kind, raw.origin).inc(raw.nbytes)
        most = self._limits.of(kind).max_nbytes
        if raw.nbytes > most:
            raise MediaTooLarge(f"the {kind} has more than {most} bytes (--max-{kind}-nbytes)")
        if raw.is_frames:
            raise UnsupportedMedia(NO_FRAMES)
        view = memoryview(raw.bytes_in(self._store))
        if not part.is_video:
            document_format_of(view)
        elif not len(view):
            raise InvalidMedia("the video file is empty")
        return view

    async def _placed(
        self, request: ItemRequest, sent: Sequence[RawMedia], views: Sequence[memoryview]
    ) -> tuple[list[File], list[Handle]]:
        """Return the location of each document, and the pinned objects with them.

        An object with other items, too, is sealed with these: so a document in it is copied.
        """
        others = [part.source for part in request.media if isinstance(part.source, RawMedia)]
        users = Counter(raw.handle for raw in (*sent, *others) if raw.handle is not None)
        files: list[File] = []
        for raw, view in zip(sent, views, strict=True):
            handle, start = raw.handle, raw.start
            if handle is None or users[handle] > 1:
                # A request with raw bytes must not wait for more: it might wait for itself.
                may_wait = not users and not files
                handle, start = await self._copy(request.request_id, view, may_wait=may_wait), 0
            if not raw.is_sealed or handle != raw.handle:
                to_seal = [SealItem(handle, handle.nbytes)]
                (handle,) = await self._store.seal(request.request_id, to_seal)
            files.append((handle, InputRange(start, raw.nbytes)))
        used = {handle for handle, _ in files} | {raw.handle for raw in others}
        left = {raw.handle for raw in sent if not raw.is_sealed} - used
        if unused := [handle for handle in left if handle is not None and users[handle] > 1]:
            self._store.discard(request.request_id, unused)
        return files, [handle for handle, _ in files]

    async def _copy(self, request_id: str, view: memoryview, *, may_wait: bool) -> Handle:
        """Return an unsealed object with a copy of these bytes."""
        create = self._gate.create if may_wait else self._store.create
        (handle,) = await create(request_id, [CreateItem(ObjectKind.RAW, len(view))])
        target = np.frombuffer(self._store.block(handle), np.uint8)
        await in_thread(np.copyto, target, np.frombuffer(view, np.uint8))
        return handle

    async def close(self) -> None:
        await self._urls.close()
