"""What a request's items become: planned from headers, or by a worker that is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
from afferent.serve.names import Name
from afferent.store import messages as m
from afferent.store.async_client import AsyncDaemonStore
from afferent.types import ContentKey, Handle, Modality, ObjectKind, decode, encode

_PLAN_TAG = b"afferent/plan/v1"
_MAX_KNOWN_PLANS = 4096

_Shape = tuple[int, int, int]
"""All that an image's plan follows from: width, height, and the most pixels that are wanted."""


@dataclass(frozen=True, slots=True)
class SourceItem:
    """One item of a request, before anything is decoded.

    Attributes:
        digest: Of the encoded bytes.
        key: Of the features.
        raw: The encoded bytes; ``None`` of an item that was not sent, because it has been here.
        name: What the client calls it.
        is_new_name: That is still to be bound.
        max_pixels: The request's own limit for this picture; 0 for none.
        header: Of an image; a video or audio clip has none yet.
        plan: Of an image, and exact.
    """

    modality: Modality
    digest: bytes
    key: ContentKey
    raw: RawMedia | None
    name: Name | None = None
    is_new_name: bool = False
    max_pixels: int = 0
    header: MediaHeader | None = None
    plan: FeaturePlan | None = None

    @property
    def data(self) -> bytes | None:
        """The bytes that are on the heap."""
        return self.raw.data if self.raw is not None else None

    @property
    def handle(self) -> Handle | None:
        """Of the object that the bytes are in, with others' perhaps."""
        return self.raw.handle if self.raw is not None else None


class Planner:
    """Plans items for one family of models."""

    def __init__(
        self, store: AsyncDaemonStore, maker: Maker, family: Family, fingerprint: bytes
    ) -> None:
        self._store, self._maker = store, maker
        self._family, self._fingerprint = family, fingerprint
        self._known_plans: dict[_Shape, FeaturePlan] = {}

    async def plan_images(
        self, request_id: str, items: Sequence[SourceItem], account: Account
    ) -> list[SourceItem]:
        """The items, the images with their exact plans; a worker is asked for those that only it
        knows.
        """
        shapes = [_shape(item) for item in items]
        plans = {shape: self._plan(shape) for shape in shapes if shape is not None}
        asked: dict[_Shape, m.AcquireItem] = {}
        for shape in (shape for shape, plan in plans.items() if plan is None):
            width, height, max_pixels = shape
            key = ContentKey(keys.frame(_PLAN_TAG, self._fingerprint, encode(shape)))
            job = PlanImage(ImageHeader(width, height), max_pixels)
            asked[shape] = _job(key, PLAN_NBYTES, job, [])
        if asked:
            planned = await self._ask(request_id, list(asked.values()), account)
            found = {shape: planned[ContentKey(item.key)].plan for shape, item in asked.items()}
            plans |= found
            self._remember(found)
        return [
            item if shape is None else replace(item, plan=plans[shape])
            for item, shape in zip(items, shapes, strict=True)
        ]

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
                key = ContentKey(keys.frame(_PLAN_TAG, item.key))
                handle, file = _input_of(item, written.get(item.key))
                asked[key] = _job(key, PLAN_NBYTES, PlanFile(item.modality, file), [handle])
                of_item[item.key] = key
        if not asked:
            return {}
        planned = await self._ask(request_id, list(asked.values()), account)
        return {item_key: planned[key] for item_key, key in of_item.items()}

    def _plan(self, shape: _Shape) -> FeaturePlan | None:
        """``None`` if only a worker knows."""
        if known := self._known_plans.get(shape):
            return known
        width, height, max_pixels = shape
        family = self._family.bounded(max_pixels) if max_pixels else self._family
        plan = family.plan(ImageHeader(width, height))
        if plan is not None:
            self._remember({shape: plan})
        return plan

    def _remember(self, plans: Mapping[_Shape, FeaturePlan]) -> None:
        if len(self._known_plans) + len(plans) > _MAX_KNOWN_PLANS:
            self._known_plans.clear()
        self._known_plans.update(plans)

    async def _ask(
        self, request_id: str, asked: Sequence[m.AcquireItem], account: Account
    ) -> dict[ContentKey, Planned]:
        """Plans that workers make."""
        outcomes = await self._maker.acquire(request_id, asked, account, in_turn=False)
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
    job = MakeFeatures(header, file, item.max_pixels)
    return _job(item.key, plan.nbytes, job, [handle])


def _shape(item: SourceItem) -> _Shape | None:
    if not isinstance(item.header, ImageHeader):
        return None
    return item.header.width, item.header.height, item.max_pixels


def _input_of(item: SourceItem, written: Handle | None) -> tuple[Handle, InputRange]:
    """The object that an item's bytes are in, and where in it they are."""
    if item.raw is None:
        raise InternalError("an item was not sent")
    if written is not None:
        return written, InputRange(0, item.raw.nbytes)
    if item.raw.handle is None:
        raise InternalError("an item's bytes are not in the arena")
    return item.raw.handle, InputRange(item.raw.start, item.raw.nbytes)


def _job(key: ContentKey, nbytes: int, job: Job, inputs: list[Handle]) -> m.AcquireItem:
    return m.AcquireItem(key, ObjectKind.FEATURES, nbytes, m.JobSpec(inputs, encode(job)))
