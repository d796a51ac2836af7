"""The messages that a store for an event loop sends, and when it sends them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from afferent.admission.shares import NAMELESS
from afferent.errors import FormatError, StoreUnavailable
from afferent.runtime.wire import FrameCutter
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import MAX_ITEMS, Queue
from afferent.types import CreateItem, Handle, ObjectKind
from tests.store.stores import SharedDaemon

HANDLE = Handle(1, 0, 64, 1)
Writes = list[list[str]]
"""The verbs in each write to the socket."""

Work = Callable[[AsyncDaemonStore, Writes], Awaitable[None]]


def run(daemon: SharedDaemon, work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        store = await AsyncDaemonStore.connect(daemon.address, name="test", writable=True)
        writes: Writes = []
        real = store._channel.send_packed

        def noted(frames: bytes) -> None:
            real(frames)
            writes.append([msgspec.msgpack.decode(each)[0] for each in FrameCutter().feed(frames)])

        monkeypatch.setattr(store._channel, "send_packed", noted)
        try:
            await work(store, writes)
        finally:
            await store.close()

    asyncio.run(main())


def test_what_nobody_waits_for_goes_with_the_next_call(
    daemon: SharedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(store: AsyncDaemonStore, writes: Writes) -> None:
        store.introduce("r", NAMELESS)
        handles = await store.create("r", [CreateItem(ObjectKind.RAW, 100)])
        store.discard("r", handles)
        assert (await store.stat()).held_nbytes == 0
        assert writes == [["introduce", "create"], ["abort", "stat"]]

    run(daemon, work, monkeypatch)


def test_what_nobody_waits_for_goes_by_itself_after_a_moment(
    daemon: SharedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(store: AsyncDaemonStore, writes: Writes) -> None:
        for _ in range(2):
            store.unpin("r", [HANDLE])
            store.unpin("s", [HANDLE])
            assert not writes
            async with asyncio.timeout(30):
                while not writes:
                    await asyncio.sleep(0)
            assert writes.pop() == ["release", "release"]

    run(daemon, work, monkeypatch)


def test_a_request_that_needs_nothing_of_the_store_sends_nothing(
    daemon: SharedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(store: AsyncDaemonStore, writes: Writes) -> None:
        store.introduce("r", NAMELESS)
        store.accepted("r", ("preprocess",))
        store.release_permit("r", "preprocess")
        store.forget("r")
        await store.stat()
        assert writes == [["stat"]]
        store.forget("r")  # as at the second end of a request whose share was never needed
        assert writes == [["stat"], ["release"]]

    run(daemon, work, monkeypatch)


def test_a_share_precedes_the_first_message_of_its_request(
    daemon: SharedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(store: AsyncDaemonStore, writes: Writes) -> None:
        store.introduce("r", NAMELESS)
        store.introduce("s", NAMELESS)
        await store.acquire_permit("s", "preprocess", limit=1)
        store.accepted("s", ("preprocess",))
        handles = await store.create("r", [CreateItem(ObjectKind.RAW, 100)])
        store.discard("r", handles)
        store.forget("s")
        store.forget("r")
        assert writes == [
            ["introduce", "acquire_permit"],
            ["accept"],
            ["introduce", "create"],
            ["abort", "release"],
            ["release"],
        ]

    run(daemon, work, monkeypatch)


def test_the_end_of_a_request_is_not_late(
    daemon: SharedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The messages are sent at once: other requests may wait for the bytes that these release."""

    async def work(store: AsyncDaemonStore, writes: Writes) -> None:
        handles = await store.create("r", [CreateItem(ObjectKind.RAW, 100)])
        store.discard("r", handles)
        store.forget("r")
        store.release_permit("r", "preprocess")
        assert writes == [["create"], ["abort", "release"], ["release_permit"]]

    run(daemon, work, monkeypatch)


def test_a_call_that_can_not_be_sent_takes_nothing_with_it(
    daemon: SharedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(store: AsyncDaemonStore, writes: Writes) -> None:
        large = Queue(b"k" * 32, ObjectKind.FEATURES, 1, [], bytes(4096))
        store.introduce("r", NAMELESS)
        with pytest.raises(FormatError, match="over the limit"):
            await store.acquire("r", [large] * MAX_ITEMS)
        await store.stat()
        assert writes == [["introduce", "stat"]]

    run(daemon, work, monkeypatch)


def test_what_is_said_after_the_end_is_not_sent(
    daemon: SharedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(store: AsyncDaemonStore, writes: Writes) -> None:
        store.unpin("r", [HANDLE])
        await store.close()
        assert writes == [["release"]]
        store.unpin("s", [HANDLE])
        with pytest.raises(StoreUnavailable):
            await store.stat()
        assert writes == [["release"]]

    run(daemon, work, monkeypatch)
