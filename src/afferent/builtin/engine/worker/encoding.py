"""Embeddings of a worker: its cache, and how items are added to it.

Embeddings are computed from views of features in the arena, or copied from blocks that an earlier
engine left. A view instead of a copy would pin its block for as long as the embeddings are cached.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from afferent.builtin.engine import messages as m
from afferent.builtin.engine.model.embeddings import Embeddings
from afferent.builtin.engine.model.grids import tensors_of
from afferent.builtin.engine.model.runner import Runner
from afferent.builtin.engine.worker.page_lock import PageLock
from afferent.errors import AfferentError, EngineUnavailable, InternalError, StoreRestarted
from afferent.store.block import codec
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.client.item_cache import ItemCache
from afferent.types import ContentKey, Failure, Handle, Span, span_since

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Encoded:
    """Result of a step's items."""

    failed: list[tuple[bytes, Failure]] = field(default_factory=list)
    spans: list[tuple[str, Span]] = field(default_factory=list)
    num_encoded: int = 0
    made_us: dict[ContentKey, int] = field(default_factory=dict)
    """Encoder time of each item that was encoded here."""


class ItemEncoder:
    """Embeddings cache of a worker; the core decides what it contains.

    Invariants:
        - `encode` adds items, `evict` removes them. An item that fails is reported to the core.
        - No view and no pin of a step outlives `encode`.
        - The failure of one item does not affect the others.
    """

    def __init__(
        self,
        runner: Runner,
        store: DaemonStore,
        *,
        published: ItemCache | None,
        page_lock: PageLock | None,
    ) -> None:
        """Create an empty cache; ``published``: the store for other processes' use, if there is
        one.
        """
        self._runner, self._store = runner, store
        self._published, self._page_lock = published, page_lock
        self._embeddings: dict[bytes, Embeddings] = {}

    @property
    def embeddings(self) -> Mapping[bytes, Embeddings]:
        """The embeddings by key."""
        return self._embeddings

    def evict(self, key: bytes) -> None:
        """Forget the embeddings of an item; there may be none."""
        self._embeddings.pop(key, None)

    def encode(self, work: m.Work) -> Encoded:
        """Add the embeddings of a step's items; all views are gone when this returns."""
        encoded = Encoded()
        try:
            pinned_for = self._pin(work, encoded)
            if pinned_for is not None:
                if self._page_lock is not None:
                    self._page_lock.follow(self._store.arena)
                for item in work.encode:
                    self._add(item, encoded)
                self._check_pins(work, pinned_for, encoded)
                self._publish(work, encoded)
        finally:
            self._store.forget(work.lease)
        return encoded

    def _pin(self, work: m.Work, encoded: Encoded) -> int | None:
        """Return the client that the step's items are pinned for; ``None``: there is no item to
        read.
        """
        if not work.encode:
            return None
        number = self._store.client_number
        if number not in work.pinned_for:
            try:
                self._store.get(work.lease, [item.handle for item in work.encode])
            except AfferentError as error:
                failure = Failure(error.code, error.message)
                encoded.failed += [(item.key, failure) for item in work.encode]
                return None
        return number

    def _check_pins(self, work: m.Work, pinned_for: int, encoded: Encoded) -> None:
        """Forget the embeddings of items whose pins were lost with this worker's connection, unless
        the items still exist: then their blocks have not been reused in between.
        """
        if self._store.client_number == pinned_for:
            return
        try:
            self._store.get(work.lease, [item.handle for item in work.encode])
        except StoreRestarted:  # blocks stayed intact until the restart; no later one was read
            return
        except AfferentError as error:
            log.warning("items were lost while they were encoded", extra={"reason": error.code})
            failed = {key for key, _ in encoded.failed}
            lost = [item.key for item in work.encode if item.key not in failed]
            for key in lost:
                self.evict(key)
            failure = Failure(EngineUnavailable.code, "an item's features are gone; try again")
            encoded.failed += [(key, failure) for key in lost]

    def _add(self, item: m.EncodeItem, encoded: Encoded) -> None:
        """Add one item; an error is a failure of that item alone."""
        start_ns = time.monotonic_ns()
        try:
            self._embeddings[item.key] = self._copy(item) if item.found else self._make(item)
        except AfferentError as error:
            encoded.failed.append((item.key, Failure(error.code, error.message)))
            return
        except Exception:
            log.exception("an item could not be encoded", extra={"request_id": item.sequence_id})
            failure = Failure(InternalError.code, "the engine failed on this item")
            encoded.failed.append((item.key, failure))
            return
        if not item.found:
            encoded.num_encoded += 1
            took_us = (time.monotonic_ns() - start_ns) // 1000
            encoded.made_us[ContentKey(item.key)] = max(1, took_us)
        copied = self._embeddings[item.key].nbytes if item.found else 0
        viewed = f"{item.handle.nbytes / 1000:,.0f} kB in place"
        span = span_since(
            start_ns,
            "worker",
            "copy_embeddings" if item.found else "encode",
            copied_nbytes=copied,
            note="" if item.found else viewed,
        )
        encoded.spans.append((item.sequence_id, span))

    def _make(self, item: m.EncodeItem) -> Embeddings:
        """Encode an item from its features, in place."""
        features = tensors_of(codec.view(self._store.block(item.handle).toreadonly()))
        return self._runner.encode(item.modality, features)

    def _copy(self, item: m.EncodeItem) -> Embeddings:
        """Copy embeddings that were computed from the same features with the same weights."""
        view = Embeddings.from_tree(codec.view(self._store.block(item.handle).toreadonly()))
        return Embeddings(view.rows.clone(), tuple(layer.clone() for layer in view.layers))

    def _publish(self, work: m.Work, encoded: Encoded) -> None:
        """Write the new embeddings to the store for other processes; lack of space is no
        failure.
        """
        if self._published is None:
            return
        failed = {key for key, _ in encoded.failed}
        made: dict[ContentKey, Handle] = {
            ContentKey(item.key): item.handle
            for item in work.encode
            if not item.found and item.key not in failed
        }
        if not made:
            return
        trees = {key: self._embeddings[key].tree() for key in made}
        try:
            self._published.set_embeddings(
                work.lease, trees, computed_from=made, made_us=encoded.made_us
            )
        except AfferentError as error:
            log.info("embeddings were not stored", extra={"reason": error.code})
