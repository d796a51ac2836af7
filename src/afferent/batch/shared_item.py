"""Reference to one item's features in a store: small, and valid in every process of the node."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from msgspec import Struct, msgpack

from afferent.batch.item_features import ItemFeatures, Producer
from afferent.batch.pinned_trees import AsyncFeatureStore, FeatureStore, PinnedTree
from afferent.errors import StaleHandle
from afferent.store.block import codec, torch_tensors
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.protocol.items import Find
from afferent.store.protocol.results import existing
from afferent.types import ContentKey, KeyBytes, NonNegative, decode, encode

_PROMPT: Final = "prompt"


class _Packed(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Content of a pickled `SharedItem`."""

    address: str
    key: KeyBytes
    nbytes: NonNegative
    is_own: bool


_packed_decoder = msgpack.Decoder(_Packed)


class SharedItem:
    """Features of one item in a store: its name is its content, and its pickle has some 150 bytes.

    `Features.share` makes it, with a pin that ends with this object, by `release`, or with the
    store. A pickled copy pins nothing until `features` opens it: keep the original until then, or
    the item may be evicted if the store needs the space. It can be sent by `multiprocessing`, a
    `DataLoader` or Ray, to processes of the same node.

    Attributes:
        key: Content key of the features: equal for equal items and settings.
        nbytes: Bytes of all tensors.
        made_by: As for `ItemFeatures`.
    """

    __slots__ = ("_address", "_pinned", "key", "made_by", "nbytes")

    key: ContentKey
    nbytes: int
    made_by: Producer

    def __init__(self, packed: bytes) -> None:
        """Restore a pickled one; `Features.share` makes new ones.

        Raises:
            FormatError: These are not the bytes of a `SharedItem`.
        """
        found = decode(_packed_decoder, packed)
        self._address, self.key = found.address, ContentKey(found.key)
        self.nbytes = found.nbytes
        self.made_by = "transformers" if found.is_own else "afferent"
        self._pinned: PinnedTree | None = None

    @classmethod
    def pinned(
        cls,
        store: FeatureStore | AsyncFeatureStore,
        key: ContentKey,
        tree: dict[str, Any],
        made_by: Producer,
    ) -> Self:
        """Return the reference to a tree of views, whose pin it keeps until the store is lost."""
        nbytes = sum(int(each.nbytes) for name, each in tree.items() if name != _PROMPT)
        is_own = made_by == "transformers"
        item = cls(encode(_Packed(store.address, key, nbytes, is_own)))
        item._pinned = store.pinned_trees.add(tree)
        return item

    def features(self, *, tensors: codec.Library = "numpy") -> ItemFeatures:
        """Return the features as read-only views, pinned for as long as one of them lives.

        Args:
            tensors: As for `Store.view`, which describes the effect of writing into torch tensors.

        Raises:
            StaleHandle: They were evicted.
            StoreUnavailable: The store is gone.
        """
        tree = pinned if (pinned := self._tree) is not None else self._found()
        views = {name: each for name, each in tree.items() if name != _PROMPT}
        if tensors == "torch":
            views = {name: torch_tensors.as_tensor(each) for name, each in views.items()}
        return ItemFeatures(
            views, prompt=tuple(tree[_PROMPT]), form="compact", made_by=self.made_by, key=self.key
        )

    def in_store(self, address: str | None) -> Self:
        """Return the reference to equal features in another store; ``None``: in the same one."""
        if address in (None, self._address):
            return self
        is_own = self.made_by == "transformers"
        return type(self)(encode(_Packed(address or "", self.key, self.nbytes, is_own)))

    def release(self) -> None:
        """Release this object's own pin; views that it has returned keep theirs."""
        self._pinned = None

    @property
    def _tree(self) -> dict[str, Any] | None:
        """The pinned views; ``None`` without a pin."""
        pinned = self._pinned  # another thread may release it
        return None if pinned is None else pinned.tree

    def _found(self) -> Mapping[str, Any]:
        store = connections.to(self._address)
        request = f"shared-{next(_numbers)}"
        try:
            (outcome,) = store.acquire(request, [Find(self.key)])
            handle = existing(outcome)
            if handle is None:
                raise StaleHandle(
                    f"the features {self.key.hex()[:12]} are not in the store any more: keep the "
                    "SharedItem that Features.share returned until its copies are opened, or give "
                    "the store more memory (arena_nbytes, --arena-nbytes)"
                )
            tree: Mapping[str, Any] = store.view_for(request, handle)
            return tree
        finally:
            store.forget(request)  # the tree's arrays get a pin of their own

    def __reduce__(self) -> tuple[Any, ...]:
        is_own = self.made_by == "transformers"
        return SharedItem, (encode(_Packed(self._address, self.key, self.nbytes, is_own)),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SharedItem) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        pinned = ", pinned" if self._tree is not None else ""
        return f"<SharedItem {self.key.hex()[:12]}: {self.nbytes:,} bytes{pinned}>"


SharedItem.__module__ = "afferent"  # its public home, which makes its pickles shorter

_numbers = itertools.count()


class _Connections:
    """Connections of this process to stores, each opened at its first use.

    Invariants: a forked process begins without any, because it can't use those of its parent.
    """

    def __init__(self) -> None:
        self._clear()
        os.register_at_fork(after_in_child=self._clear)

    def to(self, address: str) -> DaemonStore:
        """Return the connection to a store.

        Raises:
            StoreUnavailable: No store answers there.
        """
        with self._lock:
            store = self._stores.get(address)
            if store is None:
                self._drop_ended()
                store = self._stores[address] = DaemonStore(address, name="shared-items")
            return store

    def drop(self, address: str) -> None:
        """End the connection to a store, if there is one; views stay valid."""
        with self._lock:
            store = self._stores.pop(address, None)
        if store is not None:
            store.close()

    def _drop_ended(self) -> None:
        """End the connections to stores that have ended for good, and have no socket any more."""
        for address, store in list(self._stores.items()):
            if not store.is_open and not Path(address).exists():
                del self._stores[address]
                store.close()

    def _clear(self) -> None:
        self._lock = threading.Lock()
        self._stores: dict[str, DaemonStore] = {}

    def close(self) -> None:
        """End all connections; the next use of an address opens another."""
        with self._lock:
            stores, self._stores = self._stores, {}
        for store in stores.values():
            store.close()


connections: Final = _Connections()
