"""How a process's counts come to the store: again and again, all that it has counted."""

from __future__ import annotations

import asyncio
import contextlib

from afferent.errors import AfferentError
from afferent.metrics import Metrics
from afferent.store.async_client import AsyncDaemonStore

PERIOD_S = 1.0


async def push_counts(store: AsyncDaemonStore, counted: Metrics) -> None:
    """Push until cancelled; while there is no store, nothing is lost by waiting."""
    while True:
        await asyncio.sleep(PERIOD_S)
        if store.is_open:
            with contextlib.suppress(AfferentError):
                await store.push(counted.source, counted.samples())
