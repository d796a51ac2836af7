"""Transfer of media from a host or a file into memory of the caller."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable

from afferent.errors import MediaTooLarge

Sink = Callable[[bytes], None]
"""Takes an item's bytes, in order; tens of KiB at a time."""
MakeRoom = Callable[[int], Awaitable[None]]
"""Awaited, on the event loop, before a sink gets more than so many bytes in all."""


class Budget:
    """Bytes that all fetches of one request may read together. Thread-safe."""

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._taken_nbytes = 0
        self._lock = threading.Lock()

    @property
    def taken_nbytes(self) -> int:
        return self._taken_nbytes

    def take(self, nbytes: int) -> None:
        """Take bytes from the budget.

        Raises:
            MediaTooLarge: So many are not left; then nothing is taken.
        """
        with self._lock:
            if self._taken_nbytes + nbytes > self._max_nbytes:
                raise MediaTooLarge(
                    f"the media have more than {self._max_nbytes} bytes in all; what is fetched "
                    "counts like a body (--max-body-nbytes)"
                )
            self._taken_nbytes += nbytes

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self._taken_nbytes -= nbytes


class Delivery:
    """Transfer of one item's bytes into its sink, within its own limit and the budget.

    Announced bytes are taken from the budget at once, so that concurrent fetches never exceed it
    together. Leaving the ``with`` block returns the bytes that were not delivered, or all of them
    after an error.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        max_nbytes: int,
        budget: Budget,
        make_room: MakeRoom | None = None,
    ) -> None:
        self._sink, self._max_nbytes, self._budget = sink, max_nbytes, budget
        self._make_room = make_room
        self._taken_nbytes = 0
        self.nbytes = 0
        self.fresh_s = 0.0
        """Time for which these bytes are a valid copy of the URL's content."""

    async def prepare(self, nbytes: int) -> None:
        """Announce so many bytes, and reserve space for them.

        Raises:
            MediaTooLarge: They are too many.
        """
        self.announce(nbytes)
        if self._make_room is not None:
            await self._make_room(nbytes)

    def announce(self, nbytes: int) -> None:
        """Take so many bytes in all from the budget.

        Raises:
            MediaTooLarge: They are too many.
        """
        self._check(nbytes)
        if nbytes > self._taken_nbytes:
            self._budget.take(nbytes - self._taken_nbytes)
            self._taken_nbytes = nbytes

    def write(self, data: bytes) -> None:
        """Pass bytes to the sink.

        Raises:
            MediaTooLarge: They are too many, announced or not; the sink has not got them.
        """
        self.announce(self.nbytes + len(data))
        self.nbytes += len(data)
        self._sink(data)

    def _check(self, nbytes: int) -> None:
        if nbytes > self._max_nbytes:
            raise MediaTooLarge(
                f"an item has more than {self._max_nbytes} bytes (--max-image-nbytes, "
                "--max-video-nbytes, --max-audio-nbytes)"
            )

    def __enter__(self) -> Delivery:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        kept = 0 if kind else self.nbytes
        self._budget.give_back(self._taken_nbytes - kept)
        self._taken_nbytes = kept
