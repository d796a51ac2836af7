"""The gate: requests wait here for room in the arena, before they cost any.

    async with gate.reserve("request-1", {ObjectKind.FEATURES: 80 * MiB}):
        ...                                  # create and acquire under the request's name

The budget itself is the store's ledger, which all processes share: hard, in order of arrival, all
or nothing for each request. This is a process's own view of it: how long to wait, and what to tell
those who can't be let in.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from afferent.errors import DeadlineExceeded, StoreFull
from afferent.store import messages as m
from afferent.types import ObjectKind

_REMEMBERED_GRANTS = 32
_RECENT_S = 60.0
_RETRY_AFTER_S = (1.0, 60.0)


class Ledger(Protocol):
    """What of a store the gate needs: `AsyncDaemonStore` has it."""

    async def reserve(
        self, request: str, items: Sequence[m.ReserveItem], *, timeout_s: float
    ) -> None: ...

    def forget(self, request: str) -> None: ...


class Gate:
    """Lets requests in as far as their bytes fit."""

    def __init__(
        self,
        store: Ledger,
        *,
        timeout_s: float,
        on_wait: Callable[[float], object] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Guard ``store``.

        Args:
            timeout_s: For one request to be let in.
            on_wait: Told the seconds that each request waited, for a metric.
            clock: Seconds, which only grow.
        """
        self._store, self._timeout_s = store, timeout_s
        self._on_wait, self._clock = on_wait, clock
        self._grants: deque[float] = deque(maxlen=_REMEMBERED_GRANTS)
        self.num_waiting = 0

    async def admit(self, request: str, room: Sequence[m.ReserveItem]) -> None:
        """Wait until all of ``room`` is granted to the request, or none of it.

        It is the request's until it is used, unreserved, or the request is forgotten; a call that
        is cancelled, or that fails, leaves nothing granted.

        Raises:
            ArenaTooSmall: It could never be had.
            StoreFull: Too many wait already.
            DeadlineExceeded: It was not granted in time. Both say when to try again.
        """
        start_s = self._clock()
        self.num_waiting += 1
        try:
            await self._store.reserve(request, room, timeout_s=self._timeout_s)
        except (StoreFull, DeadlineExceeded) as error:
            error.retry_after_s = self.retry_after_s
            raise
        finally:
            self.num_waiting -= 1
            self._on_wait(self._clock() - start_s)
        self._grants.append(self._clock())

    @asynccontextmanager
    async def reserve(self, request: str, nbytes: Mapping[ObjectKind, int]) -> AsyncIterator[None]:
        """`admit`, and when the block ends, however it ends, drop all that the request holds."""
        await self.admit(request, [m.ReserveItem(kind, size) for kind, size in nbytes.items()])
        try:
            yield
        finally:
            self._store.forget(request)

    @property
    def retry_after_s(self) -> float:
        """When those who wait now will have been let in, at the rate of the latest grants."""
        least, most = _RETRY_AFTER_S
        if not self.num_waiting:
            return least
        now_s = self._clock()
        recent = [at_s for at_s in self._grants if now_s - at_s <= _RECENT_S]
        if len(recent) < 2:  # nothing moves
            return min(max(self._timeout_s, least), most)
        seconds_each = (now_s - recent[0]) / len(recent)
        return min(max(float(math.ceil(seconds_each * (self.num_waiting + 1))), least), most)
