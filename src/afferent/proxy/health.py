"""Endpoints on a frontend's own state: its model, health and metrics.

None of them waits long for another process: they also report processes that do not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.responses import Response

from afferent.errors import (
    AfferentError,
    StoreUnavailable,
)
from afferent.proxy.responses import json_answer
from afferent.runtime.heartbeat import Board
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.metrics import store_readings
from afferent.telemetry.readings import Reading
from afferent.telemetry.registry import REGISTRY
from afferent.tier.launch import NAME as TIER

_STORE_TIMEOUT_S = 0.6

Answer = TypeVar("Answer")


async def readiness(
    store: AsyncDaemonStore,
    board: Board | None,
    *,
    has_engine: bool,
    makes_features: bool = True,
) -> Response:
    """Report whether a request would be served now, without sending one that may hang.

    Args:
        makes_features: Whether preprocessing workers are needed.
    """
    parts = {"store": store.is_open, "preprocess": not makes_features}
    if parts["store"] and makes_features:
        try:
            parts["preprocess"] = (await _soon(store.stat())).num_workers > 0
        except AfferentError:
            parts["store"] = False
    parts["engine"] = has_engine and not (board is not None and board.are_doors_closed)
    frozen = board.silent() if board is not None else []
    ready = all(parts.values()) and set(frozen) <= {TIER}
    return json_answer({"ready": ready, **parts, "frozen": frozen}, status=200 if ready else 503)


async def gathered(store: AsyncDaemonStore) -> list[Reading]:
    """Return the sums over all processes, with this process's current counts.

    Other processes' counts may be as old as `afferent.telemetry.pushing.PERIOD_S`.

    Raises:
        Unavailable: The store, which has the sums, does not answer.
    """

    async def ask() -> list[Reading]:
        await store.push_metrics(REGISTRY.source, REGISTRY.readings())
        return [*await store.read_metrics(), *store_readings(await store.stat())]

    return await _soon(ask())


async def _soon(answer: Awaitable[Answer]) -> Answer:
    """Await an answer, with a short timeout.

    Raises:
        Unavailable: The store does not answer in time.
    """
    try:
        async with asyncio.timeout(_STORE_TIMEOUT_S):
            return await answer
    except TimeoutError as error:
        raise StoreUnavailable("the store does not answer; try again") from error
