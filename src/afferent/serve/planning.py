"""What a request's items become: planned from headers, or by a worker that is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from afferent import keys
from afferent.errors import InternalError
from afferent.ingest.probe import ImageHeader, MediaHeader
from afferent.ingest.raw import RawMedia
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
from afferent.preprocess.plan import FeaturePlan
from afferent.serve.account import Account
from afferent.serve.making import Maker, handle_of
from afferent.store import messages as m
from afferent.store.async_client import AsyncDaemonStore
from afferent.types import ContentKey, Handle, Modality, ObjectKind, decode, encode

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


class Planner:
    """Plans items for one family of models."""

    def __init__(
        self, store: AsyncDaemonStore, maker: Maker, family: Family, fingerprint: bytes
    ) -> None:
        self._store, self._maker = store, maker
        self._family, self._fingerprint = family, fingerprint
        self._known_plans: dict[tuple[int, int], FeaturePlan] = {}

    async def plan_images(
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

    async def plan_files(
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

    def _known_plan(self, header: ImageHeader) -> FeaturePlan | None:
        known = self._known_plans.get(_size(header))
        return known or self._family.plan(header)

    async def _ask(
        self, request_id: str, asked: Sequence[m.AcquireItem], account: Account
    ) -> dict[ContentKey, Planned]:
        """Plans that workers make."""
        outcomes = await self._maker.acquire(request_id, asked, account)
        item_keys = [ContentKey(item.key) for item in asked]
        outcomes = await self._maker.settle(request_id, item_keys, outcomes, account, stage="plan")
        handles = [handle_of(outcome) for outcome in outcomes]
        blocks = [self._store.block(handle) for handle in handles]
        planned = [decode(planned_decoder, block) for block in blocks]
        del blocks
        await self._store.release(request_id, handles)
        return dict(zip(item_keys, planned, strict=True))


def features_job(
    item: SourceItem, planned: Planned | None, written: Handle | None
) -> m.AcquireItem:
    """Pin an item's features, or have them made.

    Args:
        planned: Of an item without a plan of its own.
        written: Where its bytes are, if they came on the heap.
    """
    handle, file = _input_of(item, written)
    if planned is not None:
        header, plan = planned.header, planned.plan
    elif item.header is not None and item.plan is not None:
        header, plan = item.header, item.plan
    else:
        raise InternalError("an item has no plan")
    return _job(item.key, plan.nbytes, MakeFeatures(header, file), [handle])


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
