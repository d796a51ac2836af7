"""Pins of the core in the store: features of requests until they are encoded, and a step's items.

A step's items are pinned for the workers in the same round trip, so that workers need none.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from afferent import keys
from afferent.builtin.engine import messages as m
from afferent.builtin.engine.model.grids import grids_of
from afferent.engines.ahead import Ahead, Encoder
from afferent.engines.protocol import EngineRequest
from afferent.errors import (
    AfferentError,
    ClientGone,
    EngineUnavailable,
    StaleHandle,
    StoreRestarted,
)
from afferent.store.block import codec
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import Find, in_messages
from afferent.store.protocol.results import Hit
from afferent.types import ContentKey, Failure, Handle, Item

log = logging.getLogger(__name__)

Grids = dict[str, m.Grid]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Item that a step encodes, and the sequence that it is encoded for."""

    sequence_id: str
    item: Item


@dataclass(slots=True)
class StepPins:
    """Items of a step for the workers, the clients that they are pinned for, and failures by
    key.
    """

    items: list[m.EncodeItem]
    pinned_for: list[int]
    failed: dict[bytes, Failure]


class Pins:
    def __init__(
        self,
        store: AsyncDaemonStore,
        position_features: Collection[str],
        *,
        has_tier: bool = False,
    ) -> None:
        """Store the settings.

        Args:
            position_features: Names of the features that travel with the prompt.
            has_tier: Embeddings that are not here may be beyond this machine.
        """
        self._store, self._position_features = store, position_features
        self._has_tier, self._ahead = has_tier, Ahead(store)
        self._numbers = itertools.count()

    def new_lease(self) -> str:
        """Return a name for a step's pins, which no other step of this core has had."""
        return f"step-{next(self._numbers)}"

    async def fetch(self, request: EngineRequest, *, weights: bytes, row_nbytes: int) -> None:
        """Fetch embeddings that other processes have computed, before any step needs them.

        The engine encodes those that do not come in time. It never fails.

        Args:
            weights: Digest of the encoder's weights; empty for none.
            row_nbytes: Bytes of one row of embeddings.
        """
        if not self._has_tier or not weights:
            return
        num_rows = {ContentKey(item.key): item.placeholder.length for item in request.items}
        await self._ahead.fetch(num_rows, Encoder(weights, row_nbytes))

    async def hold(self, request: EngineRequest) -> list[Grids]:
        """Pin a request's features under its id; return the grids of its items.

        After an error, some may be pinned, also later: the caller has to release them.

        Raises:
            StaleHandle: The features are gone.
            StoreRestarted: They were lost when the store restarted.
            StoreUnavailable: There is no store now.
        """
        for handles in in_messages([item.handle for item in request.items]):
            await self._store.get(request.request_id, handles)
        return [self._grids(item.handle) for item in request.items]

    def let_go(self, name: str) -> None:
        """Release all pins under a request's id or a step's lease."""
        self._store.forget(name)

    def let_go_of(self, name: str, handles: Sequence[Handle]) -> None:
        """Unpin each handle once."""
        self._store.unpin(name, handles)

    async def hold_step(
        self, lease: str, wanted: Sequence[Wanted], *, weights: bytes, clients: Sequence[int]
    ) -> StepPins:
        """Pin the objects that the workers need for these items, for the core and for each worker.

        Args:
            lease: A new name. The workers need it regardless of the result: the store may have
                pinned some items for them.
            wanted: The items. Their requests may have unpinned the features: then the features may
                be gone, or have been evicted and computed again, and are found by their keys.
            weights: Look up embeddings of these weights first; empty for no lookup.
            clients: Ids of the workers in the store.
        """
        failed: dict[bytes, Failure] = {}
        if not wanted:
            return StepPins([], [], failed)
        try:
            found = await self._find(lease, wanted, weights) if weights else {}
            items = [_encode_item(each, found.get(each.item.key)) for each in wanted]
            try:
                pinned_for = await self._pin(lease, items, clients)
            except (StaleHandle, StoreRestarted):
                failed = await self._find_stale(lease, items)
                items = [item for item in items if item.key not in failed]
                pinned_for = await self._pin(lease, items, clients)
        except AfferentError as error:
            failure = _failure(error)
            return StepPins([], [], {each.item.key: failure for each in wanted})
        return StepPins(items, pinned_for, failed)

    # Inner steps

    def _grids(self, handle: Handle) -> Grids:
        return grids_of(codec.view(self._store.block(handle)), self._position_features)

    async def _find(
        self, lease: str, wanted: Sequence[Wanted], weights: bytes
    ) -> dict[bytes, Handle]:
        """Return embeddings in the store, pinned, by the items' keys."""
        names = {
            each.item.key: keys.embeddings_key(item=ContentKey(each.item.key), weights=weights)
            for each in wanted
        }
        asked = [Find(name) for name in names.values()]
        outcomes = await self._store.acquire(lease, asked)
        return {
            key: outcome.handle
            for key, outcome in zip(names, outcomes, strict=True)
            if isinstance(outcome, Hit)
        }

    async def _pin(
        self, lease: str, items: Sequence[m.EncodeItem], clients: Sequence[int]
    ) -> list[int]:
        """Return the workers that the items are pinned for; the other workers pin them
        themselves.
        """
        handles = [item.handle for item in items]
        if not handles:
            return []
        try:
            await self._store.get(lease, handles, also_for=clients)
        except ClientGone:  # a worker reconnects to the store, under an id that is unknown yet
            await self._store.get(lease, handles)
            return []
        return list(clients)

    async def _find_stale(self, lease: str, items: Sequence[m.EncodeItem]) -> dict[bytes, Failure]:
        """Return the failures of lost items; an item that was computed again gets its new
        handle.
        """
        stale: dict[bytes, Failure] = {}
        for item in items:
            try:
                await self._store.get(lease, [item.handle])
            except (StaleHandle, StoreRestarted) as error:
                asked = Find(item.key)
                (outcome,) = await self._store.acquire(lease, [asked])
                if isinstance(outcome, Hit):
                    item.handle = outcome.handle
                else:
                    stale[item.key] = _failure(error)
        return stale


def _encode_item(wanted: Wanted, found: Handle | None) -> m.EncodeItem:
    item = wanted.item
    handle = item.handle if found is None else found
    return m.EncodeItem(wanted.sequence_id, item.key, item.modality, handle, found is not None)


def _failure(error: AfferentError) -> Failure:
    """Return a failure; a stale item becomes retryable, since it existed when the request was
    accepted.
    """
    if isinstance(error, StaleHandle):
        error = EngineUnavailable("an item's features are gone; try again")
    return Failure(error.code, error.message)
