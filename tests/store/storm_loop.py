"""A client with an event loop: several concurrent requests, some of which are cancelled."""

from __future__ import annotations

import asyncio
import os
import random
import traceback

import numpy as np

from afferent.errors import StoreFull
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import SealItem
from afferent.store.protocol.results import Failed, InFlight, Owner, Scheduled, existing
from afferent.types import ContentKey, CreateItem, Handle, ObjectKind, ReserveItem
from tests.store.storm_content import (
    RETRYABLE,
    Log,
    acquire_items,
    check_content,
    content_of,
    nbytes_of,
    some_keys,
)

_NUM_AT_ONCE = 3


def run(seed: int, address: str, log: Log) -> None:
    """Run the client until it is killed."""
    try:
        asyncio.run(_LoopClient(random.Random(seed), log).run(address))
    except BaseException:
        log("failed", f"loop: {traceback.format_exc()!r}")
        os._exit(1)


class _LoopClient:
    def __init__(self, rng: random.Random, log: Log) -> None:
        self._rng, self._log = rng, log
        self._store: AsyncDaemonStore

    async def run(self, address: str) -> None:
        self._store = await AsyncDaemonStore.connect(address, name="loop", writable=True)
        async with asyncio.TaskGroup() as group:
            for number in range(_NUM_AT_ONCE):
                group.create_task(self._go_on(number))

    async def _go_on(self, number: int) -> None:
        count = 0
        while True:
            count += 1
            request = f"{number} {count}"
            try:
                async with asyncio.timeout(self._rng.choice([0.001, 0.01, 5.0])):
                    await self._step(request)
            except TimeoutError:
                self._log("cancelled")
            except RETRYABLE as error:
                self._log("retry", error.code)
                await asyncio.sleep(0.02)
            except StoreFull as error:
                self._log("refused", error.code)
            self._store.forget(request)
            await asyncio.sleep(self._rng.uniform(0.005, 0.02))

    async def _step(self, request: str) -> None:
        """Reserve and write an object, acquire some, and verify them twice."""
        (key,) = some_keys(self._rng, 1)
        await self._store.reserve(request, [ReserveItem(ObjectKind.RAW, 1 << 19)])
        news = [CreateItem(ObjectKind.RAW, nbytes_of(key))]
        (handle,) = await self._store.create(request, news)
        await self._fill(request, handle, key)
        keys = some_keys(self._rng, 3)
        items = acquire_items(keys, ObjectKind.FEATURES, self._rng.choice(["self", "job"]))
        outcomes = await self._store.acquire(request, items)
        while keys:
            found = list(zip(keys, outcomes, strict=True))
            for key, outcome in found:
                if isinstance(outcome, Owner):
                    await self._fill(request, outcome.handle, key)
                elif (handle := existing(outcome)) is not None:
                    await self._look(handle, key)
                elif isinstance(outcome, Failed):
                    self._log("refused", outcome.failure.code)
            keys = [key for key, outcome in found if isinstance(outcome, InFlight | Scheduled)]
            outcomes = await self._store.wait(request, keys) if keys else []

    async def _fill(self, request: str, handle: Handle, key: ContentKey) -> None:
        target, content = np.frombuffer(self._store.block(handle), np.uint8), content_of(key)
        target[:1000] = content[:1000]
        await asyncio.sleep(0.0)
        target[1000 : len(content)] = content[1000:]
        (sealed,) = await self._store.seal(request, [SealItem(handle, len(content))])
        await self._look(sealed, key)

    async def _look(self, handle: Handle, key: ContentKey) -> None:
        array = np.frombuffer(self._store.block(handle), np.uint8)
        check_content(array, key)
        await asyncio.sleep(self._rng.choice([0.0, 0.0, 0.02]))
        check_content(array, key)
        self._log.count_read()
