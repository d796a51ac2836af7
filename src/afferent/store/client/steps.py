"""Steps of the item cache's operations: allocate, write, seal, wait, view.

These are generators: each yields the result of a store's verb, and receives the answer.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from afferent.store.block import codec
from afferent.store.protocol.items import Claim, Find, SealItem
from afferent.store.protocol.results import Failed, Outcome, Owner, existing
from afferent.types import ContentKey, Handle, MiB, ObjectKind

Result = TypeVar("Result")

_LONG_NBYTES = MiB

Steps = Generator[Any, Any, Result]
"""Running operation that ends with a `Result`."""


def run(steps: Steps[Result]) -> Result:
    """Run all steps, over the verbs of a `Store`."""
    try:
        answer = next(steps)
        while True:
            answer = steps.send(answer)
    except StopIteration as end:
        result: Result = end.value
        return result


async def run_awaiting(steps: Steps[Result]) -> Result:
    """Run all steps, over verbs whose results are awaited."""
    try:
        asked = next(steps)
        while True:
            try:
                answer = await asked if inspect.isawaitable(asked) else asked
            except BaseException as error:
                asked = steps.throw(error)
            else:
                asked = steps.send(answer)
    except StopIteration as end:
        result: Result = end.value
        return result


Fill = Callable[[ContentKey, memoryview], Generator[Any, Any, int]]
"""Writes an item's data into its block and returns the number of written bytes."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Location of one item's data.

    ``block`` is set when this request makes the data. Otherwise another request makes it, or
    ``is_ready`` is true and it exists.
    """

    key: ContentKey
    handle: Handle | None
    block: memoryview | None
    is_ready: bool


@dataclass(frozen=True, slots=True)
class Origin:
    """Inputs of an item's data, pinned by the request, and the time to make it."""

    sources: list[Handle]
    made_us: int = 0


_UNKNOWN = Origin([])


class ItemSteps(ABC):
    """Steps over the verbs of any store."""

    def __init__(self, store: Any) -> None:
        self._verbs = store

    @abstractmethod
    def _do(self, work: Callable[..., Any], *args: Any) -> Any:
        """Call a slow function: return its result, or an awaitable of it."""

    def _write(self, work: Callable[..., int], data: Any, block: memoryview, *, nbytes: int) -> Any:
        """Write into a block; long writes do not block an event loop."""
        return self._do(work, data, block) if nbytes > _LONG_NBYTES else work(data, block)

    def _allocate(
        self, request: str, sizes: Mapping[ContentKey, int], kind: ObjectKind
    ) -> Steps[list[Slot]]:
        self._verbs.check_writable()
        items = [Claim(key, kind, nbytes) for key, nbytes in sizes.items()]
        outcomes: list[Outcome] = yield self._verbs.acquire(request, items)
        yield from self._check(request, outcomes)
        return [self._slot(key, outcome) for key, outcome in zip(sizes, outcomes, strict=True)]

    def _slot(self, key: ContentKey, outcome: Outcome) -> Slot:
        if isinstance(outcome, Owner):
            block = self._verbs.block(outcome.handle)
            return Slot(key, outcome.handle, block, is_ready=False)
        handle = existing(outcome)
        return Slot(key, handle, None, is_ready=handle is not None)

    def _check(self, request: str, outcomes: list[Outcome]) -> Steps[None]:
        """Raise a failure in a batch, after the blocks and pins of the others were released."""
        failed = next((each for each in outcomes if isinstance(each, Failed)), None)
        if failed is None:
            return
        owned = [outcome.handle for outcome in outcomes if isinstance(outcome, Owner)]
        pinned = [handle for handle in map(existing, outcomes) if handle is not None]
        yield self._verbs.abort(request, owned)
        yield self._verbs.release(request, pinned)
        raise failed.failure.error()

    def _get(
        self,
        request: str,
        wanted: Sequence[ContentKey],
        tensors: codec.Library,
        max_header_nbytes: int = codec.MAX_HEADER_NBYTES,
    ) -> Steps[dict[ContentKey, Any]]:
        outcomes: list[Outcome] = yield self._verbs.acquire(request, [Find(key) for key in wanted])
        return {
            key: self._verbs.view_for(
                request, handle, tensors=tensors, max_header_nbytes=max_header_nbytes
            )
            for key, outcome in zip(wanted, outcomes, strict=True)
            if (handle := existing(outcome)) is not None
        }

    def _fill(
        self,
        request: str,
        sizes: Mapping[ContentKey, int],
        kind: ObjectKind,
        fill: Fill,
        *,
        origins: Mapping[ContentKey, Origin],
        seal_each: bool,
    ) -> Steps[dict[ContentKey, Handle]]:
        """Make all objects, or wait for other requests to make them; return their handles."""
        handles: dict[ContentKey, Handle] = {}
        slots = yield from self._allocate(request, sizes, kind)
        while slots:
            handles |= {s.key: s.handle for s in slots if s.is_ready and s.handle is not None}
            own = [slot for slot in slots if slot.block is not None]
            handles |= yield from self._make(request, own, fill, origins, seal_each=seal_each)
            busy = [slot.key for slot in slots if slot.block is None and not slot.is_ready]
            if not busy:
                break
            outcomes: list[Outcome] = yield self._verbs.wait(request, busy)
            yield from self._check(request, outcomes)
            slots = [self._slot(key, outcome) for key, outcome in zip(busy, outcomes, strict=True)]
        return handles

    def _make(
        self,
        request: str,
        slots: list[Slot],
        fill: Fill,
        origins: Mapping[ContentKey, Origin],
        *,
        seal_each: bool,
    ) -> Steps[dict[ContentKey, Handle]]:
        """Write the blocks of slots and seal them; return their final handles."""
        items: list[SealItem] = []
        sealed: list[Handle] = []
        try:
            for slot in slots:
                if slot.block is not None and slot.handle is not None:
                    used = yield from fill(slot.key, slot.block)
                    origin = origins.get(slot.key, _UNKNOWN)
                    items.append(SealItem(slot.handle, used, origin.sources, origin.made_us))
                if items and seal_each:
                    sealed += yield self._verbs.seal(request, items)
                    items.clear()
            if items:
                sealed += yield self._verbs.seal(request, items)
        except BaseException:  # on any error: other requests wait for these objects
            begun = [slot.handle for slot in slots[len(sealed) :] if slot.handle]
            self._verbs.discard(request, begun)
            raise
        return {slot.key: handle for slot, handle in zip(slots, sealed, strict=True)}
