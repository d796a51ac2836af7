"""Ways of items from their sources to results: in this process, or through a store."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from afferent.batch.item_features import FailedItem, Form, ItemFeatures
from afferent.batch.workplace import RETRIED_FOR_S, RETRY_S, Workplace, of_extra
from afferent.errors import (
    AfferentError,
    InternalError,
    StoreFull,
    StoreRestarted,
    StoreUnavailable,
    VersionMismatch,
)
from afferent.store.block import codec
from afferent.store.client.steps import run
from afferent.store.protocol.results import Statistics
from afferent.types import Modality, ObjectKind

if TYPE_CHECKING:
    from afferent.batch.shared_item import SharedItem
    from afferent.batch.through_store import StoreSteps, Submitted


Result = TypeVar("Result")
Ticket = TypeVar("Ticket")


@dataclass(frozen=True, slots=True)
class ResultOptions:
    """Requested results."""

    form: Form
    tensors: codec.Library
    modality: Modality | None


class Route(Generic[Ticket, Result]):
    """Way from a source to its result: submitted, then collected."""

    def submit(self, source: Any, *, may_wait: bool) -> Ticket:
        """Begin an item.

        Raises:
            StoreFull: There is no space, and it may not wait for it.
        """
        raise NotImplementedError

    def collect(self, ticket: Ticket) -> Result:
        """Return the result of an item."""
        raise NotImplementedError

    def abandon(self, ticket: Ticket) -> None:
        """Release an item that is not collected; never fails."""

    def is_full(self, tickets: Iterable[Ticket]) -> bool:
        """Whether an item has to be collected before the next one is submitted."""
        return False


@dataclass(slots=True)
class _Entry(Generic[Ticket]):
    """Item of a batch: submitted, or failed already."""

    index: int
    source: Any
    ticket: Ticket | None = None
    error: AfferentError | None = None


def pipeline(
    sources: Iterable[Any], route: Route[Ticket, Result], *, in_flight: int
) -> Generator[Result | FailedItem]:
    """Yield the results of a route in order, with at most ``in_flight`` items submitted."""
    waiting: deque[_Entry[Ticket]] = deque()
    outage = Outage()
    try:
        for index, source in enumerate(sources):
            while waiting and (
                len(waiting) >= in_flight
                or route.is_full(entry.ticket for entry in waiting if entry.ticket is not None)
            ):
                yield _collected(waiting.popleft(), route, outage)
            entry = _submitted(index, source, route, may_wait=not waiting)
            while isinstance(entry.error, StoreFull) and waiting:
                yield _collected(waiting.popleft(), route, outage)
                entry = _submitted(index, source, route, may_wait=not waiting)
            if isinstance(entry.error, StoreFull):
                # Now: the next items would take the space that this one needs.
                yield _collected(entry, route, outage)
            else:
                waiting.append(entry)
        while waiting:
            yield _collected(waiting.popleft(), route, outage)
    finally:
        for entry in waiting:
            if entry.ticket is not None:
                route.abandon(entry.ticket)


def _submitted(
    index: int, source: Any, route: Route[Ticket, Any], *, may_wait: bool
) -> _Entry[Ticket]:
    try:
        return _Entry(index, source, route.submit(source, may_wait=may_wait))
    except AfferentError as error:
        return _Entry(index, source, error=error)


@dataclass(slots=True)
class Outage:
    """Time until which all items of a batch wait for a lost store; 0 while it answers."""

    _ends_s: float = 0.0

    def has_lasted(self) -> bool:
        """Whether the time for the store's restart has passed; the first call begins it."""
        self._ends_s = self._ends_s or time.monotonic() + RETRIED_FOR_S
        return time.monotonic() > self._ends_s

    def end(self) -> None:
        """Note that the store has answered."""
        self._ends_s = 0.0


def _collected(entry: _Entry[Ticket], route: Route[Ticket, Any], outage: Outage) -> Any:
    """Return the result of an item; an item that was lost with the store is submitted again."""
    while True:
        try:
            if entry.ticket is not None:
                result = route.collect(entry.ticket)
                outage.end()
                return result
        except AfferentError as error:
            entry.error = error
        why = entry.error or InternalError("nothing was made")
        if not is_lost(why) or outage.has_lasted():
            return failed_item(entry.index, entry.source, why)
        time.sleep(RETRY_S)
        entry = _submitted(entry.index, entry.source, route, may_wait=True)


def most_submitted_nbytes(statistics: Statistics) -> int:
    """Return the space that submitted items of a call may have: half of that for features."""
    return statistics.kinds[ObjectKind.FEATURES].capacity_nbytes // 2


def is_lost(error: AfferentError) -> bool:
    """Whether an item was lost with its store, which may come back."""
    is_other = isinstance(error, VersionMismatch)
    return isinstance(error, StoreUnavailable | StoreRestarted) and not is_other


def failed_item(index: int, source: Any, error: AfferentError) -> FailedItem:
    """Return the result of an item that failed."""
    path = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    return FailedItem(index, path, error)


class Here(Route[Any, ItemFeatures]):
    """Way through this process: an item is made when it is collected."""

    def __init__(self, workplace: Workplace, options: ResultOptions) -> None:
        self._workplace, self._options = workplace, options
        self._in_process = of_extra("afferent.batch.in_process")

    def submit(self, source: Any, *, may_wait: bool) -> Any:
        return (source,)

    def collect(self, ticket: Any) -> ItemFeatures:
        options = self._options
        arrays, plan, key = self._in_process.make(
            self._workplace.model, ticket[0], form=options.form, modality=options.modality
        )
        return self._workplace.finished(
            arrays, plan.prompt, key, form=options.form, tensors=options.tensors
        )


@dataclass(frozen=True, slots=True)
class InStore:
    """Item that was submitted to one store, whose successor knows nothing of it."""

    steps: StoreSteps
    submitted: Submitted


class ThroughStore(Route[InStore, Result]):
    """Way through a store.

    Invariants: submitted items have at most half of the store's space for features, so that a
    result that is taken late does not keep the workers idle.
    """

    _pins_results: ClassVar = False
    """Whether the results stay in the store, pinned: see `StoreSteps.submit_pinned`."""

    def __init__(self, workplace: Workplace, options: ResultOptions) -> None:
        workplace.check_store()
        self._workplace, self._options = workplace, options
        self._steps: StoreSteps | None = None
        self._max_nbytes = 0

    def submit(self, source: Any, *, may_wait: bool) -> InStore:
        data, kind, key = self._workplace.file_of(
            source, self._options.form, self._options.modality
        )
        store, steps = self._workplace.store(), self._steps
        if steps is None or steps.verbs is not store:
            self._max_nbytes = most_submitted_nbytes(store.stat())
            steps = self._steps = self._workplace.steps_over(store)
        submit = steps.submit_pinned if self._pins_results else steps.submit
        return InStore(steps, run(submit(data, kind, key=key, may_wait=may_wait)))

    def abandon(self, ticket: InStore) -> None:
        ticket.steps.abandon(ticket.submitted)

    def is_full(self, tickets: Iterable[InStore]) -> bool:
        return sum(ticket.submitted.nbytes for ticket in tickets) > self._max_nbytes


class Copied(ThroughStore[ItemFeatures]):
    """Way through a store to results in memory of their own."""

    def collect(self, ticket: InStore) -> ItemFeatures:
        submitted = ticket.submitted
        arrays, prompt = run(ticket.steps.collect(submitted))
        form, tensors = self._options.form, self._options.tensors
        return self._workplace.finished(arrays, prompt, submitted.key, form=form, tensors=tensors)


class Shared(ThroughStore["SharedItem"]):
    """Way through a store to results that stay there.

    It does not wait for the space of results that the program keeps.
    """

    _pins_results = True

    def collect(self, ticket: InStore) -> SharedItem:
        steps, submitted = ticket.steps, ticket.submitted
        return self._workplace.shared(steps.verbs, submitted.key, run(steps.pin(submitted)))
