"""Steps of an item through a store whose workers make features: submitted, then collected.

Each item is one request of the store, so that its pins end with it.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from afferent import keys
from afferent.batch.media_model import MediaModel
from afferent.errors import (
    AfferentError,
    DeadlineExceeded,
    InternalError,
    NotPermitted,
    StoreFull,
    StoreRestarted,
)
from afferent.media.decoded import Array
from afferent.media.families.plan import FeaturePlan, Prompt
from afferent.media.headers.probe import ImageBound, ImageHeader, probe_image
from afferent.media.workers.jobs import (
    PLAN_NBYTES,
    InputRange,
    Job,
    MakeFeatures,
    PlanFile,
    PlanImage,
    Planned,
    cost_us,
    planned_decoder,
)
from afferent.store.client.steps import Steps
from afferent.store.protocol.items import Queue, SealItem
from afferent.store.protocol.results import Failed, Outcome, Pending, existing
from afferent.types import (
    ContentKey,
    CreateItem,
    Handle,
    Modality,
    ObjectKind,
    ReserveItem,
    decode,
    encode,
)

_PLAN_TAG = b"afferent/plan/v1"
_WAIT_FOR_SPACE_S = 60.0
_numbers = itertools.count()  # concurrent calls share a connection, which knows requests by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """Item whose features are being made; its request pins them and the ``file``.

    ``nbytes`` is the space that it has in the store.
    """

    request: str
    key: ContentKey
    file: Handle
    outcome: Outcome
    nbytes: int


class StoreSteps:
    """Steps over the verbs of a `DaemonStore` or an `AsyncDaemonStore`."""

    def __init__(self, verbs: Any, model: MediaModel, *, timeout_s: float) -> None:
        """Create them.

        Args:
            timeout_s: Longest wait for the features of one item.
        """
        self.verbs, self._model, self._timeout_s = verbs, model, timeout_s
        self._has_waited = False  # for space of other processes, in vain

    def submit(
        self, data: memoryview, modality: Modality, *, key: ContentKey, may_wait: bool
    ) -> Steps[Submitted]:
        """Write a file into the store, and queue the job that makes its features.

        Args:
            key: Key of the features.
            may_wait: Wait for space; otherwise fail at once.

        Raises:
            InvalidMedia: The item can't be used.
            StoreFull: There is no space now, or none within a minute.
            ArenaTooSmall: The arena is too small for the item.
        """
        request = f"features-{next(_numbers)}"
        try:
            return (yield from self._begin(request, data, modality, key, may_wait=may_wait))
        except BaseException:
            self.verbs.forget(request)
            raise

    def submit_pinned(
        self, data: memoryview, modality: Modality, *, key: ContentKey, may_wait: bool
    ) -> Steps[Submitted]:
        """Submit an item whose features stay pinned, as those before it: see `submit`.

        It waits only for the space of other processes, as this one's own pins don't end meanwhile;
        and after a wait in vain not again, until there is space.

        Raises:
            StoreFull: There is no space now, or none within a minute.
        """
        try:
            submitted = yield from self.submit(data, modality, key=key, may_wait=False)
        except StoreFull as error:
            if not may_wait or self._has_waited or not self._fits_beside_own(error):
                raise
            try:
                submitted = yield from self.submit(data, modality, key=key, may_wait=True)
            except StoreFull as vain:
                self._has_waited = True
                raise StoreFull(vain.message, shortage=error.shortage) from vain
        self._has_waited = False
        return submitted

    def collect(self, submitted: Submitted) -> Steps[tuple[dict[str, Array], Prompt]]:
        """Return copies of the features, and the prompt; the item is released.

        Raises:
            InvalidMedia: The item can't be used.
            Unavailable: It could not be made now.
        """
        try:
            handle = yield from self.settled(submitted)
            return self._copied(submitted.request, handle)
        finally:
            self.verbs.forget(submitted.request)

    def pin(self, submitted: Submitted) -> Steps[dict[str, Any]]:
        """Return the tree of the features, pinned for as long as its arrays live.

        Raises:
            InvalidMedia: The item can't be used.
            Unavailable: It could not be made now.
        """
        try:
            handle = yield from self.settled(submitted)
            tree: dict[str, Any] = self.verbs.view_for(submitted.request, handle)
            return tree
        finally:
            self.verbs.forget(submitted.request)  # the tree's arrays get a pin of their own

    def abandon(self, submitted: Submitted) -> None:
        """Release an item that is not collected; never fails."""
        self.verbs.forget(submitted.request)

    def planned_by_worker(self, header: ImageHeader) -> Steps[FeaturePlan]:
        """Return the plan that a worker makes for an image of this size.

        Raises:
            ArenaTooSmall: The arena is too small for plans.
        """
        request = f"features-{next(_numbers)}"
        try:
            yield from self._reserve(request, [ReserveItem(ObjectKind.RECORDS, PLAN_NBYTES)])
            planned = yield from self._ask(request, os.urandom(32), PlanImage(header), [])
            return planned.plan
        finally:
            self.verbs.forget(request)

    def _begin(
        self,
        request: str,
        data: memoryview,
        modality: Modality,
        key: ContentKey,
        *,
        may_wait: bool,
    ) -> Steps[Submitted]:
        planned = self._planned(data, modality)
        if may_wait:
            space = [ReserveItem(ObjectKind.RAW, len(data))]
            if isinstance(planned, Planned):
                space.append(ReserveItem(ObjectKind.FEATURES, planned.plan.nbytes))
            yield from self._reserve(request, space)
        raw = yield from self._write(request, data)
        file = InputRange(0, len(data))
        if not isinstance(planned, Planned):
            job = PlanFile(modality, file) if planned is None else PlanImage(planned)
            planned = yield from self._ask(request, key, job, [raw] if planned is None else [])
            if may_wait:
                features = ReserveItem(ObjectKind.FEATURES, planned.plan.nbytes)
                yield from self._reserve(request, [features])
        make = MakeFeatures(planned.header, file)
        nbytes = planned.plan.nbytes
        queued = Queue(key, ObjectKind.FEATURES, nbytes, [raw], encode(make), cost_us(make))
        outcome: Outcome
        (outcome,) = yield self.verbs.acquire(request, [queued])
        if isinstance(outcome, Failed):
            raise outcome.failure.error()
        # The request keeps its pin on the file until it ends: one message less for each item.
        nbytes += len(data)
        return Submitted(request=request, key=key, file=raw, outcome=outcome, nbytes=nbytes)

    def _planned(self, data: memoryview, modality: Modality) -> Planned | ImageHeader | None:
        """Return the plan of an image, or as much of it as only a worker can complete."""
        if modality is not Modality.IMAGE:
            return None
        header = probe_image(data, self._model.limits)
        if isinstance(header, ImageBound):
            return None
        plan = self._model.family.plan(header)
        return header if plan is None else Planned(header, plan)

    def settled(self, submitted: Submitted) -> Steps[Handle]:
        """Return the handle of the features, which the item's request pins.

        Raises:
            InvalidMedia: The item can't be used.
            Unavailable: It could not be made now.
        """
        outcome = submitted.outcome
        if isinstance(outcome, Pending):
            try:
                (outcome,) = yield self.verbs.wait(
                    submitted.request, [submitted.key], timeout_s=self._timeout_s
                )
            except NotPermitted as error:  # the store does not know that we have acquired it
                raise StoreRestarted("the item was lost with a former life of the store") from error
        return _handle_of(outcome)

    def _copied(self, request: str, handle: Handle) -> tuple[dict[str, Array], Prompt]:
        tree = self.verbs.view_for(request, handle)
        prompt = tuple(tree.pop("prompt"))
        return {name: np.array(view) for name, view in tree.items()}, prompt

    def _fits_beside_own(self, error: StoreFull) -> bool:
        """Whether an item would fit if all other processes released their space."""
        if (shortage := error.shortage) is None:
            return False
        own = [each for each in shortage.holders if each.pid == os.getpid()]
        own_nbytes = sum(each.held_nbytes + each.reserved_nbytes for each in own)
        return own_nbytes + shortage.requested_nbytes <= shortage.share_nbytes

    def _reserve(self, request: str, space: list[ReserveItem]) -> Steps[None]:
        try:
            yield self.verbs.reserve(request, space, timeout_s=_WAIT_FOR_SPACE_S)
        except DeadlineExceeded as error:
            raise StoreFull(
                f"no space was released in the store within {_WAIT_FOR_SPACE_S:.0f} s"
            ) from error

    def _write(self, request: str, data: memoryview) -> Steps[Handle]:
        (handle,) = yield self.verbs.create(request, [CreateItem(ObjectKind.RAW, len(data))])
        target = np.frombuffer(self.verbs.block(handle), np.uint8)
        np.copyto(target, np.frombuffer(data, np.uint8))
        del target
        sealed: list[Handle] = yield self.verbs.seal(request, [SealItem(handle, len(data))])
        return sealed[0]

    def _ask(self, request: str, item: bytes, job: Job, inputs: list[Handle]) -> Steps[Planned]:
        """Have a worker make a plan."""
        key = keys.frame(_PLAN_TAG, item)
        asked = Queue(key, ObjectKind.RECORDS, PLAN_NBYTES, inputs, encode(job), cost_us(job))
        (outcome,) = yield self.verbs.acquire(request, [asked])
        if isinstance(outcome, Pending):
            (outcome,) = yield self.verbs.wait(request, [key], timeout_s=self._timeout_s)
        handle = _handle_of(outcome)
        planned = decode(planned_decoder, self.verbs.block(handle))
        self.verbs.unpin(request, [handle])
        return planned


def _handle_of(outcome: Outcome) -> Handle:
    handle = existing(outcome)
    if handle is not None:
        return handle
    error: AfferentError = InternalError("the store gave no features")
    raise outcome.failure.error() if isinstance(outcome, Failed) else error
