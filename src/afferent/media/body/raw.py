"""Buffers of arriving media: on the heap while they are small, then in the arena.

A process has a reserve of heap for larger ones: if the store has the features of such an item, its
bytes need no message to the store.

A request's bytes in the arena are granted before they are read where their number is known. Where
it is unknown, growth never waits: a request that waits for space while it has some could wait for
itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from afferent import keys
from afferent.admission.gate import Gate
from afferent.errors import ArenaTooSmall, InternalError, MediaTooLarge
from afferent.media.body.shared_room import SharedRoom
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import SealItem
from afferent.types import CreateItem, Handle, KiB, MiB, ObjectKind

SMALL_NBYTES = 256 * KiB
"""Bytes that each request may have on the heap."""
MEDIUM_NBYTES = MiB
"""Most bytes of a request on the heap, with what it takes of the reserve."""
_RESERVE_NBYTES = 16 * MiB
_MANY = 8
"""About so many of the last requests decide whether a reserve is open."""
_MAX_STEP_NBYTES = 4 * MiB
PAGE = "page"
"""Origin of an image that a worker has made of a document's page or a video's frame."""
COPY = "copy"
"""Origin of a copy of an item whose features are made before its request is complete."""


class HeapReserve:
    """Heap bytes that all requests of a process share.

    It is open while most items are known: an unknown one would be copied once more.
    """

    def __init__(self, nbytes: int = _RESERVE_NBYTES) -> None:
        self._left_nbytes, self._known_part = nbytes, 0.0
        # The collector may return bytes at any moment, in any thread.
        self._returned: deque[int] = deque()

    def note(self, num_known: int, number: int) -> None:
        """Note how many of a request's items were known."""
        if number:
            self._known_part += (num_known / number - self._known_part) / _MANY

    def take(self, nbytes: int) -> bool:
        """Take bytes; return whether it is open and has enough."""
        while self._returned:
            self._left_nbytes += self._returned.popleft()
        if self._known_part < 0.5 or nbytes > self._left_nbytes:
            return False
        self._left_nbytes -= nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """Return bytes that were taken."""
        self._returned.append(nbytes)


class HeapAllowance:
    """Heap bytes of all buffers of a request together.

    A `RawMedia` on the heap refers to it, and bytes of the reserve return with the last reference.
    """

    def __init__(self, nbytes: int = SMALL_NBYTES, reserve: HeapReserve | None = None) -> None:
        self._left_nbytes, self._reserve = nbytes, reserve
        self._reserved_nbytes = 0

    def take(self, nbytes: int) -> bool:
        """Take bytes; return whether enough were left. A negative number returns bytes."""
        missing_nbytes = nbytes - self._left_nbytes
        if missing_nbytes > 0 and not self._take_reserved(missing_nbytes):
            return False
        self._left_nbytes -= nbytes
        if self._reserved_nbytes and self._left_nbytes > 0:
            self._give_back(min(self._left_nbytes, self._reserved_nbytes))
        return True

    def __del__(self) -> None:
        if self._reserved_nbytes:
            self._give_back(self._reserved_nbytes)

    def _take_reserved(self, nbytes: int) -> bool:
        most = MEDIUM_NBYTES - SMALL_NBYTES - self._reserved_nbytes
        if self._reserve is None or nbytes > most or not self._reserve.take(nbytes):
            return False
        self._reserved_nbytes += nbytes
        self._left_nbytes += nbytes
        return True

    def _give_back(self, nbytes: int) -> None:
        if self._reserve is not None:
            self._reserve.give_back(nbytes)
        self._reserved_nbytes -= nbytes
        self._left_nbytes -= nbytes


@dataclass(frozen=True, slots=True)
class RawMedia:
    """Encoded bytes of one item: ``data``, or ``nbytes`` from ``start`` on in the object
    ``handle``. With neither, the bytes were not kept: features of this ``digest`` existed.

    The object is the request's own. Unless it ``is_sealed``, no other client can read it yet.

    Attributes:
        origin: Source of the bytes: ``data``, ``fetch``, ``tier`` where another node had fetched
            them, `PAGE`, or `COPY`.
        fresh_s: Time for which they are a valid copy of their URL's content.
        digest: Digest of the bytes, where it was computed as they came.
        took_us: Duration of their transfer from a media host.
        is_frames: They are the base64 text of a video's frames, with commas between them.
        is_new: The features of the item did not exist, and were begun while its body arrived.
        allowance: Of ``data``.
    """

    origin: str
    nbytes: int
    data: bytes | memoryview | None = None
    handle: Handle | None = None
    start: int = 0
    is_sealed: bool = False
    fresh_s: float = 0.0
    digest: bytes | None = None
    took_us: int = 0
    is_frames: bool = False
    is_new: bool = False
    allowance: HeapAllowance | None = field(default=None, repr=False, compare=False)

    @property
    def is_left_out(self) -> bool:
        """Whether the bytes were not kept."""
        return self.data is None and self.handle is None

    def bytes_in(self, store: AsyncDaemonStore) -> bytes | memoryview:
        """Return the bytes, without a copy; empty if they were not kept."""
        if self.handle is None:
            return self.data or b""
        return store.block(self.handle)[self.start : self.start + self.nbytes]


@contextmanager
def _naming_the_setting() -> Iterator[None]:
    """Add the setting to an error of the store.

    Raises:
        ArenaTooSmall: The store's message, and the setting that changes the limit.
    """
    try:
        yield
    except ArenaTooSmall as error:
        raise ArenaTooSmall(f"{error.message} (--raw-share of --arena-nbytes)") from error


class RawBuffer:
    """Bytes of one request, one after another; the caller knows the boundaries of items.

    All of it belongs to the request, and is released with it.

    Invariants:
        - The bytes are on the heap or in one object, never in both.
        - `make_room` never waits for space; only `reserve` does.
    """

    def __init__(
        self,
        store: AsyncDaemonStore,
        request_id: str,
        allowance: HeapAllowance | None = None,
        room: SharedRoom | None = None,
    ) -> None:
        """Create an empty buffer.

        Args:
            room: Shared objects of the request, for an item with an announced length.
        """
        self._store, self._request_id = store, request_id
        self._allowance, self._room = allowance or HeapAllowance(), room
        self._allowed_nbytes = 0
        self._heap = bytearray()
        self._handle: Handle | None = None
        self._block: memoryview | None = None
        self._shared_start: int | None = None  # where in the object, if others are in it
        self.nbytes = 0

    @property
    def is_on_heap(self) -> bool:
        return self._handle is None

    @property
    def room_nbytes(self) -> int:
        """Bytes for which there is space, those that were written included."""
        return self._allowed_nbytes if self._block is None else len(self._block)

    async def reserve(self, nbytes: int, gate: Gate) -> None:
        """Wait for space for so many bytes in all, and reserve it.

        Raises:
            ArenaTooSmall: The arena never has so much space.
            StoreFull: Too many requests wait already.
            DeadlineExceeded: The space was not free in time.
        """
        with _naming_the_setting():
            (handle,) = await gate.create(self._request_id, [CreateItem(ObjectKind.RAW, nbytes)])
        self._move_to(handle, self._store.block(handle))

    async def make_room(self, nbytes: int) -> None:
        """Reserve space for so many bytes in all, at once or not at all.

        Raises:
            StoreFull: There is no space now.
            ArenaTooSmall: The arena never has so much space.
        """
        if nbytes <= self.room_nbytes or self.make_room_on_heap(nbytes):
            return
        if self._room is not None and self._handle is None and not self.nbytes:
            place = await self._room.take(nbytes)
            self._move_to(place.handle, place.block, shared_start=place.start)
        else:
            # The first number is the announced length; later ones are estimates.
            step_nbytes = min(nbytes, _MAX_STEP_NBYTES) if self.nbytes else 0
            item = CreateItem(ObjectKind.RAW, nbytes + step_nbytes)
            with _naming_the_setting():
                (handle,) = await self._store.create(self._request_id, [item])
            self._move_to(handle, self._store.block(handle))

    def make_room_on_heap(self, nbytes: int) -> bool:
        """Return whether the heap has space for so many bytes in all; reserve it."""
        if self._handle is not None:
            return False
        if nbytes <= self.room_nbytes:
            return True
        if not self._allowance.take(nbytes - self._allowed_nbytes):
            return False
        self._allowed_nbytes = nbytes
        return True

    def write(self, data: bytes) -> None:
        """Append bytes; there must be space for them."""
        if self._block is None:
            self._heap += data
        else:
            if self.nbytes + len(data) > len(self._block):
                raise MediaTooLarge("the media are longer than was announced")
            self._block[self.nbytes : self.nbytes + len(data)] = data
        self.nbytes += len(data)

    def copy(self, start: int, nbytes: int) -> bytes:
        """Return a copy of these bytes."""
        held = self._heap if self._block is None else self._block
        return bytes(held[start : start + nbytes])

    def view(self, start: int, nbytes: int) -> memoryview:
        """Return these bytes, which are in the arena; valid until more are written."""
        if self._block is None:
            raise InternalError("these bytes are not in the arena")
        return self._block[start : start + nbytes]

    def digest(self, start: int, nbytes: int) -> bytes:
        """Return the digest of these bytes."""
        held = self._heap if self._block is None else self._block
        with memoryview(held) as view:
            return keys.digest(view[start : start + nbytes])

    def cut_out(self, start: int, nbytes: int) -> None:
        """Remove these bytes; those after them, which should be few, move to their place."""
        end = start + nbytes
        if self._block is None:
            del self._heap[start:end]
        else:
            self._block[start : self.nbytes - nbytes] = bytes(self._block[end : self.nbytes])
        self.nbytes -= nbytes

    def finish(self, parts: Sequence[tuple[int, int]], *, origin: str) -> list[RawMedia]:
        """Close the buffer; return its items, which are ``(start, nbytes)`` each."""
        self._block = None
        if self._handle is None:
            whole = memoryview(self._heap).toreadonly()
            self._heap = bytearray()
            return [
                RawMedia(
                    *(origin, nbytes),
                    data=whole[start : start + nbytes],
                    allowance=self._allowance,
                )
                for start, nbytes in parts
            ]
        handle, first = self._handle, self._shared_start
        if not self.nbytes:
            if first is None:
                self._store.discard(self._request_id, [handle])
            return [RawMedia(origin, 0, data=b"") for _ in parts]
        if first is None:
            handle, first = msgspec.structs.replace(handle, nbytes=self.nbytes), 0
        return [
            RawMedia(origin, nbytes, handle=handle, start=first + start) for start, nbytes in parts
        ]

    async def finish_sealed(self, *, origin: str) -> RawMedia:
        """Close the buffer, which is one item, and seal it. Unused space is free at once.

        An item in a shared object is sealed with the others in it.
        """
        (raw,) = self.finish([(0, self.nbytes)], origin=origin)
        if raw.handle is None or self._shared_start is not None:
            return raw
        (sealed,) = await self._store.seal(self._request_id, [SealItem(raw.handle, raw.nbytes)])
        return replace(raw, handle=sealed, is_sealed=True)

    def _move_to(
        self, handle: Handle, block: memoryview, *, shared_start: int | None = None
    ) -> None:
        """Continue in a new object."""
        before = np.frombuffer(self._block if self._block is not None else self._heap, np.uint8)
        # `copyto` releases the GIL; a copy of a memoryview does not.
        np.copyto(np.frombuffer(block, np.uint8)[: self.nbytes], before[: self.nbytes])
        del before
        old, self._handle, self._block = self._handle, handle, block
        self._heap = bytearray()
        self._allowance.take(-self._allowed_nbytes)
        self._allowed_nbytes = 0
        if old is not None and self._shared_start is None:
            self._store.discard(self._request_id, [old])
        self._shared_start = shared_start
