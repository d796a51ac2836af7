"""Sharing of one computation by concurrent callers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

_LONG_S = 0.2

T = TypeVar("T")


class Shared(Generic[T]):
    """Shares a computation between concurrent callers.

    A caller during a run waits for the next run, which all such callers share. So no result is
    older than its call, except after a long wait: then the caller gets the current run's result, as
    the next run might take as long again.
    """

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]]) -> None:
        """Create it; ``make`` must handle its errors, as its callers may be gone."""
        self._make = make
        self._now: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def get(self) -> T:
        if self._next is None:
            self._next = asyncio.create_task(self._after(self._now))
        return await asyncio.shield(self._next)

    async def _after(self, before: asyncio.Task[T] | None) -> T:
        if before is not None and not before.done():
            start_s = time.monotonic()
            await asyncio.wait([before])
            if time.monotonic() - start_s > _LONG_S:
                self._next = None
                return before.result()
        self._now, self._next = self._next, None
        return await self._make()
