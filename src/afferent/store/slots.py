"""Slots: how many requests may be at something at a time, over all processes. Pure.

A slot has a name and as many places as whoever enters says. Places are given in order of arrival. A
request that has gone while its jobs still run keeps its place until they have ended: it is their
work that the place stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from afferent.errors import NotPermitted, SlotTaken, StoreError
from afferent.store.ledger import ClientId, Lease, Ticket
from afferent.store.messages import SlotStatistics

MAX_QUEUED = 1024

Work = tuple[int, ClientId]
"""A job, and the worker that has taken it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A request that wants a place, and the call that is answered when it has one."""

    ticket: Ticket
    lease: Lease
    slot: str
    limit: int


@dataclass(slots=True, eq=False)
class _Slot:
    inside: set[Lease]
    queue: dict[Lease, Entry]  # in order of arrival
    num_lingering: int = 0

    @property
    def num_taken(self) -> int:
        return len(self.inside) + self.num_lingering


class Slots:
    """A slot is remembered while somebody is in it, or waits for a place."""

    def __init__(self) -> None:
        self._slots: dict[str, _Slot] = {}
        self._of_lease: dict[Lease, set[str]] = {}  # where it is, or wants to be
        # Places of requests that have gone, and the work that is still done for them.
        self._lingering: list[tuple[str, frozenset[Work]]] = []
        self._num_queued = 0
        self._stirred: dict[str, None] = {}  # where something has changed for those who queue

    # Questions

    def leases_of(self, client: ClientId) -> list[Lease]:
        return [lease for lease in self._of_lease if lease[0] == client]

    def __contains__(self, lease: Lease) -> bool:
        """Whether a request is in a slot, or waits for a place in one."""
        return lease in self._of_lease

    def statistics(self) -> dict[str, SlotStatistics]:
        """By family, which is what comes before the slash of a name."""
        found: dict[str, SlotStatistics] = {}
        for name, slot in self._slots.items():
            family = found.setdefault(name.partition("/")[0], SlotStatistics(0, 0))
            family.num_taken += slot.num_taken
            family.num_queued += len(slot.queue)
        return found

    # Events

    def enter(self, entry: Entry, *, queue: bool) -> bool:
        """Take a place; whether there was one. Otherwise `settle` says when there is.

        Raises:
            SlotTaken: There is no place, and the request does not queue, or too many do.
            NotPermitted: It is there already, or waits.
        """
        lease, name = entry.lease, entry.slot
        slot = self._slots.get(name) or _Slot(set(), {})
        if lease in slot.inside or lease in slot.queue:
            raise NotPermitted("a request enters a slot once")
        is_free = not slot.queue and slot.num_taken < entry.limit
        if not is_free and not queue:
            raise SlotTaken("as many requests as may are at work; try again")
        if not is_free and self._num_queued >= MAX_QUEUED:
            raise SlotTaken("too many requests wait for their turn; try again")
        self._slots[name] = slot
        self._of_lease.setdefault(lease, set()).add(name)
        if is_free:
            slot.inside.add(lease)
        else:
            slot.queue[lease] = entry
            self._num_queued += 1
        return is_free

    def leave(self, lease: Lease, name: str) -> Ticket | None:
        """Give a place back at once; the call to answer, if the request was still waiting.

        Nothing happens where it is not.
        """
        if name not in self._of_lease.get(lease, ()):
            return None
        return self._remove(lease, name)

    def retire(self, lease: Lease, work: Collection[Work]) -> list[Ticket]:
        """A request has gone: give its places back, but for what is still done for it.

        Args:
            work: Jobs that run, and that nobody else waits for. For those that began for a request
                that went before, its place stands.

        Returns:
            The calls to answer, of slots for which it was waiting.
        """
        cancelled = []
        for name in list(self._of_lease.get(lease, ())):
            slot = self._slots[name]
            if lease in slot.inside and (left := self._uncovered(name, work)):
                slot.num_lingering += 1
                self._lingering.append((name, left))
            if (ticket := self._remove(lease, name)) is not None:
                cancelled.append(ticket)
        return cancelled

    def settle(self, is_running: Callable[[Work], bool]) -> list[Entry]:
        """Give places that have become free to those who queue; who has got one now."""
        if self._lingering:
            self._end_lingering(is_running)
        stirred, self._stirred = self._stirred, {}
        return [entry for name in stirred if name in self._slots for entry in self._let_in(name)]

    def validate(self) -> None:
        """Check every rule of this class; for tests."""
        where: dict[Lease, set[str]] = {}
        for name, slot in self._slots.items():
            if not slot.num_taken and not slot.queue:
                raise StoreError("an empty slot is remembered")
            if not slot.inside.isdisjoint(slot.queue):
                raise StoreError("a request waits for a place that it has")
            first = next(iter(slot.queue.values()), None)
            if first is not None and slot.num_taken < first.limit and name not in self._stirred:
                raise StoreError("a place is free while a request waits for it")
            if slot.num_lingering != sum(name == other for other, _ in self._lingering):
                raise StoreError("the places of requests that have gone do not add up")
            for lease in (*slot.inside, *slot.queue):
                where.setdefault(lease, set()).add(name)
        if where != self._of_lease:
            raise StoreError("the list of slots by request is wrong")
        if self._num_queued != sum(len(slot.queue) for slot in self._slots.values()):
            raise StoreError("those who queue for a slot do not add up")

    # Inner steps

    def _remove(self, lease: Lease, name: str) -> Ticket | None:
        slot, names = self._slots[name], self._of_lease[lease]
        names.discard(name)
        if not names:
            del self._of_lease[lease]
        slot.inside.discard(lease)
        entry = slot.queue.pop(lease, None)
        self._num_queued -= entry is not None
        self._changed(name)
        return entry.ticket if entry is not None else None

    def _uncovered(self, name: str, work: Collection[Work]) -> frozenset[Work]:
        """The work for which no place of a request that has gone stands."""
        return frozenset(work).difference(*(them for slot, them in self._lingering if slot == name))

    def _changed(self, name: str) -> None:
        slot = self._slots[name]
        if slot.queue:
            self._stirred[name] = None
        if not slot.num_taken and not slot.queue:
            del self._slots[name]

    def _end_lingering(self, is_running: Callable[[Work], bool]) -> None:
        before, self._lingering = self._lingering, []
        for name, work in before:
            left = frozenset(filter(is_running, work))
            if left:
                self._lingering.append((name, left))
            else:
                self._slots[name].num_lingering -= 1
                self._changed(name)

    def _let_in(self, name: str) -> list[Entry]:
        slot, entered = self._slots[name], []
        while slot.queue:
            lease, entry = next(iter(slot.queue.items()))
            if slot.num_taken >= entry.limit:
                break
            del slot.queue[lease]
            self._num_queued -= 1
            slot.inside.add(lease)
            entered.append(entry)
        return entered
