"""Waiting until something holds, for tests: it is looked at often, and not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

_LOOK_AGAIN_S = 0.002


async def until(condition: Callable[[], object | Awaitable[object]], limit_s: float = 30.0) -> None:
    """Until what ``condition`` gives is true; it may be awaited.

    Raises:
        TimeoutError: It was not, for so long.
    """
    async with asyncio.timeout(limit_s):
        while True:
            holds = condition()
            if await holds if isinstance(holds, Awaitable) else holds:
                return
            await asyncio.sleep(_LOOK_AGAIN_S)
