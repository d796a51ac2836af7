"""What the processes of an engine share about the items of its requests: data and embeddings.

    cache = ItemCache(DaemonStore(address, name="encoder", writable=True), weights=digest)
    features = cache.get_data(request, keys)      # one round trip, whatever their number
    cache.set_embeddings(request, {key: encode(features[key]) for key in keys})
    cache.release(request)                        # another

Each operation is for many items in one or two round trips. Arrays that come back are views of the
arena: read-only, without a copy, and valid for as long as they live. One that outlives its request
keeps its memory pinned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from afferent.errors import ConfigError
from afferent.store.client.operations import Operations
from afferent.store.client.steps import Result, Steps
from afferent.store.client.store import Store
from afferent.types import ObjectKind
from afferent.wording import shown


class ItemCache(Operations):
    """Operations on items by key, over any store. Where one shows `Steps[X]`, it returns X.

    A `ContentKey` is 32 bytes that say what an item is; `afferent.keys` makes them of the item and
    all else that shapes its data.

    Examples:
        >>> import numpy as np
        >>> from afferent import ItemCache, LocalStore, MiB, keys
        >>> def squares(key: bytes) -> dict[str, np.ndarray]:
        ...     print("made once")
        ...     return {"values": np.arange(4.0) ** 2}
        >>> key = keys.frame(b"squares/v1", b"cat")
        >>> with LocalStore(4 * MiB) as store:
        ...     cache = ItemCache(store)
        ...     for request in ("request-1", "request-2"):
        ...         tree = cache.get_or_make(request, [key], squares, max_nbytes=MiB)[key]
        ...         print(tree["values"].sum())
        ...         del tree  # else it would keep its memory pinned after the release
        ...         cache.release(request)
        made once
        14.0
        14.0
    """

    def __init__(
        self,
        store: Store,
        *,
        weights: bytes = b"",
        kind: ObjectKind = ObjectKind.FEATURES,
        num_workers: int = 0,
    ) -> None:
        """Share what ``store`` holds.

        Args:
            weights: Digest of the encoder's weights: embeddings of other weights are not found.
            kind: Which share of the arena the items' data take.
            num_workers: Threads beside the caller's that read and digest what is loaded; 0: one
                file after another, which is faster where files are small or cores are few.

        Raises:
            ConfigError: It is no store that can be called without an event loop.
        """
        if not isinstance(store, Store):
            raise ConfigError(
                f"an ItemCache is made over a LocalStore or a DaemonStore, not {shown(store)}"
            )
        super().__init__(store, weights=weights, kind=kind, num_workers=num_workers)
        self.store = store

    def _run(self, steps: Steps[Result]) -> Result:
        try:
            answer = next(steps)
            while True:
                answer = steps.send(answer)
        except StopIteration as end:
            result: Result = end.value
            return result

    def _do(self, work: Callable[..., Any], *args: Any) -> Any:
        return work(*args)
