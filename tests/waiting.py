"""Waiting for a condition in tests, with polls and a limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

_LEAST_POLL_S, _MOST_POLL_S = 0.002, 0.05


async def until(condition: Callable[[], object | Awaitable[object]], limit_s: float = 30.0) -> None:
    """Wait until ``condition`` returns a true value or an awaitable of one.

    The longer it has waited, the longer are the pauses: polls take processor time.

    Raises:
        TimeoutError: The limit is over.
    """
    start_s = time.monotonic()
    async with asyncio.timeout(limit_s):
        while True:
            holds = condition()
            if await holds if isinstance(holds, Awaitable) else holds:
                return
            waited_s = time.monotonic() - start_s
            await asyncio.sleep(min(max(_LEAST_POLL_S, waited_s / 20), _MOST_POLL_S))
