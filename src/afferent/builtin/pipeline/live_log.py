"""Log of a live session's changes, in the store: any frontend can continue the session.

Each change is an object of its own, so it is there when its client is notified. Every
`CHUNK_CHANGES` changes, they are joined to a *chunk*, which begins with the settings at that point.
A *head* names the chunks that still matter: those before the first item are deleted. So the log
grows with the items that the session has, not with those that it had.

The objects are pinned while the session is open. Later they are normal objects: they are evicted
when they are the least recently used.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from afferent import keys
from afferent.builtin.pipeline.live_session import (
    Added,
    Change,
    Configured,
    Continued,
    LiveSession,
    Removed,
)
from afferent.errors import AfferentError, InvalidRequest, SessionContinued, SessionNotFound
from afferent.items.acquire import handle_if_there, write_and_seal
from afferent.runtime.tasks import uninterrupted
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import Claim, Find
from afferent.store.protocol.results import Failed, Owner
from afferent.types import ContentKey, CreateItem, Handle, ObjectKind, decode, encode

CHUNK_CHANGES: Final = 128
"""Number of changes in a chunk."""
MAX_CHANGE_NBYTES: Final = 1 << 20
"""Limit of one change; a larger item is refused."""
_MAX_UNJOINED_NBYTES: Final = 4 << 20
"""Limit of the changes that are not joined yet: they are pinned, and joined in one object."""
_FIND_AT_ONCE: Final = 256


class _Chunk(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    settings: Configured
    changes: list[Change]


class _Head(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Chunks that matter: ``first`` to ``end - 1``. The head with the largest ``number`` counts."""

    number: Annotated[int, Meta(ge=0)]
    first: Annotated[int, Meta(ge=0)]
    end: Annotated[int, Meta(ge=0)]


_change_decoder = msgspec.msgpack.Decoder(Change)
_chunk_decoder = msgspec.msgpack.Decoder(_Chunk)
_head_decoder = msgspec.msgpack.Decoder(_Head)


def _most_unjoined_nbytes(change: Change) -> float:
    """Return the limit for a change: an answer has room beyond that of what clients send."""
    match change:
        case Removed() | Continued():
            return math.inf
        case Added(item) if item.turn.role == "assistant":
            return _MAX_UNJOINED_NBYTES + 2 * MAX_CHANGE_NBYTES
        case _:
            return _MAX_UNJOINED_NBYTES


class LiveLog:
    """Log of one session, and the session that it describes.

    Invariants:
        - A change is in the store before it is applied.
        - Changes are numbered. A number is written once: of two frontends with one session, the
          second one to write a number has lost the session.
        - One of the two heads is valid at any time, whenever the frontend is killed.
    """

    def __init__(
        self, store: AsyncDaemonStore, *, tenant: str, session_id: str, lease: str
    ) -> None:
        """Create the log of a new session; nothing is written.

        Args:
            lease: Id of its pins. Two connections of a frontend may have the same session for a
                moment, and never the same pins.
        """
        self._store, self._tenant, self._id, self._lease = store, tenant, session_id, lease
        self.session = LiveSession()
        self._lock = asyncio.Lock()
        self._next = 0
        self._head = _Head(0, 0, 0)
        self._settings = Configured(self.session.settings)  # at the start of the next chunk
        self._changes: list[Change] = []  # since the last chunk
        self._handles: list[Handle] = []  # of these changes
        self._head_handle: Handle | None = None
        self._has_gap = False  # a change is missing that others follow
        self._chunks: deque[tuple[int, Handle]] = deque()
        self._chunk_of: dict[str, int] = {}  # the chunk of each item

    @classmethod
    async def resume(
        cls, store: AsyncDaemonStore, *, tenant: str, session_id: str, lease: str
    ) -> LiveLog:
        """Return the log of an existing session, which other frontends can't write any more.

        Raises:
            SessionNotFound: It is not stored, or a part of it is missing.
            Unavailable: Try again.
        """
        log = cls(store, tenant=tenant, session_id=session_id, lease=lease)
        try:
            while not await log._read():
                log.close()
                log = cls(store, tenant=tenant, session_id=session_id, lease=lease)
        except BaseException:
            log.close()
            raise
        return log

    async def append(self, change: Change) -> None:
        """Write a change, and apply it; an answer that it has is not written again.

        A cancelled call ends with the change written and applied, or neither.

        Raises:
            SessionContinued: Another frontend has the session now.
            InvalidRequest: It is too large.
            StoreFull: There is no space now; the change is not applied.
        """
        await uninterrupted(self._append(change))

    async def _append(self, change: Change) -> None:
        async with self._lock:
            if isinstance(change, Added) and self.has(change.item.id):
                return
            await self._write(change)
            self._apply(change)
            while len(self._changes) >= CHUNK_CHANGES and await self._roll():
                pass

    def has(self, item_id: str) -> bool:
        """Return whether it has an item."""
        return item_id in self._chunk_of

    def close(self) -> None:
        """Unpin the session; it can be continued until it is evicted."""
        self._store.forget(self._lease)

    async def delete(self) -> None:
        """Delete the session."""
        chunks = [self._chunk_key(number) for number, _ in self._chunks]
        changes = [self._change_key(n) for n in range(self._next - len(self._changes), self._next)]
        self.close()
        await self._store.delete([self._head_key(0), self._head_key(1), *chunks, *changes])

    # Writing

    async def _write(self, change: Change) -> None:
        data = encode(change)
        if len(data) > MAX_CHANGE_NBYTES:
            raise InvalidRequest(f"the item has more than {MAX_CHANGE_NBYTES} bytes without media")
        unjoined = sum(handle.nbytes for handle in self._handles)
        if unjoined + len(data) > _most_unjoined_nbytes(change):
            raise InvalidRequest("the session's last changes have too many bytes; begin another")
        claim = Claim(self._change_key(self._next), ObjectKind.RECORDS, len(data))
        (outcome,) = await self._store.acquire(self._lease, [claim])
        if isinstance(outcome, Failed):
            raise outcome.failure.error()
        if not isinstance(outcome, Owner):
            raise SessionContinued("another connection continues this session")
        self._handles += await write_and_seal(self._store, self._lease, [outcome.handle], [data])

    def _apply(self, change: Change) -> None:
        self._note(change, self._next // CHUNK_CHANGES)
        self._next += 1
        self._changes.append(change)
        self.session.apply(change)

    def _note(self, change: Change, chunk: int) -> None:
        """Note in which chunk an item is; items keep the order of the log."""
        match change:
            case Added(item):
                self._chunk_of[item.id] = chunk
            case Removed(ids):
                for item_id in ids:
                    self._chunk_of.pop(item_id, None)

    async def _roll(self) -> bool:
        """Join the first changes to a chunk, and delete the chunks without an item.

        Without space for it, the changes stay as they are until there is some.

        Returns:
            Whether there was space.
        """
        changes, handles = self._changes[:CHUNK_CHANGES], self._handles[:CHUNK_CHANGES]
        number, slot = self._head.end, (self._head.number + 1) % 2
        first = min(next(iter(self._chunk_of.values()), number), number)
        head = _Head(self._head.number + 1, first, number + 1)
        data = [encode(_Chunk(self._settings, changes)), encode(head)]
        names = [self._chunk_key(number), self._head_key(slot)]
        items = [
            CreateItem(ObjectKind.RECORDS, len(each), name)
            for each, name in zip(data, names, strict=True)
        ]
        try:
            await self._store.delete(names)  # the head before the last one
            created = await self._store.create(self._lease, items)
            chunk_handle, head_handle = await write_and_seal(
                self._store, self._lease, created, data
            )
            self._chunks.append((number, chunk_handle))
            released, gone = list(handles), []
            if self._head_handle is not None:
                released.append(self._head_handle)
            self._head_handle = head_handle
            while self._chunks[0][0] < first:
                old, handle = self._chunks.popleft()
                gone.append(self._chunk_key(old))
                released.append(handle)
            self._head, self._settings = head, Configured(self.session.settings)
            del self._changes[:CHUNK_CHANGES], self._handles[:CHUNK_CHANGES]
            await self._store.release(self._lease, released)
            start = number * CHUNK_CHANGES
            done = range(start, start + CHUNK_CHANGES)
            await self._store.delete([*map(self._change_key, done), *gone])
        except AfferentError:
            return False
        return True

    # Reading

    async def _read(self) -> bool:
        """Read the log, and take it over; return whether that was possible in one go."""
        found = [await self._find([self._head_key(slot)]) for slot in (0, 1)]
        heads = [decode(_head_decoder, self._store.block(each[0])) for each in found if each]
        self._head = max(heads, key=lambda head: head.number, default=self._head)
        names = [self._chunk_key(n) for n in range(self._head.first, self._head.end)]
        chunks = await self._find(names)
        if len(chunks) < len(names):
            raise SessionNotFound("a part of this session was evicted")
        for number, handle in zip(range(self._head.first, self._head.end), chunks, strict=True):
            chunk = decode(_chunk_decoder, self._store.block(handle))
            self.session.apply(chunk.settings)
            for change in chunk.changes:
                self._note(change, number)
                self.session.apply(change)
            self._chunks.append((number, handle))
        self._settings = Configured(self.session.settings)
        self._next = self._head.end * CHUNK_CHANGES
        await self._read_changes()
        if not self._next:
            raise SessionNotFound("there is no such session: it ended, or it was evicted")
        # Changes that were joined meanwhile are in a chunk that was not read.
        again = [await self._find([self._head_key(slot)]) for slot in (0, 1)]
        released = [handle for each in found for handle in each]
        for handle in (handle for each in again for handle in each):
            number = decode(_head_decoder, self._store.block(handle)).number
            if number > self._head.number:
                return False
            if number == self._head.number:
                self._head_handle = handle
            else:
                released.append(handle)
        if self._has_gap:
            raise SessionNotFound("a part of this session was evicted")
        await self._store.release(self._lease, released)
        try:
            await self.append(Continued())
        except SessionContinued:  # the other frontend wrote once more
            return False
        return True

    async def _read_changes(self) -> None:
        is_more = True
        while is_more:
            names = [self._change_key(self._next + n) for n in range(_FIND_AT_ONCE)]
            handles = await self._find(names)
            for handle in handles:
                self._handles.append(handle)
                self._apply(decode(_change_decoder, self._store.block(handle)))
            is_more = len(handles) == _FIND_AT_ONCE

    async def _find(self, names: Sequence[ContentKey]) -> list[Handle]:
        """Return the existing objects, pinned, up to the first missing one."""
        found: list[Handle] = []
        for start in range(0, len(names), _FIND_AT_ONCE):
            wanted = [Find(name) for name in names[start : start + _FIND_AT_ONCE]]
            outcomes = await self._store.acquire(self._lease, wanted)
            handles = list(map(handle_if_there, outcomes))
            missing = handles.index(None) if None in handles else len(handles)
            found += [handle for handle in handles[:missing] if handle is not None]
            if late := [handle for handle in handles[missing:] if handle is not None]:
                await self._store.release(self._lease, late)
                self._has_gap = True
            if missing < len(handles):
                break
        return found

    # Names

    def _change_key(self, number: int) -> ContentKey:
        return self._key(f"change {number}")

    def _chunk_key(self, number: int) -> ContentKey:
        return self._key(f"chunk {number}")

    def _head_key(self, slot: int) -> ContentKey:
        return self._key(f"head {slot}")

    def _key(self, part: str) -> ContentKey:
        return keys.session_key(tenant=self._tenant, session_id=self._id, part=part)
