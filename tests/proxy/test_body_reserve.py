"""Reader of a body: which media stay on the heap."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
from typing import Any

import pytest
from starlette.requests import Request

from afferent.admission.gate import Gate
from afferent.config import RequestLimits
from afferent.media.body.raw import HeapReserve, RawMedia
from afferent.proxy.body import BodyReader
from afferent.proxy.media_locations import MEDIA_KEYS
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.types import KiB, MiB, ObjectKind

WINDOW = 64 << 10
PAGE_NBYTES = 570_000


def a_body(*sizes: int) -> bytes:
    urls = ["data:image/png;base64," + base64.b64encode(bytes(size)).decode() for size in sizes]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()


class Body:
    """A body whose windows arrive one by one."""

    def __init__(self, store: AsyncDaemonStore, name: str, body: bytes, heap: HeapReserve) -> None:
        self._windows = [body[at : at + WINDOW] for at in range(0, len(body), WINDOW)]
        gate = Gate(store, timeout_s=5)
        self._reader = BodyReader(store, gate, name, RequestLimits(), MEDIA_KEYS, heap=heap)
        headers = [(b"content-length", str(len(body)).encode())]
        self._request = Request({"type": "http", "headers": headers}, self._receive)
        self.goes_on, self.waits = asyncio.Event(), asyncio.Event()
        self.goes_on.set()
        self.stops_after = -1

    async def _receive(self) -> dict[str, Any]:
        if self.stops_after == 0:
            self.waits.set()
            await self.goes_on.wait()
        self.stops_after -= 1
        window = self._windows.pop(0)
        return {"type": "http.request", "body": window, "more_body": bool(self._windows)}

    def hold_after(self, num_windows: int) -> None:
        self.stops_after = num_windows
        self.goes_on.clear()

    async def read(self) -> list[RawMedia]:
        return list((await self._reader.read(self._request)).media.values())


def opened(nbytes: int = 16 * MiB) -> HeapReserve:
    heap = HeapReserve(nbytes)
    for _ in range(6):
        heap.note(1, 1)
    return heap


async def connected(server: StoreServer) -> AsyncDaemonStore:
    return await AsyncDaemonStore.connect(server.address, name="test", writable=True)


@pytest.mark.parametrize(
    ("sizes", "heap", "is_on_heap"),
    [
        ([PAGE_NBYTES], opened(), True),
        ([300_000, 300_000], opened(), True),
        ([200 * KiB], HeapReserve(), True),
        ([PAGE_NBYTES], HeapReserve(), False),  # items were unknown
        ([PAGE_NBYTES], opened(200_000), False),  # the reserve is too small for all of it
        ([2 * MiB], opened(), False),
        ([200_000] * 8, opened(), False),
    ],
)
def test_media_on_the_heap(sizes: list[int], heap: HeapReserve, is_on_heap: bool) -> None:
    async def work(server: StoreServer) -> None:
        store = await connected(server)
        found = await Body(store, "r", a_body(*sizes), heap).read()
        assert [raw.nbytes for raw in found] == sizes
        for raw in found:
            assert (raw.handle is None) == is_on_heap
            assert bytes(raw.bytes_in(store)) == bytes(raw.nbytes)
        assert ((await store.stat()).held_nbytes == 0) == is_on_heap
        await store.close()

    with StoreServer(64 * MiB, shares={ObjectKind.RAW: 1.0}) as server:
        asyncio.run(work(server))


def test_a_body_takes_space_for_all_of_it_or_none() -> None:
    """A body that is half there does not lose its space to another one, which goes to the arena."""

    async def work(server: StoreServer) -> None:
        store = await connected(server)
        heap = opened(500_000)
        first, second = (Body(store, name, a_body(PAGE_NBYTES), heap) for name in ("a", "b"))
        first.hold_after(6)
        reading = asyncio.create_task(first.read())
        await first.waits.wait()
        (other,) = await second.read()
        assert other.handle is not None
        first.goes_on.set()
        (kept,) = await reading
        assert kept.handle is None
        del kept, reading, first
        await asyncio.sleep(0)  # the loop refers to the task
        gc.collect()
        third = Body(store, "c", a_body(PAGE_NBYTES), heap)
        (again,) = await third.read()
        assert again.handle is None
        await store.close()

    with StoreServer(64 * MiB, shares={ObjectKind.RAW: 1.0}) as server:
        asyncio.run(work(server))
