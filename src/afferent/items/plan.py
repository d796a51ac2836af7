"""Plans of a request's items: from headers, or by a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from afferent import keys
from afferent.items.acquire import Maker
from afferent.items.item import File, Processor, ReceivedItem, RequestItems
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
from afferent.store.protocol.items import ItemLabel, Queue
from afferent.telemetry.trace import Trace
from afferent.types import ContentKey, Handle, ObjectKind, encode

_PLAN_TAG = b"afferent/plan/v1"
_MAX_KNOWN_PLANS = 4096
_MAX_PLANS_AT_ONCE = 64
"""Limit for one request: more would delay others for no gain, as there are fewer workers."""

_Shape = tuple[int, int, int]
"""Everything that determines an image's plan: width, height, and the maximum of pixels."""


class Planner:
    """Plans items for one model."""

    def __init__(self, maker: Maker, processor: Processor) -> None:
        self._maker = maker
        self._family, self._fingerprint = processor.family, processor.fingerprint
        self._known_plans: dict[_Shape, FeaturePlan] = {}

    async def plan_images(
        self, request_id: str, items: Sequence[ReceivedItem], trace: Trace
    ) -> dict[ReceivedItem, Planned]:
        """Return the exact plans of images; a worker makes the plans that only it can."""
        shapes = {item: shape for item in items if (shape := _shape(item)) is not None}
        plans = {shape: self._plan(shape) for shape in shapes.values()}
        if waiting := [shape for shape, plan in plans.items() if plan is None]:
            asked = [self._image_job(shape) for shape in waiting]
            answers = await self._ask(request_id, asked, trace)
            made = {shape: each.plan for shape, each in zip(waiting, answers, strict=True)}
            self._remember(made)
            plans |= made
        return {
            item: Planned(item.header, plan)
            for item, shape in shapes.items()
            if isinstance(item.header, ImageHeader) and (plan := plans[shape]) is not None
        }

    async def plan_files(
        self,
        request_id: str,
        items: RequestItems,
        files: Mapping[ReceivedItem, File],
        trace: Trace,
    ) -> dict[ReceivedItem, Planned]:
        """Return the plans of items in the arena.

        If only a worker reads the header, as of a video or audio clip, the plan contains it, and
        the maximum size.
        """
        waiting = [item for item in files if item not in items.plans]
        asked = [_file_job(item, files[item]) for item in waiting]
        answers = await self._ask(request_id, asked, trace) if asked else []
        return {**items.plans, **dict(zip(waiting, answers, strict=True))}

    def exact(self, header: ImageHeader, max_pixels: int) -> FeaturePlan | None:
        """Return the plan of an image; ``None`` if only a worker can make it.

        Args:
            max_pixels: The limit for this image; 0 for none.
        """
        return self._plan((header.width, header.height, max_pixels))

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
        return await self._maker.read_records(
            request_id, asked, planned_decoder, trace, stage="plan"
        )


def features_job(item: ReceivedItem, file: File, planned: Planned, head: memoryview) -> Queue:
    """Return the item to acquire: it pins the features, or queues a job.

    Args:
        head: The first bytes of the file, `keys.PLACEMENT_NBYTES` if there are so many.
    """
    handle, place = file
    job = MakeFeatures(planned.header, place, item.max_pixels)
    nbytes, cost = planned.plan.nbytes, cost_us(job)
    label = ItemLabel(item.modality, keys.placement_digest(item.modality, head), item.alias)
    return Queue(item.key, ObjectKind.FEATURES, nbytes, [handle], encode(job), cost, label)


def _file_job(item: ReceivedItem, file: File) -> Queue:
    handle, place = file
    key = ContentKey(keys.frame(_PLAN_TAG, item.key))
    return _planning(key, PlanFile(item.modality, place, item.max_pixels), [handle])


def _shape(item: ReceivedItem) -> _Shape | None:
    if not isinstance(item.header, ImageHeader):
        return None
    return item.header.width, item.header.height, item.max_pixels


def _planning(key: ContentKey, job: Job, inputs: list[Handle]) -> Queue:
    return Queue(key, ObjectKind.RECORDS, PLAN_NBYTES, inputs, encode(job), cost_us(job))
