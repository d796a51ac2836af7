"""Features of images that are made while the rest of their request's body arrives.

An image is copied into an object of its own as soon as its last byte is there, and a job makes its
features. They stay in the store like those of any other request, and the body's request finds them
there, or joins the job. So nothing depends on this: an image that can't be begun is made later.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from afferent.admission.gate import Gate
from afferent.admission.shares import Share
from afferent.errors import AfferentError
from afferent.items.receive import ItemReader
from afferent.items.request import ItemRequest, MediaPart
from afferent.media.body.pace import Pace
from afferent.media.body.raw import COPY, RawMedia
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import SealItem
from afferent.telemetry.registry import counter
from afferent.telemetry.trace import Trace
from afferent.types import CreateItem, Modality, ObjectKind

if TYPE_CHECKING:
    from afferent.items.stage import ItemStage

EARLY_ITEMS = counter(
    "afferent_early_items_total",
    "Images whose features were begun while the rest of their request's body arrived",
)
_AT_ONCE: Final = 4
"""Images of one body whose features are being made."""
_STEP_NBYTES: Final = 256 << 10
_OPTION: Final = re.compile(
    rb'"detail"\s{0,9}:\s{0,9}"low"|"mm_processor_kwargs"|"media_io_kwargs"'
)
"""Options with which an image has other features."""
_LONGEST_OPTION: Final = 64
_PAUSE_S: Final = 60.0

log = logging.getLogger(__name__)


class EarlyItems:
    """Makes features early, for all bodies of one frontend.

    Invariants:
        - The copies of all images that are begun have at most ``max_nbytes``. An image whose copy
          finds no space at once is not begun, and none is while more requests of this frontend wait
          at the gate than images are begun.
        - Nothing stays pinned once a job has ended.
    """

    def __init__(
        self,
        store: AsyncDaemonStore,
        gate: Gate,
        items: ItemStage,
        reader: ItemReader,
        *,
        max_nbytes: int,
    ) -> None:
        """Create it.

        Args:
            max_nbytes: Most bytes of all copies.
        """
        self._store, self._gate, self._items, self._reader = store, gate, items, reader
        self._left_nbytes = max_nbytes
        self._numbers = itertools.count()
        self._paused_until_s: dict[str, float] = {}
        self._running: set[asyncio.Task[bool]] = set()

    def body(self, share: Share) -> EarlyBody:
        """Return the early images of one body."""
        return EarlyBody(self, share)

    def may_begin(self, tenant: str) -> bool:
        """Return whether no request waits, and requests of a tenant find what is made early."""
        is_paused = self._paused_until_s.get(tenant, 0.0) > time.monotonic()
        others_wait = self._gate.num_waiting > len(self._running)
        return not is_paused and not others_wait

    def pause(self, tenant: str) -> None:
        """Begin nothing for a while: the options of a request came after its images."""
        now_s = time.monotonic()
        waiting = {name: at_s for name, at_s in self._paused_until_s.items() if at_s > now_s}
        self._paused_until_s = {**waiting, tenant: now_s + _PAUSE_S}

    async def begin(
        self,
        share: Share,
        data: memoryview,
        digest: bytes | None,
        jobs: dict[bytes, asyncio.Task[bool]],
    ) -> bytes | None:
        """Have the features of an image made from a copy.

        Args:
            digest: Its digest, if it is known.
            jobs: Jobs of the body by their images' digests; a new one is added. It returns whether
                there were no features before.

        Returns:
            The image's digest; ``None`` if it is no image, or there is no space.
        """
        nbytes, task = len(data), None
        if nbytes > self._left_nbytes or not self._reader.decodes(data, share.tenant):
            return None
        lease = f"early-{next(self._numbers)}"
        self._left_nbytes -= nbytes
        self._store.introduce(lease, share)
        try:
            if digest is None:
                (digest,) = await self._reader.digester.digest_all([data])
            if digest in jobs or await self._reader.knows(lease, share.tenant, digest):
                return digest
            raw = await self._copied(lease, data, digest)
            making = self._make(ItemRequest(lease, (MediaPart(Modality.IMAGE, raw),), share))
            task = jobs[digest] = asyncio.create_task(making)
        except AfferentError:
            return None
        finally:
            if task is None:
                self._store.forget(lease)
                self._left_nbytes += nbytes
        EARLY_ITEMS.labels().inc()
        self._running.add(task)
        task.add_done_callback(partial(self._end, nbytes))
        return digest

    def _end(self, nbytes: int, task: asyncio.Task[bool]) -> None:
        self._running.discard(task)
        self._left_nbytes += nbytes

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _copied(self, lease: str, data: memoryview, digest: bytes) -> RawMedia:
        """Return a sealed copy of an image.

        Raises:
            StoreFull: There is no space now.
        """
        nbytes, pace = len(data), Pace()
        (handle,) = await self._store.create(lease, [CreateItem(ObjectKind.RAW, nbytes)])
        # Not in a thread, which would go on after a cancellation, when the object is another's.
        source = np.frombuffer(data, np.uint8)
        target = np.frombuffer(self._store.block(handle), np.uint8)
        for start in range(0, nbytes, _STEP_NBYTES):
            end = min(start + _STEP_NBYTES, nbytes)
            np.copyto(target[start:end], source[start:end])
            await pace.rest()
        (sealed,) = await self._store.seal(lease, [SealItem(handle, nbytes)])
        return RawMedia(COPY, nbytes, handle=sealed, is_sealed=True, digest=digest)

    async def _make(self, request: ItemRequest) -> bool:
        try:
            (is_new,) = await self._items.make_ahead(request, Trace(request.request_id, "early"))
        except AfferentError as error:  # the body's request meets it again
            log.debug("%s: %s", request.request_id, error)
            return True
        finally:
            self._store.forget(request.request_id)
        return is_new


class EarlyBody:
    """Early images of one body."""

    def __init__(self, early: EarlyItems, share: Share) -> None:
        self._early, self._share = early, share
        self._jobs: dict[bytes, asyncio.Task[bool]] = {}
        self._num_searched, self._has_option = 0, False

    def may_begin(self, text: bytearray) -> bool:
        """Return whether the next image may be begun.

        Args:
            text: JSON of the body, as far as it is known.
        """
        num_running = sum(not job.done() for job in self._jobs.values())
        return (
            num_running < _AT_ONCE
            and self._early.may_begin(self._share.tenant)
            and not self._finds_option(text)
        )

    async def begin(self, data: memoryview, digest: bytes | None) -> bytes | None:
        """Begin an image; return its digest, or ``None`` if it was not begun.

        Args:
            digest: Its digest, if it is known.
        """
        return await self._early.begin(self._share, data, digest, self._jobs)

    def is_new(self, digest: bytes | None) -> bool:
        """Return whether an image was begun here, and had no features before."""
        job = self._jobs.get(digest or b"")
        if job is None:
            return False
        has_result = job.done() and not job.cancelled() and job.exception() is None
        return not has_result or job.result()

    def finish(self, text: bytes) -> None:
        """End the body, whose JSON is complete."""
        if self._jobs and self._finds_option(text):
            self._early.pause(self._share.tenant)

    def _finds_option(self, text: bytes | bytearray) -> bool:
        """Search the part of the text that is new."""
        start = max(self._num_searched - _LONGEST_OPTION, 0)
        self._has_option = self._has_option or _OPTION.search(text, start) is not None
        self._num_searched = len(text)
        return self._has_option
