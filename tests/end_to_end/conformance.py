"""The engine of a running server, as the conformance suite for engines needs it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from afferent.conformance.engine_trial import Question, Subject
from afferent.engines.contract import Caller, EngineKind
from afferent.engines.remote.kind import RemoteLink
from afferent.store.daemon.launch import DAEMON
from tests.server import Server


@contextlib.asynccontextmanager
async def running(
    kind: EngineKind[Any, RemoteLink],
    server: Server,
    module: str,
    question: Callable[[int], Question],
    text: Callable[[Sequence[int]], str] | None = None,
) -> AsyncIterator[Subject]:
    """Connect to the engine as another frontend would.

    Args:
        module: The module that the engine's process runs.
        text: Decodes text tokens.
    """
    link = RemoteLink(address=server.address_of(module))
    caller = Caller(name="conformance", store_address=server.address_of(DAEMON))

    async def stop() -> None:
        (process,) = server.find(module)
        process.kill()

    async with kind.connect(link, caller) as engine:
        async with asyncio.timeout(60):
            while engine.info is None:
                await asyncio.sleep(0.01)
        yield Subject(
            engine=engine,
            store_address=caller.store_address,
            question=question,
            stop=stop,
            text=text,
        )
