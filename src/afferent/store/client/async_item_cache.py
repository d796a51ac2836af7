"""Item cache for an event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from afferent.runtime.tasks import in_thread
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.operations import Operations
from afferent.store.client.steps import Result, Steps, run_awaiting
from afferent.types import ObjectKind


class AsyncItemCache(Operations):
    """The operations of an `ItemCache` as coroutines; any number may run at a time.

    Threads read files, and write data of more than a megabyte. A cancelled call may still have been
    done: release its request.

    Examples:
        >>> import asyncio
        >>> from afferent import AsyncDaemonStore, AsyncItemCache, MiB, ObjectKind
        >>> from afferent import StoreServer, keys
        >>> def key_of(digest: bytes) -> bytes:
        ...     return keys.frame(b"my-files/v1", digest)
        >>> async def main(address: str) -> None:
        ...     connecting = AsyncDaemonStore.connect(address, name="me", writable=True)
        ...     async with await connecting as store:
        ...         cache = AsyncItemCache(store, kind=ObjectKind.RAW)
        ...         sources = [b"a cat", b"a dog", b"a cat"]
        ...         for loaded in await cache.load("request-1", sources, key_of):
        ...             print(bytes(store.block(loaded.handle)))
        ...         print((await store.stat()).num_objects)
        ...         await cache.release("request-1")
        >>> with StoreServer(16 * MiB, shares={ObjectKind.RAW: 1.0}) as server:
        ...     asyncio.run(main(server.address))
        b'a cat'
        b'a dog'
        b'a cat'
        2
    """

    def __init__(
        self,
        store: AsyncDaemonStore,
        *,
        weights: bytes = b"",
        kind: ObjectKind = ObjectKind.FEATURES,
        num_workers: int = 0,
    ) -> None:
        """Create a cache over ``store``; arguments as for `ItemCache`."""
        super().__init__(store, weights=weights, kind=kind, num_workers=num_workers)
        self.store = store

    async def _run(self, steps: Steps[Result]) -> Result:
        return await run_awaiting(steps)

    def _do(self, work: Callable[..., Any], *args: Any) -> Any:
        return in_thread(work, *args)
