"""The ledger: bytes that are promised, and bytes that nobody can take away. Pure.

For each kind of object, bytes *granted* to a request and not yet allocated, plus bytes *held*
(objects being written, pinned, or doomed and still mapped by somebody), never exceed the kind's
share of the arena. What is neither can be had by evicting. A grant is all or nothing over the kinds
it names; who can't have one now may queue, and each kind is granted in the order of arrival.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from afferent.errors import ArenaTooSmall, NotPermitted, StoreError, StoreFull
from afferent.types import ObjectKind

ClientId = int
Lease = tuple[ClientId, str | int]
"""A request of a client; jobs of the store itself have numbers."""

Ticket = tuple[ClientId, int]
"""Who waits for a grant, and the number of its call."""

Amounts = Mapping[ObjectKind, int]

MAX_QUEUED = 1024


@dataclass(frozen=True, slots=True)
class Reservation:
    """A grant that is waited for."""

    ticket: Ticket
    lease: Lease
    amounts: Amounts


class Ledger:
    """Amounts are whole cache lines: see `afferent.store.allocator.round_up`."""

    def __init__(self, capacity: Amounts) -> None:
        self._capacity = dict(capacity)
        self._held = dict.fromkeys(capacity, 0)
        self._granted = dict.fromkeys(capacity, 0)
        self._grants: dict[Lease, dict[ObjectKind, int]] = {}
        self._queue: dict[Ticket, Reservation] = {}  # in order of arrival
        self._num_awaited = dict.fromkeys(capacity, 0)  # reservations in the queue
        self._may_grant = False  # something has changed for those who queue

    # Questions

    def capacity_nbytes(self, kind: ObjectKind) -> int:
        return self._capacity[kind]

    def held_nbytes(self, kind: ObjectKind) -> int:
        return self._held[kind]

    def granted_nbytes(self, kind: ObjectKind) -> int:
        return self._granted[kind]

    def unpromised_nbytes(self, kind: ObjectKind) -> int:
        return self._capacity[kind] - self._held[kind] - self._granted[kind]

    def grant_of(self, lease: Lease, kind: ObjectKind) -> int:
        """What is left of a lease's grant."""
        return self._grants.get(lease, {}).get(kind, 0)

    def grants_of(self, lease: Lease, kinds: Iterable[ObjectKind]) -> Amounts:
        """What is left of a lease's grants, to `restore_all` them."""
        return {kind: self.grant_of(lease, kind) for kind in kinds}

    def leases_of(self, client: ClientId) -> list[Lease]:
        """The leases of a client that have grants, or queue for one."""
        queued = (reservation.lease for reservation in self._queue.values())
        return [lease for lease in dict.fromkeys((*self._grants, *queued)) if lease[0] == client]

    def granted_by_client(self) -> dict[ClientId, int]:
        """What is left of the grants of each client that has some."""
        found: dict[ClientId, int] = {}
        for (client, _), amounts in self._grants.items():
            found[client] = found.get(client, 0) + sum(amounts.values())
        return found

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def is_awaited(self, kind: ObjectKind) -> bool:
        """Whether somebody queues for bytes of this kind."""
        return self._num_awaited[kind] > 0

    def check_fits(self, kind: ObjectKind, nbytes: int) -> None:
        """Refuse what could not even be had in an empty arena.

        Raises:
            ArenaTooSmall: It is more than the kind's share.
        """
        if nbytes > self._capacity[kind]:
            raise ArenaTooSmall(
                f"{nbytes} bytes of {kind} are more than their share of the arena, "
                f"{self._capacity[kind]} bytes"
            )

    # Grants

    def grant(self, lease: Lease, amounts: Amounts) -> None:
        """Promise ``amounts`` to a lease, on top of what it has.

        Raises:
            ArenaTooSmall: Nobody could ever have that much.
            StoreFull: Others hold it, or wait for it.
        """
        for kind, nbytes in amounts.items():
            self.check_fits(kind, self.grant_of(lease, kind) + nbytes)
        if not self._has_room(amounts) or any(map(self.is_awaited, amounts)):
            raise StoreFull("no room: the arena is in use, or promised to others")
        self._grant(lease, amounts)

    def enqueue(self, reservation: Reservation) -> None:
        """Queue for a grant; `grant_queued` says when it has been made.

        Raises:
            StoreFull: Too many wait already.
            NotPermitted: The ticket is in the queue already.
        """
        if len(self._queue) >= MAX_QUEUED:
            raise StoreFull("no room, and too many requests wait for some")
        if reservation.ticket in self._queue:
            raise NotPermitted("a call has a number of its own")
        self._queue[reservation.ticket] = reservation
        for kind in reservation.amounts:
            self._num_awaited[kind] += 1
        self._may_grant = True

    def grant_queued(self) -> list[Reservation]:
        """Grant what has become possible: for each kind in order of arrival."""
        if not self._may_grant:
            return []
        self._may_grant = False
        granted, blocked = [], set[ObjectKind]()
        for reservation in self._queue.values():
            amounts = reservation.amounts
            if blocked.isdisjoint(amounts) and self._has_room(amounts):
                self._grant(reservation.lease, amounts)
                granted.append(reservation)
            else:
                blocked.update(amounts)
                if len(blocked) == len(self._capacity):
                    break
        self._unqueue(granted)
        return granted

    def cancel(self, ticket: Ticket) -> bool:
        """Stop waiting; whether it was still waited for."""
        reservation = self._queue.get(ticket)
        if reservation is not None:
            self._unqueue([reservation])
        return reservation is not None

    def give_back(self, lease: Lease, amounts: Amounts) -> None:
        """Return a part of a grant, as much of it as is left."""
        for kind, nbytes in amounts.items():
            self._spend(lease, kind, nbytes)
        self._may_grant = True

    def drop(self, lease: Lease) -> list[Ticket]:
        """Return all of a lease's grants, and stop its waiting for more: the tickets of these."""
        for kind, nbytes in self._grants.pop(lease, {}).items():
            self._granted[kind] -= nbytes
            self._may_grant = True
        if not self._queue:
            return []
        cancelled = [waiting for waiting in self._queue.values() if waiting.lease == lease]
        self._unqueue(cancelled)
        return [reservation.ticket for reservation in cancelled]

    def hand_over(self, source: Lease, target: Lease, kind: ObjectKind, nbytes: int) -> int:
        """Move up to ``nbytes`` of a grant to another lease; how many there were."""
        moved = self._spend(source, kind, nbytes)
        if moved:
            self._grant(target, {kind: moved})
        return moved

    # Holding

    def hold(self, lease: Lease, kind: ObjectKind, nbytes: int) -> int:
        """Count an object as held: from the lease's grant, the rest from what nobody was promised.

        Returns:
            How much came from the grant; `unhold` takes it back.

        Raises:
            ArenaTooSmall: It is more than the kind's share.
            StoreFull: The rest is held, promised to others, or others queue for it.
        """
        grant = self._grants.get(lease)
        spent = min(grant.get(kind, 0), nbytes) if grant else 0
        rest = nbytes - spent
        if rest and (self._num_awaited[kind] or rest > self.unpromised_nbytes(kind)):
            self.check_fits(kind, nbytes)
            raise StoreFull("no room: the arena is in use, or promised to others")
        if spent:
            self._spend(lease, kind, spent)
        self._held[kind] += nbytes
        return spent

    def unhold(self, lease: Lease, kind: ObjectKind, nbytes: int, *, spent: int) -> None:
        """Undo a `hold`: what came from the grant is granted again."""
        self.let_go(kind, nbytes)
        self.restore(lease, kind, spent)

    def restore(self, lease: Lease, kind: ObjectKind, nbytes: int) -> None:
        """Grant again what a `hold` that was undone had spent."""
        if nbytes:
            self._grant(lease, {kind: nbytes})

    def restore_all(self, lease: Lease, grants: Amounts) -> None:
        """Have a lease's grants be these again, of which some was spent and let go."""
        for kind, nbytes in grants.items():
            self.restore(lease, kind, nbytes - self.grant_of(lease, kind))

    def let_go(self, kind: ObjectKind, nbytes: int) -> None:
        """An object is not held any more, or has become shorter."""
        self._held[kind] -= nbytes
        self._may_grant = True

    def validate(self) -> None:
        """Check every rule of this class; for tests."""
        for kind, capacity in self._capacity.items():
            granted = sum(grant.get(kind, 0) for grant in self._grants.values())
            if granted != self._granted[kind] or min(self._held[kind], granted) < 0:
                raise StoreError(f"the grants of {kind} do not add up")
            if self._held[kind] + granted > capacity:
                raise StoreError(f"more {kind} are promised than their share")
            awaited = sum(kind in waiting.amounts for waiting in self._queue.values())
            if awaited != self._num_awaited[kind]:
                raise StoreError(f"those who queue for {kind} do not add up")
        if not all(any(grant.values()) for grant in self._grants.values()):
            raise StoreError("a grant of nothing is remembered")

    def _unqueue(self, reservations: Iterable[Reservation]) -> None:
        for reservation in reservations:
            del self._queue[reservation.ticket]
            for kind in reservation.amounts:
                self._num_awaited[kind] -= 1
            self._may_grant = True

    def _has_room(self, amounts: Amounts) -> bool:
        return all(nbytes <= self.unpromised_nbytes(kind) for kind, nbytes in amounts.items())

    def _grant(self, lease: Lease, amounts: Amounts) -> None:
        if not amounts:
            return
        grants = self._grants.setdefault(lease, {})
        for kind, nbytes in amounts.items():
            grants[kind] = grants.get(kind, 0) + nbytes
            self._granted[kind] += nbytes

    def _spend(self, lease: Lease, kind: ObjectKind, nbytes: int) -> int:
        grants = self._grants.get(lease)
        spent = min(grants.get(kind, 0), nbytes) if grants else 0
        if grants and spent:
            self._granted[kind] -= spent
            grants[kind] -= spent
            if not any(grants.values()):
                del self._grants[lease]
        return spent
