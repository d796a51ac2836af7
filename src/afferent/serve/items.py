"""A request's media: from URLs to handles of features, pinned under the request's id.

What there is of an item is asked first, what has to be made comes after: encoded bytes go into the
arena, a plan says how large the features are, and a job makes them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from afferent.admit.gate import Gate
from afferent.config import RequestLimits
from afferent.errors import TooManyItems, UnsupportedMedia
from afferent.ingest.digest import Digester
from afferent.metrics import Metrics
from afferent.preprocess.family import Family
from afferent.preprocess.plan import Prompt
from afferent.serve.account import Account
from afferent.serve.making import Maker, count, handle_if_there, handle_of, summary
from afferent.serve.names import Binding, Names
from afferent.serve.planning import Planner, SourceItem, features_job
from afferent.serve.reading import ItemReader, not_cached
from afferent.serve.request import GenerateRequest, MediaPart
from afferent.store import codec
from afferent.store import messages as m
from afferent.store.async_client import AsyncDaemonStore
from afferent.store.region import Shares
from afferent.types import ContentKey, Handle, Modality, ObjectKind


@dataclass(frozen=True, slots=True)
class ReadyItem:
    """Its features are there, and pinned; ``prompt`` says how it is written."""

    key: ContentKey
    handle: Handle
    prompt: Prompt


class ItemStage:
    """Reads, plans and prepares items, with one store behind it."""

    def __init__(
        self,
        store: AsyncDaemonStore,
        gate: Gate,
        family: Family,
        fingerprint: bytes,
        *,
        limits: RequestLimits,
        shares: Shares,
        timeout_s: float,
        metrics: Metrics,
        digester: Digester,
    ) -> None:
        self._store, self._gate = store, gate
        self._family, self._limits, self._metrics = family, limits, metrics
        self._names = Names(store, timeout_s=timeout_s)
        self._reader = ItemReader(
            store, family, fingerprint, self._names, limits=limits, digester=digester
        )
        self._maker = Maker(store, gate, shares=shares, timeout_s=timeout_s)
        self._planner = Planner(store, self._maker, family, fingerprint)

    def check(self, parts: Sequence[MediaPart]) -> None:
        """Refuse what can be refused by counting.

        Raises:
            TooManyItems: More of a kind than a request may have.
            UnsupportedMedia: Of a kind that the model does not take.
        """
        for modality in Modality:
            most = self._limits.of(modality).max_items
            number = sum(part.modality is modality for part in parts)
            if number > most:
                raise TooManyItems(
                    f"the request has {count(number, modality)}; at most {most} are accepted",
                    param="messages",
                )
            if number and modality not in self._family.tokens:
                raise UnsupportedMedia(f"the model takes no {modality}", param="messages")

    async def read(self, request: GenerateRequest, account: Account) -> list[SourceItem]:
        """The items' bytes, keys, and, of images, plans.

        Raises:
            MediaNotCached: Some were not sent, and are not here.
            InvalidMedia: An item can't be used, or its name is another's.
            Unavailable: Try again.
        """
        if not request.media:
            return []
        items = await self._reader.read(request, account)
        for item in items:
            if item.raw is not None:
                labels = (item.modality, item.raw.origin)
                self._metrics.media_nbytes.labels(*labels).inc(item.raw.nbytes)
        return await self._planner.plan_images(request.request_id, items, account)

    async def prepare(
        self, request_id: str, items: Sequence[SourceItem], account: Account
    ) -> list[ReadyItem]:
        """The features of all items, in order, made where they are missing.

        Raises:
            InvalidMedia: An item can't be used.
            ArenaTooSmall: The items could never be in the arena at once.
            Unavailable: Try again.
        """
        distinct = _distinct(items)
        if not distinct:
            return []
        outcomes = await self._find(request_id, distinct, account)
        states = [outcome.state for outcome in outcomes]
        sealed, unsealed = _received(items)
        if all(state == "hit" for state in states):
            if unsealed:
                self._store.discard(request_id, unsealed)
        else:
            self._check_room(distinct)
            if unsealed:
                to_seal = [m.SealItem(handle, handle.nbytes) for handle in unsealed]
                sealed += await self._store.seal(request_id, to_seal)
            outcomes = await self._admit(request_id, distinct, outcomes, account)
            states = [outcome.state for outcome in outcomes]
            item_keys = [item.key for item in distinct]
            outcomes = await self._maker.settle(request_id, item_keys, outcomes, account)
        if sealed:  # jobs hold what they need of what was received
            await self._store.release(request_id, sealed)
        self._count_outcomes(distinct, states, outcomes, account)
        ready = {
            item.key: self._ready(item, outcome)
            for item, outcome in zip(distinct, outcomes, strict=True)
        }
        await self._bind_names(request_id, items)
        return [ready[item.key] for item in items]

    async def close(self) -> None:
        await self._reader.close()

    async def _find(
        self, request_id: str, items: Sequence[SourceItem], account: Account
    ) -> list[m.Outcome]:
        """Pin what is there; nothing else is made or waited for."""
        start_ns = time.monotonic_ns()
        wanted = [m.AcquireItem(item.key, ObjectKind.FEATURES, 1, "find") for item in items]
        outcomes = await self._store.acquire(request_id, wanted)
        account.stage(start_ns, "acquire", note=summary(outcomes))
        return outcomes

    async def _admit(
        self,
        request_id: str,
        items: Sequence[SourceItem],
        found: Sequence[m.Outcome],
        account: Account,
    ) -> list[m.Outcome]:
        """Have room for all features granted, and those made that nobody has made.

        Nothing is pinned while this waits for room, or requests might wait for one another.
        """
        hits = {
            item.key: outcome.handle
            for item, outcome in zip(items, found, strict=True)
            if outcome.handle is not None
        }
        if hits:
            await self._store.release(request_id, list(hits.values()))
        missing = [item for item in items if item.key not in hits]
        unsent = [
            item.name
            for item, outcome in zip(items, found, strict=True)
            if item.raw is None and handle_if_there(outcome) is None
        ]
        if unsent:
            raise not_cached(unsent)
        written = await self._write_raw(request_id, missing, account)
        planned = await self._planner.plan_files(request_id, missing, written, account)
        wanted = {
            item.key: features_job(item, planned.get(item.key), written.get(item.key))
            for item in missing
        }
        for key, handle in hits.items():
            wanted[key] = m.AcquireItem(key, ObjectKind.FEATURES, handle.nbytes, None)
        outcomes = await self._maker.acquire(
            request_id, [wanted[item.key] for item in items], account, in_turn=True
        )
        if written:
            await self._store.release(request_id, list(written.values()))
        return outcomes

    def _ready(self, item: SourceItem, outcome: m.Outcome) -> ReadyItem:
        handle = handle_of(outcome)
        if item.plan is not None:
            return ReadyItem(item.key, handle, item.plan.prompt)
        tree: Any = codec.view(self._store.block(handle))
        return ReadyItem(item.key, handle, tuple(tree["prompt"]))

    async def _write_raw(
        self, request_id: str, items: Sequence[SourceItem], account: Account
    ) -> dict[ContentKey, Handle]:
        """What is on the heap comes into the arena, for the workers to read."""
        on_heap = {item.key: item.data for item in items if item.data is not None}
        if not on_heap:
            return {}
        start_ns = time.monotonic_ns()
        sizes = [len(data) for data in on_heap.values()]
        blocks = [m.CreateItem(ObjectKind.RAW, nbytes) for nbytes in sizes]
        if all(item.handle is None for item in items):
            with account.at("admission"):
                handles = await self._gate.create(request_id, blocks)
        else:  # who holds raw bytes already must not wait for more: he might wait for himself
            handles = await self._store.create(request_id, blocks)
        for data, handle in zip(on_heap.values(), handles, strict=True):
            target = np.frombuffer(self._store.block(handle), dtype=np.uint8)
            np.copyto(target, np.frombuffer(data, dtype=np.uint8))
        items_to_seal = [m.SealItem(handle, handle.nbytes) for handle in handles]
        sealed = await self._store.seal(request_id, items_to_seal)
        account.stage(start_ns, "into the arena", copied_nbytes=sum(sizes))
        return dict(zip(on_heap, sealed, strict=True))

    async def _bind_names(self, request_id: str, items: Sequence[SourceItem]) -> None:
        """Only now: what can't be used is bound to no name."""
        new = {
            item.name: Binding(item.digest, item.modality)
            for item in items
            if item.name is not None and item.is_new_name
        }
        if new:
            await self._names.bind(request_id, new)

    # Room and figures

    def _check_room(self, items: Sequence[SourceItem]) -> None:
        """Refuse what could never be in the arena at once, however long one waits."""
        on_heap = [len(item.data) for item in items if item.data is not None]
        self._maker.check_share(ObjectKind.RAW, on_heap)
        planned = [item.plan.nbytes for item in items if item.plan is not None]
        self._maker.check_share(ObjectKind.FEATURES, planned)

    def _count_outcomes(
        self,
        items: Sequence[SourceItem],
        states: Sequence[str],
        outcomes: Sequence[m.Outcome],
        account: Account,
    ) -> None:
        words = {"hit": "hit", "busy": "joined", "miss": "made"}
        names = Counter(
            (item.modality, "failed" if outcome.state == "failed" else words[state])
            for item, state, outcome in zip(items, states, outcomes, strict=True)
        )
        for (modality, name), number in names.items():
            self._metrics.items.labels(modality, name).inc(number)
            account.items.append(f"{count(number, modality)} {name}")


def _received(items: Sequence[SourceItem]) -> tuple[list[Handle], list[Handle]]:
    """Objects that the items' bytes are in: those that are sealed, and those that are not."""
    is_sealed = {
        item.raw.handle: item.raw.is_sealed
        for item in items
        if item.raw is not None and item.raw.handle is not None
    }
    sealed = [handle for handle, yes in is_sealed.items() if yes]
    return sealed, [handle for handle in is_sealed if handle not in sealed]


def _distinct(items: Sequence[SourceItem]) -> list[SourceItem]:
    """One item for each key, with its bytes if they were sent."""
    distinct: dict[ContentKey, SourceItem] = {}
    for item in items:
        if item.key not in distinct or item.raw is not None:
            distinct[item.key] = item
    return list(distinct.values())
