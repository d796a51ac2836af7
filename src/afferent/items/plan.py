"""Plans of a request's items: from headers, or by a worker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from afferent import keys
from afferent.errors import InternalError
from afferent.items.acquire import Maker, handle_of
from afferent.items.item_state import ItemState, Processor
from afferent.media.families.plan import FeaturePlan
from afferent.media.headers.probe import ImageHeader
from afferent.media.workers.jobs import (
    PLAN_NBYTES,
    Job,
    MakeFeatures,
    PlanFile,
    PlanImage,
    Planned,
    cost_us,
    planned_decoder,
)
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import Queue
from afferent.telemetry.trace import Trace
from afferent.types import ContentKey, Handle, ObjectKind, ReserveItem, decode, encode

_PLAN_TAG = b"afferent/plan/v1"
_MAX_KNOWN_PLANS = 4096
_MAX_PLANS_AT_ONCE = 64
"""Limit for one request: more would delay others for no gain, as there are fewer workers."""

_Shape = tuple[int, int, int]
"""Everything that determines an image's plan: width, height, and the maximum of pixels."""


class Planner:
    """Plans items for one model."""

    def __init__(self, store: AsyncDaemonStore, maker: Maker, processor: Processor) -> None:
        self._store, self._maker = store, maker
        self._family, self._fingerprint = processor.family, processor.fingerprint
        self._known_plans: dict[_Shape, FeaturePlan] = {}

    async def plan_images(self, request_id: str, items: Sequence[ItemState], trace: Trace) -> None:
        """Set the exact plans of images; a worker makes the plans that only it can."""
        waiting: defaultdict[_Shape, list[ItemState]] = defaultdict(list)
        for item in items:
            if (shape := _shape(item)) is not None:
                item.plan = self._plan(shape)
                if item.plan is None:
                    waiting[shape].append(item)
        if not waiting:
            return
        asked = [self._image_job(shape) for shape in waiting]
        answers = await self._ask(request_id, asked, trace)
        planned = {shape: each.plan for shape, each in zip(waiting, answers, strict=True)}
        self._remember(planned)
        for shape, plan in planned.items():
            for item in waiting[shape]:
                item.plan = plan

    async def plan_files(self, request_id: str, items: Sequence[ItemState], trace: Trace) -> None:
        """Set the bounds of items whose headers only workers read."""
        waiting = [item for item in items if item.plan is None]
        if not waiting:
            return
        asked = [_file_job(item) for item in waiting]
        answers = await self._ask(request_id, asked, trace)
        for item, bound in zip(waiting, answers, strict=True):
            item.bound = bound

    def _image_job(self, shape: _Shape) -> Queue:
        width, height, max_pixels = shape
        key = ContentKey(keys.frame(_PLAN_TAG, self._fingerprint, encode(shape)))
        return _planning(key, PlanImage(ImageHeader(width, height), max_pixels), [])

    def _plan(self, shape: _Shape) -> FeaturePlan | None:
        """Return the plan; ``None`` if only a worker can make it."""
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

    async def _ask(self, request_id: str, asked: Sequence[Queue], trace: Trace) -> list[Planned]:
        """Have workers make plans."""
        room = [ReserveItem(item.kind, item.nbytes) for item in asked]
        outcomes = await self._maker.acquire(request_id, asked, trace, room=room, in_turn=False)
        item_keys = [ContentKey(item.key) for item in asked]
        outcomes = await self._maker.settle(request_id, item_keys, outcomes, trace, stage="plan")
        handles = [handle_of(outcome) for outcome in outcomes]
        blocks = [self._store.block(handle) for handle in handles]
        planned = [decode(planned_decoder, block) for block in blocks]
        del blocks
        await self._store.release(request_id, handles)
        return planned


def features_job(item: ItemState) -> Queue:
    """Return the item to acquire: it pins the features, or queues a job."""
    if item.file is None:
        raise InternalError("an item's bytes are not in the arena")
    if item.bound is not None:
        header, plan = item.bound.header, item.bound.plan
    elif item.plan is not None and isinstance(item.header, ImageHeader):
        header, plan = item.header, item.plan
    else:
        raise InternalError("an item has no plan")
    handle, file = item.file
    job = MakeFeatures(header, file, item.max_pixels)
    cost = cost_us(job)
    return Queue(item.key, ObjectKind.FEATURES, plan.nbytes, [handle], encode(job), cost)


def _file_job(item: ItemState) -> Queue:
    if item.file is None:
        raise InternalError("an item's bytes are not in the arena")
    handle, file = item.file
    key = ContentKey(keys.frame(_PLAN_TAG, item.key))
    return _planning(key, PlanFile(item.modality, file), [handle])


def _shape(item: ItemState) -> _Shape | None:
    if not isinstance(item.header, ImageHeader):
        return None
    return item.header.width, item.header.height, item.max_pixels


def _planning(key: ContentKey, job: Job, inputs: list[Handle]) -> Queue:
    return Queue(key, ObjectKind.RECORDS, PLAN_NBYTES, inputs, encode(job), cost_us(job))
