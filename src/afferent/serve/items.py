"""A request's media: from URLs to handles of features, pinned under the request's id.

What there is of an item is asked first, what has to be made comes after: encoded bytes go into the
arena, a plan says how large the features are, and a job makes them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from afferent import keys
from afferent.admit.gate import Gate
from afferent.config import RequestLimits
from afferent.errors import (
    AfferentError,
    ArenaTooSmall,
    InternalError,
    InvalidMedia,
    MediaTooLarge,
    StoreFull,
    TooManyItems,
    UnsupportedMedia,
    error_from,
)
from afferent.ingest.digest import Digester
from afferent.ingest.fetch import Fetcher, FetchSession
from afferent.ingest.probe import ImageHeader, MediaHeader, probe_image
from afferent.ingest.raw import HeapAllowance, RawBuffer, RawMedia
from afferent.ingest.source import max_nbytes, read_media
from afferent.metrics import Metrics
from afferent.preprocess.family import Family
from afferent.preprocess.jobs import (
    PLAN_NBYTES,
    InputRange,
    Job,
    MakeFeatures,
    PlanFile,
    PlanImage,
    Planned,
    planned_decoder,
)
from afferent.preprocess.plan import FeaturePlan, Prompt
from afferent.serve.account import Account
from afferent.serve.request import MediaPart
from afferent.store import codec
from afferent.store import messages as m
from afferent.store.allocator import round_up
from afferent.store.async_client import AsyncDaemonStore
from afferent.store.region import Shares
from afferent.types import ContentKey, Handle, Modality, ObjectKind, decode, encode

Result = TypeVar("Result")

_PLAN_TAG = b"afferent/plan/v1"
_MAX_KNOWN_PLANS = 4096


@dataclass(frozen=True, slots=True)
class SourceItem:
    """One item of a request, before anything is decoded.

    An image's ``header`` and ``plan`` are exact; a video or audio clip has none yet.
    """

    modality: Modality
    raw: RawMedia
    digest: bytes
    key: ContentKey
    header: MediaHeader | None = None
    plan: FeaturePlan | None = None


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
        self._limits, self._shares, self._timeout_s = limits, shares, timeout_s
        self._metrics, self._digester = metrics, digester
        self._fetcher = Fetcher(limits)
        self._known_plans: dict[tuple[int, int], FeaturePlan] = {}

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
                    f"the request has {_count(number, modality)}; at most {most} are accepted",
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
            note = _count(len(fetched), "item")
            account.stage(start_ns, "fetch", copied_nbytes=sum(fetched), note=note)
        start_ns = time.monotonic_ns()
        views = [self._view(item) for item in media]
        headers = [self._header(p.modality, view) for p, view in zip(parts, views, strict=True)]
        digests = await self._digester.digest_all(views)
        del views
        account.stage(start_ns, "header, digest")
        plans = await self._plan_images(request_id, headers, account)
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
            outcomes = await self._settle(request_id, item_keys, outcomes, account)
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

    async def _plan_images(
        self, request_id: str, headers: Sequence[MediaHeader | None], account: Account
    ) -> list[FeaturePlan | None]:
        """Exact, by the images' sizes; a worker is asked for those that only it knows."""
        images = [header for header in headers if isinstance(header, ImageHeader)]
        plans = {_size(image): self._known_plan(image) for image in images}
        asked: dict[tuple[int, int], m.AcquireItem] = {}
        for size in (size for size, plan in plans.items() if plan is None):
            key = ContentKey(keys.frame(_PLAN_TAG, self._fingerprint, encode(size)))
            asked[size] = _job(key, PLAN_NBYTES, PlanImage(ImageHeader(*size)), [])
        if asked:
            planned = await self._ask(request_id, list(asked.values()), account)
            found = {size: planned[ContentKey(item.key)].plan for size, item in asked.items()}
            plans |= found
            if len(self._known_plans) + len(found) > _MAX_KNOWN_PLANS:
                self._known_plans.clear()
            self._known_plans |= found
        return [plans[_size(h)] if isinstance(h, ImageHeader) else None for h in headers]

    def _known_plan(self, header: ImageHeader) -> FeaturePlan | None:
        known = self._known_plans.get(_size(header))
        return known or self._family.plan(header)

    async def _ask(
        self, request_id: str, asked: Sequence[m.AcquireItem], account: Account
    ) -> dict[ContentKey, Planned]:
        """Plans that workers make."""
        room = [m.ReserveItem(item.kind, item.nbytes) for item in asked]
        await self._gate.admit(request_id, room)
        outcomes = await self._store.acquire(request_id, asked)
        if any(outcome.state != "miss" for outcome in outcomes):
            await self._store.unreserve(request_id, room)
        item_keys = [ContentKey(item.key) for item in asked]
        outcomes = await self._settle(request_id, item_keys, outcomes, account, stage="plan")
        handles = [_handle_of(outcome) for outcome in outcomes]
        blocks = [self._store.block(handle) for handle in handles]
        planned = [decode(planned_decoder, block) for block in blocks]
        del blocks
        await self._store.release(request_id, handles)
        return dict(zip(item_keys, planned, strict=True))

    # Features

    async def _find(
        self, request_id: str, items: Sequence[SourceItem], account: Account
    ) -> list[m.Outcome]:
        """Pin what is there; nothing else is made or waited for."""
        start_ns = time.monotonic_ns()
        wanted = [m.AcquireItem(item.key, ObjectKind.FEATURES, 1, "find") for item in items]
        outcomes = await self._store.acquire(request_id, wanted)
        account.stage(start_ns, "acquire", note=_summary(outcomes))
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
        planned = await self._plan_files(request_id, missing, written, account)
        wanted = {
            item.key: self._features_job(item, planned.get(item.key), written.get(item.key))
            for item in missing
        }
        for key, handle in hits.items():
            wanted[key] = m.AcquireItem(key, ObjectKind.FEATURES, handle.nbytes, None)
        outcomes = await self._acquire_granted(
            request_id, [wanted[item.key] for item in items], account
        )
        if written:
            await self._store.release(request_id, list(written.values()))
        return outcomes

    async def _acquire_granted(
        self, request_id: str, wanted: Sequence[m.AcquireItem], account: Account
    ) -> list[m.Outcome]:
        """In order of arrival, all of it or nothing; what the grant was not needed for goes back.

        Raises:
            ArenaTooSmall: It could never be had.
            StoreFull: Too many wait.
            DeadlineExceeded: It was not granted in time.
        """
        self._check_share(ObjectKind.FEATURES, [item.nbytes for item in wanted])
        start_ns = time.monotonic_ns()
        room = [m.ReserveItem(ObjectKind.FEATURES, item.nbytes) for item in wanted]
        await self._gate.admit(request_id, room)
        account.stage(start_ns, "room for features")
        start_ns = time.monotonic_ns()
        outcomes = await self._store.acquire(request_id, wanted)
        if any(outcome.state != "miss" for outcome in outcomes):
            await self._store.unreserve(request_id, room)
        account.stage(start_ns, "queue jobs", note=_summary(outcomes))
        if any(outcome.state == "absent" for outcome in outcomes):
            raise StoreFull("features were evicted while this request waited for room; try again")
        return outcomes

    async def _plan_files(
        self,
        request_id: str,
        items: Sequence[SourceItem],
        written: Mapping[ContentKey, Handle],
        account: Account,
    ) -> dict[ContentKey, Planned]:
        """Of the items whose headers only workers read."""
        asked: dict[ContentKey, m.AcquireItem] = {}
        of_item: dict[ContentKey, ContentKey] = {}
        for item in items:
            if item.plan is None:
                parts = (self._fingerprint, item.modality.encode(), item.digest)
                key = ContentKey(keys.frame(_PLAN_TAG, *parts))
                handle, file = _input_of(item, written.get(item.key))
                asked[key] = _job(key, PLAN_NBYTES, PlanFile(item.modality, file), [handle])
                of_item[item.key] = key
        if not asked:
            return {}
        planned = await self._ask(request_id, list(asked.values()), account)
        return {item_key: planned[key] for item_key, key in of_item.items()}

    def _features_job(
        self, item: SourceItem, planned: Planned | None, written: Handle | None
    ) -> m.AcquireItem:
        handle, file = _input_of(item, written)
        if planned is not None:
            header, plan = planned.header, planned.plan
        elif item.header is not None and item.plan is not None:
            header, plan = item.header, item.plan
        else:
            raise InternalError("an item has no plan")
        return _job(item.key, plan.nbytes, MakeFeatures(header, file), [handle])

    async def _settle(
        self,
        request_id: str,
        item_keys: Sequence[ContentKey],
        outcomes: list[m.Outcome],
        account: Account,
        *,
        stage: str = "wait for features",
    ) -> list[m.Outcome]:
        """The outcomes once none of them is pending."""
        pending = [i for i, outcome in enumerate(outcomes) if outcome.state in ("busy", "miss")]
        if not pending:
            return outcomes
        start_ns = time.monotonic_ns()
        made = await self._store.wait(
            request_id, [item_keys[index] for index in pending], timeout_s=self._timeout_s
        )
        account.stage(start_ns, stage, note=_count(len(made), "item"))
        settled = list(outcomes)
        for index, outcome in zip(pending, made, strict=True):
            settled[index] = outcome
            account.add(outcome.spans)
        return settled

    def _ready(self, item: SourceItem, outcome: m.Outcome) -> ReadyItem:
        handle = _handle_of(outcome)
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
        self._check_share(ObjectKind.RAW, on_heap)
        planned = [item.plan.nbytes for item in items if item.plan is not None]
        self._check_share(ObjectKind.FEATURES, planned)

    def _check_share(self, kind: ObjectKind, sizes: Sequence[int]) -> None:
        """Raises: ArenaTooSmall: They are more than the kind's share."""
        needed = sum(map(round_up, sizes))
        share = int(self._store.capacity_nbytes * self._shares[kind])
        if needed > share:
            raise ArenaTooSmall(
                f"the request's media take {needed} bytes as {kind}; "
                f"their share of the arena is {share}",
                param="messages",
            )

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
        for (modality, name), count in names.items():
            self._metrics.items.labels(modality, name).inc(count)
            account.items.append(f"{_count(count, modality)} {name}")


def _size(header: ImageHeader) -> tuple[int, int]:
    return header.width, header.height


def _input_of(item: SourceItem, written: Handle | None) -> tuple[Handle, InputRange]:
    """The object that an item's bytes are in, and where in it they are."""
    if written is not None:
        return written, InputRange(0, item.raw.nbytes)
    if item.raw.handle is None:
        raise InternalError("an item's bytes are not in the arena")
    return item.raw.handle, InputRange(item.raw.start, item.raw.nbytes)


def _job(key: ContentKey, nbytes: int, job: Job, inputs: list[Handle]) -> m.AcquireItem:
    return m.AcquireItem(key, ObjectKind.FEATURES, nbytes, m.JobSpec(inputs, encode(job)))


def _summary(outcomes: Sequence[m.Outcome]) -> str:
    """How many of each, such as ``"3 hit, 1 absent"``."""
    counts = Counter(outcome.state for outcome in outcomes)
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def _handle_of(outcome: m.Outcome) -> Handle:
    if outcome.failure is not None:
        raise error_from(outcome.failure.code, outcome.failure.message)
    if outcome.handle is None:
        raise InternalError("the store named no handle")
    return outcome.handle


def _count(number: int, noun: str) -> str:
    if noun == Modality.AUDIO:
        noun = "audio clip"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


async def gather(coroutines: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results in order; the first failure cancels the others and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except* AfferentError as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
