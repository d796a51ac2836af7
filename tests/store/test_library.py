"""The store as a library: its shares, its errors, and its use in worker processes."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from afferent.errors import (
    ArenaTooSmall,
    ConfigError,
    FormatError,
    NotPermitted,
    StoreFull,
    StoreUnavailable,
)
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.client.item_cache import ItemCache
from afferent.store.client.local_store import LocalStore
from afferent.store.client.store import Store
from afferent.store.daemon.server import StoreServer
from afferent.types import ContentKey, CreateItem, MiB, ObjectKind, ReserveItem

pytestmark = pytest.mark.timeout(60)

CAPACITY = 8 * MiB
KEY = ContentKey(b"k" * 32)


@pytest.fixture(scope="module")
def server() -> Iterator[StoreServer]:
    with StoreServer(CAPACITY) as server:
        yield server


@pytest.fixture(params=["local", "daemon"])
def store(request: pytest.FixtureRequest, server: StoreServer) -> Iterator[Store]:
    opened: Store
    if request.param == "local":
        opened = LocalStore(CAPACITY)
    else:
        opened = DaemonStore(server.address, name="trainer", writable=True)
    with opened:
        yield opened
        opened.release("r")


# Shares


def test_features_have_all_of_the_arena(store: Store) -> None:
    assert store.stat().kinds[ObjectKind.FEATURES].capacity_nbytes == CAPACITY
    (handle,) = store.create("r", [CreateItem(ObjectKind.FEATURES, CAPACITY)])
    assert len(store.block(handle)) == CAPACITY


def test_a_kind_without_a_region_share_is_refused_with_what_to_do(store: Store) -> None:
    with pytest.raises(ArenaTooSmall, match=r"of raw .*, 0 bytes: give raw a region share"):
        store.create("r", [CreateItem(ObjectKind.RAW, 1)])


def test_shares_that_are_asked_for_are_given() -> None:
    with LocalStore(CAPACITY, shares={ObjectKind.RAW: 0.5, ObjectKind.FEATURES: 0.5}) as store:
        kinds = store.stat().kinds
    assert kinds[ObjectKind.RAW].capacity_nbytes == CAPACITY // 2
    assert kinds[ObjectKind.FEATURES].capacity_nbytes == CAPACITY // 2


# StoreFull


def shortage_of(error: StoreFull) -> Any:
    assert error.shortage is not None
    return error.shortage


def test_store_full_names_numbers_and_holders(store: Store) -> None:
    store.create("r", [CreateItem(ObjectKind.FEATURES, 5 * MiB)])
    store.reserve("other", [ReserveItem(ObjectKind.FEATURES, MiB)])
    with pytest.raises(StoreFull) as caught:
        store.put("second", {"pixels": np.zeros(3 * MiB, np.uint8)})
    store.release("other")
    found = shortage_of(caught.value)
    assert found.kind == "features"
    assert 3 * MiB < found.requested_nbytes < 3 * MiB + 4096
    assert (found.share_nbytes, found.held_nbytes) == (CAPACITY, 5 * MiB)
    assert (found.reserved_nbytes, found.num_queued) == (MiB, 0)
    (holder,) = found.holders
    assert (holder.client, holder.pid) == (store.client_number, os.getpid())
    assert holder.name == ("local" if isinstance(store, LocalStore) else "trainer")
    assert (holder.held_nbytes, holder.reserved_nbytes) == (5 * MiB, MiB)
    assert 0 <= holder.held_s < 60
    text = str(caught.value)
    for part in (holder.name, f"pid {os.getpid()}", "5,242,880", "8,388,608", "larger arena"):
        assert part in text
    assert holder.name not in caught.value.message, "a client of a server may see this"


def test_store_full_names_holders_to_the_cache_of_items(store: Store) -> None:
    store.create("r", [CreateItem(ObjectKind.FEATURES, 6 * MiB)])
    big = {"pixels": np.zeros(3 * MiB, np.uint8)}
    cache = ItemCache(store)
    calls: list[Callable[[], object]] = [
        lambda: cache.set_data("second", {KEY: big}),
        lambda: cache.get_or_make("second", [KEY], lambda _: big, max_nbytes=3 * MiB),
    ]
    for call in calls:
        with pytest.raises(StoreFull) as caught:
            call()
        (holder,) = shortage_of(caught.value).holders
        assert holder.held_nbytes == 6 * MiB
        store.release("second")


def test_store_full_without_an_extent_names_what_is_in_use() -> None:
    with LocalStore(4 * MiB) as store:
        handles = store.create("r", [CreateItem(ObjectKind.FEATURES, MiB)] * 4)
        store.abort("r", [handles[0], handles[2]])
        with pytest.raises(StoreFull, match="long enough") as caught:
            store.create("r", [CreateItem(ObjectKind.FEATURES, 2 * MiB)])
    found = shortage_of(caught.value)
    assert (found.requested_nbytes, found.held_nbytes) == (2 * MiB, 2 * MiB)


def test_store_full_names_holders_largest_first(server: StoreServer) -> None:
    with (
        DaemonStore(server.address, name="small", writable=True) as small,
        DaemonStore(server.address, name="large", writable=True) as large,
        DaemonStore(server.address, name="reader") as reader,
    ):
        small.create("s", [CreateItem(ObjectKind.FEATURES, MiB)])
        handle = large.put("l", {"pixels": np.zeros(5 * MiB, np.uint8)})
        reader.get("r", [handle])
        large.release("l")
        with pytest.raises(StoreFull) as caught:
            large.create("l", [CreateItem(ObjectKind.FEATURES, 4 * MiB)])
    assert [holder.name for holder in shortage_of(caught.value).holders] == ["reader", "small"]


# Event loops


def test_an_async_store_is_closed_by_its_block(server: StoreServer) -> None:
    async def main() -> None:
        async with await AsyncDaemonStore.connect(server.address, name="loop") as store:
            assert store.is_open
            await store.stat()
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.stat()

    asyncio.run(main())


# Workers


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_store_that_is_pickled_says_how_a_worker_opens_one(
    take: Callable[[Any], object], server: StoreServer
) -> None:
    with DaemonStore(server.address, name="trainer", writable=True) as store:
        line = f"store = DaemonStore({server.address!r}, name='trainer', writable=True)"
        for each in (store,) if take is copy.copy else (store, ItemCache(store), {"in": [store]}):
            with pytest.raises(NotPermitted, match="open a store in that process") as caught:
                take(each)
            assert line in str(caught.value)
        exec(line, names := {"DaemonStore": DaemonStore})  # noqa: S102
        opened: Any = names["store"]
        opened.close()
    with pytest.raises(NotPermitted, match=r'DaemonStore.* name="worker"'):
        take(server)
    with LocalStore(MiB) as local, pytest.raises(NotPermitted, match="StoreServer"):
        take(local)


def test_an_async_store_that_is_pickled_says_how_a_worker_opens_one(server: StoreServer) -> None:
    async def main() -> None:
        async with await AsyncDaemonStore.connect(server.address, name="loop") as store:
            with pytest.raises(
                NotPermitted, match=r"await AsyncDaemonStore.connect\('.*name='loop'"
            ):
                pickle.dumps(store)

    asyncio.run(main())


def test_a_store_as_an_argument_of_a_process_is_refused(server: StoreServer) -> None:
    context = multiprocessing.get_context("spawn")
    with (
        DaemonStore(server.address, name="trainer") as store,
        pytest.raises(NotPermitted, match="open a store in that process"),
    ):
        context.Process(target=print, args=(store,)).start()


def test_a_forked_child_is_told_how_to_open_a_store(server: StoreServer) -> None:
    result, told = os.pipe()
    with DaemonStore(server.address, name="trainer") as store:
        if (pid := os.fork()) == 0:
            try:
                store.stat()
            except NotPermitted as error:
                os.write(told, error.message.encode())
            finally:
                os._exit(0)
        os.close(told)
        with os.fdopen(result) as said:
            assert "Open it in that process, as by: store = Daemon" in said.read()
        os.waitpid(pid, 0)


# Logs

_PROGRAM = """
import asyncio
from afferent import AsyncDaemonStore, MiB, StoreServer

async def main():
    server = StoreServer(4 * MiB)
    store = await AsyncDaemonStore.connect(server.address, name="loop")
    server.close()
    while store.is_open:
        await asyncio.sleep(0.01)
    await store.close()

{configure}
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("configure", "begins"),
    [
        ("", "WARNING afferent.store.client.async_store: the connection of 'loop' to the store"),
        ("import logging; logging.basicConfig(format='<%(levelname)s>')", "<WARNING>\n"),
        ("import logging; logging.basicConfig(level='ERROR')", ""),
    ],
)
def test_a_lost_connection_is_logged_with_level_and_logger(configure: str, begins: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(configure=configure)],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    assert done.stderr.startswith(begins)
    assert done.stderr.count("\n") == (1 if begins else 0), "once"


def test_shares_that_are_no_part_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 1 in all"):
        StoreServer(CAPACITY, shares={ObjectKind.RAW: 0.5, ObjectKind.FEATURES: 0.6})


# Many tensors

MANY = {f"tensor-{number}": np.full(4, number, np.int32) for number in range(100_000)}
HEADER_NBYTES = 16 * MiB


@pytest.fixture(params=["local", "daemon"])
def wide(request: pytest.FixtureRequest) -> Iterator[Store]:
    if request.param == "local":
        with LocalStore(64 * MiB) as store:
            yield store
    else:
        with (
            StoreServer(64 * MiB) as server,
            DaemonStore(server.address, name="wide", writable=True) as store,
        ):
            yield store


def check_many(tree: Any) -> None:
    assert list(tree) == list(MANY)
    assert all((tree[name] == MANY[name]).all() for name in ("tensor-0", "tensor-99999"))


def test_put_and_view_take_many_tensors(wide: Store) -> None:
    with pytest.raises(FormatError, match="max_header_nbytes=1048576"):
        wide.put("r", MANY)
    assert wide.stat().num_objects == 0
    handle = wide.put("r", MANY, max_header_nbytes=HEADER_NBYTES)
    with pytest.raises(FormatError, match="max_header_nbytes=1048576"):
        wide.view(handle)
    with wide.view(handle, max_header_nbytes=HEADER_NBYTES) as tree:
        check_many(tree)


def test_a_cache_takes_many_tensors(wide: Store) -> None:
    cache, other = ItemCache(wide), ContentKey(b"o" * 32)
    with pytest.raises(FormatError, match="max_header_nbytes=1048576"):
        cache.set_data("r", {KEY: MANY})
    cache.set_data("r", {KEY: MANY}, max_header_nbytes=HEADER_NBYTES)
    with pytest.raises(FormatError, match="max_header_nbytes=1048576"):
        cache.get_data("r", [KEY])
    check_many(cache.get_data("r", [KEY], max_header_nbytes=HEADER_NBYTES)[KEY])
    made = cache.get_or_make(
        *("r", [other], lambda _: MANY), max_nbytes=16 * MiB, max_header_nbytes=HEADER_NBYTES
    )
    check_many(made[other])
