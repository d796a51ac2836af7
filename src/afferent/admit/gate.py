"""The gate: requests wait here for room in the arena, before they cost any.

    async with gate.reserve("request-1", {ObjectKind.FEATURES: 80 * MiB}):
        ...                                  # create and acquire under the request's name

The budget itself is the store's ledger, which all processes share: hard, in order of arrival, all
or nothing for each request. Besides, so many requests at a time may be behind the gate, if a limit
is set: the count gate, a slot of the store. This is a process's own view of both: how long to wait,
and what to tell those who can't be let in.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from afferent.errors import DeadlineExceeded, SlotTaken, StoreFull
from afferent.store import messages as m
from afferent.types import Handle, ObjectKind

SLOT = "preprocess"
"""Of the count gate."""

_REMEMBERED_GRANTS = 32
_RECENT_S = 60.0
_RETRY_AFTER_S = (1.0, 60.0)


class Ledger(Protocol):
    """What of a store the gate needs: `AsyncDaemonStore` has it."""

    async def reserve(
        self, request: str, items: Sequence[m.ReserveItem], *, timeout_s: float
    ) -> None: ...

    async def create(self, request: str, items: Sequence[m.CreateItem]) -> list[Handle]: ...

    async def enter(self, request: str, slot: str, *, limit: int, timeout_s: float) -> None: ...

    def forget(self, request: str) -> None: ...


class Gate:
    """Lets requests in as far as their bytes fit, and so many at a time."""

    def __init__(
        self,
        store: Ledger,
        *,
        timeout_s: float,
        max_concurrency: int = 0,
        on_wait: Callable[[float], object] = lambda _: None,
        on_turn: Callable[[float], object] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Guard ``store``.

        Args:
            timeout_s: For one request to be let in: for its bytes, and again for its turn.
            max_concurrency: Requests that may have entered, and not been forgotten, at a time, over
                all processes; 0: any number.
            on_wait: Told the seconds that each request waited for bytes, for a metric.
            on_turn: Told the seconds that each request waited for its turn.
            clock: Seconds, which only grow.
        """
        self._store, self._timeout_s = store, timeout_s
        self._max_concurrency = max_concurrency
        self._for_bytes = _Line(timeout_s, on_wait, clock)
        self._for_turn = _Line(timeout_s, on_turn, clock)

    async def admit(self, request: str, room: Sequence[m.ReserveItem]) -> None:
        """Wait until all of ``room`` is granted to the request, or none of it.

        It is the request's until it is used, unreserved, or the request is forgotten; a call that
        is cancelled, or that fails, leaves nothing granted.

        Raises:
            ArenaTooSmall: It could never be had.
            StoreFull: Too many wait already.
            DeadlineExceeded: It was not granted in time. Both say when to try again.
        """
        with self._for_bytes.standing():
            await self._store.reserve(request, room, timeout_s=self._timeout_s)

    async def create(self, request: str, items: Sequence[m.CreateItem]) -> list[Handle]:
        """Blocks to write, all or none, once there is room for all of them.

        Where there is, and nobody waits for it, one round trip gives them.

        Raises:
            StoreFull, ArenaTooSmall, DeadlineExceeded: As from `admit`.
        """
        with self._for_bytes.standing():
            with contextlib.suppress(StoreFull):
                return await self._store.create(request, items)
            room = [m.ReserveItem(item.kind, item.nbytes) for item in items]
            await self._store.reserve(request, room, timeout_s=self._timeout_s)
        return await self._store.create(request, items)

    async def enter(self, request: str) -> None:
        """Wait until it is the request's turn; at once, without a limit.

        Its place is its own until the request is forgotten; who has one must not wait for bytes. A
        call that is cancelled, or that fails, leaves no place taken.

        Raises:
            SlotTaken: Too many wait already.
            DeadlineExceeded: Its turn did not come in time. Both say when to try again.
        """
        if self.is_counting:
            with self._for_turn.standing():
                await self._store.enter(
                    request, SLOT, limit=self._max_concurrency, timeout_s=self._timeout_s
                )

    @asynccontextmanager
    async def reserve(self, request: str, nbytes: Mapping[ObjectKind, int]) -> AsyncIterator[None]:
        """`admit` and `enter`; when the block ends, however it ends, the request is forgotten, and
        so is all that it holds.
        """
        await self.admit(request, [m.ReserveItem(kind, size) for kind, size in nbytes.items()])
        try:
            await self.enter(request)
            yield
        finally:
            self._store.forget(request)

    @property
    def is_counting(self) -> bool:
        """Whether only so many requests may be behind the gate at a time."""
        return self._max_concurrency > 0

    @property
    def num_waiting(self) -> int:
        """Requests of this process that wait for bytes, or for their turn."""
        return self._for_bytes.num_waiting + self._for_turn.num_waiting

    @property
    def retry_after_s(self) -> float:
        """When those who wait for bytes now will have been let in."""
        return self._for_bytes.retry_after_s


class _Line:
    """Those of this process who wait for one thing."""

    def __init__(
        self, timeout_s: float, on_wait: Callable[[float], object], clock: Callable[[], float]
    ) -> None:
        self._timeout_s, self._on_wait, self._clock = timeout_s, on_wait, clock
        self._grants: deque[float] = deque(maxlen=_REMEMBERED_GRANTS)
        self.num_waiting = 0

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """Wait within the block, which ends when it is granted; who is refused hears when to come
        again.
        """
        start_s = self._clock()
        self.num_waiting += 1
        try:
            yield
        except (StoreFull, SlotTaken, DeadlineExceeded) as error:
            error.retry_after_s = self.retry_after_s
            raise
        finally:
            self.num_waiting -= 1
            self._on_wait(self._clock() - start_s)
        self._grants.append(self._clock())

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
