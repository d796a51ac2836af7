"""One suite for every store: in this process, behind a daemon, and on an event loop."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from afferent.errors import (
    AfferentError,
    ArenaTooSmall,
    ClientGone,
    ConfigError,
    DeadlineExceeded,
    FormatError,
    NoPermitLeft,
    NotPermitted,
    StaleHandle,
    StoreError,
    StoreFull,
    StoreRestarted,
    StoreUnavailable,
)
from afferent.store.block import codec
from afferent.store.client.local_store import LocalStore
from afferent.store.protocol.items import Claim, Find, Join, Queue, SealItem, Wanted
from afferent.store.protocol.results import (
    Absent,
    Evicted,
    Hit,
    InFlight,
    Made,
    Outcome,
    Owner,
    Scheduled,
)
from afferent.types import CreateItem, Failure, Handle, KiB, MiB, ObjectKind, ReserveItem
from tests.server import wait_until
from tests.store.outcomes import failure_of, states
from tests.store.stores import CAPACITY, STORES, SharedDaemon

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
RAW, FEATURES = ObjectKind.RAW, ObjectKind.FEATURES


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, daemon: SharedDaemon) -> Iterator[Any]:
    with STORES[request.param](daemon) as made:
        yield made


def put(store: Any, request: str, data: bytes, *, key: bytes | None = None) -> Handle:
    (handle,) = store.create(request, [CreateItem(FEATURES, len(data), key)])
    write(store, handle, data)
    (sealed,) = store.seal(request, [SealItem(handle, len(data))])
    return sealed


def write(store: Any, handle: Handle, data: bytes) -> None:
    np.frombuffer(store.block(handle), np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)


def acquire(store: Any, request: str, wanted: Wanted | None = None) -> Outcome:
    """Acquire one item; by default, the usual key, made by the request itself."""
    (outcome,) = store.acquire(request, [wanted or Claim(KEY, FEATURES, 1000)])
    return outcome


def held_nbytes(store: Any) -> int:
    return store.stat().held_nbytes


# Objects


def test_what_is_put_is_found(store: Any) -> None:
    handle = put(store, "writer", b"hello", key=KEY)
    assert handle.nbytes == 5
    outcome = acquire(store, "reader")
    assert outcome == Hit(handle)
    assert bytes(store.block(handle)) == b"hello"
    for request in ("writer", "reader"):
        store.release(request)
    assert held_nbytes(store) == 0
    assert isinstance(acquire(store, "later"), Hit)


def test_without_a_key_only_the_handle_finds_it(store: Any) -> None:
    handle = put(store, "writer", b"raw")
    store.get("reader", [handle])
    store.release("writer")
    assert bytes(store.block(handle)) == b"raw"
    store.release("reader", [handle])
    assert store.stat().num_objects == 0
    with pytest.raises(StaleHandle):
        store.get("reader", [handle])


def test_pins_for_a_client_by_its_number(store: Any) -> None:
    """The client may name itself; an unknown client is an error that pins nothing."""
    handle = put(store, "writer", b"features")
    with pytest.raises(ClientGone):
        store.get("reader", [handle], also_for=[store.client_number, store.client_number + 1])
    store.get("reader", [handle], also_for=[store.client_number])
    store.release("writer")
    for _ in range(2):
        assert bytes(store.block(handle)) == b"features"
        store.release("reader", [handle])
    assert held_nbytes(store) == 0


def test_forgetting_needs_no_answer(store: Any) -> None:
    handle = put(store, "writer", b"features")
    store.get("reader", [handle])
    store.forget("writer")
    store.forget("nobody")
    assert held_nbytes(store) > 0
    store.forget("reader")
    assert held_nbytes(store) == 0


def test_a_tree_crosses_without_a_copy(store: Any) -> None:
    tree = {"pixel_values": np.arange(1000, dtype=np.float32).reshape(10, 100), "n": 3}
    nbytes = codec.plan(tree).nbytes
    (handle,) = store.create("writer", [CreateItem(FEATURES, nbytes)])
    codec.write_into(tree, store.block(handle))
    store.seal("writer", [SealItem(handle, nbytes)])
    viewed: Any = codec.view(store.block(handle))
    assert np.array_equal(viewed["pixel_values"], tree["pixel_values"])
    start = np.frombuffer(store.block(handle), np.uint8).ctypes.data
    assert start <= viewed["pixel_values"].ctypes.data < start + nbytes


def test_sealing_gives_the_tail_back(store: Any) -> None:
    (handle,) = store.create("r", [CreateItem(FEATURES, 100 * KiB)])
    before = store.stat().used_nbytes
    store.seal("r", [SealItem(handle, 10 * KiB)])
    assert before - store.stat().used_nbytes == 90 * KiB


def test_only_the_writer_seals_and_aborts(store: Any) -> None:
    (handle,) = store.create("writer", [CreateItem(FEATURES, 100)])
    for attempt in (
        lambda: store.seal("thief", [SealItem(handle, 100)]),
        lambda: store.seal("writer", [SealItem(handle, 101)]),
        lambda: store.abort("thief", [handle]),
    ):
        with pytest.raises(NotPermitted):
            attempt()
    store.abort("writer", [handle])
    assert store.stat().num_objects == 0


def test_sealing_is_all_or_none(store: Any) -> None:
    items = [CreateItem(FEATURES, 100), CreateItem(FEATURES, 100)]
    good, bad = store.create("writer", items)
    with pytest.raises(NotPermitted):
        store.seal("writer", [SealItem(good, 100), SealItem(bad, 200)])
    with pytest.raises(StaleHandle):
        store.get("reader", [good])


def test_what_was_computed_from_a_pin_that_was_lost_is_not_published(store: Any) -> None:
    source = put(store, "encoder", b"features", key=KEY)
    (target,) = store.create("encoder", [CreateItem(ObjectKind.EMBEDDINGS, 100, OTHER_KEY)])
    store.release("encoder", [source])
    with pytest.raises(StaleHandle):
        store.seal("encoder", [SealItem(target, 100, [source])])
    store.get("encoder", [source])
    store.seal("encoder", [SealItem(target, 100, [source])])


def test_delete_takes_the_key_and_leaves_the_pins(store: Any) -> None:
    handle = put(store, "r", b"data", key=KEY)
    assert store.delete([KEY, OTHER_KEY]) == [True, False]
    assert isinstance(acquire(store, "s", Join(KEY)), Absent)
    assert bytes(store.block(handle)) == b"data"
    store.release("r")
    assert store.stat().num_objects == 0


def test_evict(store: Any) -> None:
    for number in range(4):
        put(store, "r", bytes(1000), key=bytes([number]) * 32)
    kept = put(store, "pinned", bytes(1000), key=KEY)
    store.release("r")
    assert store.evict(FEATURES, 1500) == Evicted(2, 2048)
    joined = store.acquire("q", [Join(bytes([i]) * 32) for i in range(4)])
    assert states(joined) == ["absent", "absent", "hit", "hit"]
    store.release("q")
    assert store.evict(FEATURES).num_objects == 2
    assert [info.handle for info in store.list_objects()] == [kept]


# Single flight


def test_one_makes_it_and_all_are_told(store: Any) -> None:
    mine = acquire(store, "first")
    assert isinstance(mine, Owner)
    assert isinstance(acquire(store, "second"), InFlight)
    with ThreadPoolExecutor(1) as thread:
        if isinstance(store, LocalStore):  # the others do one call at a time
            waiting = thread.submit(store.wait, "second", [KEY])
        write(store, mine.handle, b"made")
        (sealed,) = store.seal("first", [SealItem(mine.handle, 4)])
        (made,) = waiting.result() if isinstance(store, LocalStore) else store.wait("second", [KEY])
    assert made == Made(sealed)
    store.release("first")
    assert bytes(store.block(sealed)) == b"made"
    assert held_nbytes(store) > 0


def test_who_gives_up_hands_it_on(store: Any) -> None:
    mine = acquire(store, "first")
    assert isinstance(acquire(store, "second"), InFlight)
    store.abort("first", [mine.handle])
    (outcome,) = store.wait("second", [KEY])
    assert isinstance(outcome, Owner)
    write(store, outcome.handle, b"made")
    store.seal("second", [SealItem(outcome.handle, 4)])
    assert isinstance(acquire(store, "third"), Hit)


def test_who_fails_fails_all_who_wait(store: Any) -> None:
    mine = acquire(store, "first")
    acquire(store, "second")
    store.abort("first", [mine.handle], failure=Failure("invalid_media", "truncated"))
    (outcome,) = store.wait("second", [KEY])
    assert failure_of(outcome) == Failure("invalid_media", "truncated")
    assert isinstance(acquire(store, "third"), Owner)


def test_waiting_has_a_deadline(store: Any) -> None:
    acquire(store, "first")
    acquire(store, "second")
    with pytest.raises(DeadlineExceeded):
        store.wait("second", [KEY], timeout_s=0.01)
    with pytest.raises(NotPermitted):
        store.wait("second", [OTHER_KEY])
    assert store.stat().num_objects == 1


def test_a_worker_takes_jobs(store: Any) -> None:
    raw = put(store, "r", b"raw")
    outcome = acquire(store, "r", Queue(KEY, FEATURES, 1000, [raw], b"how"))
    assert isinstance(outcome, Scheduled)
    order = store.take()
    assert (order.inputs, order.payload) == ([raw], b"how")
    write(store, order.target, b"features")
    store.finish(order, used_nbytes=8)
    (made,) = store.wait("r", [KEY])
    assert isinstance(made, Made)
    assert bytes(store.block(made.handle)) == b"features"


# Space


def test_what_does_not_fit(store: Any) -> None:
    share = CAPACITY // 2
    with pytest.raises(ArenaTooSmall):
        store.create("r", [CreateItem(FEATURES, share + 1)])
    with pytest.raises(ArenaTooSmall):  # nor can the two of them ever fit
        store.create("r", [CreateItem(FEATURES, share - 64), CreateItem(FEATURES, 65)])
    store.create("q", [CreateItem(FEATURES, 64)])
    with pytest.raises(StoreFull):
        store.create("r", [CreateItem(FEATURES, share // 2)] * 2)
    assert store.stat().num_objects == 1
    store.release("q")
    store.create("r", [CreateItem(FEATURES, share)])
    with pytest.raises(StoreFull):
        store.create("s", [CreateItem(FEATURES, 1)])
    store.create("s", [CreateItem(RAW, CAPACITY // 4)])  # another kind has a share of its own


def test_room_is_granted_all_or_nothing(store: Any) -> None:
    items = [ReserveItem(FEATURES, MiB), ReserveItem(RAW, MiB)]
    store.reserve("first", items)
    with pytest.raises(StoreFull):
        store.reserve("second", items, queue=False)
    with pytest.raises(ArenaTooSmall):
        store.reserve("third", [*items, *items])
    with pytest.raises(StoreFull):  # reserved bytes are not given to other requests
        store.create("second", [CreateItem(FEATURES, MiB + 1)])
    store.create("first", [CreateItem(FEATURES, MiB)])
    statistics = store.stat()
    assert (statistics.reserved_nbytes, statistics.held_nbytes) == (MiB, MiB)
    store.unreserve("first", [ReserveItem(RAW, MiB)])
    store.reserve("second", items)
    store.release("first")
    store.release("second")
    assert store.stat().reserved_nbytes == 0


def test_a_reservation_that_was_not_granted_in_time_is_not_waited_for(store: Any) -> None:
    items = [ReserveItem(RAW, MiB)]
    store.reserve("first", items)
    with pytest.raises(DeadlineExceeded):
        store.reserve("second", items, timeout_s=0.01)
    statistics = store.stat()
    assert (statistics.num_reservations_queued, statistics.reserved_nbytes) == (0, MiB)
    store.release("first")
    assert store.stat().reserved_nbytes == 0


def test_a_reservation_waits_its_turn(store: Any) -> None:
    items = [ReserveItem(RAW, MiB)]
    store.reserve("first", items)
    if not isinstance(store, LocalStore):
        pytest.skip("this needs two connections: see test_daemon.py")
    granted = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(store.reserve, "second", items)
        waiting.add_done_callback(lambda _: granted.set())
        while store.stat().num_reservations_queued == 0:
            assert not granted.is_set()
        store.release("first")
        waiting.result()
    assert store.stat().reserved_nbytes == MiB


# Bad input


@pytest.mark.parametrize(
    "handle",
    [
        Handle(1, 0, 64, 1),
        Handle(1, 0, 64, 2**62),
        Handle(0, 0, 64, 1),
        Handle(7, 0, 64, 1),
        Handle(1, 2**50, 2**50, 1),
        Handle(1, CAPACITY - 1, 2, 1),
    ],
)
def test_handles_that_nobody_gave_out(store: Any, handle: Handle) -> None:
    with pytest.raises((StaleHandle, StoreRestarted)):
        store.get("r", [handle])
    with pytest.raises((StaleHandle, StoreRestarted)):
        store.seal("r", [SealItem(handle, 1)])
    if handle.offset + handle.nbytes > CAPACITY or handle.segment != 1:
        with pytest.raises((StaleHandle, StoreRestarted)):
            store.block(handle)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda store: store.create("r", [CreateItem(FEATURES, 0)]),
        lambda store: store.create("", [CreateItem(FEATURES, 1)]),
        lambda store: store.create("x" * 65, [CreateItem(FEATURES, 1)]),
        lambda store: store.acquire("r", [Join(b"short")]),
        lambda store: store.delete([KEY] * 5000),
        lambda store: store.get("r", [Handle(1, 0, 1, 2**63)]),
    ],
)
def test_a_call_that_makes_no_sense_costs_nothing_else(store: Any, mistake: Any) -> None:
    handle = put(store, "r", b"data", key=KEY)
    with pytest.raises(FormatError):
        mistake(store)
    assert bytes(store.block(handle)) == b"data"
    assert held_nbytes(store) > 0, "nor is the connection lost, with all that is held"


def test_a_handle_from_before_the_sealing_shows_nothing_of_the_neighbour(store: Any) -> None:
    (long,) = store.create("r", [CreateItem(FEATURES, 1000)])
    (short,) = store.seal("r", [SealItem(long, 64)])
    with pytest.raises(StaleHandle):
        store.get("r", [long])
    store.get("r", [short])


def test_a_create_that_was_not_done_in_time_is_not_done_later(store: Any) -> None:
    """The call waits under its reservation for an extent, until it is over its deadline."""
    first, middle, last = store.create("r", [CreateItem(RAW, 320 * KiB)] * 3)
    store.abort("r", [first, last])
    room = ReserveItem(RAW, 400 * KiB)
    store.reserve("s", [room])
    with pytest.raises(DeadlineExceeded):
        store.create("s", [CreateItem(RAW, room.nbytes)], timeout_s=0.05)
    store.abort("r", [middle])
    statistics = store.stat()
    assert statistics.num_objects == 0
    assert statistics.reserved_nbytes > 0


def test_a_search_waits_for_nobody(store: Any) -> None:
    mine = acquire(store, "first")
    assert isinstance(acquire(store, "second", Find(KEY)), Absent)
    store.seal("first", [SealItem(mine.handle, 1)])
    store.release("first")
    assert held_nbytes(store) == 0, "the second has nothing that it was not told of"
    assert isinstance(acquire(store, "second", Find(KEY)), Hit)


def test_a_key_is_created_once(store: Any) -> None:
    put(store, "r", b"data", key=KEY)
    with pytest.raises(StoreError):
        store.create("r", [CreateItem(FEATURES, 1, KEY)])


def test_releasing_more_than_one_holds(store: Any) -> None:
    handle = put(store, "r", b"data", key=KEY)
    with pytest.raises(NotPermitted):
        store.release("r", [handle, handle])
    with pytest.raises(NotPermitted):
        store.release("other", [handle])
    store.release("r", [handle])
    store.release("nobody")


def test_a_closed_store_says_so(store: Any) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.stat()


# Queries


def test_the_store_describes_itself(store: Any) -> None:
    before = store.stat()
    handle = put(store, "r", bytes(1000), key=KEY)
    acquire(store, "s")
    statistics = store.stat()
    features = statistics.kinds[FEATURES]
    assert (features.used_nbytes, features.held_nbytes, features.num_objects) == (1024, 1024, 1)
    assert features.capacity_nbytes == CAPACITY // 2
    assert features.largest_free_nbytes == CAPACITY // 2 - 1024
    assert statistics.num_hits - before.num_hits == 1
    assert statistics.num_misses == before.num_misses
    (info,) = store.list_objects(FEATURES)
    (client,) = store.list_clients()
    assert (info.handle, info.key, info.state) == (handle, KEY, "sealed")
    assert info.pins == [client.client]
    assert (client.num_held, client.held_nbytes) == (1, 1024)
    assert store.list_objects(RAW) == []


def test_shares_must_fit() -> None:
    with pytest.raises(ConfigError):
        LocalStore(MiB, shares={RAW: 0.6, FEATURES: 0.6})
    with LocalStore(MiB, shares={FEATURES: 1.0}) as store:
        put(store, "r", bytes(MiB))
        with pytest.raises(ArenaTooSmall):
            store.create("r", [CreateItem(RAW, 1)])


def test_a_store_needs_no_torch() -> None:
    code = """
import sys
from afferent.store.client.local_store import LocalStore
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.daemon.server import StoreServer
with StoreServer(1 << 20) as server, DaemonStore(server.address, name="test") as store:
    assert store.stat().num_clients == 1
with LocalStore(1 << 20) as store:
    assert store.stat().num_clients == 1
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("kind", ["local", "async"])
def test_a_forked_process_is_told(kind: str) -> None:
    """`test_daemon.py` tests the same for `DaemonStore`."""
    code = f"""
import os, asyncio, warnings
warnings.simplefilter("ignore")
from afferent.errors import NotPermitted
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.local_store import LocalStore
from afferent.store.daemon.server import StoreServer
from afferent.types import CreateItem
from afferent.types import ObjectKind

def in_a_child(attempt):
    pid = os.fork()
    if pid == 0:
        try:
            attempt()
        except NotPermitted:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0

item = CreateItem(ObjectKind.FEATURES, 100)
if {kind!r} == "local":
    store = LocalStore(1 << 20)
    (handle,) = store.create("r", [item])
    in_a_child(store.stat)
    in_a_child(lambda: store.block(handle))
else:
    async def main(address):
        store = await AsyncDaemonStore.connect(address, name="parent", writable=True)
        (handle,) = await store.create("r", [item])
        in_a_child(lambda: store.block(handle))
        pid = os.fork()
        if pid == 0:
            try:
                store.close().send(None)  # does nothing to the parent
            except StopIteration:
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert (await store.stat()).held_nbytes == 128
        await store.close()
    with StoreServer(1 << 20) as server:
        asyncio.run(main(server.address))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_error_of_a_store_is_typed(store: Any) -> None:
    """Random calls in random order raise only errors of the `AfferentError` tree."""
    rng = np.random.default_rng(7)
    handles: list[Handle] = []
    for _ in range(300):
        handle = handles[rng.integers(len(handles))] if handles else Handle(1, 0, 1, 1)
        request, key = f"r{rng.integers(3)}", bytes([rng.integers(4)]) * 32
        attempts = [
            lambda k=key, r=request: store.create(r, [CreateItem(FEATURES, 100, k)]),
            lambda h=handle, r=request: store.seal(r, [SealItem(h, 50)]),
            lambda h=handle, r=request: store.get(r, [h, h]),
            lambda h=handle, r=request: store.abort(r, [h]),
            lambda h=handle, r=request: store.release(r, [h]),
            lambda r=request: store.release(r),
            lambda k=key: store.delete([k]),
            lambda k=key, r=request: store.acquire(r, [Claim(k, RAW, 64)]),
        ]
        try:
            result = attempts[rng.integers(len(attempts))]()
        except AfferentError:
            continue
        handles += [entry for entry in result or [] if isinstance(entry, Handle)]
    for number in range(3):
        store.release(f"r{number}")
    statistics = store.stat()
    assert (statistics.held_nbytes, statistics.reserved_nbytes) == (0, 0)


def permits(store: Any) -> dict[str, tuple[int, int]]:
    return {name: (s.num_held, s.num_queued) for name, s in store.stat().permits.items()}


def test_permits(store: Any) -> None:
    assert store.acquire_permit("r", "preprocess", limit=1) == 0
    with pytest.raises(NotPermitted):
        store.acquire_permit("r", "preprocess", limit=2)
    with pytest.raises(NoPermitLeft):
        store.acquire_permit("s", "preprocess", limit=1, queue=False)
    with pytest.raises(DeadlineExceeded):
        store.acquire_permit("s", "preprocess", limit=1, timeout_s=0.05)
    assert store.acquire_permit("r", "tenant/anna", limit=1, queue=False) == 0
    assert store.acquire_permit("s", "tenant/bob", limit=4, queue=False) == 3
    wait_until(lambda: permits(store) == {"preprocess": (1, 0), "tenant": (2, 0)})
    store.release_permit("r", "tenant/anna")
    store.release_permit("r", "tenant/anna")
    store.release("s")
    wait_until(lambda: permits(store) == {"preprocess": (1, 0)})
    store.release("r")
    assert store.acquire_permit("s", "preprocess", limit=5, number=3) == 2
    store.release("s")
    assert permits(store) == {}
    with pytest.raises(FormatError):
        store.acquire_permit("r", "", limit=1)
