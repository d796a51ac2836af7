"""Raw media while they arrive: on the heap while they are small, then in the arena."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from afferent.errors import MediaTooLarge, StoreFull
from afferent.media.body.raw import SMALL_NBYTES, HeapAllowance, RawBuffer
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.types import KiB, MiB, ObjectKind

PIECE = bytes(range(256)) * 256


@pytest.fixture
def run() -> Iterator[Callable[[Callable[[AsyncDaemonStore], Awaitable[None]]], None]]:
    with StoreServer(8 * MiB, shares={ObjectKind.RAW: 1.0}) as server:

        async def main(work: Callable[[AsyncDaemonStore], Awaitable[None]]) -> None:
            store = await AsyncDaemonStore.connect(server.address, name="test", writable=True)
            await work(store)
            store.forget("r")
            assert (await store.stat()).held_nbytes == 0
            await store.close()

        yield lambda work: asyncio.run(main(work))


async def fill(buffer: RawBuffer, num_pieces: int) -> None:
    for _ in range(num_pieces):
        await buffer.make_room(buffer.nbytes + len(PIECE))
        buffer.write(PIECE)


def test_growth_keeps_what_there_is(run: Callable[..., None]) -> None:
    async def work(store: AsyncDaemonStore) -> None:
        for num_pieces in (1, 4, 5, 30):
            buffer = RawBuffer(store, "r")
            await fill(buffer, num_pieces)
            assert buffer.is_on_heap == (num_pieces * len(PIECE) <= SMALL_NBYTES)
            parts = [(0, 10), (100, 0), (70_000 % (num_pieces * len(PIECE)), 300)]
            media = buffer.finish(parts, origin="data")
            for (start, nbytes), item in zip(parts, media, strict=True):
                assert item.nbytes == nbytes
                whole = item.data
                if item.handle is not None:
                    whole = bytes(store.block(item.handle)[item.start :][:nbytes])
                    assert item.handle.nbytes == num_pieces * len(PIECE)
                assert whole == (PIECE * num_pieces)[start : start + nbytes]
            await store.release("r")

    run(work)


def test_no_more_room_than_was_announced(run: Callable[..., None]) -> None:
    async def work(store: AsyncDaemonStore) -> None:
        for _ in range(2):  # the arena has no space for a third one
            buffer = RawBuffer(store, "r")
            await buffer.make_room(56 * len(PIECE))
            await fill(buffer, 56)
            raw = await buffer.finish_sealed(origin="fetch")
            assert raw.handle is not None
            assert raw.is_sealed
            assert raw.handle.nbytes == raw.nbytes == 56 * len(PIECE)

    run(work)


def test_room_that_was_not_needed_is_free_at_once(run: Callable[..., None]) -> None:
    async def work(store: AsyncDaemonStore) -> None:
        for _ in range(2):
            buffer = RawBuffer(store, "r")
            await fill(buffer, 24)
            await buffer.finish_sealed(origin="fetch")
        held_nbytes = (await store.stat()).held_nbytes
        assert 2 * 24 * len(PIECE) <= held_nbytes < 2 * 24 * len(PIECE) + 64 * KiB

    run(work)


def test_all_buffers_of_a_request_share_the_heap(run: Callable[..., None]) -> None:
    async def work(store: AsyncDaemonStore) -> None:
        allowance = HeapAllowance()
        buffers = [RawBuffer(store, "r", allowance) for _ in range(6)]
        for buffer in buffers:
            await fill(buffer, 1)
        assert [buffer.is_on_heap for buffer in buffers] == [True] * 4 + [False] * 2
        await fill(buffers[0], 1)  # it moves, and its bytes on the heap are free for another
        late = RawBuffer(store, "r", allowance)
        await fill(late, 1)
        assert not buffers[0].is_on_heap
        assert late.is_on_heap

    run(work)


def test_an_item_that_did_not_come_leaves_no_block(run: Callable[..., None]) -> None:
    async def work(store: AsyncDaemonStore) -> None:
        buffer = RawBuffer(store, "r")
        await buffer.make_room(2 * SMALL_NBYTES)
        assert not buffer.is_on_heap
        assert (await store.stat()).held_nbytes > 0
        raw = await buffer.finish_sealed(origin="fetch")
        assert (raw.nbytes, raw.data, raw.handle) == (0, b"", None)
        assert (await store.stat()).held_nbytes == 0

    run(work)


def test_growth_does_not_wait(run: Callable[..., None]) -> None:
    async def work(store: AsyncDaemonStore) -> None:
        buffer = RawBuffer(store, "r")
        with pytest.raises(StoreFull):
            await asyncio.wait_for(fill(buffer, 120), 10)
        with pytest.raises(MediaTooLarge):
            buffer.write(bytes(8 * MiB))

    run(work)
