"""Checks that no call, job or reservation waits although it could proceed."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from afferent.errors import StoreError
from afferent.store.state.allocator import round_up
from afferent.store.state.budget import Budget, QueuedReservation
from afferent.store.state.jobs import Job
from afferent.store.state.machine import StoreState
from afferent.types import ObjectKind, Ticket

AGAIN_S = 1.6
"""The daemon asks for memory again each second; its clock may run slowly."""


def check_nobody_waits_in_vain(state: StoreState) -> None:
    """Check that nothing in the daemon's state waits although it could proceed.

    Raises:
        StoreError: A key, job, reservation or idle process waits although it could proceed.
    """
    objects, flights, budget = state.objects, state.flights, state.objects.budget
    unplaced = set(flights.unplaced_keys())
    for key in flights.waiters._waiting:
        if objects.find(key) is None and flights.jobs.find(key) is None and key not in unplaced:
            raise StoreError("what is waited for is made by nobody")
    for job in flights.jobs:
        if job.worker is None and not flights.waiters.is_awaited(job.key):
            raise StoreError("a job waits for a worker, and nobody for the job")
    waiting = [(entry.new.kind, entry.new.nbytes) for entry in _unplaced_jobs(state)]
    waiting += [
        (create.items[0].kind, create.items[0].nbytes)
        for _, create in state._pending
        if len(create.items) == 1
    ]
    for kind, nbytes in waiting:
        region = objects.regions[kind]
        fits = region.allocator.largest_free_nbytes >= round_up(nbytes)
        if fits or region.choose_victims(nbytes) is not None:
            raise StoreError("what has its bytes and an extent still waits for one")
    # Counts only the memory that the arena has: the daemon may not have asked for more yet.
    for first in _heads(budget):
        if _fits(budget, first, budget._backed):
            raise StoreError("who is next has room, and still waits for it")
    if flights.keeping._idle and flights.keeping._made:
        raise StoreError("who keeps has nothing to do while something is to be kept")
    if flights.idle.can_fetch and flights.jobs._fetches:
        raise StoreError("who fetches has nothing to do while something is to be fetched")


def check_every_call_waits(state: StoreState, open_calls: Collection[Ticket]) -> None:
    """Check that exactly the open calls are waiting in the daemon's state.

    Raises:
        StoreError: An open call waits for nothing, or an answered call still waits.
    """
    budget, flights = state.objects.budget, state.flights
    known = {entry.ticket for entry in budget.queued}
    known |= {
        asked.ticket
        for semaphore in state.semaphores._semaphores.values()
        for asked in semaphore.queue.values()
    }
    known |= {(client, create.seq) for client, create in state._pending}
    known |= {
        (client, wait.seq)
        for (client, _), interests in flights.waiters._interests.items()
        for interest in interests.values()
        for wait in interest.waits
    }
    known |= {*flights.idle._makers, *flights.idle._fetchers, *flights.keeping._idle}
    if lost := set(open_calls) - known:
        raise StoreError(f"calls {sorted(lost)} are not answered, and wait for nothing")
    if answered := known - set(open_calls):
        raise StoreError(f"calls {sorted(answered)} were answered, and still wait")


class Slow:
    """Measures how long steps are overdue that only time or free memory has made possible."""

    def __init__(self) -> None:
        self._since: dict[object, float] = {}

    def overdue(
        self, state: StoreState, now_s: float, *, is_troubled: bool
    ) -> Iterator[tuple[str, float]]:
        """Yield each step that is overdue by more than the daemon's interval, and for how long.

        Args:
            is_troubled: Whether a fault is active: then the time begins anew.
        """
        possible: dict[object, str] = {}
        budget, flights = state.objects.budget, state.flights
        for first in _heads(budget):
            if _fits(budget, first, budget._capacity):
                possible[first.ticket] = "who is next could have room, with memory"
        jobs, num_idle = flights.jobs, len(flights.idle._makers)
        if num_idle and jobs._long and jobs._may_begin_long(state._now_s, num_idle):
            possible["long"] = "a long job could begin"
        before = {} if is_troubled else self._since
        self._since = {what: before.get(what, now_s) for what in possible}
        for what, since_s in self._since.items():
            if now_s - since_s > AGAIN_S:
                yield possible[what], now_s - since_s


def _heads(budget: Budget) -> Iterator[QueuedReservation]:
    """Yield the first reservation of each queue whose kinds no earlier reservation waits for."""
    blocked: set[ObjectKind] = set()
    tickets = [order.peek() for order in budget._orders.values()]
    heads = [budget._queue[ticket] for ticket in tickets if ticket is not None]
    for first in sorted(heads, key=lambda head: head.number):
        if blocked.isdisjoint(first.kinds):
            yield first
        blocked |= first.kinds


def _fits(budget: Budget, first: QueuedReservation, memory: dict[ObjectKind, int]) -> bool:
    return all(
        nbytes <= memory[kind] - budget.held_nbytes(kind) - budget.reserved_nbytes(kind)
        for kind, nbytes in first.amounts.items()
    )


def _unplaced_jobs(state: StoreState) -> list[Job]:
    jobs = state.flights.jobs
    return [e for e in state.flights._unplaced if isinstance(e, Job) and jobs.get(e.id) is e]
