"""The core requests embeddings from the tier."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

import msgspec
import numpy as np
import pytest

from afferent import keys
from afferent.builtin.engine.core.pins import Pins
from afferent.engines.protocol import EngineRequest
from afferent.store.block import codec
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.store.protocol.items import Find
from afferent.store.protocol.results import Fetching, Order
from afferent.types import (
    ContentKey,
    Failure,
    Handle,
    Item,
    MiB,
    Modality,
    ObjectKind,
    Placeholder,
    Sampling,
)
from tests.store.outcomes import states

WEIGHTS = b"w" * 32
ROWS, WIDTH = 40, 256
TREE = {"rows": np.ones((ROWS, WIDTH), np.float32), "layers": []}
KEYS = [ContentKey(bytes([number]) * 32) for number in (1, 2)]
NAMES = [keys.embeddings_key(item=key, weights=WEIGHTS) for key in KEYS]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    shares = {ObjectKind.FEATURES: 0.5, ObjectKind.EMBEDDINGS: 0.5}
    with StoreServer(16 * MiB, shares=shares) as server:
        yield server.address


def request() -> EngineRequest:
    """Return a request with two items, one of them twice; their features are not used."""
    items = [
        Item(Modality.IMAGE, key, Handle(1, 0, 64, 1), Placeholder(2 + index * ROWS, ROWS))
        for index, key in enumerate((KEYS[0], KEYS[1], KEYS[0]))
    ]
    return EngineRequest("r", [7] * (4 + 3 * ROWS), items, Sampling(max_tokens=1))


Answer = Callable[[AsyncDaemonStore, Order, Fetching], Awaitable[None]]


async def has_one(store: AsyncDaemonStore, order: Order, fetching: Fetching) -> None:
    """Answer as a tier that has only the embeddings of the first item."""
    assert fetching.kind is ObjectKind.EMBEDDINGS
    if fetching.key == NAMES[0]:
        nbytes = codec.write_into(TREE, store.block(order.target))
        await store.finish(order, used_nbytes=nbytes)
    else:
        await store.finish(order, failure=Failure("absent", "not there"))


def fetched(address: str, answer: Answer | None, **options: bool) -> list[str]:
    """Return the outcomes of the lookups for the embeddings of both items."""

    async def main() -> list[str]:
        store = await AsyncDaemonStore.connect(address, name="core")
        tier = await AsyncDaemonStore.connect(address, name="tier", writable=True)

        async def serve(given: Answer) -> None:
            while True:
                order = await tier.take("fetch")
                await given(tier, order, msgspec.msgpack.decode(order.payload, type=Fetching))

        serving = asyncio.create_task(serve(answer)) if answer is not None else None
        await asyncio.sleep(0.05)
        pins = Pins(store, (), **{"has_tier": True, **options})
        await pins.fetch(request(), weights=WEIGHTS, row_nbytes=WIDTH * 4)
        found = await store.acquire("look", [Find(name) for name in NAMES])
        statistics = await tier.stat()
        await store.release("look")
        if serving is not None:
            serving.cancel()
        assert statistics.num_jobs_queued == statistics.num_jobs_running == 0
        await tier.delete(NAMES)
        assert (await tier.stat()).held_nbytes == 0, "nothing stays pinned"
        await store.close()
        await tier.close()
        return states(found)

    return asyncio.run(main())


def test_what_others_have_encoded_comes_before_a_step_needs_it(address: str) -> None:
    assert fetched(address, has_one) == ["hit", "absent"]


def test_without_a_tier_nobody_is_asked(address: str) -> None:
    assert fetched(address, has_one, has_tier=False) == ["absent", "absent"]


def test_while_nobody_fetches_nothing_is_waited_for(address: str) -> None:
    start_s = time.monotonic()
    assert fetched(address, None) == ["absent", "absent"]
    assert time.monotonic() - start_s < 5.0
