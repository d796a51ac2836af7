"""Reader of a request's body: it cuts media into the arena while the body arrives."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import replace
from functools import partial

from starlette.requests import ClientDisconnect, Request

from afferent.admission.gate import Gate
from afferent.config import Limits, RequestLimits
from afferent.errors import BodyTooLarge, BodyTooSlow, MediaTooLarge
from afferent.items.early import EarlyBody
from afferent.media.body.cutter import BodyCutter, MediaKeys
from afferent.media.body.form import FormCutter, FormType
from afferent.media.body.json_keys import check_keys
from afferent.media.body.json_text import check_encoding
from afferent.media.body.pace import Pace
from afferent.media.body.raw import (
    SMALL_NBYTES,
    HeapAllowance,
    HeapReserve,
    RawBuffer,
    RawMedia,
)
from afferent.media.body.received import ReceivedBody
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.types import FILE_KINDS

_WINDOW_NBYTES = 64 << 10
_HELD_NBYTES = 512
"""Most bytes of a window that the cutter writes with the next one: what could begin a boundary."""
_SLOW_GRACE_S = 2.0
_MOST_KNOWN_TIMES = 8
"""Length of a body with known media, in limits of a body."""
_LEAST_KNOWN_NBYTES = 64 << 10
"""Smaller items count in any case: a lookup costs more than it could spare."""
_LEAST_EARLY_NBYTES = 256 << 10
_LEAST_LEFT_NBYTES = 1 << 20
"""Smaller images, and those near the end of a body, are not begun early: it would not be faster."""
_TOO_SLOW = "the body did not arrive in time (--body-timeout-s, --body-idle-timeout-s)"
_SMALL_NBYTES = 1 << 20
_SMALL_TIMEOUT_S = 30.0
_LARGE_NBYTES, _FIRST_NBYTES = 1 << 20, 60 << 10
"""With so much left of a body, an item waits for the arena as soon as so many bytes have come: they
show that the client sends.
"""
_SHORTEST_WAIT_S = 0.1
_JSON_WINDOW_NBYTES = 16 << 10
"""Smaller window outside of media: JSON costs more per byte than media, which are only searched."""


class BodyReader:
    """Reads one body. Its data in the arena belong to the request."""

    def __init__(
        self,
        store: AsyncDaemonStore,
        gate: Gate,
        request_id: str,
        limits: RequestLimits,
        media_keys: MediaKeys,
        *,
        tenant: str = "",
        paths: Collection[tuple[str | None, ...]] | None = None,
        knows: Callable[[bytes], Awaitable[bool]] | None = None,
        early: EarlyBody | None = None,
        form: FormType | None = None,
        heap: HeapReserve | None = None,
    ) -> None:
        """Create it.

        Args:
            heap: Reserve of the process, for media of which the features may exist.
            form: Description of a body that is a form and no JSON; ``media_keys`` and the arguments
                on JSON have no effect then.
            early: Begins the features of the body's images while the rest of it arrives.
            knows: Returns whether there are features of media with this digest. In a body that is
                longer than the limit, such media are not kept, and do not count.
            paths: Locations of media in JSON that is passed on without parsing: its text may be
                as long as the body, and its shape has no limit. ``None``: everywhere that
                ``media_keys`` allow, in JSON that is parsed here.
        """
        self._gate, self._limits, self._request_id = gate, limits, request_id
        self._tenant = tenant
        self._is_uploading = False
        self._buffer = RawBuffer(store, request_id, HeapAllowance(reserve=heap))
        self._sink = _Sink(self._buffer, limits)
        self._is_form = form is not None
        self._cutter: BodyCutter | FormCutter
        if form is not None:
            self._cutter = FormCutter(self._sink, form)
        else:
            self._cutter = BodyCutter(
                *(self._sink, media_keys),
                max_json_nbytes=limits.max_json_nbytes if paths is None else limits.max_body_nbytes,
                max_media=sum(limits.of(kind).max_items for kind in FILE_KINDS),
                max_parts=limits.max_parts,
                is_parsed=paths is None,
                paths=paths,
            )
        self._num_read = self._num_cut = 0
        self._reserved: tuple[float, int] | None = None
        """When the body's space was reserved: the seconds left for it, and the bytes read."""
        self._knows = knows
        self._num_looked_up = self._num_known = 0
        self._digests: dict[int, bytes] = {}  # of items that were looked up
        self._left_out: dict[int, RawMedia] = {}
        self._early = early
        self._num_offered = 0

    def first_item(self, nbytes: int) -> tuple[str, bytes] | None:
        """Return the text before the base64 of the first item, and its first ``nbytes`` bytes.

        Returns:
            ``None`` until the bytes, or all bytes of the item, are in the arena.
        """
        if self._buffer.is_on_heap:
            return None
        if self._sink.parts:
            nbytes = min(nbytes, self._sink.parts[0][1])
        elif self._buffer.nbytes < nbytes:
            return None
        return self._cutter.first_head, self._buffer.copy(0, nbytes)

    async def read(
        self, request: Request, follow: Callable[[bytes], Awaitable[None]] | None = None
    ) -> ReceivedBody:
        """Read the whole body.

        If the length was announced and the media exceed the heap limit, they wait once in a fair
        queue. Media of other bodies are refused if there is no space. After the wait, the body must
        arrive fast enough, as it blocks other requests.

        Args:
            follow: Called with each chunk, once it is in the arena or in the JSON.

        Raises:
            BodyTooLarge: More than the limits allow, with its media or without.
            BodyTooSlow: The client stopped sending, or is too slow for the timeout.
            InvalidMedia: An item's base64 is malformed.
            InvalidRequest: The JSON breaks off in an item, an object has a key twice, or it is
                not UTF-8; or the form is malformed.
            StoreFull: There is no space for the media now.
            DeadlineExceeded: The space was not available in time.
        """
        announced = announced_nbytes(request)
        may_leave_out = self._knows is not None and _is_longer(announced, self._limits)
        if not may_leave_out:
            self._check_size(announced or 0)
        pace = Pace()
        most_wait_s = partial(self._most_wait_s, announced)
        async for chunk in timely_chunks(request, self._limits, most_wait_s=most_wait_s):
            self._num_read += len(chunk)
            if not may_leave_out:
                self._check_size(self._num_read)
            left = memoryview(chunk)
            while left:
                window_nbytes = _WINDOW_NBYTES if self._sink.is_open else _JSON_WINDOW_NBYTES
                window, left = left[:window_nbytes], left[window_nbytes:]
                await self._make_room(announced, len(window))
                self._cutter.feed(window)
                self._num_cut += len(window)
                if may_leave_out:
                    await self._leave_out_known()
                    self._check_size(self._num_cut - self._num_known)
                await pace.rest()
            if self._early is not None and _has_more(announced, self._num_read):
                await self._begin_early(self._early)
            if follow is not None:
                await follow(chunk)
        cut = self._cutter.finish()
        if not self._is_form:
            check_encoding(cut.json)
            for _ in check_keys(cut.json):
                await pace.rest()
        media = self._buffer.finish(self._sink.parts, origin="data")
        media = [
            self._left_out.get(index) or self._with_digest(raw, self._digests.get(index))
            for index, raw in enumerate(media)
        ]
        if self._early is not None:
            self._early.finish(cut.json)
        by_marker = {
            item.marker: replace(raw, is_frames=True) if item.is_frames else raw
            for item, raw in zip(cut.media, media, strict=True)
        }
        cut_by_marker = {item.marker: item for item in cut.media}
        return ReceivedBody(cut.json, by_marker, self._num_read, cut_by_marker)

    def let_others_come(self) -> None:
        """Let waiting large bodies proceed: this body is in use, or released.

        The release of the request has the same effect.
        """
        if self._is_uploading:
            self._gate.end_upload(self._request_id, tenant=self._tenant)

    async def _make_room(self, announced: int | None, window_nbytes: int) -> None:
        """Reserve space for the next window's decoded bytes.

        For an announced body that does not fit on the heap, reserve all of the rest: a client that
        announces bytes and never sends them uses its own share.
        """
        if not self._sink.has_begun:  # one window is small enough
            return
        if announced is None:
            await self._buffer.make_room(self._buffer.nbytes + window_nbytes + _HELD_NBYTES)
        elif self._buffer.is_on_heap:
            most = self._limits.max_body_nbytes + self._num_known
            left_nbytes = max(min(announced, most) - self._num_cut, 0)
            # The cutter may still have the end of a window.
            quarters = 4 if self._cutter.is_text else 3
            nbytes = self._buffer.nbytes + (left_nbytes + _WINDOW_NBYTES) * quarters // 4
            # Of the reserve, a body takes the space for all of it, or none.
            soon_nbytes = self._buffer.nbytes + window_nbytes
            is_small = soon_nbytes <= max(SMALL_NBYTES, self._buffer.room_nbytes)
            is_sent = self._is_sent(announced, left_nbytes)
            if not is_sent and self._buffer.make_room_on_heap(soon_nbytes if is_small else nbytes):
                return
            self._is_uploading = await self._gate.begin_upload(
                self._request_id, nbytes, tenant=self._tenant
            )
            await self._buffer.reserve(nbytes, self._gate)
        elif self._cutter.is_text and not self._buffer.is_on_heap:  # it was taken for base64
            await self._buffer.make_room(self._buffer.nbytes + window_nbytes)

    def _is_sent(self, announced: int, left_nbytes: int) -> bool:
        """Whether a large item has begun to come. Not in a body that may have known media: those
        are left out.
        """
        return (
            self._sink.is_open
            and self._num_read >= _FIRST_NBYTES
            and left_nbytes >= _LARGE_NBYTES
            and announced <= self._limits.max_body_nbytes
        )

    async def _leave_out_known(self) -> None:
        """Remove the items that have just ended and whose features exist."""
        if self._knows is None:
            return
        for index in range(self._num_looked_up, len(self._sink.parts)):
            start, nbytes = self._sink.parts[index]
            if nbytes < _LEAST_KNOWN_NBYTES:
                continue
            digest = await asyncio.to_thread(self._buffer.digest, start, nbytes)
            self._digests[index] = digest
            if await self._knows(digest):
                self._sink.leave_out(index)
                self._left_out[index] = RawMedia("data", nbytes, digest=digest)
                self._num_known += nbytes * 4 // 3
        self._num_looked_up = len(self._sink.parts)

    async def _begin_early(self, early: EarlyBody) -> None:
        """Begin the images that have ended, in order."""
        if self._buffer.is_on_heap:
            return
        for index in range(self._num_offered, len(self._sink.parts)):
            start, nbytes = self._sink.parts[index]
            if nbytes >= _LEAST_EARLY_NBYTES:
                if not early.may_begin(self._cutter.text):
                    return
                known = self._digests.get(index)
                digest = await early.begin(self._buffer.view(start, nbytes), known)
                if digest is not None:
                    self._digests[index] = digest
            self._num_offered = index + 1

    def _with_digest(self, raw: RawMedia, digest: bytes | None) -> RawMedia:
        if digest is None:
            return raw
        is_new = self._early is not None and self._early.is_new(digest)
        return replace(raw, digest=digest, is_new=is_new)

    def _check_size(self, nbytes: int) -> None:
        most = self._limits.max_body_nbytes
        if nbytes > most:
            new = " besides known media" if self._num_known else ""
            raise BodyTooLarge(f"the body has more than {most} bytes{new} (--max-body-nbytes)")

    def _most_wait_s(self, announced: int | None, left_s: float) -> float:
        """Return how long the next bytes may take, in seconds, ``left_s`` before the body's end.

        Raises:
            BodyTooSlow: The body has a reservation, and is too far behind.
        """
        if not announced or self._buffer.is_on_heap:
            return left_s
        before_s, num_before = self._reserved = self._reserved or (left_s, self._num_read)
        in_all_s = self._limits.body_timeout_s
        behind_s = before_s - left_s - in_all_s * (self._num_read - num_before) / announced
        if behind_s > _SLOW_GRACE_S + _SHORTEST_WAIT_S:  # it has had its last chance
            raise BodyTooSlow(_TOO_SLOW)
        return min(left_s, max(_SLOW_GRACE_S - behind_s, _SHORTEST_WAIT_S))


async def timely_chunks(
    request: Request,
    limits: RequestLimits,
    *,
    min_nbytes_per_s: float = math.inf,
    most_wait_s: Callable[[float], float] = lambda left_s: left_s,
) -> AsyncIterator[bytes]:
    """Yield a body's chunks within its timeouts; the time between two of them does not count.

    Args:
        min_nbytes_per_s: Slowest rate of a body that lasts longer than ``body_timeout_s``; by
            default, none may.
        most_wait_s: Returns how long the next chunk may take, by what is left of the body's time;
            both in seconds.

    Raises:
        BodyTooSlow: The client stopped sending, or is too slow.
        ClientDisconnect: The client has gone.
    """
    left_s, has_more, loop = limits.body_timeout_s, True, asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as waiting:
            while has_more:
                start_s = time.monotonic()
                wait_s = min(limits.body_idle_timeout_s, most_wait_s(left_s))
                waiting.reschedule(loop.time() + wait_s)
                message = await request.receive()
                waiting.reschedule(None)
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunk = message.get("body", b"")
                left_s += len(chunk) / min_nbytes_per_s
                left_s -= time.monotonic() - start_s
                if left_s <= 0:
                    raise BodyTooSlow(_TOO_SLOW)
                yield chunk
                has_more = message.get("more_body", False)
    except TimeoutError:
        raise BodyTooSlow(_TOO_SLOW) from None


async def read_small_body(request: Request) -> bytes:
    """Read a body without media.

    Raises:
        BodyTooLarge: It is larger than the endpoint needs.
        BodyTooSlow: It did not arrive in time.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_SMALL_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > _SMALL_NBYTES:
                    raise BodyTooLarge(f"the body has more than {_SMALL_NBYTES} bytes")
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive within {_SMALL_TIMEOUT_S:g} s") from None
    return bytes(body)


class _Sink:
    """Consecutive items in one buffer; ``parts`` has the start and length of each."""

    def __init__(self, buffer: RawBuffer, limits: Limits) -> None:
        self._buffer = buffer
        self._max_nbytes = max(limits.of(kind).max_nbytes for kind in FILE_KINDS)
        self._start = 0
        self.parts: list[tuple[int, int]] = []
        self.has_begun = self.is_open = False

    def begin(self) -> None:
        self.has_begun = self.is_open = True
        self._start = self._buffer.nbytes

    def write(self, data: bytes) -> None:
        if self._buffer.nbytes - self._start + len(data) > self._max_nbytes:
            raise MediaTooLarge(
                f"an item has more than {self._max_nbytes} bytes (--max-image-nbytes, "
                "--max-video-nbytes, --max-audio-nbytes, --max-document-nbytes)"
            )
        self._buffer.write(data)

    def end(self) -> None:
        self.parts.append((self._start, self._buffer.nbytes - self._start))
        self.is_open = False

    def leave_out(self, index: int) -> None:
        """Remove the bytes of an item that has ended."""
        start, nbytes = self.parts[index]
        self._buffer.cut_out(start, nbytes)
        self.parts[index] = (start, 0)
        self.parts[index + 1 :] = [(at - nbytes, size) for at, size in self.parts[index + 1 :]]
        self._start -= nbytes


def _is_longer(announced: int | None, limits: RequestLimits) -> bool:
    """Whether a body is longer than its limit, but not so long that it is refused at once."""
    most = limits.max_body_nbytes
    return announced is not None and most < announced <= _MOST_KNOWN_TIMES * most


def _has_more(announced: int | None, num_read: int) -> bool:
    """Whether much of a body may still come."""
    return announced is None or announced - num_read >= _LEAST_LEFT_NBYTES


def announced_nbytes(request: Request) -> int | None:
    """Return the length that a request announces for its body, if it does."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else None
