"""A user's program with the library: strict type checkers check it, and it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import numpy as np
from numpy.typing import NDArray

from afferent import (
    Accepted,
    AsyncDaemonStore,
    ContentKey,
    DaemonStore,
    EngineEvent,
    EngineInfo,
    EngineRequest,
    Finished,
    Gate,
    Handle,
    ItemCache,
    LocalStore,
    MiB,
    ObjectKind,
    Sampling,
    StoreServer,
    Tokens,
    codec,
    errors,
    keys,
    schedule,
)


def make(key: ContentKey) -> dict[str, NDArray[np.float32]]:
    return {"values": np.full(3, key[0], np.float32)}


def use_a_cache() -> int:
    key = keys.features_key(tenant="", fingerprint=b"x", options=b"", media=keys.digest(b"cat"))
    with LocalStore(4 * MiB) as store:
        cache = ItemCache(store)
        trees = cache.get_or_make("request", [key], make, max_nbytes=MiB)
        found = len(trees)
        del trees
        cache.release("request")
        return found


def use_two_connections() -> int:
    with (
        StoreServer(16 * MiB) as server,
        DaemonStore(server.address, name="writer", writable=True) as writer,
    ):
        handle: Handle = writer.put("request", {"a": np.ones(3)})
        with (
            DaemonStore(server.address, name="reader") as reader,
            reader.view(handle) as tree,
        ):
            nbytes = handle.nbytes * int(tree["a"].sum() == 3)
        writer.release("request")
        try:
            writer.get("request", [handle])
        except errors.StaleHandle:
            return nbytes
    raise RuntimeError("an object without a key outlived its pins")


async def use_the_gate() -> bool:
    with StoreServer(16 * MiB, shares={ObjectKind.FEATURES: 1.0}) as server:
        store = await AsyncDaemonStore.connect(server.address, name="frontend")
        gate = Gate(store, timeout_s=5.0)
        async with gate.reserve("request", {ObjectKind.FEATURES: MiB}):
            is_inside = True
        await store.close()
        return is_inside


class Silent:
    """An engine with an empty answer."""

    @property
    def info(self) -> EngineInfo | None:
        return EngineInfo(64, [0])

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        yield Accepted()
        yield Tokens([0], [])
        yield Finished("stop", [])


async def ask(engine: Silent) -> int:
    request = EngineRequest("1", [1, 2], [], Sampling(max_tokens=1))
    return len([event async for event in engine.submit(request)])


def decide() -> int:
    scheduler = schedule.Scheduler(
        schedule.Limits(
            max_num_seqs=1,
            max_num_batched_tokens=8,
            max_num_batched_embeds=8,
            cache_num_embeds=8,
            kv_num_blocks=8,
        )
    )
    scheduler.add(schedule.Request(id="a", num_tokens=4, max_tokens=2))
    return len(scheduler.next_step().prefill)


if __name__ == "__main__":
    block = memoryview(bytearray(codec.plan({"a": np.ones(3)}).nbytes))
    codec.write_into({"a": np.ones(3)}, block)
    print(use_a_cache(), use_two_connections() > 0, asyncio.run(use_the_gate()), decide())
