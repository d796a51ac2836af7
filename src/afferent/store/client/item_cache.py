"""Cache of items that an engine's processes share: data and embeddings.

    cache = ItemCache(DaemonStore(address, name="encoder", writable=True), weights=digest)

    features = cache.get_data(request, keys)      # one round trip, for any number of keys
    cache.set_embeddings(request, {key: encode(features[key]) for key in keys})
    cache.release(request)                        # another

Each operation handles many items in one or two round trips. Returned arrays are views of the
arena: read-only, without a copy, and valid for as long as they live. An array that outlives its
request keeps its memory pinned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from afferent.errors import ConfigError
from afferent.store.client.operations import Operations
from afferent.store.client.steps import Result, Steps, run
from afferent.store.client.store import Store
from afferent.types import ObjectKind
from afferent.wording import shown


class ItemCache(Operations):
    """Operations on items by key, over any store. An operation with ``Steps[X]`` returns X.

    A `ContentKey` is 32 bytes that identify an item; `afferent.keys` computes it from the item and
    all settings that shape its data.

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
        """Create a cache over ``store``.

        Args:
            weights: Digest of the encoder's weights: embeddings of other weights are not found.
            kind: Kind of object for the items' data.
            num_workers: Threads that help the caller's thread to read and digest loaded files. 0:
                one file after another, which is faster with small files or few cores.

        Raises:
            ConfigError: ``store`` is no store without an event loop.
        """
        if not isinstance(store, Store):
            raise ConfigError(
                f"an ItemCache is made over a LocalStore or a DaemonStore, not {shown(store)}"
            )
        super().__init__(store, weights=weights, kind=kind, num_workers=num_workers)
        self.store = store

    def _run(self, steps: Steps[Result]) -> Result:
        return run(steps)

    def _do(self, work: Callable[..., Any], *args: Any) -> Any:
        return work(*args)
