"""The gate: requests wait here for room in the arena, before they cost any.

    async with gate.reserve("request-1", {ObjectKind.FEATURES: 80 * MiB}):
        ...                                  # create and acquire under the request's name

The budget itself is the store's, which all processes share: hard, by fair shares, all
or nothing for each request. Besides, so many requests at a time may be behind the gate, if a limit
is set: the count gate, a semaphore of the store. This is a process's own view of both: how long to
wait, and what to tell those who can't be let in.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from afferent.errors import DeadlineExceeded, NoPermitLeft, StoreFull
from afferent.quota.permits import FORWARDED, GATE, PREPROCESS
from afferent.store.protocol.items import CreateItem, ReserveItem
from afferent.telemetry.registry import WAIT_SECONDS, HistogramCell, histogram
from afferent.types import Handle, MiB, ObjectKind

if TYPE_CHECKING:
    from afferent.store.client.async_store import AsyncDaemonStore

UPLOADS = "uploads"
"""Of MiB that large bodies are going to be, and are not in all."""
UPLOADS_OF = "uploads_of"
"""The same of one tenant: `uploads_of/acme`."""

ADMISSION_SECONDS = histogram(
    "afferent_admission_seconds",
    "Seconds that a request waited for room in the arena, whether it came to it or not",
    WAIT_SECONDS,
)
PERMIT_SECONDS = histogram(
    "afferent_permit_seconds",
    "Seconds that a request waited for its permit of the gate, whether it came or not",
    WAIT_SECONDS,
)

_SMALL_PART = 32
"""Of what large bodies may take together: what is smaller is no large one."""
_REMEMBERED_GRANTS = 32
_RECENT_S = 60.0
_RETRY_AFTER_S = (1.0, 60.0)


class Budget(Protocol):
    """What of a store the gate needs: `AsyncDaemonStore` has it."""

    async def reserve(
        self, request: str, items: Sequence[ReserveItem], *, timeout_s: float
    ) -> None: ...

    async def create(self, request: str, items: Sequence[CreateItem]) -> list[Handle]: ...

    async def acquire_permit(
        self, request: str, semaphore: str, *, limit: int, number: int = 1, timeout_s: float
    ) -> None: ...

    def release_permit(self, request: str, semaphore: str) -> None: ...

    def accepted(self, request: str, semaphores: Sequence[str]) -> None: ...

    def forget(self, request: str) -> None: ...


class Gate:
    """Lets requests in as far as their bytes fit, and so many at a time.

    Examples:
        >>> import asyncio
        >>> from afferent import AsyncDaemonStore, Gate, MiB, ObjectKind, StoreServer
        >>> async def main(address: str) -> None:
        ...     store = await AsyncDaemonStore.connect(address, name="frontend")
        ...     gate = Gate(store, timeout_s=30.0)
        ...     async with gate.reserve("request-1", {ObjectKind.FEATURES: 2 * MiB}):
        ...         print("it has its bytes; others wait for theirs")
        ...     await store.close()
        >>> with StoreServer(16 * MiB) as server:
        ...     asyncio.run(main(server.address))
        it has its bytes; others wait for theirs
    """

    def __init__(
        self,
        # Named besides: pyright does not see verbs, which are descriptors, as a protocol's methods.
        store: AsyncDaemonStore | Budget,
        *,
        timeout_s: float,
        max_concurrency: int = 0,
        max_uploads_nbytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Guard ``store``.

        Args:
            timeout_s: For one request to be let in: for its bytes, and again for its turn.
            max_concurrency: Requests that may have entered, and not been forgotten, at a time, over
                all processes; 0: any number.
            max_uploads_nbytes: Of large bodies, as long as they will be, until `end_upload`, over
                all processes; 0: any number. A thirty-second of it and less is not counted.
            clock: Seconds, which only grow.
        """
        self._store, self._timeout_s = store, timeout_s
        self._max_uploads_nbytes = max_uploads_nbytes
        self._max_concurrency = max_concurrency
        self._for_bytes = _Line(timeout_s, ADMISSION_SECONDS.labels(), clock)
        self._for_turn = _Line(timeout_s, PERMIT_SECONDS.labels(), clock)

    async def admit(self, request: str, room: Sequence[ReserveItem]) -> None:
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

    async def create(self, request: str, items: Sequence[CreateItem]) -> list[Handle]:
        """Blocks to write, all or none, once there is room for all of them.

        Where there is, and nobody waits for it, one round trip gives them.

        Raises:
            StoreFull, ArenaTooSmall, DeadlineExceeded: As from `admit`.
        """
        with self._for_bytes.standing():
            with contextlib.suppress(StoreFull):
                return await self._store.create(request, items)
            room = [ReserveItem(item.kind, item.nbytes) for item in items]
            await self._store.reserve(request, room, timeout_s=self._timeout_s)
        return await self._store.create(request, items)

    async def enter(self, request: str) -> None:
        """Wait until it is the request's turn; at once, without a limit.

        Its place is its own until the request is forgotten; who has one must not wait for bytes. A
        call that is cancelled, or that fails, leaves no place taken.

        Raises:
            NoPermitLeft: Too many wait already.
            DeadlineExceeded: Its turn did not come in time. Both say when to try again.
        """
        if self.is_counting:
            with self._for_turn.standing():
                await self._store.acquire_permit(
                    request, PREPROCESS, limit=self._max_concurrency, timeout_s=self._timeout_s
                )

    async def enter_forwarded(self, request: str, nbytes: int, *, limit_nbytes: int) -> None:
        """`enter`, for media that the engine processes itself: besides, wait until what it makes of
        those that have entered, and of these, is no more than a limit.

        Args:
            nbytes: Of the tensors that the engine makes; a request with more than the limit is
                alone.
            limit_nbytes: Of all requests together, over all processes.

        Raises:
            NoPermitLeft, DeadlineExceeded: As from `enter`.
        """
        with self._for_bytes.standing():
            await self._store.acquire_permit(
                request,
                FORWARDED,
                limit=max(limit_nbytes // MiB, 1),
                number=max(math.ceil(nbytes / MiB), 1),
                timeout_s=self._timeout_s,
            )
        await self.enter(request)

    def leave(self, request: str) -> None:
        """The engine has accepted the request: it gives back its turn, and keeps what it has
        pinned. Nothing happens the second time.
        """
        self._store.accepted(request, GATE)

    async def begin_upload(self, request: str, nbytes: int, *, tenant: str = "") -> bool:
        """Wait until a body that is to be so long may take room before it is there; whether it has
        to be said when it is (`end_upload`).

        So small ones find room, however many large ones have been announced; and large ones do,
        however many a tenant has announced: all of one tenant take half of it at most. The nameless
        are no tenant.

        Raises:
            NoPermitLeft, DeadlineExceeded: As from `enter`.
        """
        if nbytes <= self._max_uploads_nbytes // _SMALL_PART or not self._max_uploads_nbytes:
            return False
        limits = {UPLOADS: self._max_uploads_nbytes}
        if tenant:  # first, so that who waits for his own keeps nobody else waiting
            limits = {f"{UPLOADS_OF}/{tenant}": self._max_uploads_nbytes // 2, **limits}
        with self._for_bytes.standing():
            for semaphore, limit_nbytes in limits.items():
                await self._store.acquire_permit(
                    request,
                    semaphore,
                    limit=max(limit_nbytes // MiB, 1),
                    number=math.ceil(nbytes / MiB),
                    timeout_s=self._timeout_s,
                )
        return True

    def end_upload(self, request: str, *, tenant: str = "") -> None:
        """What came is made into features, or let go of; of a forgotten request it is, too."""
        self._store.release_permit(request, UPLOADS)
        if tenant:
            self._store.release_permit(request, f"{UPLOADS_OF}/{tenant}")

    @asynccontextmanager
    async def reserve(self, request: str, nbytes: Mapping[ObjectKind, int]) -> AsyncIterator[None]:
        """`admit` and `enter`; when the block ends, however it ends, the request is forgotten, and
        so is all that it holds.
        """
        await self.admit(request, [ReserveItem(kind, size) for kind, size in nbytes.items()])
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

    def __init__(self, timeout_s: float, waits: HistogramCell, clock: Callable[[], float]) -> None:
        self._timeout_s, self._waits, self._clock = timeout_s, waits, clock
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
        except (StoreFull, NoPermitLeft, DeadlineExceeded) as error:
            error.retry_after_s = self.retry_after_s
            raise
        finally:
            self.num_waiting -= 1
            self._waits.observe(self._clock() - start_s)
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
