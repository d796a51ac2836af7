"""Embeddings are fetched ahead for encoders that have announced themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from afferent import keys
from afferent.engines.ahead import Ahead, Encoder, announce
from afferent.store.block import codec
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.store.protocol.items import Find
from afferent.store.protocol.results import Fetching
from afferent.types import ContentKey, Failure, MiB, ObjectKind
from tests.store.outcomes import states

KEY = ContentKey(b"k" * 32)
ONE, OTHER = Encoder(b"1" * 32, 1024), Encoder(b"2" * 32, 1024)
ROWS = 40
TREE = {"rows": np.ones((ROWS, 256), np.float32)}


@pytest.fixture
def address() -> Iterator[str]:
    shares = {ObjectKind.FEATURES: 0.5, ObjectKind.EMBEDDINGS: 0.4, ObjectKind.RECORDS: 0.1}
    with StoreServer(16 * MiB, shares=shares) as server:
        yield server.address


def asked_for(address: str, *said: tuple[Encoder, bool]) -> list[bytes]:
    """Return the keys that the tier process fetches after encoders have announced themselves."""

    async def main() -> list[bytes]:
        with DaemonStore(address, name="worker", writable=True) as worker:
            for encoder, is_first in said:
                announce(worker, encoder, is_first=is_first)
        store = await AsyncDaemonStore.connect(address, name="frontend")
        tier = await AsyncDaemonStore.connect(address, name="tier", writable=True)
        asked: list[bytes] = []

        async def serve() -> None:
            while True:
                order = await tier.take("fetch")
                what = msgspec.msgpack.decode(order.payload, type=Fetching)
                asked.append(what.key)
                assert what.nbytes >= codec.plan(TREE).nbytes
                nbytes = codec.write_into(TREE, tier.block(order.target))
                await tier.finish(order, used_nbytes=nbytes)

        serving = asyncio.create_task(serve())
        async with asyncio.timeout(20):
            await asyncio.sleep(0)
            await tier.stat()  # the tier process waits for a task now
            ahead = Ahead(store)
            await ahead.fetch({KEY: ROWS})
            await ahead.fetch({KEY: ROWS})  # now it is in the store
        serving.cancel()
        outcomes = await store.acquire("look", [Find(key) for key in asked])
        assert states(outcomes) == ["hit"] * len(asked)
        await store.release("look")
        assert (await tier.stat()).held_nbytes == 0, "nothing stays pinned"
        await store.close()
        await tier.close()
        return asked

    return asyncio.run(main())


def name_of(encoder: Encoder) -> bytes:
    return keys.embeddings_key(item=KEY, weights=encoder.weights)


def test_the_announced_encoders_embeddings_are_fetched_once(address: str) -> None:
    assert asked_for(address, (ONE, True)) == [name_of(ONE)]


def test_while_nobody_has_said_which_nobody_is_asked(address: str) -> None:
    assert asked_for(address) == []


def test_a_new_encoder_takes_the_place_of_one_that_is_gone(address: str) -> None:
    assert asked_for(address, (ONE, True), (OTHER, True)) == [name_of(OTHER)]


def test_of_two_that_say_it_again_and_again_neither_drives_out_the_other(address: str) -> None:
    said = ((ONE, True), (OTHER, True), (ONE, False), (OTHER, False))
    assert asked_for(address, *said) == [name_of(OTHER)]


def test_what_is_absent_costs_a_round_trip_and_no_store_is_no_failure(address: str) -> None:
    async def main() -> None:
        store = await AsyncDaemonStore.connect(address, name="frontend")
        tier = await AsyncDaemonStore.connect(address, name="tier", writable=True)

        async def serve() -> None:
            while True:
                order = await tier.take("fetch")
                await tier.finish(order, failure=Failure("absent", "not there"))

        serving = asyncio.create_task(serve())
        async with asyncio.timeout(20):
            await asyncio.sleep(0)
            await tier.stat()  # the tier process waits for a task now
            start_s = time.monotonic()
            assert await Ahead(store).fetch({KEY: ROWS}, ONE) == []
            assert time.monotonic() - start_s < 5
        serving.cancel()
        await tier.close()
        await store.close()
        assert await Ahead(store).fetch({KEY: ROWS}, ONE) == []
        assert await Ahead(store).fetch({KEY: ROWS}) == []

    asyncio.run(main())
