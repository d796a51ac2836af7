"""What the processes of an engine share about the items of its requests: data and embeddings.

    cache = ItemCache(DaemonStore(address, name="encoder", writable=True), weights=digest)
    features = cache.get_data(request, keys)      # one round trip, whatever their number
    cache.set_embeddings(request, {key: encode(features[key]) for key in keys})
    cache.release(request)                        # another

Each operation is for many items in one or two round trips. Arrays that come back are views of the
arena: read-only, without a copy, and valid until the request is released.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from afferent import keys
from afferent.errors import AfferentError, FormatError, error_from
from afferent.store.block import codec
from afferent.store.client.store import Store
from afferent.store.protocol.items import Claim, Find, SealItem
from afferent.store.protocol.requests import check_key
from afferent.store.protocol.results import Outcome
from afferent.types import ContentKey, Handle, ObjectKind


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one item's data.

    ``block`` is there to be written when the data is this request's to make; without it somebody
    else makes it, or ``is_ready`` says that it has been made.
    """

    key: ContentKey
    handle: Handle | None
    block: memoryview | None
    is_ready: bool


class ItemCache:
    """Operations on items by key, over any store.

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
        ...         del tree  # what a request holds is not looked at after its release
        ...         cache.release(request)
        made once
        14.0
        14.0
    """

    def __init__(
        self, store: Store, *, weights: bytes = b"", kind: ObjectKind = ObjectKind.FEATURES
    ) -> None:
        """Share what ``store`` holds.

        Args:
            weights: Digest of the encoder's weights: embeddings of other weights are not found.
            kind: Which share of the arena the items' data take.
        """
        self.store, self._weights, self._kind = store, weights, kind

    # Data

    def allocate(self, request: str, sizes: Mapping[ContentKey, int]) -> list[Slot]:
        """A slot for each item, in one round trip: all or none.

        Of all who allocate the same item, one is given its block; follow with `publish`.

        Args:
            sizes: For each item, the most bytes that its data may take.

        Raises:
            StoreFull: There is no room now.
            ArenaTooSmall: There never is.
        """
        return self._allocate(request, sizes, self._kind)

    def publish(self, request: str, used: Mapping[Handle, int]) -> list[Handle]:
        """Blocks of `allocate` have been written: in one round trip, all or none.

        Args:
            used: How many bytes were written, for the handle of each slot.

        Returns:
            The handles to pass on, in the same order.
        """
        items = [SealItem(handle, nbytes) for handle, nbytes in used.items()]
        return self.store.seal(request, items)

    def set_data(self, request: str, data: Mapping[ContentKey, codec.Tree]) -> None:
        """Store what is not stored yet; each is a tree of tensors (`afferent.codec`).

        What somebody else is writing is waited for. All of it is pinned for the request.

        Raises:
            NotPermitted: The store was opened without ``writable=True``.
        """
        self._set(request, data, self._kind, sources={})

    def get_data(
        self, request: str, item_keys: Iterable[ContentKey], *, tensors: codec.Library = "numpy"
    ) -> dict[ContentKey, Any]:
        """The data of those items that are stored, pinned for the request.

        Args:
            tensors: As for `Store.view`, where it says what writing into torch's does.
        """
        return self._get(request, list(item_keys), tensors)

    def get_or_make(
        self,
        request: str,
        item_keys: Iterable[ContentKey],
        make: Callable[[ContentKey], codec.Tree],
        *,
        max_nbytes: int,
        tensors: codec.Library = "numpy",
    ) -> dict[ContentKey, Any]:
        """The data of all of the items, pinned for the request; what is missing is made.

        Each item is made by one of all who ask for it, the others wait. If ``make`` raises, so does
        this, and the next who waits makes the item.

        Args:
            make: Called here for the items that are this request's to make; each is there for
                others as soon as it has been made.
            max_nbytes: The most that one item's tree takes: its tensors, and some 100 bytes for
                each (``codec.plan(tree).nbytes`` is exact). What it does not use is given back.
            tensors: As for `Store.view`, where it says what writing into torch's does.

        Raises:
            FormatError: A tree takes more than ``max_nbytes``, or ``make`` returned ``None``.
            NotPermitted: The store was opened without ``writable=True``.
            StoreFull: There is no room now.
        """

        def checked(key: ContentKey) -> codec.Tree:
            tree = make(key)
            if tree is None:
                raise FormatError("make returned None instead of a tree: is a return missing?")
            if (nbytes := codec.plan(tree).nbytes) > max_nbytes:
                raise FormatError(f"a tree takes {nbytes} bytes, and max_nbytes is {max_nbytes}")
            return tree

        sizes = dict.fromkeys(item_keys, max_nbytes)
        self._fill(request, sizes, self._kind, checked, sources={}, seal_each=True)
        return self.get_data(request, sizes, tensors=tensors)

    # Embeddings

    def set_embeddings(
        self,
        request: str,
        embeddings: Mapping[ContentKey, codec.Tree],
        *,
        computed_from: Mapping[ContentKey, Handle] | None = None,
    ) -> None:
        """Store the encoder's output under the items' keys and the digest of its weights.

        Args:
            embeddings: For each item an array of shape ``(num_embeds, hidden)``, or a tree of such.
            computed_from: The features that each was computed from, pinned by this request: should
                a pin have been lost meanwhile, nothing is stored.

        Raises:
            StaleHandle: A pin was lost; the features may have changed under the encoder.
        """
        renamed = {self._embeddings_key(key): array for key, array in embeddings.items()}
        sources = {self._embeddings_key(key): h for key, h in (computed_from or {}).items()}
        self._set(request, renamed, ObjectKind.EMBEDDINGS, sources=sources)

    def get_embeddings(
        self, request: str, item_keys: Iterable[ContentKey]
    ) -> dict[ContentKey, NDArray[Any]]:
        """The embeddings of those items that have some, pinned for the request."""
        renamed = {self._embeddings_key(key): key for key in item_keys}
        found: dict[ContentKey, Any] = self._get(request, list(renamed), "numpy")
        return {renamed[key]: array for key, array in found.items()}

    def release(self, request: str) -> None:
        """Drop all that the request holds, in one round trip. Its arrays must be gone by then."""
        self.store.release(request)

    # Inner steps

    def _embeddings_key(self, item: ContentKey) -> ContentKey:
        check_key(item)  # any bytes would do for what is made of it
        return keys.embeddings_key(item=item, weights=self._weights)

    def _allocate(
        self, request: str, sizes: Mapping[ContentKey, int], kind: ObjectKind
    ) -> list[Slot]:
        self.store.check_writable()
        items = [Claim(key, kind, nbytes) for key, nbytes in sizes.items()]
        outcomes = self.store.acquire(request, items)
        failed = next((outcome.failure for outcome in outcomes if outcome.failure), None)
        if failed is not None:
            self._give_up(request, outcomes)
            raise error_from(failed.code, failed.message)
        return [self._slot(key, outcome) for key, outcome in zip(sizes, outcomes, strict=True)]

    def _slot(self, key: ContentKey, outcome: Outcome) -> Slot:
        is_ready = outcome.state in ("hit", "made")
        block = None
        if outcome.state == "owner" and outcome.handle is not None:
            block = self.store.block(outcome.handle)
        return Slot(key, outcome.handle, block, is_ready)

    def _give_up(self, request: str, outcomes: list[Outcome]) -> None:
        """Let go of what a part of a batch was given."""
        by_state: dict[str, list[Handle]] = {"owner": [], "hit": []}
        for outcome in outcomes:
            if outcome.state in by_state and outcome.handle is not None:
                by_state[outcome.state].append(outcome.handle)
        self.store.abort(request, by_state["owner"])
        self.store.release(request, by_state["hit"])

    def _set(
        self,
        request: str,
        trees: Mapping[ContentKey, codec.Tree],
        kind: ObjectKind,
        *,
        sources: Mapping[ContentKey, Handle],
    ) -> None:
        sizes = {key: codec.plan(tree).nbytes for key, tree in trees.items()}
        self._fill(request, sizes, kind, trees.__getitem__, sources=sources, seal_each=False)

    def _fill(
        self,
        request: str,
        sizes: Mapping[ContentKey, int],
        kind: ObjectKind,
        make: Callable[[ContentKey], codec.Tree],
        *,
        sources: Mapping[ContentKey, Handle],
        seal_each: bool,
    ) -> None:
        """Have all of the objects made, by this request or by others."""
        slots = self._allocate(request, sizes, kind)
        while slots:
            own = [slot for slot in slots if slot.block is not None]
            self._write(request, own, make, sources, seal_each=seal_each)
            busy = [slot.key for slot in slots if slot.block is None and not slot.is_ready]
            outcomes = self.store.wait(request, busy) if busy else []
            for outcome in outcomes:
                if outcome.failure is not None:
                    self._give_up(request, outcomes)
                    raise error_from(outcome.failure.code, outcome.failure.message)
            slots = [self._slot(key, outcome) for key, outcome in zip(busy, outcomes, strict=True)]
            slots = [slot for slot in slots if not slot.is_ready]

    def _write(
        self,
        request: str,
        slots: list[Slot],
        make: Callable[[ContentKey], codec.Tree],
        sources: Mapping[ContentKey, Handle],
        *,
        seal_each: bool,
    ) -> None:
        items: list[SealItem] = []
        num_sealed = 0
        try:
            for slot in slots:
                if slot.block is not None and slot.handle is not None:
                    used = codec.write_into(make(slot.key), slot.block)
                    source = sources.get(slot.key)
                    items.append(SealItem(slot.handle, used, [source] if source else []))
                if items and seal_each:
                    self.store.seal(request, items)
                    num_sealed += len(items)
                    items.clear()
            if items:
                self.store.seal(request, items)
        except BaseException:  # whatever it was, others wait for what we began
            begun = [slot.handle for slot in slots[num_sealed:] if slot.handle]
            with contextlib.suppress(AfferentError):
                self.store.abort(request, begun)
            raise

    def _get(
        self, request: str, wanted: list[ContentKey], tensors: codec.Library
    ) -> dict[ContentKey, Any]:
        outcomes = self.store.acquire(request, [Find(key) for key in wanted])
        return {
            key: codec.view(self.store.block(outcome.handle).toreadonly(), tensors=tensors)
            for key, outcome in zip(wanted, outcomes, strict=True)
            if outcome.state == "hit" and outcome.handle is not None
        }
