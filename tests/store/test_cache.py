"""The operations of a cache server: batched, and shared by processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from afferent import keys
from afferent.errors import FormatError, StaleHandle, StoreFull
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.client.item_cache import ItemCache
from afferent.store.client.local_store import LocalStore
from afferent.store.client.store import Store
from afferent.store.daemon.server import StoreServer
from afferent.store.protocol.results import ObjectInfo
from afferent.types import ContentKey, MiB, ObjectKind
from tests.server import wait_until
from tests.store.stores import STORES, SharedDaemon

WEIGHTS = keys.digest(b"weights")


def key_of(number: int) -> ContentKey:
    return keys.features_key(
        tenant="", fingerprint=b"f", options=b"", media=keys.digest(bytes([number]))
    )


@pytest.fixture(params=["local", "daemon"])
def store(request: pytest.FixtureRequest, daemon: SharedDaemon) -> Iterator[Store]:
    with STORES[request.param](daemon) as made:
        yield made


@pytest.fixture
def cache(store: Store) -> ItemCache:
    return ItemCache(store, weights=WEIGHTS)


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
    real = store._exchange

    def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(type(request).__name__)
        return real(request, *args, **kwargs)

    monkeypatch.setattr(store, "_exchange", counted)
    arrays = {key_of(number): np.full((4, 8), number, np.float32) for number in range(50)}
    cache.set_data("r", {key: {"pixel_values": array} for key, array in arrays.items()})
    assert calls == ["Acquire", "Seal"]
    cache.set_embeddings("r", arrays)
    calls.clear()
    assert len(cache.get_data("r", arrays)) == 50
    assert len(cache.get_embeddings("r", arrays)) == 50
    cache.release("r")
    assert calls == ["Acquire", "Acquire", "Release"]


def test_embeddings_belong_to_weights(store: Store, cache: ItemCache) -> None:
    array = np.arange(32, dtype=np.float32).reshape(4, 8)
    cache.set_embeddings("r", {key_of(1): array})
    found = cache.get_embeddings("r", [key_of(1), key_of(2)])
    assert list(found) == [key_of(1)]
    assert np.array_equal(found[key_of(1)], array)
    other = ItemCache(store, weights=keys.digest(b"other weights"))
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
    assert store.stat().used_nbytes < 3 * 1000  # trimmed
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
    bare: Any = key_of(1)  # instead of a list of it
    for wanted, words in (([b"abc"], "one of these has 3"), (bare, "is of type int")):
        with pytest.raises(
            FormatError, match=f"a key is 32 bytes, made by afferent.keys; .*{words}"
        ):
            cache.get_or_make("r", wanted, lambda _: {}, max_nbytes=100)
        with pytest.raises(FormatError, match=words):
            cache.get_embeddings("r", wanted)
        with pytest.raises(FormatError, match=words):
            cache.store.delete(wanted)
    with pytest.raises(FormatError, match="a key is 32 bytes"):
        cache.store.put("r", {}, key=b"abc")


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


def test_an_encoder_process_and_a_language_model_process_share_embeddings() -> None:
    with (
        StoreServer(4 * MiB) as server,
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


def test_a_local_cache() -> None:
    """In one process, without a daemon: a cache in front of an expensive function."""
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
