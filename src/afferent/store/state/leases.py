"""Index of the objects that each lease writes or pins. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from afferent.store.state.object import StoredObject
from afferent.types import ClientId, Lease


class LeaseIndex:
    """Objects by lease; the objects themselves record their writer and pins.

    Invariants:
        - A lease without objects has no entry.
        - The objects of a lease are in the order in which it took them.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        # By generation, in the order of `add`, each with its time.
        self._held: dict[Lease, dict[int, tuple[StoredObject, float]]] = {}
        self._clock = clock

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._held)

    def of_client(self, client: ClientId) -> list[Lease]:
        return [lease for lease in self._held if lease[0] == client]

    def items(self, lease: Lease) -> list[StoredObject]:
        return [item for item, _ in self._held.get(lease, {}).values()]

    def held_since(self) -> Iterator[tuple[Lease, StoredObject, float]]:
        """Yield each lease, object and the time since when the lease has it."""
        for lease, held in self._held.items():
            for item, since_s in held.values():
                yield lease, item, since_s

    def add(self, lease: Lease, *items: StoredObject) -> None:
        held = self._held.get(lease)
        if held is None:
            held = self._held[lease] = {}
        now_s = self._clock()
        for item in items:
            held[item.handle.generation] = (item, now_s)

    def remove(self, lease: Lease, item: StoredObject) -> None:
        """Remove an object that the lease neither writes nor pins."""
        held = self._held.get(lease)
        if held is not None and held.pop(item.handle.generation, None) is not None and not held:
            del self._held[lease]

    def drop(self, lease: Lease) -> list[StoredObject]:
        """Remove all objects of a lease and return them."""
        return [item for item, _ in self._held.pop(lease, {}).values()]

    def move(self, source: Lease, target: Lease) -> None:
        """Move all objects of one lease to another."""
        for item in self.drop(source):
            if item.writer == source:
                item.writer = target
            if source in item.pins:
                item.pins[target] = item.pins.get(target, 0) + item.pins.pop(source)
            self.add(target, item)
