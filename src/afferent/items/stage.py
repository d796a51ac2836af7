"""Media of a request: from URLs to handles of features, pinned under the request's id.

Existing features are looked up first. For missing ones, encoded bytes go into the arena, a plan
gives the size of the features, and a job makes them. `item` lists the stages.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from afferent.admission.gate import Gate
from afferent.errors import Param, StoreFull, TooManyItems, UnsupportedMedia
from afferent.items.acquire import Maker, count, handle_if_there, handle_of, summary
from afferent.items.documents import DocumentReader
from afferent.items.early import EarlyItems
from afferent.items.forwarded import tensor_nbytes
from afferent.items.item import File, ItemSettings, Processor, ReceivedItem, RequestItems
from afferent.items.names import Names
from afferent.items.plan import Planner, features_job
from afferent.items.receive import MEDIA_BYTES, ItemReader, not_cached
from afferent.items.request import Detail, ItemRequest, MediaPart
from afferent.keys import PLACEMENT_NBYTES
from afferent.media.body.raw import COPY, PAGE, HeapReserve
from afferent.media.families.plan import Prompt
from afferent.media.headers.probe import ImageHeader
from afferent.media.workers.jobs import InputRange, Planned
from afferent.store.block import codec
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import Find, Join, SealItem
from afferent.store.protocol.results import (
    Failed,
    Hit,
    InFlight,
    Outcome,
    Scheduled,
    existing,
    spans_of,
)
from afferent.telemetry.registry import counter
from afferent.telemetry.trace import Trace
from afferent.tier.launch import FETCHED
from afferent.types import ContentKey, CreateItem, Handle, Modality, ObjectKind, ReserveItem

_MOST_PROMPTS, _MOST_PIECES = 8192, 16
"""Prompts that are kept, and pieces of each: those of images are short."""
_LIVE_AUDIO_PART: Final = 2
_EARLY_PART: Final = 8
"""Part of the space for media that copies for early images of one frontend may take."""


@dataclass(frozen=True, slots=True)
class ReadyItem:
    """Item with pinned features.

    Attributes:
        prompt: Its form in the prompt.
        was_there: Whether the features existed before.
        alias: See `ReceivedItem`.
    """

    key: ContentKey
    handle: Handle
    prompt: Prompt
    was_there: bool
    alias: bytes = b""


ITEMS = counter(
    "afferent_items_total",
    "Media items by modality and outcome: hit, made, joined, fetched from a tier, or failed",
    modality=tuple(Modality),
    outcome=("hit", "made", "joined", "fetched", "failed"),
)


class ItemStage:
    """Reads, plans and prepares items, over one store."""

    def __init__(
        self,
        store: AsyncDaemonStore,
        gate: Gate,
        processor: Processor,
        settings: ItemSettings,
    ) -> None:
        self._store, self._gate = store, gate
        self._family, self._settings = processor.family, settings
        self._names = Names(store, timeout_s=settings.timeout_s)
        self._reader = ItemReader(store, processor, self._names, settings)
        self._prompts: dict[ContentKey, Prompt] = {}
        self.heap = HeapReserve()
        self._maker = Maker(store, gate, shares=settings.shares, timeout_s=settings.timeout_s)
        self._planner = Planner(self._maker, processor)
        self.documents = DocumentReader(store, gate, self._maker, self, self._reader, settings)
        self.early = EarlyItems(
            *(store, gate, self, self._reader),
            max_nbytes=self._maker.share_nbytes(ObjectKind.RAW) // _EARLY_PART,
        )

    def takes(self, modality: Modality) -> bool:
        """Whether the model supports this modality."""
        return modality in self._family.tokens

    def follows(self, max_pixels: int) -> bool:
        """Whether a limit of ``max_pixels`` makes images smaller."""
        return self._family.bounded(max_pixels) is not self._family

    def check(self, request: ItemRequest) -> None:
        """Refuse a request by the number and modality of its items.

        Raises:
            TooManyItems: It has more items of a modality than allowed.
            UnsupportedMedia: The model does not support a modality.
        """
        self.check_count(request)
        for modality in {part.modality for part in request.media}:
            if not self.takes(modality):
                raise UnsupportedMedia(f"the model takes no {modality}", param=Param.MESSAGES)

    @property
    def shows_documents(self) -> bool:
        """Whether documents are replaced by their pages, for an engine behind this server."""
        return self._settings.limits.document_content != "forward"

    @property
    def names_items(self) -> bool:
        """Whether items have names outside of the store, for which their bytes are needed."""
        return self._settings.name_of is not None

    async def missing(self, request: ItemRequest) -> set[MediaPart]:
        """Return the items known by their digests whose features are gone; nothing stays pinned.

        Raises:
            Unavailable: Try again.
        """
        return await self._reader.missing(request)

    def check_count(self, request: ItemRequest) -> None:
        """Check only the number of items."""
        limits = self._settings.limits_of(request.share.tenant)
        numbers = Counter(part.modality for part in request.media if not part.is_page)
        for modality, number in numbers.items():
            most = limits.of(modality).max_items
            if number > most:
                raise TooManyItems(
                    f"the request has {count(number, modality)}; at most {most} are accepted "
                    f"({_MOST_SETTING[modality]})",
                    param=Param.MESSAGES,
                )

    async def read(self, request: ItemRequest, trace: Trace) -> RequestItems:
        """Return the items with their bytes and keys, and the plans of images.

        Raises:
            MediaNotCached: Some were not sent, and are not cached.
            InvalidMedia: An item is invalid, or its name belongs to another item.
            Unavailable: Try again.
        """
        items = await self._read(request, trace, may_recall=True)
        try:
            return await self.plan(request.request_id, items, trace)
        except BaseException:
            with items.awaited():
                raise

    async def read_bytes(self, request: ItemRequest, trace: Trace) -> RequestItems:
        """Call `read` without plans: for items that are not decoded here."""
        return await self._read(request, trace, may_recall=False)

    async def _read(self, request: ItemRequest, trace: Trace, *, may_recall: bool) -> RequestItems:
        if not request.media:
            return RequestItems()
        items = await self._reader.read(request, trace, may_recall=may_recall)
        for item in items.distinct:
            for raw in item.copies:
                if raw.origin not in (PAGE, COPY):
                    MEDIA_BYTES.labels(item.modality, raw.origin).inc(raw.nbytes)
        return items

    async def plan(self, request_id: str, items: RequestItems, trace: Trace) -> RequestItems:
        """Return the items with the plans of images, after `read_bytes`, to make features of them.

        Raises:
            InvalidMedia: An item is invalid.
            Unavailable: Try again.
        """
        plans = await self._planner.plan_images(request_id, items.distinct, trace)
        return replace(items, plans=plans)

    async def knows(self, request_id: str, tenant: str, digest: bytes) -> bool:
        """Return whether features of media with this digest exist, so that the bytes need not come.

        Raises:
            StoreUnavailable: Try again.
        """
        return await self._reader.knows(request_id, tenant, digest)

    async def make_ahead(self, request: ItemRequest, trace: Trace) -> list[bool]:
        """Make the features of items before the request that counts them as its own.

        Returns:
            Whether those of each item did not exist, in order.

        Raises:
            As from `read` and `prepare`.
        """
        items = await self.read(request, trace)
        with items.awaited():
            ready = await self.prepare(request.request_id, items, trace, is_ahead=True)
        return [not item.was_there for item in ready]

    def check_images(self, images: Sequence[tuple[ImageHeader, Detail]], *, max_pixels: int) -> int:
        """Check that the features of such images can be in the arena at once.

        Args:
            max_pixels: As for `MediaPart`.

        Returns:
            The number of their tokens in a prompt, as far as it is known.

        Raises:
            InvalidMedia: The model does not support an image.
            ArenaTooSmall: They can't.
        """
        asked = [
            self._planner.exact(header, self._reader.most_pixels(detail, max_pixels))
            for header, detail in images
        ]
        plans = [plan for plan in asked if plan is not None]
        self._maker.check_share(ObjectKind.FEATURES, [plan.nbytes for plan in plans])
        return sum(piece for plan in plans for piece in plan.prompt if isinstance(piece, int))

    def sent(self, item: ReceivedItem) -> bytes | memoryview | None:
        """Return an item's encoded bytes, without a copy; ``None`` if it was not sent."""
        raw = item.raw
        return None if raw is None or raw.is_left_out else raw.bytes_in(self._store)

    async def keep_bytes(self, request_id: str, items: RequestItems, trace: Trace) -> list[File]:
        """Return the location of all items' bytes, in order: sealed, and pinned by the request.

        Raises:
            MediaNotCached: An item came by name alone, and its bytes are needed.
            StoreFull: There is no space now.
        """
        if unsent := [item for item in items.distinct if item.raw is None]:
            self._reader.need(item.digest for item in unsent)
            raise not_cached([item.name for item in unsent])
        _, unsealed = items.received
        if unsealed:
            to_seal = [SealItem(handle, handle.nbytes) for handle in unsealed]
            await self._store.seal(request_id, to_seal)
        self.heap.note(0, len(items.distinct))  # known or not, they come into the arena
        files, _ = await self._write_raw(
            request_id, items.distinct, trace, may_wait=not any(items.received)
        )
        return [files[item] for item in items.in_order]

    @property
    def live_audio_nbytes(self) -> int:
        """Limit of the gate for the audio of live transcriptions, which an engine keeps."""
        return self._maker.share_nbytes(ObjectKind.FEATURES) // _LIVE_AUDIO_PART

    async def enter_forwarded(
        self, request_id: str, items: RequestItems, trace: Trace, *, num_machines: int = 1
    ) -> None:
        """Wait at the gate with items that the engine processes itself.

        Args:
            num_machines: Machines on which it does so.

        Raises:
            NoPermitLeft: Too many requests wait already.
            DeadlineExceeded: The gate did not admit them in time.
        """
        nbytes = sum(map(tensor_nbytes, items.in_order))
        start_ns = time.monotonic_ns()
        with trace.at("admission"):
            limit_nbytes = num_machines * self._maker.share_nbytes(ObjectKind.FEATURES)
            await self._gate.enter_forwarded(request_id, nbytes, limit_nbytes=limit_nbytes)
        trace.stage(start_ns, "wait_for_a_permit")

    async def prepare(
        self,
        request_id: str,
        items: RequestItems,
        trace: Trace,
        *,
        is_forwarded: bool = False,
        is_ahead: bool = False,
    ) -> list[ReadyItem]:
        """Return the features of all items, in order; missing ones are made.

        Args:
            is_forwarded: Whether the engine gets these items or others of the request as bytes, so
                that `keep_bytes` came before, and `enter_forwarded` follows: the bytes stay pinned,
                and no permit is taken.
            is_ahead: Whether another request counts these items as its own.

        Raises:
            InvalidMedia: An item is invalid.
            ArenaTooSmall: The arena is too small for all items at once.
            Unavailable: Try again.
        """
        if not (distinct := items.distinct):
            return []
        sealed, unsealed = items.received
        settled = found = await self._find(request_id, distinct, trace)
        if all(isinstance(outcome, Hit) for outcome in found):
            if unsealed:
                self._store.discard(request_id, unsealed)
        else:
            self._check_room(items)
            if unsealed:
                to_seal = [SealItem(handle, handle.nbytes) for handle in unsealed]
                sealed += await self._store.seal(request_id, to_seal)
            found, settled = await self._make(
                request_id, items, found, trace, in_turn=not is_forwarded
            )
        if sealed and not is_forwarded:  # jobs pin the received bytes that they need
            await self._store.release(request_id, sealed)
        _count_outcomes(distinct, found, settled, trace, is_ahead=is_ahead)
        if not is_ahead and not is_forwarded:
            self._note_known(distinct, found)
        ready = {
            item: self._ready(item, items.plans.get(item), before, after)
            for item, before, after in zip(distinct, found, settled, strict=True)
        }
        if items.new_names:  # only now: no name is bound to an invalid item
            await self._names.bind(request_id, items.new_names)
        return [ready[item] for item in items.in_order]

    async def close(self) -> None:
        await self.early.close()
        await self.documents.close()
        await self._reader.close()

    # Steps

    async def _find(
        self, request_id: str, items: Sequence[ReceivedItem], trace: Trace
    ) -> list[Outcome]:
        """Pin existing features; nothing is made or awaited."""
        start_ns = time.monotonic_ns()
        wanted = [Find(item.key) for item in items]
        outcomes = await self._store.acquire(request_id, wanted)
        trace.stage(start_ns, "acquire", note=summary(outcomes))
        return outcomes

    async def _make(
        self,
        request_id: str,
        items: RequestItems,
        found: Sequence[Outcome],
        trace: Trace,
        *,
        in_turn: bool,
    ) -> tuple[list[Outcome], list[Outcome]]:
        """Reserve space for all features, and have missing ones made.

        Returns:
            The outcomes when the space was there, and those after the jobs.
        """
        distinct = items.distinct
        # Nothing is pinned while this waits for space: otherwise requests could deadlock.
        if pinned := [handle for handle in map(existing, found) if handle is not None]:
            await self._store.release(request_id, pinned)
        nbytes = {
            item: handle.nbytes
            for item, outcome in zip(distinct, found, strict=True)
            if (handle := handle_if_there(outcome) if item.raw is None else existing(outcome))
        }
        missing = [item for item in distinct if item not in nbytes]
        self._check_sent(missing)
        files, written = await self._write_raw(
            request_id, missing, trace, may_wait=not any(items.received)
        )
        planned = await self._planner.plan_files(request_id, items, files, trace)
        jobs = {
            item: features_job(item, file, planned[item], self._head(file))
            for item, file in files.items()
        }
        nbytes |= {item: job.nbytes for item, job in jobs.items()}
        wanted = [jobs.get(item) or Join(item.key) for item in distinct]
        room = [ReserveItem(ObjectKind.FEATURES, nbytes[item]) for item in distinct]
        outcomes = await self._maker.acquire(request_id, wanted, trace, room=room, in_turn=in_turn)
        if written:
            await self._store.release(request_id, written)
        keys = [item.key for item in distinct]
        return outcomes, await self._maker.settle(request_id, keys, outcomes, trace)

    def _check_sent(self, missing: Sequence[ReceivedItem]) -> None:
        """Refuse missing items whose bytes are not here.

        Raises:
            StoreFull: One was a URL cache hit, or known, when the request came.
            MediaNotCached: They are known by their names alone.
        """
        unsent = [item for item in missing if item.raw is None]
        self._reader.need(item.digest for item in unsent)
        if any(item.is_recalled for item in unsent):
            raise StoreFull("features were evicted while this request came; try again")
        if unsent:
            raise not_cached([item.name for item in unsent])

    def _head(self, file: File) -> memoryview:
        """Return the first bytes of a file, as many as decide its placement."""
        handle, where = file
        return self._store.block(handle)[where.start :][: min(where.nbytes, PLACEMENT_NBYTES)]

    async def _write_raw(
        self,
        request_id: str,
        items: Sequence[ReceivedItem],
        trace: Trace,
        *,
        may_wait: bool,
    ) -> tuple[dict[ReceivedItem, File], list[Handle]]:
        """Move bytes from the heap into the arena.

        Args:
            may_wait: Whether the request has no other raw bytes in the arena: with some, it might
                wait for itself, or for another such request.

        Returns:
            The location of each item's bytes, and the objects that were written now.
        """
        files = {item: item.file for item in items}
        located = {item: file for item, file in files.items() if file is not None}
        on_heap = [(item, item.data) for item in items if item.data is not None]
        if not on_heap:
            return located, []
        start_ns = time.monotonic_ns()
        blocks = [CreateItem(ObjectKind.RAW, len(data)) for _, data in on_heap]
        if may_wait:
            with trace.at("admission"):
                handles = await self._gate.create(request_id, blocks)
        else:
            handles = await self._store.create(request_id, blocks)
        for (_, data), handle in zip(on_heap, handles, strict=True):
            target = np.frombuffer(self._store.block(handle), dtype=np.uint8)
            np.copyto(target, np.frombuffer(data, dtype=np.uint8))
        items_to_seal = [SealItem(handle, handle.nbytes) for handle in handles]
        sealed = await self._store.seal(request_id, items_to_seal)
        for (item, data), handle in zip(on_heap, sealed, strict=True):
            located[item] = handle, InputRange(0, len(data))
        nbytes = sum(len(data) for _, data in on_heap)
        trace.stage(start_ns, "into_the_arena", copied_nbytes=nbytes)
        return located, sealed

    def _note_known(self, items: Sequence[ReceivedItem], found: Sequence[Outcome]) -> None:
        """Tell the heap's reserve which of the items that came in bodies were known."""
        were_known = [
            isinstance(outcome, Hit) and not item.is_new
            for item, outcome in zip(items, found, strict=True)
            if item.raw is not None and item.raw.origin == "data"
        ]
        self.heap.note(sum(were_known), len(were_known))

    def _ready(
        self, item: ReceivedItem, planned: Planned | None, before: Outcome, after: Outcome
    ) -> ReadyItem:
        handle, was_there = handle_of(after), isinstance(before, Hit)
        if planned is not None:
            return ReadyItem(item.key, handle, planned.plan.prompt, was_there, item.alias)
        return ReadyItem(item.key, handle, self._prompt_of(item.key, handle), was_there, item.alias)

    def _prompt_of(self, key: ContentKey, handle: Handle) -> Prompt:
        """Return the prompt in an item's features, which the key determines."""
        known = self._prompts.get(key)
        if known is None:
            tree: Any = codec.view(self._store.block(handle))
            known = tuple(tree["prompt"])
            if len(known) <= _MOST_PIECES:
                if len(self._prompts) >= _MOST_PROMPTS:
                    self._prompts.clear()
                self._prompts[key] = known
        return known

    # Limits and metrics

    def _check_room(self, items: RequestItems) -> None:
        """Refuse items that can never be in the arena at once."""
        on_heap = [len(item.data) for item in items.distinct if item.data is not None]
        self._maker.check_share(ObjectKind.RAW, on_heap)
        planned = [each.plan.nbytes for each in items.plans.values()]
        self._maker.check_share(ObjectKind.FEATURES, planned)


def _count_outcomes(
    items: Sequence[ReceivedItem],
    found: Sequence[Outcome],
    settled: Sequence[Outcome],
    trace: Trace,
    *,
    is_ahead: bool,
) -> None:
    words = Counter(
        (item.modality, _word(item, *outcomes))
        for item, *outcomes in zip(items, found, settled, strict=True)
    )
    for (modality, word), number in words.items():
        trace.outcomes[word] += number
        if is_ahead:
            continue
        ITEMS.labels(modality, word).inc(number)
        trace.items.append(f"{count(number, modality)} {word}")
    trace.digests += [item.key.hex() for item in items]


_MOST_SETTING = {
    Modality.IMAGE: "--max-images",
    Modality.VIDEO: "--max-videos",
    Modality.AUDIO: "--max-audio-clips",
}


def _word(item: ReceivedItem, found: Outcome, settled: Outcome) -> str:
    """Return the metric label of an item's outcomes: before the jobs, and after them."""
    if isinstance(settled, Failed):
        return "failed"
    if item.is_new:
        return "made"
    if isinstance(found, Scheduled):
        is_fetched = any(span.stage == FETCHED for span in spans_of(settled))
        return "fetched" if is_fetched else "made"
    return "joined" if isinstance(found, InFlight) else "hit"
