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
from afferent.config import Limits
from afferent.errors import (
    AfferentError,
    ArenaTooSmall,
    InternalError,
    InvalidMedia,
    TooManyItems,
    UnsupportedMedia,
    error_from,
)
from afferent.ingest.digest import Digester
from afferent.ingest.fetch import Fetcher
from afferent.ingest.probe import ImageHeader, MediaHeader, probe_image
from afferent.ingest.source import Media, read_media
from afferent.metrics import Metrics
from afferent.preprocess.family import Family
from afferent.preprocess.jobs import (
    PLAN_NBYTES,
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
    data: bytes
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
        family: Family,
        fingerprint: bytes,
        *,
        limits: Limits,
        shares: Shares,
        timeout_s: float,
        metrics: Metrics,
        digester: Digester,
    ) -> None:
        self._store, self._family, self._fingerprint = store, family, fingerprint
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
        fetches = self._fetcher.session(max_nbytes=self._limits.max_body_nbytes)
        media = await gather(
            [
                read_media(part.url, part.modality, limits=self._limits, fetches=fetches)
                for part in parts
            ]
        )
        fetched = any(item.origin == "fetch" for item in media)
        nbytes = sum(len(item.data) for item in media)
        stage = "fetch" if fetched else "base64"
        account.stage(start_ns, stage, copied_nbytes=nbytes, note=_count(len(media), "item"))
        start_ns = time.monotonic_ns()
        headers = [self._header(p.modality, item) for p, item in zip(parts, media, strict=True)]
        digests = await self._digester.digest_all([item.data for item in media])
        account.stage(start_ns, "header, digest")
        plans = await self._plan_images(request_id, headers, account)
        return [
            SourceItem(part.modality, item.data, digest, self._key(digest), header, plan)
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
        start_ns = time.monotonic_ns()
        outcomes = await self._store.acquire(
            request_id,
            [m.AcquireItem(item.key, ObjectKind.FEATURES, 1, None) for item in distinct],
        )
        account.stage(start_ns, "acquire", note=_summary(outcomes))
        absent = [index for index, outcome in enumerate(outcomes) if outcome.state == "absent"]
        if absent:
            missing = [distinct[index] for index in absent]
            queued = await self._queue(request_id, missing, account)
            for index, outcome in zip(absent, queued, strict=True):
                outcomes[index] = outcome
        states = [outcome.state for outcome in outcomes]
        item_keys = [item.key for item in distinct]
        outcomes = await self._settle(request_id, item_keys, outcomes, account)
        self._count_outcomes(distinct, states, outcomes, account)
        ready = {
            item.key: self._ready(item, outcome)
            for item, outcome in zip(distinct, outcomes, strict=True)
        }
        return [ready[item.key] for item in items]

    async def close(self) -> None:
        await self._fetcher.close()
        self._digester.close()

    # Plans

    def _header(self, modality: Modality, media: Media) -> MediaHeader | None:
        """Containers of video and audio are read by workers, which are confined."""
        if modality is Modality.IMAGE:
            return probe_image(media.data, self._limits)
        if not media.data:
            raise InvalidMedia(f"the {modality} file is empty")
        return None

    def _key(self, digest: bytes) -> ContentKey:
        return keys.features_key(
            tenant="", fingerprint=self._fingerprint, options=b"", media=digest
        )

    async def _plan_images(
        self, request_id: str, headers: Sequence[MediaHeader | None], account: Account
    ) -> list[FeaturePlan | None]:
        """Exact, by the images' sizes; a worker is asked for those that only it knows."""
        asked: dict[ContentKey, m.AcquireItem] = {}
        sizes: dict[tuple[int, int], ContentKey] = {}
        for header in headers:
            if not isinstance(header, ImageHeader) or self._known_plan(header) is not None:
                continue
            upright = ImageHeader(header.width, header.height)
            key = ContentKey(keys.frame(_PLAN_TAG, self._fingerprint, encode(upright)))
            sizes[header.width, header.height] = key
            asked[key] = _job(key, PLAN_NBYTES, PlanImage(upright), [])
        if asked:
            planned = await self._ask(request_id, list(asked.values()), account)
            for size, key in sizes.items():
                if len(self._known_plans) >= _MAX_KNOWN_PLANS:
                    self._known_plans.clear()
                self._known_plans[size] = planned[key].plan
        return [self._known_plan(h) if isinstance(h, ImageHeader) else None for h in headers]

    def _known_plan(self, header: ImageHeader) -> FeaturePlan | None:
        known = self._known_plans.get((header.width, header.height))
        return known or self._family.plan(header)

    async def _ask(
        self, request_id: str, asked: Sequence[m.AcquireItem], account: Account
    ) -> dict[ContentKey, Planned]:
        """Plans that workers make."""
        outcomes = await self._store.acquire(request_id, asked)
        item_keys = [ContentKey(item.key) for item in asked]
        outcomes = await self._settle(request_id, item_keys, outcomes, account, stage="plan")
        handles = [_handle_of(outcome) for outcome in outcomes]
        blocks = [self._store.block(handle) for handle in handles]
        planned = [decode(planned_decoder, block) for block in blocks]
        del blocks
        await self._store.release(request_id, handles)
        return dict(zip(item_keys, planned, strict=True))

    # Features

    async def _queue(
        self, request_id: str, items: Sequence[SourceItem], account: Account
    ) -> list[m.Outcome]:
        """Have the features made that nobody has made or is making."""
        start_ns = time.monotonic_ns()
        raw = await self._write_raw(request_id, items)
        copied = sum(len(item.data) for item in items)
        account.stage(start_ns, "into the arena", copied_nbytes=copied)
        unplanned = {
            ContentKey(
                keys.frame(_PLAN_TAG, self._fingerprint, item.modality.encode(), item.digest)
            ): (item, handle)
            for item, handle in zip(items, raw, strict=True)
            if item.plan is None
        }
        planned: dict[ContentKey, Planned] = {}
        if unplanned:
            asked = [
                _job(key, PLAN_NBYTES, PlanFile(item.modality), [handle])
                for key, (item, handle) in unplanned.items()
            ]
            found = await self._ask(request_id, asked, account)
            planned = {unplanned[key][0].key: value for key, value in found.items()}
        start_ns = time.monotonic_ns()
        jobs = [
            self._features_job(item, planned.get(item.key), handle)
            for item, handle in zip(items, raw, strict=True)
        ]
        self._check_share(ObjectKind.FEATURES, [job.nbytes for job in jobs])
        outcomes = await self._store.acquire(request_id, jobs)
        await self._store.release(request_id, raw)
        account.stage(start_ns, "queue jobs", note=_summary(outcomes))
        return outcomes

    def _features_job(
        self, item: SourceItem, planned: Planned | None, raw: Handle
    ) -> m.AcquireItem:
        if planned is not None:
            header, plan = planned.header, planned.plan
        elif item.header is not None and item.plan is not None:
            header, plan = item.header, item.plan
        else:
            raise InternalError("an item has no plan")
        return _job(item.key, plan.nbytes, MakeFeatures(header), [raw])

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

    async def _write_raw(self, request_id: str, items: Sequence[SourceItem]) -> list[Handle]:
        """The encoded media in the arena, for the workers to read."""
        handles = await self._store.create(
            request_id, [m.CreateItem(ObjectKind.RAW, len(item.data)) for item in items]
        )
        for item, handle in zip(items, handles, strict=True):
            target = np.frombuffer(self._store.block(handle), dtype=np.uint8)
            np.copyto(target, np.frombuffer(item.data, dtype=np.uint8))
        sealed = [m.SealItem(handle, handle.nbytes) for handle in handles]
        return await self._store.seal(request_id, sealed)

    # Room and figures

    def _check_room(self, items: Sequence[SourceItem]) -> None:
        """Refuse what could never be in the arena at once, however long one waits."""
        self._check_share(ObjectKind.RAW, [len(item.data) for item in items])
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
