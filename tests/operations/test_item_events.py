"""Item events: a reader knows the items of a store, after losses and deaths too."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from afferent.engines.item_events import ItemRemoved, requests_endpoint
from afferent.errors import ConfigError
from afferent.operations.item_events import publisher as publisher_module
from afferent.operations.item_events.publisher import Publisher, follow
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.store.protocol.items import Claim, ItemLabel, SealItem
from afferent.types import ContentKey, MiB, Modality, ObjectKind
from tests import waiting
from tests.operations.item_reader import ItemReader, ask
from tests.operations.seen import in_loop
from tests.pages import DOCS, blocks_of
from tests.store.outcomes import handle_of

pytestmark = pytest.mark.timeout(120)

until = partial(waiting.until, limit_s=30.0)
KEY = "a key of twenty-two.."


@pytest.fixture
def server() -> Iterator[StoreServer]:
    shares = {ObjectKind.FEATURES: 0.5, ObjectKind.EMBEDDINGS: 0.5}
    with StoreServer(16 * MiB, shares=shares) as made:
        yield made


@dataclass(slots=True)
class Site:
    """A store, its publisher, and a client that stores items."""

    store: AsyncDaemonStore
    publisher: Publisher
    endpoint: str

    async def put(self, number: int, kind: ObjectKind = ObjectKind.FEATURES) -> None:
        label = ItemLabel(Modality.IMAGE, bytes([number % 256]) * 32)
        wanted = [Claim(key_of(number, kind), kind, 64, label)]
        (outcome,) = await self.store.acquire("r", wanted)
        await self.store.seal("r", [SealItem(handle_of(outcome), 64)])
        await self.store.release("r")

    async def delete(self, *numbers: int) -> None:
        await self.store.delete([key_of(number) for number in numbers])

    def reader(self, **more: object) -> ItemReader:
        return ItemReader(self.endpoint, requests_endpoint(self.endpoint), **more)  # type: ignore[arg-type]


def key_of(number: int, kind: ObjectKind = ObjectKind.FEATURES) -> ContentKey:
    return ContentKey(number.to_bytes(31, "big") + bytes([kind is ObjectKind.FEATURES]))


def names(*numbers: int, kind: ObjectKind = ObjectKind.FEATURES) -> set[tuple[str, str]]:
    return {(key_of(number, kind).hex(), str(kind)) for number in numbers}


@contextlib.asynccontextmanager
async def site(server: StoreServer, folder: Path, *, key: str = "") -> AsyncIterator[Site]:
    """Run a publisher at a path in ``folder``."""
    endpoint = f"ipc://{folder}/items"
    publisher = Publisher(endpoint, key=key)
    connect = partial(AsyncDaemonStore.connect, server.address, writable=True)
    async with await connect(name="publisher") as own, await connect(name="client") as store:
        tasks = [
            asyncio.create_task(each)
            for each in (
                follow(own, publisher),
                publisher.keep_publishing(),
                publisher.keep_answering(own),
            )
        ]
        try:
            yield Site(store, publisher, endpoint)
        finally:
            await stop(*tasks)
            publisher.close()


async def stop(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks; an error in one of them is raised here."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def following(*readers: ItemReader) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(reader.follow()) for reader in readers]
    try:
        yield
    finally:
        await stop(*tasks)
        for reader in readers:
            reader.close()


@in_loop
async def test_reader_follows_stored_and_removed_items(server: StoreServer, tmp_path: Path) -> None:
    async with site(server, tmp_path) as here:
        await here.put(1)
        reader = here.reader()
        async with following(reader):
            await until(lambda: set(reader.items) == names(1))
            await here.put(2)
            await here.put(1, ObjectKind.EMBEDDINGS)
            await here.delete(1)
            expected = names(2) | names(1, kind=ObjectKind.EMBEDDINGS)
            await until(lambda: set(reader.items) == expected)
        assert reader.num_lists == 1
        (found,) = (reader.items[name] for name in names(2))
        placement = (b"\x02" * 32).hex()
        assert found == {
            "type": "ItemStored",
            "name": key_of(2).hex(),
            "kind": "features",
            "nbytes": 64,
            "modality": "image",
            "placement": placement,
        }


@pytest.mark.parametrize("every", [2, 3])
@in_loop
async def test_reader_that_loses_batches_repairs_its_items(
    server: StoreServer, tmp_path: Path, every: int
) -> None:
    """A batch is missed by the number of the next one, which comes without any event, too."""
    async with site(server, tmp_path) as here:
        reader = here.reader(loses=lambda seq: seq % every == 0)
        async with following(reader):
            for number in range(8):
                await here.put(number)
                await until(lambda: set(reader.items) == names(*range(number + 1)))  # noqa: B023
        assert reader.num_replays > 0


@in_loop
async def test_reader_lists_all_items_if_the_replay_buffer_is_too_short(
    server: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "_MAX_REPLAY_NBYTES", 1)
    async with site(server, tmp_path) as here:
        is_deaf = False
        reader = here.reader(loses=lambda _: is_deaf)
        async with following(reader):
            await here.put(1)
            await until(lambda: set(reader.items) == names(1))
            num_lists, is_deaf = reader.num_lists, True
            await here.put(2)
            await until(lambda: here.publisher._seq > reader.seq + 2)
            is_deaf = False
            await until(lambda: set(reader.items) == names(1, 2))
        assert reader.num_lists > num_lists


@in_loop
async def test_items_are_cleared_when_the_store_daemon_dies(
    server: StoreServer, tmp_path: Path
) -> None:
    async with site(server, tmp_path) as here:
        reader = here.reader()
        async with following(reader):
            await here.put(1)
            await until(lambda: set(reader.items) == names(1))
            os.kill(server.pid, signal.SIGKILL)
            await until(lambda: not reader.items)
            await until(lambda: here.store.is_open)
            await here.put(2)
            await until(lambda: set(reader.items) == names(2))


@in_loop
async def test_reader_of_a_publisher_that_is_started_again_knows_its_items(
    server: StoreServer, tmp_path: Path
) -> None:
    async with site(server, tmp_path) as here:
        reader = here.reader()
        await here.put(1)
        async with following(reader):
            await until(lambda: set(reader.items) == names(1))
    async with site(server, tmp_path) as again:
        reader = again.reader(items=reader.items, seq=reader.seq)
        await again.delete(1)
        await again.put(3)
        async with following(reader):
            await until(lambda: set(reader.items) == names(3))


@in_loop
async def test_reader_of_the_documentation_follows_items(
    server: StoreServer, tmp_path: Path
) -> None:
    (block,) = blocks_of(DOCS / "routers.md", "python")
    program: dict[str, Any] = {}
    exec(block.text, program)  # noqa: S102
    async with site(server, tmp_path) as here:
        await here.put(1)
        reader = program["ItemReader"](here.endpoint, requests_endpoint(here.endpoint))
        with contextlib.closing(reader.events), contextlib.closing(reader.requests):
            reader.events.setsockopt(zmq.RCVTIMEO, 100)  # between two batches, `follow` ends
            ended = threading.Event()
            following = asyncio.create_task(asyncio.to_thread(follow_until, ended, reader))
            await until(lambda: set(reader.items) == names(1))
            await here.put(2)
            await here.delete(1)
            await until(lambda: set(reader.items) == names(2))
            ended.set()
            await following


def follow_until(ended: threading.Event, reader: Any) -> None:
    while not ended.is_set():
        with contextlib.suppress(zmq.Again):
            reader.follow()


@in_loop
async def test_find_returns_items_that_are_stored(server: StoreServer, tmp_path: Path) -> None:
    async with site(server, tmp_path) as here:
        for number in range(300):
            await here.put(number)
        reader = here.reader()
        requests = reader.socket(zmq.DEALER, reader.requests)
        wanted = [name.encode() for name, _ in sorted(names(3, 1))]
        answer = await ask(requests, [b"find", *wanted, b"ff" * 32, b"no digits", b"", b"ab" * 65])
        for _, payload in answer:
            reader.apply(payload)
        assert set(reader.items) == names(1, 3)
        assert len(await ask(requests, [b"list"])) == 3
        reader.close()


@pytest.mark.parametrize(
    "frames",
    [
        *([b"list", b"more"], [b"find" + b"x" * 10_000], [b"1234567"], [b""]),
        [b"find", *[b"ab" * 32] * 4097],
    ],
    ids=lambda frames: f"{frames[0][:10]!r} {len(frames)}",
)
@in_loop
async def test_malformed_request_is_not_answered(
    server: StoreServer, tmp_path: Path, frames: list[bytes]
) -> None:
    async with site(server, tmp_path) as here:
        reader = here.reader()
        requests = reader.socket(zmq.DEALER, reader.requests)
        with pytest.raises(LookupError):
            await ask(requests, frames)
        await here.put(1)
        assert len(await ask(requests, [b"list"])) == 2
        reader.close()


@in_loop
async def test_request_without_a_frame_is_no_request(server: StoreServer, tmp_path: Path) -> None:
    async with site(server, tmp_path) as here:
        reader = here.reader()
        requests = reader.socket(zmq.DEALER, reader.requests)
        await requests.send_multipart([b"x"])
        with pytest.raises(LookupError):
            await ask(requests, [])
        reader.close()


@in_loop
async def test_request_while_the_store_is_gone_is_not_answered(
    server: StoreServer, tmp_path: Path
) -> None:
    async with site(server, tmp_path) as here:
        reader = here.reader()
        requests = reader.socket(zmq.DEALER, reader.requests)
        await here.put(1)
        server.close()
        with pytest.raises(LookupError):
            await ask(requests, [b"list"])
        reader.close()


@in_loop
async def test_slow_client_gets_its_whole_answer_beside_others(
    server: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket could take messages for the idle client, and reports a full queue of the other."""
    monkeypatch.setattr(publisher_module, "_MAX_QUEUED", 2)
    async with site(server, tmp_path) as here:
        reader = here.reader()
        idle = reader.socket(zmq.DEALER, reader.requests)
        assert len(await ask(idle, [b"list"])) == 1
        first = here.publisher._seq
        await here.publisher.publish([ItemRemoved("0" * 64, ObjectKind.FEATURES)] * 256 * 400)
        slow = reader.socket(zmq.DEALER, reader.requests, receives=1)
        answer = await ask(slow, [first.to_bytes(8, "big")], pause_s=0.002)
        assert [seq for seq, _ in answer][:401] == list(range(first, first + 401))
        reader.close()


@in_loop
async def test_replay_buffer_has_the_latest_batches(
    server: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "_MAX_REPLAYED", 5)
    async with site(server, tmp_path) as here:
        for _ in range(20):
            await here.publisher.publish([])
        reader = here.reader()
        requests = reader.socket(zmq.DEALER, reader.requests)
        answer = await ask(requests, [(0).to_bytes(8, "big")])
        assert len(answer) == 5
        assert answer[-1][0] >= here.publisher._seq - 1
        reader.close()


@in_loop
async def test_client_that_reads_no_answer_delays_others_for_a_moment_only(
    server: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "_MAX_QUEUED", 2)
    monkeypatch.setattr(publisher_module, "_ANSWER_TIMEOUT_S", 0.1)
    async with site(server, tmp_path) as here:
        for _ in range(5000):
            await here.publisher.publish([])
        reader = here.reader()
        deaf = reader.socket(zmq.DEALER, reader.requests, receives=1)
        await deaf.send_multipart([b"", (0).to_bytes(8, "big")])
        requests = reader.socket(zmq.DEALER, reader.requests)
        await here.put(1)
        assert len(await ask(requests, [b"list"])) == 2
        reader.close()


@in_loop
async def test_only_readers_with_the_key_get_events(server: StoreServer, tmp_path: Path) -> None:
    async with site(server, tmp_path, key=KEY) as here:
        one, wrong, without = here.reader(key=KEY), here.reader(key="x" * 20), here.reader()
        async with following(one, wrong, without):
            await here.put(1)
            await until(lambda: set(one.items) == names(1))
            start = one.seq
            await until(lambda: one.seq > start + 2)
        assert (wrong.seq, without.seq) == (-1, -1)


@in_loop
async def test_socket_file_is_of_this_user_alone(tmp_path: Path) -> None:
    Publisher(f"ipc://{tmp_path}/items").close()
    publisher = Publisher(f"ipc://{tmp_path}/items")
    modes = {name: os.stat(tmp_path / name).st_mode & 0o777 for name in os.listdir(tmp_path)}  # noqa: PTH116, PTH208
    publisher.close()
    assert modes == {"items": 0o700, "items.requests": 0o700}


@in_loop
async def test_address_that_can_not_be_bound_is_refused_with_its_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--item-events ipc:///.*no/such"):
        Publisher(f"ipc://{tmp_path}/no/such/folder")


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"),
        ("tcp://[::1]:5557", "tcp://[::1]:5558"),
        ("ipc:///run/items", "ipc:///run/items.requests"),
    ],
)
def test_requests_endpoint_is_beside_that_of_the_events(endpoint: str, expected: str) -> None:
    assert requests_endpoint(endpoint) == expected
