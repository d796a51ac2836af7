"""Features of a model's media, for programs with an event loop."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sized
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from afferent.batch.feature_maker import Features
from afferent.batch.item_features import FailedItem, Form, ItemFeatures, Progress
from afferent.batch.item_routes import (
    Outage,
    ResultOptions,
    failed_item,
    is_lost,
    most_submitted_nbytes,
)
from afferent.batch.pinned_trees import AsyncFeatureStore
from afferent.batch.workplace import HERE, RETRY_S, STORE_NAME, check_form
from afferent.errors import AfferentError, ConfigError, StoreFull
from afferent.runtime.tasks import in_thread
from afferent.store.block import codec
from afferent.store.client.steps import Steps, run_awaiting
from afferent.types import Modality

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from afferent.batch.media_sources import Source
    from afferent.batch.shared_item import SharedItem
    from afferent.batch.through_store import StoreSteps, Submitted
    from afferent.media.families.plan import FeaturePlan

T = TypeVar("T")


class AsyncFeatures:
    """Operations of `Features` as coroutines; any number may run at a time.

    In this process, items are made in threads. A cancelled call releases its item.

    Examples:
        >>> import asyncio
        >>> from afferent import AsyncFeatures
        >>> from PIL import Image
        >>> async def main() -> None:
        ...     async with AsyncFeatures("shapes") as features:
        ...         images = [Image.new("RGB", (96, 64), name) for name in ("red", "blue")]
        ...         async for made in features.make_many(images):
        ...             print(made["pixel_values"].shape)
        >>> asyncio.run(main())
        (80, 588)
        (80, 588)
    """

    def __init__(self, model: str | os.PathLike[str], **arguments: Any) -> None:
        """Create it; ``async with`` or `open` starts it.

        Args:
            model: As for `Features`.
            arguments: As for `Features`.
        """
        self._given = (model, arguments)
        self._features: Features | None = None
        self._store: AsyncFeatureStore | None = None
        self._steps: StoreSteps | None = None
        self._max_nbytes = 0

    async def open(self) -> None:
        """Load the model, and start or find the processes that make features.

        Raises:
            ConfigError: As `Features`.
            UnsupportedModel: Likewise.
            StoreUnavailable: Likewise.
        """
        model, arguments = self._given
        features = self._features = await in_thread(lambda: Features(model, **arguments))
        if (address := features.address) is not None:
            connecting = AsyncFeatureStore.connect(address, name=STORE_NAME, writable=True)
            store = self._store = cast("AsyncFeatureStore", await connecting)
            self._steps = features._workplace.steps_over(store)
            self._max_nbytes = most_submitted_nbytes(await store.stat())

    async def close(self) -> None:
        """End the pool, or the connection to the server."""
        store, self._store = self._store, None
        features, self._features = self._features, None
        if store is not None:
            await store.close()
        if features is not None:
            await in_thread(features.close)

    @property
    def features(self) -> Features:
        """The same without an event loop: its properties, `plan` and `model_inputs`.

        Raises:
            ConfigError: It is not open.
        """
        if self._features is None:
            raise ConfigError("this AsyncFeatures is not open: use it in `async with`")
        return self._features

    async def plan(
        self,
        source: Source | tuple[int, int],
        *,
        form: Form = "compact",
        modality: Modality | None = None,
    ) -> FeaturePlan:
        """Return the plan of an item; see `Features.plan`."""
        features = self.features
        return await in_thread(lambda: features.plan(source, form=form, modality=modality))

    async def make(
        self,
        source: Source,
        *,
        form: Form = "compact",
        tensors: codec.Library = "numpy",
        modality: Modality | None = None,
    ) -> ItemFeatures:
        """Return the features of one item; see `Features.make`."""
        options = ResultOptions(form, tensors, modality)
        return await self._make(source, options, self._new_space())

    async def share(self, source: Source, *, modality: Modality | None = None) -> SharedItem:
        """Return a reference to the features of one item in the store; see `Features.share`."""
        return await self._share(source, modality, self._new_space())

    def make_many(
        self,
        sources: Iterable[Source],
        *,
        form: Form = "compact",
        tensors: codec.Library = "numpy",
        modality: Modality | None = None,
        in_flight: int | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> AsyncIterator[ItemFeatures | FailedItem]:
        """Yield the features of many items, in order; see `Features.make_many`.

        Args:
            sources: As for `Features.make_many`.
            form: Likewise.
            tensors: Likewise.
            modality: Likewise.
            in_flight: Likewise; in this process, the items that threads make at a time.
            progress: Called after each item.
        """
        options, space = ResultOptions(form, tensors, modality), self._new_space()

        def make(source: Source) -> Awaitable[ItemFeatures]:
            return self._make(source, options, space)

        self.features._workplace.model.family_for(form)
        return self._many(sources, make, in_flight, progress)

    def share_many(
        self,
        sources: Iterable[Source],
        *,
        modality: Modality | None = None,
        in_flight: int | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> AsyncIterator[SharedItem | FailedItem]:
        """Yield references to the features of many items, in order; see `Features.share_many`.

        A reference that you have not taken yet pins its features: choose ``in_flight`` so that the
        features of that many items fit into the store.
        """
        space = self._new_space()

        def share(source: Source) -> Awaitable[SharedItem]:
            return self._share(source, modality, space)

        return self._many(sources, share, in_flight, progress)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Inside

    def _new_space(self) -> _Space:
        return _Space(self._max_nbytes)

    async def _make(self, source: Source, options: ResultOptions, space: _Space) -> ItemFeatures:
        features, steps = self.features, self._steps
        form, tensors, modality = options.form, options.tensors, options.modality
        if steps is None:
            return await in_thread(
                lambda: features.make(source, form=form, tensors=tensors, modality=modality)
            )
        check_form(form, tensors)
        submitted = await self._submit(steps.submit, source, form, modality, space)
        arrays, prompt = await self._settled(steps, submitted, steps.collect(submitted), space)
        return await in_thread(
            lambda: features._workplace.finished(
                arrays, prompt, submitted.key, form=form, tensors=tensors
            )
        )

    async def _share(self, source: Source, modality: Modality | None, space: _Space) -> SharedItem:
        features, steps = self.features, self._steps
        if steps is None:
            return await in_thread(lambda: features.share(source, modality=modality))
        submitted = await self._submit(steps.submit_pinned, source, "compact", modality, space)
        tree = await self._settled(steps, submitted, steps.pin(submitted), space)
        return features._workplace.shared(steps.verbs, submitted.key, tree)

    async def _submit(
        self,
        submit: Callable[..., Steps[Submitted]],
        source: Source,
        form: Form,
        modality: Modality | None,
        space: _Space,
    ) -> Submitted:
        features = self.features
        data, kind, key = await in_thread(
            lambda: features._workplace.file_of(source, form, modality)
        )
        return await space.take(
            lambda is_alone: run_awaiting(submit(data, kind, key=key, may_wait=is_alone))
        )

    async def _settled(
        self, steps: StoreSteps, submitted: Submitted, rest: Any, space: _Space
    ) -> Any:
        try:
            return await run_awaiting(rest)
        except asyncio.CancelledError:
            steps.abandon(submitted)
            raise
        finally:
            space.release(submitted)

    async def _many(
        self,
        sources: Iterable[Source],
        make: Callable[[Source], Awaitable[T]],
        in_flight: int | None,
        progress: Callable[[Progress], None] | None,
    ) -> AsyncIterator[T | FailedItem]:
        features = self.features
        most = features._workplace.num_in_flight(in_flight)
        if features._workplace.where == HERE:
            most = in_flight or len(os.sched_getaffinity(0))
        num_total = len(sources) if isinstance(sources, Sized) else None
        waiting: deque[asyncio.Task[T | FailedItem]] = deque()
        num_done = num_failed = 0
        rest, outage = enumerate(sources), Outage()
        try:
            while True:
                while len(waiting) < most and (following := next(rest, None)) is not None:
                    waiting.append(asyncio.create_task(_tried(make, *following, outage)))
                if not waiting:
                    return
                result = await waiting.popleft()
                num_done, num_failed = num_done + 1, num_failed + isinstance(result, FailedItem)
                if progress is not None:
                    progress(Progress(num_done, num_failed, num_total))
                yield result
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


class _Space:
    """Space in the store that the submitted items of one call have.

    Invariants: one item is submitted at a time. It waits while the others have more than the most,
    and tries again if the store is full and one of the others has been collected.
    """

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes, self._nbytes, self._num_items = max_nbytes, 0, 0
        self._turn, self._released = asyncio.Lock(), asyncio.Event()

    async def take(self, submit: Callable[[bool], Awaitable[Submitted]]) -> Submitted:
        """Submit an item; ``submit`` learns whether no other item of the call is submitted.

        Raises:
            StoreFull: There is no space, and none will be released by other items of the call.
        """
        async with self._turn:
            while True:
                self._released.clear()
                if self._nbytes <= self._max_nbytes:
                    is_alone = not self._num_items
                    try:
                        submitted = await submit(is_alone)
                    except StoreFull:
                        if is_alone:
                            raise
                    else:
                        self._nbytes += submitted.nbytes
                        self._num_items += 1
                        return submitted
                await self._released.wait()

    def release(self, submitted: Submitted) -> None:
        """Note that an item has been collected."""
        self._nbytes -= submitted.nbytes
        self._num_items -= 1
        self._released.set()


async def _tried(
    make: Callable[[Source], Awaitable[T]], index: int, source: Source, outage: Outage
) -> T | FailedItem:
    while True:
        try:
            result = await make(source)
        except AfferentError as error:
            if not is_lost(error) or outage.has_lasted():
                return failed_item(index, source, error)
        else:
            outage.end()
            return result
        await asyncio.sleep(RETRY_S)
