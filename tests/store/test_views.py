"""Views carry their pin, and drop it when the last of their arrays is collected."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from afferent.errors import (
    DeadlineExceeded,
    FormatError,
    NotPermitted,
    StaleHandle,
    StoreFull,
    StoreRestarted,
    StoreUnavailable,
)
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.client.local_store import LocalStore
from afferent.store.client.store import Store
from afferent.store.client.views import DroppedPins
from afferent.store.daemon.server import StoreServer
from afferent.store.protocol.items import Claim, Find, SealItem
from afferent.store.protocol.requests import Get
from afferent.store.protocol.results import Absent
from afferent.types import CreateItem, Handle, KiB, MiB, ObjectKind, ReserveItem, TensorSpec
from tests.server import wait_until
from tests.store.stores import CAPACITY, SHARES, STORES, SharedDaemon

FEATURES = ObjectKind.FEATURES
KEY = b"k" * 32
TREE = {
    "pixels": np.arange(24, dtype=np.uint8).reshape(2, 4, 3),
    "nested": {"audio": [np.linspace(-1, 1, 100, dtype=np.float32)]},
    "name": "cat",
}


@pytest.fixture(params=["local", "daemon"])
def store(request: pytest.FixtureRequest, daemon: SharedDaemon) -> Iterator[Store]:
    with STORES[request.param](daemon) as made:
        yield made


def stored(store: Store, tree: Any = TREE) -> Handle:
    """Store a tree without a pin."""
    handle = store.put("writer", tree, key=KEY)
    store.release("writer")
    return handle


def is_pinned(store: Store) -> bool:
    return store.stat().held_nbytes > 0


def test_put_and_view(store: Store) -> None:
    handle = store.put("writer", TREE, key=KEY)
    assert is_pinned(store)
    with store.view(handle) as tree:
        assert tree["pixels"].tolist() == TREE["pixels"].tolist()  # type: ignore[attr-defined]
        assert tree["nested"]["audio"][0][-1] == 1.0
        assert tree["name"] == "cat"
    store.release("writer")
    assert not is_pinned(store)
    (outcome,) = store.acquire("r", [Find(KEY)])
    assert outcome.handle == handle


def test_the_pin_lives_as_long_as_the_last_array(store: Store) -> None:
    handle = stored(store)
    view = store.view(handle)
    row = view.tree["pixels"][1, 2:]
    deep = view.tree["nested"]["audio"][0].reshape(10, 10)[::2]
    del view
    assert store.evict(FEATURES).num_objects == 0
    del row
    assert store.evict(FEATURES).num_objects == 0
    assert deep[0, 0] == -1
    del deep
    wait_until(lambda: not is_pinned(store))
    assert store.evict(FEATURES).num_objects == 1


def test_a_view_is_released_at_once(store: Store) -> None:
    view = store.view(stored(store))
    tree = view.tree
    assert view.release()
    assert not is_pinned(store)
    assert tree == {}
    with pytest.raises(NotPermitted):
        _ = view.tree
    assert view.release()


def test_arrays_taken_out_of_a_released_view_keep_its_pin(store: Store) -> None:
    handle = stored(store)
    with store.view(handle) as tree:
        kept = tree["pixels"]
    assert tree == {}
    assert is_pinned(store)
    assert kept[0, 0].tolist() == [0, 1, 2]
    del kept
    wait_until(lambda: not is_pinned(store))


def test_each_view_has_a_pin_of_its_own(store: Store) -> None:
    handle = stored(store)
    views = [store.view(handle) for _ in range(5)]
    for _ in range(5):
        assert is_pinned(store)
        assert views.pop().release()
    assert not is_pinned(store)


def test_tensors_of_torch_hold_the_pin_and_lie_in_the_arena(store: Store) -> None:
    handle = stored(store)
    view = store.view(handle, tensors="torch")
    arena = np.frombuffer(store.block(handle), np.uint8)
    first = arena.ctypes.data
    pixels, audio = view.tree["pixels"], view.tree["nested"]["audio"][0]
    assert isinstance(pixels, torch.Tensor)
    for tensor in (pixels, audio):
        assert first < tensor.data_ptr() < first + handle.nbytes
        assert tensor.data_ptr() % 64 == 0
    assert torch.equal(pixels, torch.arange(24, dtype=torch.uint8).reshape(2, 4, 3))
    del view, audio, tensor, arena
    assert is_pinned(store)
    del pixels
    wait_until(lambda: not is_pinned(store))


def test_views_are_read_only(store: Store) -> None:
    with store.view(stored(store)) as tree, pytest.raises(ValueError, match="read-only"):
        tree["pixels"][0] = 1


def test_a_view_without_tensors_needs_no_pin(store: Store) -> None:
    view = store.view(stored(store, ["only", 1, b"scalar"]))
    wait_until(lambda: not is_pinned(store))
    assert view.tree == ["only", 1, b"scalar"]
    assert view.release()


def test_what_can_not_be_stored_leaves_nothing(store: Store) -> None:
    with pytest.raises(FormatError):
        store.put("writer", {"a": object()})  # type: ignore[dict-item]
    with pytest.raises(FormatError, match="only its shape"):
        store.put("writer", {"a": TensorSpec("uint8", (5,))}, key=KEY)
    assert not is_pinned(store)
    (outcome,) = store.acquire("r", [Find(KEY)])
    assert isinstance(outcome, Absent)


def test_what_can_not_be_viewed_is_not_pinned(store: Store) -> None:
    (handle,) = store.create("writer", [CreateItem(FEATURES, 100, KEY)])
    np.frombuffer(store.block(handle), np.uint8)[:] = 255
    (handle,) = store.seal("writer", [SealItem(handle, 100)])
    store.release("writer")
    with pytest.raises(FormatError):
        store.view(handle)
    assert not is_pinned(store)


def test_handles_of_another_generation(store: Store) -> None:
    handle = stored(store)
    other = Handle(handle.segment, handle.offset, handle.nbytes, handle.generation + 1)
    with pytest.raises(StaleHandle):
        store.view(other)
    store.evict(FEATURES)
    with pytest.raises(StaleHandle):
        store.view(handle)
    reused = stored(store)
    assert reused.offset == handle.offset
    with pytest.raises(StaleHandle):
        store.view(handle)
    assert not is_pinned(store)


def test_collected_in_a_cycle(store: Store) -> None:
    holder: dict[str, Any] = {"view": store.view(stored(store))}
    holder["self"] = holder
    del holder
    gc.collect()
    wait_until(lambda: not is_pinned(store))


def test_a_thread_that_waits_for_room_gets_that_of_a_view_that_goes(store: Store) -> None:
    """The dropped view alone frees the space; no other call is made meanwhile."""
    share = int(CAPACITY * SHARES[FEATURES])
    view = store.view(stored(store, np.zeros(share - 8 * KiB, np.uint8)))
    with pytest.raises(StoreFull):
        store.reserve("other", [ReserveItem(FEATURES, MiB)], queue=False)
    wanted = [ReserveItem(FEATURES, MiB)]
    with contextlib.ExitStack() as stack:
        other = store
        if isinstance(store, DaemonStore):  # one connection does one call at a time
            other = stack.enter_context(DaemonStore(store.address, name="other"))
        thread = threading.Thread(target=lambda: other.reserve("other", wanted, timeout_s=30))
        thread.start()
        wait_until(lambda: store.stat().num_reservations_queued == 1)
        del view
        thread.join(30)
        assert not thread.is_alive()
        assert store.stat().reserved_nbytes >= MiB


def test_collected_while_its_own_thread_holds_the_lock() -> None:
    with (
        StoreServer(CAPACITY, shares=SHARES) as server,
        DaemonStore(server.address, name="one", writable=True) as store,
    ):
        view = store.view(stored(store))
        with store._lock:
            del view
        wait_until(lambda: not is_pinned(store))


def test_views_over_a_restart_of_the_store() -> None:
    """A view stays readable after a restart, but its handle is not valid in the next epoch."""
    with (
        StoreServer(CAPACITY, shares=SHARES) as server,
        DaemonStore(server.address, name="one", writable=True) as store,
    ):
        handle = stored(store)
        view = store.view(handle)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(StoreUnavailable):
            store.stat()
        assert view.tree["pixels"][1, 3].tolist() == [21, 22, 23]
        view.release()
        wait_until(lambda: store.is_open)
        with pytest.raises(StoreRestarted):
            store.view(handle)
        with store.view(stored(store)) as tree:
            assert tree["name"] == "cat"


def test_array_that_goes_while_its_request_is_released_leaves_no_pin(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread drops the arrays while another releases the request."""
    keys = [KEY, b"l" * 32]
    handles = [store.put("writer", TREE, key=key) for key in keys]
    store.release("writer")
    store.acquire("r", [Find(key) for key in keys])
    trees = [store.view_for("r", handle) for handle in handles]
    take, tell = store._request_views.take, store._tell

    def take_and_lose(*arguments: Any) -> Any:
        found = take(*arguments)
        trees.clear()
        return found

    def tell_late(request: Any) -> None:
        if isinstance(request, Get):
            time.sleep(0.2)
        tell(request)

    monkeypatch.setattr(store._request_views, "take", take_and_lose)
    monkeypatch.setattr(store, "_tell", tell_late)
    store.forget("r")
    wait_until(lambda: not is_pinned(store), timeout_s=20.0)
    assert store.evict(FEATURES).num_objects == 2


def test_a_view_outlives_its_store() -> None:
    store = LocalStore(MiB)
    view = store.view(store.put("writer", TREE))
    store.close()
    assert view.tree["pixels"][1, 3].tolist() == [21, 22, 23]
    view.release()


READER = """
import ctypes, sys
import numpy as np
from afferent.store.client.daemon_store import DaemonStore
from afferent.types import Handle

store = DaemonStore(sys.argv[1], name="reader")
view = store.view(Handle(*map(int, sys.argv[2:])))
print(view.tree["name"], flush=True)
ctypes.memset(view.tree["pixels"].ctypes.data, 255, 1)
print("has written", flush=True)
"""


def test_a_readers_map_can_not_be_written() -> None:
    """A write that bypasses numpy's check kills the writer; the object is intact, and unpinned."""
    with (
        StoreServer(CAPACITY, shares=SHARES) as server,
        DaemonStore(server.address, name="one", writable=True) as store,
    ):
        handle = stored(store)
        numbers = (handle.segment, handle.offset, handle.nbytes, handle.generation)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(READER), server.address, *map(str, numbers)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout == "cat\n", done.stderr
        assert done.returncode == -11
        wait_until(lambda: not is_pinned(store))
        with store.view(handle) as tree:
            assert tree["pixels"][0, 0].tolist() == [0, 1, 2]


def test_notes_are_taken_by_several_at_a_time() -> None:
    pins = DroppedPins()
    taken: list[Handle] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:

            def take() -> None:
                for _ in range(3000):
                    for handles in pins.take().values():
                        taken.extend(handles)

            takers = [threads.submit(take) for _ in range(3)]
            for number in range(20_000):
                pins.note(Handle(1, number, 1, 1))
            for taker in takers:
                taker.result()
    finally:
        sys.setswitchinterval(interval)
    left = [handle for handles in pins.take().values() for handle in handles]
    assert sorted(handle.offset for handle in [*taken, *left]) == list(range(20_000))


def test_call_beside_a_long_one_ends_by_its_deadline(daemon: SharedDaemon) -> None:
    """Messages without an answer are sent when the other thread's call has ended."""
    item = CreateItem(FEATURES, 4096)
    with (
        DaemonStore(daemon.address, name="me", writable=True) as store,
        daemon.lent(store),
        DaemonStore(daemon.address, name="other", writable=True) as other,
        ThreadPoolExecutor(1) as threads,
    ):
        key = b"w" * 32
        (handle,) = other.create("maker", [CreateItem(FEATURES, 4096, key)])
        store.acquire("long", [Claim(key, FEATURES, 4096)])
        (own,) = store.create("short", [item])
        waiting = threads.submit(store.wait, "long", [key], timeout_s=60.0)
        wait_until(store._lock.locked)
        with pytest.raises(DeadlineExceeded):
            store.reserve("short", [ReserveItem(FEATURES, 4096)], timeout_s=0.05)
        store.forget("short")
        assert not waiting.done(), "neither has waited for the other thread"
        other.seal("maker", [SealItem(handle, 4096)])
        waiting.result()
        assert own not in {each.handle for each in store.list_objects()}
        store.release("long")
        other.release("maker")
