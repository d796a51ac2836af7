"""A gateway's follower of item events knows the items of a real store, also after losses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from afferent.engines.http_upstream import item_follower
from afferent.engines.http_upstream.item_follower import (
    ItemFollower,
    KnownItems,
    SeenEvent,
)
from afferent.engines.item_events import pack_seq
from afferent.operations.item_events.publisher import Publisher, follow
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.store.protocol.items import Claim, ItemLabel, SealItem
from afferent.types import ContentKey, MiB, Modality, ObjectKind
from tests.examples import examples
from tests.ports import free_pair
from tests.store.outcomes import handle_of

pytestmark = pytest.mark.timeout(120)

HOST = "127.0.0.1"
KEY = "a key of twenty-two.."


def placement_of(number: int) -> bytes:
    return bytes([number]) * 32


def stored(name: int, placement: int, kind: str = "features") -> SeenEvent:
    return SeenEvent(
        "ItemStored", str(name), kind, placement_of(placement).hex() if placement else ""
    )


EVENTS = st.one_of(
    st.builds(stored, st.integers(0, 4), st.integers(0, 3), st.sampled_from(["features", "e"])),
    st.builds(
        lambda name, kind: SeenEvent("ItemRemoved", str(name), kind),
        st.integers(0, 4),
        st.sampled_from(["features", "e"]),
    ),
    st.just(SeenEvent("AllItemsCleared")),
    st.just(SeenEvent("of a later version", "1", "features")),
)


@given(st.lists(st.lists(EVENTS, max_size=6), max_size=8))
@examples(200, storm=5000)
def test_items_are_those_of_the_events(batches: list[list[SeenEvent]]) -> None:
    known, model = KnownItems(), dict[tuple[str, str], str]()
    for seq, events in enumerate(batches):
        known.apply(seq, events)
        assert known.latest == seq
        for event in events:
            if event.type == "AllItemsCleared":
                model.clear()
            elif event.type == "ItemRemoved":
                model.pop((event.name, event.kind), None)
            elif event.type == "ItemStored" and event.placement:
                model[event.name, event.kind] = event.placement
        for number in range(1, 4):
            placement = placement_of(number)
            assert known.has(placement) == (placement.hex() in model.values())
    known.clear()
    assert (known.latest, known.has(placement_of(1))) == (-1, False)


def test_a_server_with_too_many_items_takes_no_more_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(item_follower, "_MAX_ITEMS", 3)
    known = KnownItems()
    known.apply(1, [stored(number, number) for number in range(1, 10)])
    assert [number for number in range(1, 10) if known.has(placement_of(number))] == [1, 2, 3]
    known.apply(2, [SeenEvent("ItemRemoved", "1", "features"), stored(9, 9)])
    assert known.has(placement_of(9))


@pytest.fixture
def store_server() -> Iterator[StoreServer]:
    with StoreServer(16 * MiB) as made:
        yield made


@contextlib.asynccontextmanager
async def publishing(server: StoreServer, port: int, *, key: str = "") -> AsyncIterator[Publisher]:
    publisher = Publisher(f"tcp://{HOST}:{port}", key=key)
    async with await AsyncDaemonStore.connect(server.address, name="publisher") as store:
        tasks = follow(store, publisher), publisher.keep_publishing()
        async with running(*tasks, publisher.keep_answering(store)):
            yield publisher
    publisher.close()


@contextlib.asynccontextmanager
async def running(*coroutines: Coroutine[None, None, None]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def put(store: AsyncDaemonStore, number: int) -> None:
    label = ItemLabel(Modality.IMAGE, placement_of(number))
    wanted = [Claim(key_of(number), ObjectKind.FEATURES, 64, label)]
    (outcome,) = await store.acquire("r", wanted)
    await store.seal("r", [SealItem(handle_of(outcome), 64)])
    await store.release("r")


def key_of(number: int) -> ContentKey:
    return ContentKey(number.to_bytes(32, "big"))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def known_of(follower: ItemFollower) -> set[int]:
    return {number for number in range(1, 40) if follower.items.has(placement_of(number))}


@pytest.mark.parametrize("key", ["", KEY])
def test_follower_knows_the_items_of_a_store(store_server: StoreServer, key: str) -> None:
    async def main() -> None:
        port = free_pair(HOST)
        follower = ItemFollower(HOST, port, key=key)
        connecting = AsyncDaemonStore.connect(store_server.address, name="client", writable=True)
        async with await connecting as store, publishing(store_server, port, key=key):
            await put(store, 1)
            await put(store, 2)
            async with running(follower.keep_following()):
                await until(lambda: known_of(follower) == {1, 2})
                await put(store, 3)
                await store.delete([key_of(1)])
                await until(lambda: known_of(follower) == {2, 3})

    asyncio.run(main())


def test_lost_batches_are_asked_for_again(
    store_server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that never arrives shows within half a second, by the next empty one."""
    losing = False
    receive = zmq.asyncio.Socket.recv_multipart

    async def lossy(socket: zmq.asyncio.Socket) -> list[bytes]:
        frames = await receive(socket)
        while losing and frames[0] == b"items":
            frames = await receive(socket)
        return frames

    monkeypatch.setattr(zmq.asyncio.Socket, "recv_multipart", lossy)

    async def main() -> None:
        nonlocal losing
        port = free_pair(HOST)
        follower = ItemFollower(HOST, port)
        connecting = AsyncDaemonStore.connect(store_server.address, name="client", writable=True)
        async with (
            await connecting as store,
            publishing(store_server, port) as publisher,
            running(follower.keep_following()),
        ):
            await until(lambda: follower.items.latest >= 0)
            losing, before = True, publisher._seq
            for number in range(1, 6):
                await put(store, number)
            await until(lambda: publisher._seq > before)
            losing = False
            await until(lambda: known_of(follower) == {1, 2, 3, 4, 5})

    asyncio.run(main())


def test_publisher_that_is_started_again_is_followed(
    store_server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is gone, nothing is known: the server may have lost its items."""
    monkeypatch.setattr(item_follower, "_SILENCE_S", 1.0)

    async def main() -> None:
        port = free_pair(HOST)
        follower = ItemFollower(HOST, port)
        connecting = AsyncDaemonStore.connect(store_server.address, name="client", writable=True)
        async with await connecting as store, running(follower.keep_following()):
            await put(store, 1)
            async with publishing(store_server, port):
                await until(lambda: known_of(follower) == {1})
            await until(lambda: follower.items.latest == -1)
            assert not known_of(follower)
            await put(store, 2)
            async with publishing(store_server, port):
                await until(lambda: known_of(follower) == {1, 2})

    asyncio.run(main())


@pytest.mark.parametrize(
    "batch",
    [b"", b"\xc1", msgspec.msgpack.encode([1.0, "none"]), msgspec.msgpack.encode([1.0, [{}]])],
)
def test_malformed_events_are_no_items(batch: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        port, context = free_pair(HOST), zmq.asyncio.Context()
        events, requests = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        events.bind(f"tcp://{HOST}:{port}")
        requests.bind(f"tcp://{HOST}:{port + 1}")

        async def answer() -> None:
            while True:
                client, *_ = await requests.recv_multipart()
                await requests.send_multipart([client, b"", b"items", pack_seq(7), batch])

        async def publish() -> None:
            while True:
                await events.send_multipart([b"items", pack_seq(7), batch])
                await asyncio.sleep(0.01)

        follower = ItemFollower(HOST, port)
        async with running(answer(), publish(), follower.keep_following()):
            await until(lambda: "can't be followed" in caplog.text)
        assert follower.items.latest == -1
        context.destroy(linger=0)

    asyncio.run(main())
