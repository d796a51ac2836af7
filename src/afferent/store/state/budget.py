"""Budget of bytes: reserved, in use, and evictable. Pure.

For each kind of object, two amounts together never exceed the memory of the kind's region share:

- *reserved* bytes, promised to a request and not yet allocated;
- *held* bytes: objects that are written, pinned, or pending deletion and still mapped.

All other bytes are free or evictable. If the memory is too small, the budget requests more.

A reservation is all or nothing over its kinds. A request that does not fit may queue. The queue is
fair between tenants. Within a tenant, a small request does not wait for a large one; a large
request waits for at most as many bytes of small ones as it requests itself. The next request in the
queue is never overtaken because a later one fits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from afferent.admission.shares import NAMELESS, FairQueue, Share
from afferent.errors import ArenaTooSmall, NotPermitted, Shortage, StoreError, StoreFull
from afferent.types import ClientId, Lease, ObjectKind, Ticket

Amounts = Mapping[ObjectKind, int]

_IN_USE = "no room: the arena is in use, or promised to others"

MAX_QUEUED = 2048
"""Limit for the same set of kinds; one tenant may use half of it."""


@dataclass(frozen=True, slots=True)
class QueuedReservation:
    """Reservation in the queue, with its tenant share. `Budget.enqueue` sets ``number``."""

    ticket: Ticket
    lease: Lease
    amounts: Amounts
    share: Share = NAMELESS
    number: int = field(default=0, compare=False)

    @property
    def kinds(self) -> frozenset[ObjectKind]:
        return frozenset(self.amounts)


class Budget:
    """Reserved and held bytes of each kind, and the queue of reservations.

    Amounts are whole cache lines: see `afferent.store.state.allocator.round_up`.

    Args:
        capacity: The region shares of the kinds.
        more: Gets up to this much more memory for a kind's share and returns how much it got.
            Without it, all shares have their memory from the start.

    Invariants:
        - For each kind, held plus reserved <= backed <= capacity.
        - ``_reserved`` is the sum of ``_reservations``; no lease has an empty reservation.
        - Each queued ticket is in exactly one order, and ``_num_awaited`` counts the queue by kind.
    """

    def __init__(
        self, capacity: Amounts, *, more: Callable[[ObjectKind, int], int] | None = None
    ) -> None:
        self._capacity = dict(capacity)
        self._backed = dict(capacity) if more is None else dict.fromkeys(capacity, 0)
        self._more = more
        self._held = dict.fromkeys(capacity, 0)
        self._reserved = dict.fromkeys(capacity, 0)
        self._reservations: dict[Lease, dict[ObjectKind, int]] = {}
        # The calls that made these reservations; leases whose calls can be forgotten soon.
        self._granted: dict[Lease, set[Ticket]] = {}
        self._emptied: list[Lease] = []
        self._queue: dict[Ticket, QueuedReservation] = {}  # in order of arrival
        self._orders: dict[frozenset[ObjectKind], FairQueue[Ticket]] = {}
        self._num_awaited = dict.fromkeys(capacity, 0)  # queued reservations
        self._numbers = itertools.count()
        self._may_reserve = False  # whether a queued reservation may fit since the last attempt

    # Queries

    def capacity_nbytes(self, kind: ObjectKind) -> int:
        return self._capacity[kind]

    def backed_nbytes(self, kind: ObjectKind) -> int:
        return self._backed[kind]

    def held_nbytes(self, kind: ObjectKind) -> int:
        return self._held[kind]

    def reserved_nbytes(self, kind: ObjectKind) -> int:
        return self._reserved[kind]

    def unpromised_nbytes(self, kind: ObjectKind) -> int:
        """Return the bytes that have memory and are neither held nor reserved."""
        return self._backed[kind] - self._held[kind] - self._reserved[kind]

    def reservation_of(self, lease: Lease, kind: ObjectKind) -> int:
        """Return the rest of a lease's reservation."""
        return self._reservations.get(lease, {}).get(kind, 0)

    def reserved_by_client_of(self, kind: ObjectKind) -> dict[ClientId, int]:
        """Return the reserved bytes of one kind, by client."""
        found: dict[ClientId, int] = {}
        for (client, _), amounts in self._reservations.items():
            if nbytes := amounts.get(kind, 0):
                found[client] = found.get(client, 0) + nbytes
        return found

    def reservations_of(self, lease: Lease, kinds: Iterable[ObjectKind]) -> Amounts:
        """Return the rest of a lease's reservations, for `restore_all`."""
        return {kind: self.reservation_of(lease, kind) for kind in kinds}

    def leases_of(self, client: ClientId) -> list[Lease]:
        """Return the leases of a client that have reservations or queue for one."""
        queued = (reservation.lease for reservation in self._queue.values())
        return [
            lease for lease in dict.fromkeys((*self._reservations, *queued)) if lease[0] == client
        ]

    def reserved_by_lease(self) -> dict[Lease, int]:
        """Return the reserved bytes by lease."""
        return {lease: sum(amounts.values()) for lease, amounts in self._reservations.items()}

    def reserved_by_client(self) -> dict[ClientId, int]:
        """Return the reserved bytes by client."""
        found: dict[ClientId, int] = {}
        for (client, _), nbytes in self.reserved_by_lease().items():
            found[client] = found.get(client, 0) + nbytes
        return found

    @property
    def queued(self) -> Collection[QueuedReservation]:
        """Queued reservations, in order of arrival."""
        return self._queue.values()

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def is_awaited(self, kind: ObjectKind) -> bool:
        """Whether a reservation of this kind is queued."""
        return self._num_awaited[kind] > 0

    def check_fits(self, kind: ObjectKind, nbytes: int) -> None:
        """Refuse a size that does not fit even into an empty arena.

        Raises:
            ArenaTooSmall: It exceeds the kind's region share.
        """
        capacity = self._capacity[kind]
        if nbytes > capacity:
            raise ArenaTooSmall(
                f"{nbytes} bytes of {kind} are more than their share of the arena, "
                f"{capacity} bytes"
                + ("" if capacity else f": give {kind} a region share, or use another kind")
            )

    def shortage(self, kind: ObjectKind, nbytes: int) -> Shortage:
        """Describe the use of a kind's share, for a call that needs ``nbytes`` of it."""
        return Shortage(
            kind=kind.value,
            requested_nbytes=nbytes,
            share_nbytes=self._capacity[kind],
            held_nbytes=self._held[kind],
            reserved_nbytes=self._reserved[kind],
            num_queued=self._num_awaited[kind],
        )

    def grow(self, kind: ObjectKind, nbytes: int) -> bool:
        """Get up to ``nbytes`` more memory for a kind; return whether there is more than before."""
        grown = self._more(kind, nbytes) if self._more is not None and nbytes > 0 else 0
        self._backed[kind] += grown
        return grown > 0

    def look_again(self) -> None:
        """Retry the queued reservations: memory that was refused may be available now."""
        self._may_reserve = True

    # Reservations

    def reserve(self, lease: Lease, amounts: Amounts, *, ticket: Ticket | None = None) -> None:
        """Reserve ``amounts`` for a lease, in addition to its rest; ``ticket`` is for `take_back`.

        Raises:
            ArenaTooSmall: The total exceeds a kind's region share.
            StoreFull: The bytes are held, reserved, or awaited by other requests.
        """
        for kind, nbytes in amounts.items():
            self.check_fits(kind, self.reservation_of(lease, kind) + nbytes)
        for kind, nbytes in amounts.items():
            if self.is_awaited(kind) or not self._has(kind, nbytes):
                raise StoreFull(_IN_USE, shortage=self.shortage(kind, nbytes))
        self._reserve_now(lease, amounts, ticket=ticket)

    def enqueue(self, reservation: QueuedReservation) -> None:
        """Queue a reservation; `reserve_queued` reports when it is made.

        Raises:
            StoreFull: The queue is full.
            NotPermitted: The ticket is in the queue already.
        """
        if reservation.ticket in self._queue:
            raise NotPermitted("a call has a number of its own")
        order = self._orders.setdefault(reservation.kinds, FairQueue())
        if not order.has_place(reservation.share, MAX_QUEUED):
            kind, nbytes = max(reservation.amounts.items(), key=lambda amount: amount[1])
            shortage = self.shortage(kind, nbytes)
            raise StoreFull("no room, and too many requests wait for some", shortage=shortage)
        number = next(self._numbers)
        self._queue[reservation.ticket] = replace(reservation, number=number)
        cost = max(sum(reservation.amounts.values()), 1)
        order.push(reservation.ticket, share=reservation.share, flow=reservation.lease, cost=cost)
        for kind in reservation.amounts:
            self._num_awaited[kind] += 1
        self._may_reserve = True

    def reserve_queued(self) -> list[QueuedReservation]:
        """Make the queued reservations that fit now, in fair order, and return them."""
        if self._emptied:
            self._forget_calls()
        if not self._may_reserve:
            return []
        reserved, blocked = [], set[ObjectKind]()
        while (reservation := self._next(blocked)) is not None:
            if self._has_room(reservation.amounts):
                self._orders[reservation.kinds].pop()
                self._unqueue([reservation])
                lease, amounts = reservation.lease, reservation.amounts
                self._reserve_now(lease, amounts, ticket=reservation.ticket)
                reserved.append(reservation)
            else:
                blocked |= reservation.kinds
        self._may_reserve = False
        return reserved

    def cancel(self, ticket: Ticket) -> bool:
        """Remove a reservation from the queue; return whether it was there."""
        reservation = self._queue.get(ticket)
        if reservation is not None:
            self._unqueue([reservation])
        return reservation is not None

    def give_back(self, lease: Lease, amounts: Amounts) -> None:
        """Return a part of a reservation, up to its rest."""
        for kind, nbytes in amounts.items():
            self._spend(lease, kind, nbytes)
        self._may_reserve = True

    def take_back(self, lease: Lease, amounts: Amounts, *, ticket: Ticket) -> None:
        """Return the bytes that a call reserved; no-op if it was refused or has not arrived."""
        if ticket in self._granted.get(lease, ()):
            self.give_back(lease, amounts)

    def drop(self, lease: Lease) -> list[Ticket]:
        """Drop the reservations of a lease and its queue entries; return the entries' tickets."""
        self._granted.pop(lease, None)
        for kind, nbytes in self._reservations.pop(lease, {}).items():
            self._reserved[kind] -= nbytes
            self._may_reserve = True
        if not self._queue:
            return []
        cancelled = [waiting for waiting in self._queue.values() if waiting.lease == lease]
        self._unqueue(cancelled)
        return [reservation.ticket for reservation in cancelled]

    def hand_over(self, source: Lease, target: Lease, kind: ObjectKind, nbytes: int) -> int:
        """Move up to ``nbytes`` of a reservation to another lease; return the moved bytes."""
        moved = self._spend(source, kind, nbytes)
        if moved:
            self._reserve_now(target, {kind: moved})
        return moved

    # Held bytes

    def hold(self, lease: Lease, kind: ObjectKind, nbytes: int) -> int:
        """Count an object as held: from the lease's reservation first, then from unreserved bytes.

        Returns:
            The bytes taken from the reservation, for `unhold`.

        Raises:
            ArenaTooSmall: The object exceeds the kind's share.
            StoreFull: The rest is held, reserved or awaited by other requests.
        """
        reservation = self._reservations.get(lease)
        spent = min(reservation.get(kind, 0), nbytes) if reservation else 0
        rest = nbytes - spent
        if rest and (self._num_awaited[kind] or not self._has(kind, rest)):
            self.check_fits(kind, nbytes)
            raise StoreFull(_IN_USE, shortage=self.shortage(kind, nbytes))
        if spent:
            self._spend(lease, kind, spent)
        self._held[kind] += nbytes
        return spent

    def unhold(self, lease: Lease, kind: ObjectKind, nbytes: int, *, spent: int) -> None:
        """Undo a `hold`: bytes from the reservation are reserved again."""
        self.release(kind, nbytes)
        self.restore(lease, kind, spent)

    def restore(self, lease: Lease, kind: ObjectKind, nbytes: int) -> None:
        """Reserve again the bytes that an undone `hold` had spent."""
        if nbytes:
            self._reserve_now(lease, {kind: nbytes})

    def restore_all(self, lease: Lease, reservations: Amounts) -> None:
        """Restore a lease's reservations to earlier amounts, after parts were spent and freed."""
        for kind, nbytes in reservations.items():
            self.restore(lease, kind, nbytes - self.reservation_of(lease, kind))

    def release(self, kind: ObjectKind, nbytes: int) -> None:
        """Stop counting bytes as held: the object is unpinned or shrunk."""
        self._held[kind] -= nbytes
        self._may_reserve = True

    def validate(self) -> None:
        """Check every invariant; for tests."""
        for kind, capacity in self._capacity.items():
            reserved = sum(reservation.get(kind, 0) for reservation in self._reservations.values())
            if reserved != self._reserved[kind] or min(self._held[kind], reserved) < 0:
                raise StoreError(f"the reservations of {kind} do not add up")
            if not self._held[kind] + reserved <= self._backed[kind] <= capacity:
                raise StoreError(f"more {kind} are promised than there is memory in their share")
            awaited = sum(kind in waiting.amounts for waiting in self._queue.values())
            if awaited != self._num_awaited[kind]:
                raise StoreError(f"those who queue for {kind} do not add up")
        if {t for order in self._orders.values() for t in order} != set(self._queue):
            raise StoreError("those who queue have no order")
        if not all(any(reservation.values()) for reservation in self._reservations.values()):
            raise StoreError("a reservation of nothing is remembered")
        if not self._granted.keys() <= {*self._reservations, *self._emptied}:
            raise StoreError("calls are remembered of which nothing is left")

    def _forget_calls(self) -> None:
        """Forget the calls of empty reservations. Delayed: an undone `hold` reserves again."""
        for lease in self._emptied:
            if lease not in self._reservations:
                self._granted.pop(lease, None)
        self._emptied.clear()

    def _next(self, blocked: set[ObjectKind]) -> QueuedReservation | None:
        """Return the oldest of the next reservations of all orders without a blocked kind."""
        heads = (order.peek() for kinds, order in self._orders.items() if blocked.isdisjoint(kinds))
        return min(
            (self._queue[ticket] for ticket in heads if ticket is not None),
            key=lambda reservation: reservation.number,
            default=None,
        )

    def _unqueue(self, reservations: Iterable[QueuedReservation]) -> None:
        for reservation in reservations:
            del self._queue[reservation.ticket]
            order = self._orders[reservation.kinds]
            order.discard(reservation.ticket)
            if not order:
                del self._orders[reservation.kinds]
            for kind in reservation.amounts:
                self._num_awaited[kind] -= 1
            self._may_reserve = True

    def _has_room(self, amounts: Amounts) -> bool:
        return all(self._has(kind, nbytes) for kind, nbytes in amounts.items())

    def _has(self, kind: ObjectKind, nbytes: int) -> bool:
        """Whether ``nbytes`` can be reserved, now or after growing."""
        missing = nbytes - self.unpromised_nbytes(kind)
        return missing <= 0 or (self.grow(kind, missing) and nbytes <= self.unpromised_nbytes(kind))

    def _reserve_now(self, lease: Lease, amounts: Amounts, *, ticket: Ticket | None = None) -> None:
        if not amounts:
            return
        if ticket is not None:
            self._granted.setdefault(lease, set()).add(ticket)
        left = self._reservations.setdefault(lease, {})
        for kind, nbytes in amounts.items():
            left[kind] = left.get(kind, 0) + nbytes
            self._reserved[kind] += nbytes

    def _spend(self, lease: Lease, kind: ObjectKind, nbytes: int) -> int:
        left = self._reservations.get(lease)
        spent = min(left.get(kind, 0), nbytes) if left else 0
        if left and spent:
            self._reserved[kind] -= spent
            left[kind] -= spent
            if not any(left.values()):
                del self._reservations[lease]
                self._emptied.append(lease)
        return spent
