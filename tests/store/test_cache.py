"""The operations of a cache server: batched, and shared by processes."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from afferent import keys
from afferent.errors import ArenaTooSmall, FormatError, StaleHandle, StoreFull
from afferent.store.block import codec
from afferent.store.client.async_item_cache import AsyncItemCache
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.client.item_cache import ItemCache
from afferent.store.client.local_store import LocalStore
from afferent.store.client.operations import Loaded
from afferent.store.client.store import Store
from afferent.store.daemon.server import StoreServer
from afferent.store.protocol.items import MAX_ITEMS, Find
from afferent.store.protocol.results import ObjectInfo
from afferent.types import ContentKey, MiB, Modality, ObjectKind
from tests.server import wait_until
from tests.store.stores import STORES, SharedDaemon, cache_of

WEIGHTS = keys.digest(b"weights")


def key_of(number: int) -> ContentKey:
    return keys.features_key(
        tenant="", fingerprint=b"f", options=b"", media=keys.digest(bytes([number]))
    )


@pytest.fixture(params=list(STORES))
def store(request: pytest.FixtureRequest, daemon: SharedDaemon) -> Iterator[Store]:
    with STORES[request.param](daemon) as made:
        yield made


@pytest.fixture
def cache(store: Store) -> ItemCache:
    made: ItemCache = cache_of(store, weights=WEIGHTS)
    return made


def test_allocate_write_publish_find(store: Store, cache: ItemCache) -> None:
    sizes = {key_of(number): 100 + number for number in range(128)}
    slots = cache.allocate("writer", sizes)
    assert all(slot.block is not None and len(slot.block) == sizes[slot.key] for slot in slots)
    again = cache.allocate("other", sizes)
    assert not any(slot.block or slot.is_ready for slot in again)
    for number, slot in enumerate(slots):
        assert slot.block is not None
        slot.block[:] = bytes([number]) * len(slot.block)
    cache.publish("writer", {slot.handle: 50 for slot in slots if slot.handle})
    found = cache.allocate("reader", sizes)
    assert all(slot.is_ready for slot in found)
    for number, slot in enumerate(found):
        assert slot.handle is not None
        assert bytes(store.block(slot.handle)) == bytes([number]) * 50
    for request in ("writer", "other", "reader"):
        cache.release(request)
    assert store.stat().held_nbytes == 0


def test_each_operation_is_one_round_trip_or_two(
    store: Store, cache: ItemCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    target: Any = getattr(store, "_store", store)
    real = target._call

    def counted(call: Any) -> Any:
        calls.append(type(call.request).__name__)
        return real(call)

    monkeypatch.setattr(target, "_call", counted)
    arrays = {key_of(number): np.full((4, 8), number, np.float32) for number in range(50)}
    cache.set_data("r", {key: {"pixel_values": array} for key, array in arrays.items()})
    assert calls == ["Acquire", "Seal"]
    cache.set_embeddings("r", arrays)
    calls.clear()
    assert len(cache.get_data("r", arrays)) == 50
    assert len(cache.get_embeddings("r", arrays)) == 50
    cache.release("r")
    assert calls == ["Acquire", "Acquire", "Release"]
    calls.clear()
    assert len(cache.load("r", [bytes([number]) for number in range(50)], load_key)) == 50
    assert calls == ["Acquire", "Seal"]


def test_embeddings_belong_to_weights(store: Store, cache: ItemCache) -> None:
    array = np.arange(32, dtype=np.float32).reshape(4, 8)
    cache.set_embeddings("r", {key_of(1): array})
    found = cache.get_embeddings("r", [key_of(1), key_of(2)])
    assert list(found) == [key_of(1)]
    assert np.array_equal(found[key_of(1)], array)
    other = cache_of(store, weights=keys.digest(b"other weights"))
    assert other.get_embeddings("r", [key_of(1)]) == {}
    assert cache.get_data("r", [key_of(1)]) == {}


def test_nothing_is_published_that_was_computed_from_features_that_went(
    store: Store, cache: ItemCache
) -> None:
    cache.set_data("maker", {key_of(1): {"x": np.zeros(8)}})
    (slot,) = cache.allocate("encoder", {key_of(1): 1000})
    assert slot.handle is not None
    store.release("encoder", [slot.handle])
    with pytest.raises(StaleHandle):
        cache.set_embeddings(
            "encoder", {key_of(1): np.zeros((1, 2))}, computed_from={key_of(1): slot.handle}
        )
    assert cache.get_embeddings("encoder", [key_of(1)]) == {}
    assert store.stat().kinds[ObjectKind.EMBEDDINGS].num_objects == 0


def test_what_is_set_twice_is_stored_once(store: Store, cache: ItemCache) -> None:
    for request in ("a", "b"):
        cache.set_data(request, {key_of(1): {"x": np.zeros(8)}})
    assert store.stat().num_objects == 1


def test_what_is_missing_is_made(store: Store, cache: ItemCache) -> None:
    made: list[bytes] = []

    def make(key: ContentKey) -> dict[str, Any]:
        made.append(key)
        return {"x": np.full(8, key[0])}

    wanted = [key_of(number) for number in range(3)]
    first = cache.get_or_make("a", wanted[:2], make, max_nbytes=10_000)
    both = cache.get_or_make("b", wanted, make, max_nbytes=10_000)
    assert made == wanted
    assert [int(both[key]["x"][0]) for key in wanted] == [key[0] for key in wanted]
    assert all(both[key]["x"].ctypes.data == first[key]["x"].ctypes.data for key in first)
    assert store.stat().used_nbytes < 3 * 1000  # the objects are trimmed to their size
    del first, both
    for request in ("a", "b"):
        cache.release(request)
    assert store.stat().held_nbytes == 0


@pytest.mark.parametrize(
    ("mistake", "error", "words"),
    [
        (ValueError("no"), ValueError, "no"),
        ({"x": np.zeros(10_000)}, FormatError, "takes 80064 bytes, and max_nbytes is 1000"),
        (None, FormatError, "is a return missing"),
    ],
)
def test_what_can_not_be_made_is_left_for_others(
    store: Store, cache: ItemCache, mistake: Any, error: type[Exception], words: str
) -> None:
    wanted = [key_of(number) for number in range(4)]

    def make(key: ContentKey) -> Any:
        if key != wanted[1]:
            return {"x": np.zeros(8)}
        if isinstance(mistake, Exception):
            raise mistake
        return mistake

    with pytest.raises(error, match=words):
        cache.get_or_make("a", wanted, make, max_nbytes=1000)
    cache.release("a")
    assert list(cache.get_data("b", wanted)) == wanted[:1]
    slots = cache.allocate("c", dict.fromkeys(wanted, 1000))
    assert [slot.block is None for slot in slots] == [True, False, False, False]


def test_what_is_no_key_is_named(cache: ItemCache) -> None:
    bare: Any = key_of(1)  # instead of a list of keys
    for wanted, words in (
        ([b"abc"], "a key is 32 bytes, made by afferent.keys; .* has 3"),
        (bare, "keys must be a list, not bytes"),
    ):
        with pytest.raises(FormatError, match=words):
            cache.get_or_make("r", wanted, lambda _: {}, max_nbytes=100)
        with pytest.raises(FormatError, match=words):
            cache.get_embeddings("r", wanted)
        with pytest.raises(FormatError, match=words):
            cache.store.delete(wanted)


def test_a_tree_is_put_under_a_key_or_none() -> None:
    with LocalStore(MiB) as store, pytest.raises(FormatError, match="a key is 32 bytes"):
        store.put("r", {}, key=b"abc")


def test_data_as_tensors_of_torch(cache: ItemCache) -> None:
    torch: Any = pytest.importorskip("torch")
    wanted = [key_of(1)]
    made = cache.get_or_make(
        "r", wanted, lambda _: {"x": np.arange(4.0)}, max_nbytes=1000, tensors="torch"
    )
    (found,) = cache.get_data("r", wanted, tensors="torch").values()
    assert torch.equal(found["x"], torch.arange(4.0, dtype=torch.float64))
    assert found["x"].data_ptr() == made[key_of(1)]["x"].data_ptr()


def test_a_batch_that_does_not_fit_leaves_nothing(store: Store, cache: ItemCache) -> None:
    cache.set_data("r", {key_of(1): {"x": np.zeros(8)}})
    cache.release("r")
    with pytest.raises(StoreFull):
        cache.allocate("r", {key_of(1): 100, key_of(2): MiB, key_of(3): 2 * MiB})
    assert store.stat().held_nbytes == 0


def test_who_waits_for_another_writer_writes_when_that_one_gives_up() -> None:
    with StoreServer(4 * MiB) as server, DaemonStore(server.address, name="b") as watcher:
        key = key_of(1)
        code = f"""
import sys, numpy as np
from afferent.store.client.item_cache import ItemCache
from afferent.store.client.daemon_store import DaemonStore
store = DaemonStore(sys.argv[1], name="setter", writable=True)
cache = ItemCache(store)
print("ready", flush=True)
cache.set_data("r", {{{key!r}: {{"x": np.arange(8)}}}})
print(sum(info.state == "sealed" for info in store.list_objects()), flush=True)
"""
        with DaemonStore(server.address, name="first", writable=True) as first:
            ItemCache(first).allocate("r", {key: 1000})
            child = subprocess.Popen(
                [sys.executable, "-c", code, server.address], stdout=subprocess.PIPE, text=True
            )
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            while watcher.stat().num_joined == 0:
                assert child.poll() is None
        assert child.stdout.readline() == "1\n"
        child.wait(60)
        child.stdout.close()


ENCODER = """
import sys, numpy as np
from afferent.store.client.item_cache import ItemCache
from afferent.store.client.daemon_store import DaemonStore
from afferent.types import ContentKey
with DaemonStore(sys.argv[1], name="encoder", writable=True) as store:
    cache = ItemCache(store, weights=bytes.fromhex(sys.argv[2]))
    keys = [ContentKey(bytes.fromhex(key)) for key in sys.argv[3:]]
    features = cache.get_data("r", keys)
    handles = {slot.key: slot.handle for slot in cache.allocate("r", dict.fromkeys(keys, 1))}
    embeddings = {key: tree["pixel_values"] * 2 for key, tree in features.items()}
    cache.set_embeddings("r", embeddings, computed_from=handles)
    del features
    cache.release("r")
"""


HALVES = {ObjectKind.FEATURES: 0.5, ObjectKind.EMBEDDINGS: 0.5}


def test_an_encoder_process_and_a_language_model_process_share_embeddings() -> None:
    with (
        StoreServer(4 * MiB, shares=HALVES) as server,
        DaemonStore(server.address, name="language model", writable=True) as store,
    ):
        cache = ItemCache(store, weights=WEIGHTS)
        arrays = {key_of(number): np.full((4, 8), number, np.float32) for number in range(8)}
        cache.set_data("r", {key: {"pixel_values": array} for key, array in arrays.items()})
        hex_keys = [key.hex() for key in arrays]
        subprocess.run(
            [sys.executable, "-c", ENCODER, server.address, WEIGHTS.hex(), *hex_keys],
            check=True,
            timeout=60,
        )
        found = cache.get_embeddings("r", arrays)
        assert list(found) == list(arrays)
        for key, array in arrays.items():
            assert np.array_equal(found[key], array * 2)
        with pytest.raises(ValueError, match="read-only"):
            found[key_of(1)][:] = 0
        del found
        cache.release("r")
        wait_until(lambda: store.stat().held_nbytes == 0)


def load_key(digest: bytes) -> ContentKey:
    return keys.item_key(tenant="", fingerprint=b"f", modality=Modality.IMAGE, media=digest)


def contents(store: Store, loaded: list[Loaded]) -> list[bytes]:
    return [bytes(store.block(one.handle)) for one in loaded]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_files_and_bytes_are_loaded_together(
    store: Store, tmp_path: Path, num_workers: int
) -> None:
    """Load twice, to reuse the read buffers; the later files are larger."""
    cache = cache_of(store, kind=ObjectKind.RAW, num_workers=num_workers)
    for turn in range(2):
        data = [bytes([turn, number]) * (1 + number * 50) for number in range(50)]
        sources: list[Any] = [memoryview(one) for one in data]
        for number in range(0, 50, 2):
            path = tmp_path / f"{turn}-{number}"
            path.write_bytes(data[number])
            sources[number] = path if number % 4 else str(path)
        loaded = cache.load("r", [*sources, sources[0], data[3]], load_key)
        assert contents(store, loaded) == [*data, data[0], data[3]]
        assert [one.digest for one in loaded[:50]] == [*map(keys.digest, data)]
        assert [one.key for one in loaded[:50]] == [*map(load_key, map(keys.digest, data))]
        again = cache.load("other", data, load_key)
        assert [one.handle for one in again] == [one.handle for one in loaded[:50]]
        assert store.stat().kinds[ObjectKind.RAW].num_objects == 50
        for request in ("r", "other"):
            cache.release(request)
        assert store.stat().held_nbytes == 0
        store.evict(ObjectKind.RAW)


def test_large_files_are_loaded(store: Store, tmp_path: Path) -> None:
    """A file larger than the read buffers is loaded; one larger than its region is refused."""
    cache = cache_of(store)
    path = tmp_path / "large"
    path.write_bytes(bytes(range(256)) * 5000)
    (loaded,) = cache.load("r", [path], load_key)
    assert contents(store, [loaded]) == [path.read_bytes()]
    path.write_bytes(bytes(5 * MiB))
    with pytest.raises(ArenaTooSmall):
        cache.load("r", [path], load_key)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_can_not_be_loaded_leaves_nothing(
    store: Store, tmp_path: Path, num_workers: int
) -> None:
    cache = cache_of(store, num_workers=num_workers)
    (tmp_path / "empty").touch()
    for bad, error, words in (
        (tmp_path / "missing", FileNotFoundError, "missing"),
        (tmp_path / "empty", FormatError, "source 3 has no bytes"),
        (b"", FormatError, "source 3 has no bytes"),
        (tmp_path, IsADirectoryError, "directory"),
    ):
        with pytest.raises(error, match=words):
            cache.load("r", [b"1", b"2", b"3", bad, b"4"], load_key)
    with pytest.raises(FormatError, match="key has 3"):
        cache.load("r", [b"1"], lambda _: ContentKey(b"abc"))
    assert store.stat().num_objects == 0
    assert len(cache.load("r", [b"1"], load_key)) == 1


@pytest.mark.parametrize("store", ["local", "async"], indirect=True)
def test_what_another_loads_is_waited_for(store: Store) -> None:
    cache = cache_of(store)
    (key, other) = (load_key(keys.digest(one)) for one in (b"one", b"other"))
    (slot,) = cache.allocate("first", {key: 3})
    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(cache.load, "second", [b"one", b"other"], load_key)
        wait_until(lambda: store.stat().num_joined == 1 and len(sealed(store)) == 1)
        assert not loading.done()
        slot.block[:] = b"one"
        cache.publish("first", {slot.handle: 3})
        loaded = loading.result(60)
    assert [one.key for one in loaded] == [key, other]
    assert contents(store, loaded) == [b"one", b"other"]


@pytest.mark.parametrize("store", ["local", "async"], indirect=True)
def test_what_another_gives_up_is_loaded(store: Store) -> None:
    cache = cache_of(store)
    cache.allocate("first", {load_key(keys.digest(b"one")): 3})
    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(cache.load, "second", [b"one"], load_key)
        wait_until(lambda: store.stat().num_joined == 1)
        cache.release("first")
        assert contents(store, loading.result(60)) == [b"one"]


def sealed(store: Store) -> list[ObjectInfo]:
    return [info for info in store.list_objects() if info.state == "sealed"]


def test_many_calls_at_a_time_read_into_memory_of_their_own(store: Store, tmp_path: Path) -> None:
    cache = cache_of(store, num_workers=1)

    def load(number: int) -> list[bytes]:
        data = [bytes([number, n]) * 500 for n in range(20)]
        paths = [tmp_path / f"{number}-{n}" for n in range(20)]
        for path, one in zip(paths, data, strict=True):
            path.write_bytes(one)
        loaded = cache.load(f"r{number}", paths, load_key)
        assert contents(store, loaded) == data
        return data

    with ThreadPoolExecutor(4) as threads:
        assert len({one for data in threads.map(load, range(16)) for one in data}) == 320


def test_an_awaited_maker_that_is_cancelled_leaves_the_item_to_others(
    daemon: SharedDaemon,
) -> None:
    async def main(address: str) -> None:
        store = await AsyncDaemonStore.connect(address, name="cache", writable=True)
        cache, begun = AsyncItemCache(store), asyncio.Event()

        async def never(_: ContentKey) -> Any:
            begun.set()
            await asyncio.get_running_loop().create_future()

        async def soon(_: ContentKey) -> Any:
            await asyncio.sleep(0)
            return {"x": np.arange(4)}

        wanted = [key_of(1)]
        first = asyncio.create_task(cache.get_or_make("a", wanted, never, max_nbytes=1000))
        await begun.wait()
        second = asyncio.create_task(cache.get_or_make("b", wanted, soon, max_nbytes=1000))
        while (await store.stat()).num_joined == 0:
            await asyncio.sleep(0.001)
        first.cancel()
        found = await second
        assert found[key_of(1)]["x"].tolist() == [0, 1, 2, 3]
        with pytest.raises(asyncio.CancelledError):
            await first
        del found, second  # a task keeps its result, and with it the views
        await cache.release("b")
        await store.close()

    asyncio.run(main(daemon.address))


def test_a_local_cache() -> None:
    """A cache in one process, without a daemon, in front of an expensive function."""
    with LocalStore(4 * MiB) as store:
        cache, calls = ItemCache(store), 0

        def features_of(number: int) -> float:
            nonlocal calls
            key = key_of(number)
            if key not in cache.get_data("r", [key]):
                calls += 1
                cache.set_data("r", {key: {"x": np.full(8, number)}})
            found: Any = cache.get_data("r", [key])[key]
            total = float(found["x"].sum())
            del found
            cache.release("r")
            return total

        assert [features_of(number) for number in (1, 2, 1, 2)] == [8, 16, 8, 16]
        assert calls == 2
        assert isinstance(store.list_objects()[0], ObjectInfo)


# Arrays that outlive their request


def fill_features(cache: ItemCache, value: float) -> None:
    """Write objects, pinned by one request, into all free space for features."""
    with contextlib.suppress(StoreFull):
        for number in range(2, 256):
            cache.set_data("fill", {key_of(number): {"values": np.full(30_000, value)}})


@pytest.mark.parametrize("way", ["release", "store release", "forget", "handle"])
def test_array_kept_after_release_shows_its_item_until_it_is_gone(
    store: Store, cache: ItemCache, way: str
) -> None:
    key = key_of(1)
    store.delete([key_of(number) for number in range(256)])
    cache.set_data("maker", {key: {"values": np.full(100_000, 7.0)}})
    cache.release("maker")
    tree = cache.get_data("reader", [key])[key]
    kept, other = tree["values"][5:10], cache.get_data("reader", [key])[key]["values"]
    del tree
    if way == "release":
        cache.release("reader")
    elif way == "store release":
        store.release("reader")
    elif way == "forget":
        store.forget("reader")
    else:
        (outcome,) = store.acquire("reader", [Find(key)])
        assert outcome.handle is not None
        store.release("reader", [outcome.handle])
        store.release("reader")
    store.delete([key])
    fill_features(cache, 36.0)
    assert kept.mean() == other.mean() == 7.0
    del other
    assert kept.mean() == 7.0
    held = store.stat().kinds[ObjectKind.FEATURES].used_nbytes
    del kept
    wait_until(lambda: store.stat().kinds[ObjectKind.FEATURES].used_nbytes <= held - 800_000)
    cache.release("fill")


def test_arrays_that_are_gone_before_the_release_cost_no_message(
    daemon: SharedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DaemonStore(daemon.address, name="me", writable=True) as store, daemon.lent(store):
        cache = ItemCache(store)
        told: list[Any] = []
        tell = store._tell
        monkeypatch.setattr(store, "_tell", lambda request: (told.append(request), tell(request)))
        cache.set_data("request", {key_of(1): {"values": np.ones(10)}})
        tree = cache.get_data("request", [key_of(1)])
        del tree
        cache.release("request")
        assert told == []


def test_more_arrays_than_one_message_may_name_keep_their_pins(daemon: SharedDaemon) -> None:
    with DaemonStore(daemon.address, name="me", writable=True) as store, daemon.lent(store):
        cache, key = ItemCache(store), key_of(1)
        store.delete([key_of(number) for number in range(256)])
        cache.set_data("request", {key: {"values": np.full(1000, 7.0)}})
        trees = [cache.get_data("request", [key])[key] for _ in range(MAX_ITEMS + 1)]
        cache.release("request")
        store.delete([key])
        fill_features(cache, 36.0)
        assert all(tree["values"].mean() == 7.0 for tree in (trees[0], trees[-1]))
        held = store.stat().kinds[ObjectKind.FEATURES].used_nbytes
        trees.clear()
        wait_until(lambda: store.stat().kinds[ObjectKind.FEATURES].used_nbytes < held)
        cache.release("fill")


# A request that waits for another one's item


def test_item_that_another_request_has_published_is_found_at_once(
    store: Store, cache: ItemCache
) -> None:
    key, tree = key_of(1), {"values": np.ones(4)}
    (slot,) = cache.allocate("maker", {key: 4096})
    (joined,) = cache.allocate("other", {key: 4096})
    assert (joined.block, joined.is_ready) == (None, False)
    assert slot.handle is not None
    assert slot.block is not None
    used = codec.write_into(tree, slot.block)
    cache.publish("maker", {slot.handle: used})
    assert list(cache.get_data("other", [key])) == [key]
    for request in ("maker", "other"):
        cache.release(request)


def test_look_for_an_item_does_not_take_its_writing_over(store: Store, cache: ItemCache) -> None:
    """The request that is next to write it learns this when it waits, not when it looks."""
    key = key_of(1)
    store.delete([key])
    for request in ("maker", "other"):
        cache.allocate(request, {key: 4096})
    cache.release("maker")
    assert cache.get_data("other", [key]) == {}
    cache.set_data("other", {key: {"values": np.ones(4)}})
    assert list(cache.get_data("third", [key])) == [key]
    for request in ("other", "third"):
        cache.release(request)
