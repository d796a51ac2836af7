"""A request's media: from URLs to handles of features, pinned under the request's id.

What there is of an item is asked first, what has to be made comes after: encoded bytes go into the
arena, a plan says how large the features are, and a job makes them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from afferent import keys
from afferent.admit.gate import Gate
from afferent.config import RequestLimits
from afferent.errors import (
    AfferentError,
    InvalidMedia,
    MediaTooLarge,
    TooManyItems,
    UnsupportedMedia,
)
from afferent.ingest.digest import Digester
from afferent.ingest.fetch import Fetcher, FetchSession
from afferent.ingest.probe import MediaHeader, probe_image
from afferent.ingest.raw import HeapAllowance, RawBuffer, RawMedia
from afferent.ingest.source import max_nbytes, read_media
from afferent.metrics import Metrics
from afferent.preprocess.family import Family
from afferent.preprocess.plan import Prompt
from afferent.serve.account import Account
from afferent.serve.making import Maker, count, handle_of, summary
from afferent.serve.planning import Planner, SourceItem, features_job
from afferent.serve.request import MediaPart
from afferent.store import codec
from afferent.store import messages as m
from afferent.store.async_client import AsyncDaemonStore
from afferent.store.region import Shares
from afferent.types import ContentKey, Handle, Modality, ObjectKind

Result = TypeVar("Result")


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
        self._family, self._fingerprint = family, fingerprint
        self._limits = limits
        self._metrics, self._digester = metrics, digester
        self._fetcher = Fetcher(limits)
        self._maker = Maker(store, gate, shares=shares, timeout_s=timeout_s)
        self._planner = Planner(store, self._maker, family, fingerprint)

    def check(self, parts: Sequence[MediaPart]) -> None:
        """Refuse what can be refused by counting.

        Raises:
            TooManyItems: More of a kind than a request may have.
            UnsupportedMedia: Of a kind that the model does not take.
        """
        limits = self._limits
        for modality, most in (
            (Modality.IMAGE, limits.max_images),
            (Modality.VIDEO, limits.max_videos),
            (Modality.AUDIO, limits.max_audio_clips),
        ):
            number = sum(part.modality is modality for part in parts)
            if number > most:
                raise TooManyItems(
                    f"the request has {count(number, modality)}; at most {most} are accepted",
                    param="messages",
                )
            if number and modality not in self._family.tokens:
                raise UnsupportedMedia(f"the model takes no {modality}", param="messages")

    async def read(
        self, request_id: str, parts: Sequence[MediaPart], account: Account
    ) -> list[SourceItem]:
        """The items' bytes, keys, and, of images, plans."""
        if not parts:
            return []
        start_ns = time.monotonic_ns()
        most = [max_nbytes(part.modality, self._limits) for part in parts]
        fetches = self._fetcher.session(max_nbytes=max(self._limits.max_body_nbytes, *most))
        heap = HeapAllowance()
        media = await gather([self._receive(request_id, part, fetches, heap) for part in parts])
        fetched = [item.nbytes for item in media if item.origin == "fetch"]
        if fetched:
            note = count(len(fetched), "item")
            account.stage(start_ns, "fetch", copied_nbytes=sum(fetched), note=note)
        start_ns = time.monotonic_ns()
        views = [self._view(item) for item in media]
        headers = [self._header(p.modality, view) for p, view in zip(parts, views, strict=True)]
        digests = await self._digester.digest_all(views)
        del views
        account.stage(start_ns, "header, digest")
        plans = await self._planner.plan_images(request_id, headers, account)
        return [
            SourceItem(part.modality, item, digest, self._key(part.modality, digest), header, plan)
            for part, item, digest, header, plan in zip(
                parts, media, digests, headers, plans, strict=True
            )
        ]

    async def prepare(
        self, request_id: str, items: Sequence[SourceItem], account: Account
    ) -> list[ReadyItem]:
        """The features of all items, in order, made where they are missing.

        Raises:
            InvalidMedia: An item can't be used.
            ArenaTooSmall: The items could never be in the arena at once.
            Unavailable: Try again.
        """
        distinct = list({item.key: item for item in items}.values())
        if not distinct:
            return []
        self._check_room(distinct)
        outcomes = await self._find(request_id, distinct, account)
        states = [outcome.state for outcome in outcomes]
        if any(state != "hit" for state in states):
            outcomes = await self._admit(request_id, distinct, outcomes, account)
            states = [outcome.state for outcome in outcomes]
            item_keys = [item.key for item in distinct]
            outcomes = await self._maker.settle(request_id, item_keys, outcomes, account)
        # Jobs hold what they need of what was received.
        received = {item.raw.handle for item in items if item.raw.handle is not None}
        if received:
            await self._store.release(request_id, list(received))
        self._count_outcomes(distinct, states, outcomes, account)
        ready = {
            item.key: self._ready(item, outcome)
            for item, outcome in zip(distinct, outcomes, strict=True)
        }
        return [ready[item.key] for item in items]

    async def close(self) -> None:
        await self._fetcher.close()
        self._digester.close()

    # Bytes

    async def _receive(
        self, request_id: str, part: MediaPart, fetches: FetchSession, heap: HeapAllowance
    ) -> RawMedia:
        if isinstance(part.source, RawMedia):
            most = max_nbytes(part.modality, self._limits)
            if part.source.nbytes > most:
                raise MediaTooLarge(f"the {part.modality} file has more than {most} bytes")
            return part.source
        buffer = RawBuffer(self._store, request_id, heap)
        return await read_media(
            part.source, part.modality, buffer, limits=self._limits, fetches=fetches
        )

    def _view(self, raw: RawMedia) -> memoryview:
        if raw.handle is None:
            return memoryview(raw.data or b"")
        return self._store.block(raw.handle)[raw.start : raw.start + raw.nbytes]

    # Plans

    def _header(self, modality: Modality, data: memoryview) -> MediaHeader | None:
        """Containers of video and audio are read by workers, which are confined."""
        if modality is Modality.IMAGE:
            return probe_image(data, self._limits)
        if not len(data):
            raise InvalidMedia(f"the {modality} file is empty")
        return None

    def _key(self, modality: Modality, digest: bytes) -> ContentKey:
        """The same file as a picture and as a video is not the same item."""
        return keys.features_key(
            tenant="", fingerprint=self._fingerprint, options=modality.encode(), media=digest
        )

    # Features

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
        written = await self._write_raw(request_id, missing, account)
        planned = await self._planner.plan_files(request_id, missing, written, account)
        wanted = {
            item.key: features_job(item, planned.get(item.key), written.get(item.key))
            for item in missing
        }
        for key, handle in hits.items():
            wanted[key] = m.AcquireItem(key, ObjectKind.FEATURES, handle.nbytes, None)
        outcomes = await self._maker.acquire(
            request_id, [wanted[item.key] for item in items], account
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
        on_heap = {item.key: item.raw.data for item in items if item.raw.data is not None}
        if not on_heap:
            return {}
        start_ns = time.monotonic_ns()
        sizes = [len(data) for data in on_heap.values()]
        if all(item.raw.handle is None for item in items):
            room = [m.ReserveItem(ObjectKind.RAW, nbytes) for nbytes in sizes]
            await self._gate.admit(request_id, room)
        # Who holds raw bytes already must not wait for more: he might wait for himself.
        handles = await self._store.create(
            request_id, [m.CreateItem(ObjectKind.RAW, nbytes) for nbytes in sizes]
        )
        for data, handle in zip(on_heap.values(), handles, strict=True):
            target = np.frombuffer(self._store.block(handle), dtype=np.uint8)
            np.copyto(target, np.frombuffer(data, dtype=np.uint8))
        items_to_seal = [m.SealItem(handle, handle.nbytes) for handle in handles]
        sealed = await self._store.seal(request_id, items_to_seal)
        account.stage(start_ns, "into the arena", copied_nbytes=sum(sizes))
        return dict(zip(on_heap, sealed, strict=True))

    # Room and figures

    def _check_room(self, items: Sequence[SourceItem]) -> None:
        """Refuse what could never be in the arena at once, however long one waits."""
        on_heap = [item.raw.nbytes for item in items if item.raw.data is not None]
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


async def gather(coroutines: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results in order; the first failure cancels the others and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except* AfferentError as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
