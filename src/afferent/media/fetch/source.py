"""Sources of media bytes that did not come with the body: media hosts, files, stored files."""

from __future__ import annotations

import asyncio
import binascii
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import msgspec
import pybase64

from afferent.config import Limits
from afferent.errors import ForbiddenUrl, InternalError, InvalidMedia
from afferent.files.file_store import FileStore
from afferent.files.stored_file import StoredFile
from afferent.media.body.cutter import is_frames
from afferent.media.body.raw import HeapAllowance, RawBuffer, RawMedia
from afferent.media.body.shared_room import SharedRoom
from afferent.media.fetch.fetch import FetchSession, WantedFile
from afferent.media.fetch.files import Readable
from afferent.runtime.tasks import gather
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.types import CreateItem, FileKind, Handle, ObjectKind

_BARE_BASE64: Final = re.compile(r"[A-Za-z0-9+/\r\n]{64}|[A-Za-z0-9+/\r\n]{16,}={0,2}\Z")
_FILES_AT_ONCE: Final = 32
"""Each of them is open until all of them have been read."""
_WITHOUT_LINE_BREAKS: Final = {ord("\r"): None, ord("\n"): None}


@dataclass(frozen=True, slots=True)
class WantedMedia:
    """Item that came as a URL, or as the id of a stored file."""

    source: str | StoredFile
    modality: FileKind

    @property
    def url(self) -> str:
        """Its URL; empty for a stored file."""
        return self.source if isinstance(self.source, str) else ""

    @property
    def is_http(self) -> bool:
        """Whether it is on a media host."""
        return self.url[:4].lower() == "http"

    @property
    def is_file(self) -> bool:
        """Whether its length is known, and it is read in one piece."""
        return isinstance(self.source, StoredFile) or self.source[:5].lower() == "file:"


class MediaSource:
    """Media of one request that came as URLs, or are stored files.

    All are read and digested concurrently, into space that is reserved together.
    """

    def __init__(
        self,
        store: AsyncDaemonStore,
        request_id: str,
        *,
        limits: Limits,
        fetches: FetchSession,
        files: FileStore | None = None,
        tenant: str = "",
    ) -> None:
        """Create a source.

        Args:
            files: Store of the files of ``tenant``, if there is one.
        """
        self._files, self._tenant = files, tenant
        self._store, self._request_id = store, request_id
        self._limits, self._fetches = limits, fetches
        self._heap = HeapAllowance()
        self._turns = asyncio.Lock()

    async def read_all(self, wanted: Sequence[WantedMedia]) -> list[RawMedia]:
        """Return the encoded bytes of all items, in order. Items from the arena are not sealed.

        Raises:
            InvalidMedia: Or one of its subclasses, which name the error.
            StoreFull: There is no space in the arena now.
        """
        is_file = [item.is_file for item in wanted]
        files = [item for item, yes in zip(wanted, is_file, strict=True) if yes]
        others = [item for item, yes in zip(wanted, is_file, strict=True) if not yes]
        room = SharedRoom(self._store, self._request_id, num_items=len(others))
        groups = [files[at : at + _FILES_AT_ONCE] for at in range(0, len(files), _FILES_AT_ONCE)]
        work = [self._read_files(group) for group in groups]
        read = await gather([*work, *(self._read_one(item, room) for item in others)])
        by_file = iter([raw for group in read[: len(work)] for raw in group])
        by_url = iter(_settled([raw for (raw,) in read[len(work) :]], room))
        return [next(by_file if yes else by_url) for yes in is_file]

    async def _read_files(self, files: Sequence[WantedMedia]) -> list[RawMedia]:
        """Read files into one allocation, in the arena or on the heap.

        An empty file is refused before it could be sealed.
        """
        handles: list[Handle] = []
        blocks: list[memoryview] = []

        async def make_room(sizes: Sequence[int]) -> list[memoryview]:
            if self._heap.take(sum(sizes)):
                blocks.extend(memoryview(bytearray(nbytes)) for nbytes in sizes)
            else:
                items = [CreateItem(ObjectKind.RAW, max(nbytes, 1)) for nbytes in sizes]
                handles.extend(await self._store.create(self._request_id, items))
                pairs = zip(handles, sizes, strict=True)
                blocks.extend(self._store.block(handle)[:nbytes] for handle, nbytes in pairs)
            return blocks

        limits = [self._limits.of(item.modality).max_nbytes for item in files]
        asked = [
            WantedFile(item.url, most, self._opener(item.source))
            for item, most in zip(files, limits, strict=True)
        ]
        async with self._turns:
            read = await self._fetches.read_files(asked, make_room)
        if not handles:
            return [
                RawMedia("fetch", file.nbytes, data=bytes(block[: file.nbytes]), digest=file.digest)
                for file, block in zip(read, blocks, strict=True)
            ]
        return [
            RawMedia(
                *("fetch", file.nbytes),
                handle=msgspec.structs.replace(handle, nbytes=file.nbytes),
                digest=file.digest,
            )
            for handle, file in zip(handles, read, strict=True)
        ]

    def _opener(self, source: str | StoredFile) -> Callable[[], Readable] | None:
        """Return the function that opens a stored file."""
        if isinstance(source, str):
            return None
        if self._files is None:
            raise InternalError("a file is wanted of a server without a store of files")
        return partial(self._files.open, self._tenant, source.id)

    async def _read_one(self, wanted: WantedMedia, room: SharedRoom) -> list[RawMedia]:
        """Read one item. A ``data:`` URL here was left in the JSON by a streaming reader: it is
        short, or odd.
        """
        if wanted.url[:5].lower() == "data:":
            return [_decode(wanted)]
        if _BARE_BASE64.match(wanted.url):
            raise ForbiddenUrl(
                f"this is base64, and no URL: put data:{wanted.modality}/...;base64, in front of it"
            )
        buffer = RawBuffer(self._store, self._request_id, self._heap, room)
        start_ns = time.monotonic_ns()
        fetched = await self._fetches.fetch_into(
            wanted.url,
            buffer.write,
            modality=wanted.modality,
            max_nbytes=self._limits.of(wanted.modality).max_nbytes,
            make_room=buffer.make_room,
        )
        took_us = (time.monotonic_ns() - start_ns) // 1000
        raw = await buffer.finish_sealed(origin="fetch")
        return [replace(raw, fresh_s=fetched.fresh_s, took_us=max(1, took_us))]


def _settled(media: Sequence[RawMedia], room: SharedRoom) -> list[RawMedia]:
    """Return media in objects that are cut to their used length."""
    used = room.settle({raw.handle for raw in media if raw.handle is not None})
    return [
        raw if raw.handle is None else replace(raw, handle=used.get(raw.handle, raw.handle))
        for raw in media
    ]


def _decode(wanted: WantedMedia) -> RawMedia:
    header, comma, payload = wanted.url[5:].partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise ForbiddenUrl(f"a data: URL has the form data:{wanted.modality}/...;base64,...")
    if is_frames(wanted.url):
        text = payload.translate(_WITHOUT_LINE_BREAKS).encode(errors="replace")
        return RawMedia("data", len(text), data=text, is_frames=True)
    try:
        data = pybase64.b64decode(payload.translate(_WITHOUT_LINE_BREAKS), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidMedia(f"the base64 of the {wanted.modality} file is malformed") from error
    return RawMedia("data", len(data), data=data)
