"""Gate: requests wait for space in the arena here, before they use any.

    async with gate.reserve("request-1", {ObjectKind.FEATURES: 80 * MiB}):
        ...                                  # create and acquire under the request's name

The store has the budget itself, which all processes share: hard, by fair shares, all or nothing for
each request. If a limit is set, the count gate, a semaphore of the store, also bounds the number of
requests behind the gate. This module is one process's view of both: it waits, and tells refused
requests when to try again.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from afferent.admission.permits import FORWARDED, GATE, LIVE_AUDIO, PREPROCESS
from afferent.errors import DeadlineExceeded, NoPermitLeft, StoreFull
from afferent.telemetry.registry import WAIT_SECONDS, HistogramCell, histogram
from afferent.types import CreateItem, Handle, MiB, ObjectKind, ReserveItem

if TYPE_CHECKING:  # the store imports this package
    from afferent.store.client.async_store import AsyncDaemonStore

UPLOADS = "uploads"
"""Semaphore in MiB of announced large bodies that are not complete yet."""
UPLOADS_OF = "uploads_of"
"""The same for one tenant: `uploads_of/acme`."""

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
"""Divisor of the limit on large bodies: a smaller body than this part is not counted."""
_SOON_S = 1.0
_REMEMBERED_GRANTS = 32
_RECENT_S = 60.0
_RETRY_AFTER_S = (1.0, 60.0)


class Budget(Protocol):
    """Part of a store that the gate needs: `AsyncDaemonStore` implements it."""

    async def reserve(
        self, request: str, items: Sequence[ReserveItem], *, timeout_s: float
    ) -> None: ...

    async def create(self, request: str, items: Sequence[CreateItem]) -> list[Handle]: ...

    async def acquire_permit(
        self, request: str, semaphore: str, *, limit: int, number: int = 1, timeout_s: float
    ) -> object: ...

    def release_permit(self, request: str, semaphore: str) -> None: ...

    def accepted(self, request: str, semaphores: Sequence[str]) -> None: ...

    def forget(self, request: str) -> None: ...


class Gate:
    """Admission by bytes, and optionally by the number of concurrent requests.

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
        # A union: pyright does not accept verbs, which are descriptors, as a protocol's methods.
        store: AsyncDaemonStore | Budget,
        *,
        timeout_s: float,
        max_concurrency: int = 0,
        max_uploads_nbytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Guard ``store``.

        Args:
            timeout_s: Limit of each wait of a request: for its bytes, and for its permit.
            max_concurrency: Requests that have entered and are not forgotten, at a time, over all
                processes; 0: any number.
            max_uploads_nbytes: Announced bytes of large bodies until `end_upload`, over all
                processes; 0: any number. A body of at most a thirty-second of it is not counted.
            clock: Monotonic seconds.
        """
        self._store, self._timeout_s = store, timeout_s
        self._max_uploads_nbytes = max_uploads_nbytes
        self._max_concurrency = max_concurrency
        self._for_bytes = _Line(timeout_s, ADMISSION_SECONDS.labels(), clock)
        self._for_turn = _Line(timeout_s, PERMIT_SECONDS.labels(), clock)

    async def admit(
        self, request: str, room: Sequence[ReserveItem], *, may_wait: bool = True
    ) -> None:
        """Wait until all of ``room`` is granted to the request, or none of it.

        The request has the bytes until they are used or unreserved, or the request is forgotten. A
        call that is cancelled or fails leaves nothing granted.

        Args:
            may_wait: Whether it waits for its turn. A request that has bytes must not wait for
                long: it could wait for itself.

        Raises:
            ArenaTooSmall: It exceeds the arena's share; waiting does not help.
            StoreFull: Too many requests wait already. The error contains the time to try again.
            DeadlineExceeded: It was not granted in time. The error contains the time to try again.
        """
        with self._for_bytes.standing():
            timeout_s = self._timeout_s if may_wait else min(_SOON_S, self._timeout_s)
            await self._store.reserve(request, room, timeout_s=timeout_s)

    async def create(self, request: str, items: Sequence[CreateItem]) -> list[Handle]:
        """Create blocks to write, all or none, once there is space for all of them.

        If there is free space and no request waits for it, this takes one round trip.

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
        """Wait for a permit of the count gate; return at once without a limit.

        The request has its permit until it is forgotten; a request with a permit must not wait for
        bytes. A call that is cancelled or fails leaves no permit taken.

        Raises:
            NoPermitLeft: Too many requests wait already. The error contains the time to try again.
            DeadlineExceeded: No permit came in time. The error contains the time to try again.
        """
        if self.is_counting:
            with self._for_turn.standing():
                await self._store.acquire_permit(
                    request, PREPROCESS, limit=self._max_concurrency, timeout_s=self._timeout_s
                )

    async def enter_forwarded(self, request: str, nbytes: int, *, limit_nbytes: int) -> None:
        """Enter with media that the engine processes itself.

        In addition to `enter`, wait until the engine's tensors of all such media are within a
        limit.

        Args:
            nbytes: Size of the tensors that the engine computes; a request above the limit runs
                alone.
            limit_nbytes: Limit for all requests together, over all processes.

        Raises:
            NoPermitLeft, DeadlineExceeded: As from `enter`.
        """
        with self._for_bytes.standing():
            await self._take_mib(request, FORWARDED, nbytes, limit_nbytes=limit_nbytes)
        await self.enter(request)

    async def admit_audio(self, request: str, *, limit_nbytes: int, may_wait: bool) -> None:
        """Admit one MiB of the floats that the engine makes of a live transcription's audio.

        Their semaphore is their own, as a live transcription has its permits for long.

        Args:
            limit_nbytes: Limit for all live transcriptions together, over all processes.
            may_wait: Whether it waits for its turn. One that has permits must not: it could wait
                for another one that waits for it.

        Raises:
            NoPermitLeft, DeadlineExceeded: As from `enter`.
        """
        with self._for_bytes.standing():
            timeout_s = self._timeout_s if may_wait else min(_SOON_S, self._timeout_s)
            await self._take_mib(
                request, LIVE_AUDIO, MiB, limit_nbytes=limit_nbytes, timeout_s=timeout_s
            )

    def leave(self, request: str) -> None:
        """Release the permits of a request that the engine has accepted; its pins stay.

        A second call does nothing.
        """
        self._store.accepted(request, GATE)

    async def begin_upload(self, request: str, nbytes: int, *, tenant: str = "") -> bool:
        """Wait until a body of announced length may take space before it has arrived.

        Return whether the caller has to call `end_upload`. Small bodies always find space, however
        many large ones are announced. All large bodies of one tenant take at most half of the
        limit, so that those of other tenants find space. Requests without a tenant have no limit of
        their own.

        Raises:
            NoPermitLeft, DeadlineExceeded: As from `enter`.
        """
        if nbytes <= self._max_uploads_nbytes // _SMALL_PART or not self._max_uploads_nbytes:
            return False
        limits = {UPLOADS: self._max_uploads_nbytes}
        if tenant:  # first, so that waiting for the tenant's own limit delays no other tenant
            limits = {f"{UPLOADS_OF}/{tenant}": self._max_uploads_nbytes // 2, **limits}
        with self._for_bytes.standing():
            for semaphore, limit_nbytes in limits.items():
                await self._take_mib(request, semaphore, nbytes, limit_nbytes=limit_nbytes)
        return True

    def end_upload(self, request: str, *, tenant: str = "") -> None:
        """Release an upload's permits, once its body is processed or dropped.

        A forgotten request releases them too.
        """
        self._store.release_permit(request, UPLOADS)
        if tenant:
            self._store.release_permit(request, f"{UPLOADS_OF}/{tenant}")

    @asynccontextmanager
    async def reserve(self, request: str, nbytes: Mapping[ObjectKind, int]) -> AsyncIterator[None]:
        """Reserve bytes and a permit with `admit` and `enter`, for the time of the block.

        When the block ends, even with an error, the request and all that it has are forgotten.
        """
        await self.admit(request, [ReserveItem(kind, size) for kind, size in nbytes.items()])
        try:
            await self.enter(request)
            yield
        finally:
            self._store.forget(request)

    async def _take_mib(
        self,
        request: str,
        semaphore: str,
        nbytes: int,
        *,
        limit_nbytes: int,
        timeout_s: float | None = None,
    ) -> None:
        """Wait for the permits of a semaphore in MiB: at least one."""
        await self._store.acquire_permit(
            request,
            semaphore,
            limit=max(limit_nbytes // MiB, 1),
            number=max(math.ceil(nbytes / MiB), 1),
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
        )

    @property
    def is_counting(self) -> bool:
        """Whether the number of requests behind the gate is limited."""
        return self._max_concurrency > 0

    @property
    def num_waiting(self) -> int:
        """Requests of this process that wait for bytes or for a permit."""
        return self._for_bytes.num_waiting + self._for_turn.num_waiting

    @property
    def retry_after_s(self) -> float:
        """Estimated seconds until all requests that wait for bytes now are admitted."""
        return self._for_bytes.retry_after_s


class _Line:
    """Requests of this process that wait for one resource."""

    def __init__(self, timeout_s: float, waits: HistogramCell, clock: Callable[[], float]) -> None:
        self._timeout_s, self._waits, self._clock = timeout_s, waits, clock
        self._grants: deque[float] = deque(maxlen=_REMEMBERED_GRANTS)
        self.num_waiting = 0

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """Count a wait: run the block, which ends when the resource is granted.

        A refusal passes with the time to try again.
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
        """Seconds until all waiting requests are admitted, at the rate of the latest grants."""
        if not self.num_waiting:
            return retry_in_s(0.0)
        now_s = self._clock()
        recent = [at_s for at_s in self._grants if now_s - at_s <= _RECENT_S]
        if len(recent) < 2:  # no progress
            return retry_in_s(self._timeout_s)
        seconds_each = (now_s - recent[0]) / len(recent)
        return retry_in_s(float(math.ceil(seconds_each * (self.num_waiting + 1))))


def retry_in_s(expected_s: float) -> float:
    """Return the seconds to suggest to a refused client: as expected, within 1 and 60."""
    least, most = _RETRY_AFTER_S
    return min(max(expected_s, least), most)
