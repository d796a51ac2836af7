"""The stores over which one conformance suite runs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from afferent.errors import StoreUnavailable
from afferent.store.client.async_item_cache import AsyncItemCache
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.client.item_cache import ItemCache
from afferent.store.client.local_store import LocalStore
from afferent.store.client.store import Store
from afferent.store.daemon.server import StoreServer
from afferent.store.state.region import DEFAULT_SHARES
from afferent.types import MiB, ObjectKind
from tests.server import wait_until

CAPACITY = 4 * MiB
SHARES = {ObjectKind.RAW: 0.25, ObjectKind.FEATURES: 0.5, ObjectKind.EMBEDDINGS: 0.25}


class LoopStore:
    """A synchronous interface to an `AsyncDaemonStore`, whose event loop runs in a thread."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._store = self._run(AsyncDaemonStore.connect(address, name="async", writable=True))

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store, name)
        if not callable(value):
            return value

        async def in_loop(*args: Any, **kwargs: Any) -> Any:
            result = value(*args, **kwargs)
            return await result if asyncio.iscoroutine(result) else result

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._run(in_loop(*args, **kwargs))

        return call

    def close(self) -> None:
        self._run(self._store.close())

    def stop(self) -> None:
        self.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class LoopCache:
    """A synchronous interface to an `AsyncItemCache`."""

    def __init__(self, store: LoopStore, **options: Any) -> None:
        self.store = store
        self._cache = AsyncItemCache(store._store, **options)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._cache, name)
        return lambda *args, **kwargs: self.store._run(method(*args, **kwargs))


def cache_of(store: Any, **options: Any) -> Any:
    return (LoopCache if isinstance(store, LoopStore) else ItemCache)(store, **options)


class SharedDaemon:
    """A daemon for several tests in turn; it is replaced when a test leaves unsealed objects."""

    def __init__(
        self, capacity_nbytes: int, shares: Mapping[ObjectKind, float] = DEFAULT_SHARES
    ) -> None:
        self._start = functools.partial(StoreServer, capacity_nbytes, shares=shares)
        self._stack = contextlib.ExitStack()
        self._server: StoreServer | None = None

    @property
    def address(self) -> str:
        if self._server is None:
            self._server = self._stack.enter_context(self._start())
        return self._server.address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self._server = None
        self._stack.close()

    @contextlib.contextmanager
    def lent(self, store: Any) -> Iterator[None]:
        """Lend the daemon to one test; its first connection empties it, except for the counters.

        An unsealed object that a test leaves would affect the next test: the daemon counts it
        against the client that wrote it.
        """
        is_clean = False
        try:
            wait_until(lambda: store.stat().num_clients == 1)
            for kind in ObjectKind:
                store.evict(kind)
            yield
            with contextlib.suppress(StoreUnavailable):
                is_clean = all(info.writer is None for info in store.list_objects())
        finally:
            if not is_clean:
                self._end()


@contextlib.contextmanager
def local_store() -> Iterator[Store]:
    with LocalStore(CAPACITY, shares=SHARES) as store:
        yield store


@contextlib.contextmanager
def daemon_store(daemon: SharedDaemon) -> Iterator[Store]:
    with DaemonStore(daemon.address, name="sync", writable=True) as store, daemon.lent(store):
        yield store


@contextlib.contextmanager
def async_store(daemon: SharedDaemon) -> Iterator[Any]:
    store = LoopStore(daemon.address)
    try:
        with daemon.lent(store):
            yield store
    finally:
        store.stop()


STORES: dict[str, Callable[[SharedDaemon], contextlib.AbstractContextManager[Any]]] = {
    "local": lambda _: local_store(),
    "daemon": daemon_store,
    "async": async_store,
}
