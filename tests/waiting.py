"""Waiting for a condition in tests, with frequent polls and a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

_LOOK_AGAIN_S = 0.002


async def until(condition: Callable[[], object | Awaitable[object]], limit_s: float = 30.0) -> None:
    """Wait until ``condition`` returns a true value or an awaitable of one.

    Raises:
        TimeoutError: The limit is over.
    """
    async with asyncio.timeout(limit_s):
        while True:
            holds = condition()
            if await holds if isinstance(holds, Awaitable) else holds:
                return
            await asyncio.sleep(_LOOK_AGAIN_S)
