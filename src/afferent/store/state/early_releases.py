"""Pins that end when an engine has encoded the item, and not with their request. Pure."""

from __future__ import annotations

from afferent.types import ClientId, Lease


class EarlyReleases:
    """Requests that allow the early end of their pins, by the generation of the object.

    An engine reports items, and no requests. Pins of one object are alike, so that a report ends
    the oldest of those that may end.

    Invariants:
        - A lease has an entry for an object only once: it may end, or it has ended.
        - `forget` leaves no entry of a lease.
    """

    def __init__(self) -> None:
        # By generation, in the order of the calls.
        self._allowed: dict[int, dict[Lease, None]] = {}
        self._by_lease: dict[Lease, set[int]] = {}
        self._ended: dict[Lease, set[int]] = {}

    def allow(self, lease: Lease, generation: int) -> None:
        """Allow that a lease's pin of an object ends early."""
        if not self.has_ended(lease, generation):
            self._allowed.setdefault(generation, {})[lease] = None
            self._by_lease.setdefault(lease, set()).add(generation)

    def disallow(self, lease: Lease, generation: int) -> None:
        """Undo `allow`, if there was one: the lease has no pin of the object any more."""
        if lease in self._allowed.get(generation, ()):
            self._drop(lease, generation)

    def end_one(self, generation: int) -> Lease | None:
        """Return the lease whose pin of an object ends now; ``None`` if no pin of it may end."""
        waiting = self._allowed.get(generation)
        if not waiting:
            return None
        lease = next(iter(waiting))
        self._drop(lease, generation)
        self._ended.setdefault(lease, set()).add(generation)
        return lease

    def has_ended(self, lease: Lease, generation: int) -> bool:
        """Whether a lease's pin of an object has ended early."""
        return generation in self._ended.get(lease, ())

    def has_any(self, lease: Lease) -> bool:
        """Whether any pin of a lease has ended early, and the lease itself has not ended."""
        return bool(self._ended.get(lease))

    def forget(self, lease: Lease) -> None:
        """Forget a lease that has ended."""
        for generation in list(self._by_lease.get(lease, ())):
            self._drop(lease, generation)
        self._ended.pop(lease, None)

    def forget_client(self, client: ClientId) -> None:
        """Forget all leases of a client."""
        for lease in [each for each in (*self._by_lease, *self._ended) if each[0] == client]:
            self.forget(lease)

    def _drop(self, lease: Lease, generation: int) -> None:
        del self._allowed[generation][lease]
        if not self._allowed[generation]:
            del self._allowed[generation]
        self._by_lease[lease].discard(generation)
        if not self._by_lease[lease]:
            del self._by_lease[lease]
