"""The stores that one conformance suite runs over."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from afferent.store.async_client import AsyncDaemonStore
from afferent.store.client import DaemonStore
from afferent.store.local import LocalStore
from afferent.store.server import StoreServer
from afferent.store.verbs import Store
from afferent.types import MiB, ObjectKind

CAPACITY = 4 * MiB
SHARES = {ObjectKind.RAW: 0.25, ObjectKind.FEATURES: 0.5, ObjectKind.EMBEDDINGS: 0.25}


class LoopStore:
    """An `AsyncDaemonStore` behind the calls of a `Store`; its loop runs in a thread."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._store = self._run(AsyncDaemonStore.connect(address, name="async", writable=True))

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store, name)
        if not asyncio.iscoroutinefunction(value):
            return value
        return lambda *args, **kwargs: self._run(value(*args, **kwargs))

    def close(self) -> None:
        self._run(self._store.close())

    def stop(self) -> None:
        self.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextlib.contextmanager
def local_store() -> Iterator[Store]:
    with LocalStore(CAPACITY, shares=SHARES) as store:
        yield store


@contextlib.contextmanager
def daemon_store() -> Iterator[Store]:
    with (
        StoreServer(CAPACITY, shares=SHARES) as server,
        DaemonStore(server.address, name="sync", writable=True) as store,
    ):
        yield store


@contextlib.contextmanager
def async_store() -> Iterator[Any]:
    with StoreServer(CAPACITY, shares=SHARES) as server:
        store = LoopStore(server.address)
        yield store
        store.stop()


STORES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "local": local_store,
    "daemon": daemon_store,
    "async": async_store,
}
