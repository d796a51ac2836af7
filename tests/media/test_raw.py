"""Raw media while they arrive: on the heap while they are small, then in the arena."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import pytest

from afferent.errors import MediaTooLarge, StoreFull
from afferent.media.body.raw import (
    MEDIUM_NBYTES,
    SMALL_NBYTES,
    HeapAllowance,
    HeapReserve,
    RawBuffer,
)
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


def open_reserve(nbytes: int) -> HeapReserve:
    reserve = HeapReserve(nbytes)
    for _ in range(6):
        reserve.note(1, 1)
    return reserve


def free_nbytes(reserve: HeapReserve, nbytes: int) -> int:
    """Return how much of a reserve is free, in pieces."""
    num_pieces = 0
    while reserve.take(nbytes):
        num_pieces += 1
    reserve.give_back(num_pieces * nbytes)
    return num_pieces * nbytes


def test_a_reserve_is_open_while_most_items_are_known() -> None:
    reserve = HeapReserve(SMALL_NBYTES)
    assert not reserve.take(1)
    for _ in range(6):
        reserve.note(2, 2)
    assert reserve.take(SMALL_NBYTES)
    assert not reserve.take(1)
    reserve.give_back(SMALL_NBYTES)
    reserve.note(0, 0)
    assert reserve.take(1)
    for _ in range(6):
        reserve.note(0, 1)
    assert not reserve.take(1)


def test_larger_bodies_share_the_reserve_of_the_process(run: Callable[..., None]) -> None:
    """Each has at most `MEDIUM_NBYTES`; the reserve has its bytes back with the last reference."""
    piece, nbytes = len(PIECE), MEDIUM_NBYTES - SMALL_NBYTES
    reserve = open_reserve(nbytes + piece)

    async def work(store: AsyncDaemonStore) -> None:
        first, second = (RawBuffer(store, "r", HeapAllowance(reserve=reserve)) for _ in range(2))
        await fill(first, MEDIUM_NBYTES // piece)
        assert first.is_on_heap
        assert free_nbytes(reserve, piece) == piece
        await fill(second, SMALL_NBYTES // piece + 1)
        assert second.is_on_heap
        assert free_nbytes(reserve, piece) == 0
        await fill(second, 1)
        assert not second.is_on_heap
        assert free_nbytes(reserve, piece) == piece
        media = first.finish([(0, piece), (piece, 2 * piece)], origin="data")
        assert [item.data for item in media] == [PIECE, PIECE * 2]
        del first
        assert free_nbytes(reserve, piece) == piece
        kept = replace(media.pop(), digest=b"d")
        del media
        assert free_nbytes(reserve, piece) == piece
        del kept
        assert free_nbytes(reserve, piece) == nbytes + piece
        third = RawBuffer(store, "r", HeapAllowance(reserve=reserve))
        await fill(third, MEDIUM_NBYTES // piece + 1)
        assert not third.is_on_heap
        assert free_nbytes(reserve, piece) == nbytes + piece

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
