"""Semaphores: limits on the number of requests in a stage, over all processes. Pure.

A semaphore has a name; each request states its number of permits. Permits are shared fairly between
tenants, and given in order of arrival to the requests of one tenant. A permit covers the work of a
request: if a request ends while its jobs still run, its permit is released when they have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from afferent.admission.shares import NAMELESS, FairQueue, Share
from afferent.errors import NoPermitLeft, NotPermitted, StoreError
from afferent.types import ClientId, Lease, Ticket

MAX_QUEUED = 2048
"""Queue limit of one semaphore; half of it for one tenant."""

PREPROCESS: Final = "preprocess"
"""Semaphore of the count gate: requests whose media are prepared."""
FORWARDED: Final = "forwarded"
"""Semaphore in MiB of tensors that an engine computes from media that it processes itself."""
LIVE_AUDIO: Final = "live_audio"
"""Semaphore in MiB of the floats that an engine makes of the audio of live transcriptions."""
GATE: Final = (PREPROCESS, FORWARDED)
"""Semaphores that a request releases when the engine has accepted it."""

Work = tuple[int, ClientId]
"""A job, and the worker that runs it."""


class PermitStatistics(Struct, forbid_unknown_fields=True):
    """Statistics of one family of semaphores: permits in use, and queued requests."""

    num_held: int
    num_queued: int


@dataclass(frozen=True, slots=True)
class PermitRequest:
    """Request for permits: its tenant, and the call to answer when it has them.

    A number above the semaphore's limit counts as the limit.
    """

    ticket: Ticket
    lease: Lease
    semaphore: str
    limit: int
    share: Share = NAMELESS
    number: int = 1

    @property
    def wanted(self) -> int:
        return min(self.number, self.limit)


@dataclass(slots=True, eq=False)
class _Semaphore:
    holders: dict[Lease, PermitRequest]
    queue: dict[Lease, PermitRequest] = field(default_factory=dict)
    order: FairQueue[Lease] = field(default_factory=FairQueue)
    num_lingering: int = 0
    num_held: int = 0
    """Permits in use, lingering ones included."""

    def grant(self, asked: PermitRequest) -> None:
        self.holders[asked.lease] = asked
        self.num_held += asked.wanted


class Semaphores:
    """Semaphores by name; one without permits in use and without a queue is forgotten.

    Invariants:
        - A request has permits of a semaphore, or waits for them, but not both.
        - A free permit is never left while a request waits for it, after `settle`.
        - A lingering permit stands for jobs of an ended request that still run.
    """

    def __init__(self) -> None:
        self._semaphores: dict[str, _Semaphore] = {}
        self._of_lease: dict[Lease, set[str]] = {}  # names of semaphores
        # Permits of ended requests, and their jobs that still run.
        self._lingering: list[tuple[str, frozenset[Work], int]] = []
        self._stirred: dict[str, None] = {}  # semaphores whose queue may advance

    # Questions

    def leases_of(self, client: ClientId) -> list[Lease]:
        return [lease for lease in self._of_lease if lease[0] == client]

    def __contains__(self, lease: Lease) -> bool:
        """Return whether a request has a permit of any semaphore, or waits for one."""
        return lease in self._of_lease

    def is_waiting(self, lease: Lease, name: str) -> bool:
        """Return whether a request waits for a permit of a semaphore."""
        return name in self._semaphores and lease in self._semaphores[name].queue

    def num_left(self, asked: PermitRequest) -> int:
        """Return how many permits of a request's semaphore are left, with the request's limit."""
        held = self._semaphores[asked.semaphore].num_held
        return max(asked.limit - held, 0)  # another request may have stated a larger limit

    def statistics(self) -> dict[str, PermitStatistics]:
        """Return the statistics by family: the part of a name before the slash."""
        found: dict[str, PermitStatistics] = {}
        for name, semaphore in self._semaphores.items():
            family = found.setdefault(name.partition("/")[0], PermitStatistics(0, 0))
            family.num_held += semaphore.num_held
            family.num_queued += len(semaphore.queue)
        return found

    def queued_shares(self) -> list[Share]:
        """Return the tenant of each queued request."""
        return [
            asked.share for found in self._semaphores.values() for asked in found.queue.values()
        ]

    # Events

    def acquire(self, asked: PermitRequest, *, queue: bool) -> bool:
        """Take permits; return whether enough were free. Otherwise `settle` grants them later.

        Raises:
            NoPermitLeft: No permit is free, and the request does not queue or the queue is full.
            NotPermitted: It has or waits for a permit of this semaphore already.
        """
        lease, name = asked.lease, asked.semaphore
        semaphore = self._semaphores.get(name) or _Semaphore({})
        if lease in semaphore.holders or lease in semaphore.queue:
            raise NotPermitted("a request has one permit of a semaphore")
        is_free = not semaphore.queue and semaphore.num_held + asked.wanted <= asked.limit
        if not is_free and not queue:
            raise NoPermitLeft("as many requests as may are at work; try again")
        if not is_free and not semaphore.order.has_place(asked.share, MAX_QUEUED):
            raise NoPermitLeft("too many requests wait for their turn; try again")
        self._semaphores[name] = semaphore
        self._of_lease.setdefault(lease, set()).add(name)
        if is_free:
            semaphore.grant(asked)
        else:
            semaphore.queue[lease] = asked
            semaphore.order.push(lease, share=asked.share, flow=lease, cost=asked.wanted)
            self._stirred[name] = None  # it may be first now, and need fewer permits
        return is_free

    def release(self, lease: Lease, name: str, *, ticket: Ticket | None = None) -> Ticket | None:
        """Release a permit at once; return the call to answer if the request was still waiting.

        Without such a permit, nothing happens.

        Args:
            ticket: Release only the permit that this call requested.
        """
        if name not in self._of_lease.get(lease, ()):
            return None
        semaphore = self._semaphores[name]
        asked = semaphore.holders.get(lease) or semaphore.queue[lease]
        if ticket not in (None, asked.ticket):
            return None
        return self._remove(lease, name)

    def retire(self, lease: Lease, work: Collection[Work]) -> list[Ticket]:
        """Release the permits of an ended request, except those that its running jobs still need.

        Args:
            work: Running jobs that no other request waits for. A job that began for an earlier
                request is covered by that request's permit.

        Returns:
            The calls to answer, for semaphores on which it was waiting.
        """
        cancelled = []
        for name in list(self._of_lease.get(lease, ())):
            semaphore = self._semaphores[name]
            if lease in semaphore.holders and (left := self._uncovered(name, work)):
                number = semaphore.holders[lease].wanted
                semaphore.num_lingering += number
                semaphore.num_held += number
                self._lingering.append((name, left, number))
            if (ticket := self._remove(lease, name)) is not None:
                cancelled.append(ticket)
        return cancelled

    def settle(self, is_running: Callable[[Work], bool]) -> list[PermitRequest]:
        """Grant permits that have become free to queued requests; return the granted requests."""
        if self._lingering:
            self._end_lingering(is_running)
        stirred, self._stirred = self._stirred, {}
        return [
            asked for name in stirred if name in self._semaphores for asked in self._let_in(name)
        ]

    def validate(self) -> None:
        """Check all invariants of this class; for tests."""
        where: dict[Lease, set[str]] = {}
        for name, semaphore in self._semaphores.items():
            if not semaphore.num_held and not semaphore.queue:
                raise StoreError("an empty semaphore is remembered")
            if not semaphore.holders.keys().isdisjoint(semaphore.queue):
                raise StoreError("a request waits for a permit that it has")
            semaphore.order.validate()
            if set(semaphore.order) != set(semaphore.queue):
                raise StoreError("those who queue have no order")
            next_one = semaphore.order.peek()
            first = semaphore.queue[next_one] if next_one is not None else None
            is_next = first is not None and semaphore.num_held + first.wanted <= first.limit
            if is_next and name not in self._stirred:
                raise StoreError("a permit is free while a request waits for it")
            lingering = sum(number for other, _, number in self._lingering if other == name)
            held = sum(asked.wanted for asked in semaphore.holders.values()) + lingering
            if (semaphore.num_lingering, semaphore.num_held) != (lingering, held):
                raise StoreError("the permits of requests that have gone do not add up")
            for lease in (*semaphore.holders, *semaphore.queue):
                where.setdefault(lease, set()).add(name)
        if where != self._of_lease:
            raise StoreError("the list of semaphores by request is wrong")

    # Inner steps

    def _remove(self, lease: Lease, name: str) -> Ticket | None:
        semaphore, names = self._semaphores[name], self._of_lease[lease]
        names.discard(name)
        if not names:
            del self._of_lease[lease]
        held = semaphore.holders.pop(lease, None)
        semaphore.num_held -= held.wanted if held is not None else 0
        asked = semaphore.queue.pop(lease, None)
        semaphore.order.discard(lease)
        self._changed(name)
        return asked.ticket if asked is not None else None

    def _uncovered(self, name: str, work: Collection[Work]) -> frozenset[Work]:
        """Return the work that no permit of an ended request covers."""
        return frozenset(work).difference(
            *(them for semaphore, them, _ in self._lingering if semaphore == name)
        )

    def _changed(self, name: str) -> None:
        semaphore = self._semaphores[name]
        if semaphore.queue:
            self._stirred[name] = None
        if not semaphore.num_held and not semaphore.queue:
            del self._semaphores[name]

    def _end_lingering(self, is_running: Callable[[Work], bool]) -> None:
        before, self._lingering = self._lingering, []
        for name, work, number in before:
            left = frozenset(filter(is_running, work))
            if left:
                self._lingering.append((name, left, number))
            else:
                self._semaphores[name].num_lingering -= number
                self._semaphores[name].num_held -= number
                self._changed(name)

    def _let_in(self, name: str) -> list[PermitRequest]:
        semaphore, entered = self._semaphores[name], []
        while (lease := semaphore.order.peek()) is not None:
            asked = semaphore.queue[lease]
            if semaphore.num_held + asked.wanted > asked.limit:
                break
            semaphore.order.pop()
            del semaphore.queue[lease]
            semaphore.grant(asked)
            entered.append(asked)
        return entered
