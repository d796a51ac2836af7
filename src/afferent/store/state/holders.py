"""The clients that use the arena's bytes, for the error `StoreFull`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec import structs

from afferent.errors import AfferentError, Holder, StoreFull
from afferent.store.state.object_table import ObjectTable
from afferent.types import ClientId, Failure, ObjectKind

_MOST_HOLDERS = 8
_CHEAP = 256
"""Up to this many pins are counted for each error; above it, the result is reused for
`_FRESH_S`.
"""
_FRESH_S = 0.1


@dataclass(slots=True)
class Client:
    """Known facts about a client."""

    name: str
    pid: int
    connected: bool = True
    is_worker: bool = False


class Holders:
    """Counts the bytes that each client pins, writes or reserves, for errors.

    Invariants:
        - A full store refuses many calls a second, and many items per call. Counting takes a small
          part of the time: once per event, and above `_CHEAP` pins at most once per `_FRESH_S`.
    """

    def __init__(
        self,
        objects: ObjectTable,
        clients: Mapping[ClientId, Client],
        clock: Callable[[], float],
    ) -> None:
        self._objects, self._clients, self._clock = objects, clients, clock
        self._counted: dict[ObjectKind, tuple[float, tuple[Holder, ...]]] = {}

    def failure_of(self, error: AfferentError) -> Failure:
        """Return the error as a `Failure`; `StoreFull` includes the clients that use the space."""
        failure = Failure.of(error)
        if not isinstance(error, StoreFull) or error.shortage is None:
            return failure
        holders = self._of(ObjectKind(error.shortage.kind))
        return structs.replace(failure, shortage=structs.replace(error.shortage, holders=holders))

    def _of(self, kind: ObjectKind) -> tuple[Holder, ...]:
        now_s = self._clock()
        if (counted := self._counted.get(kind)) is not None and now_s <= counted[0]:
            return counted[1]
        holders, num_counted = self._count(kind, now_s)
        fresh_until_s = now_s + (_FRESH_S if num_counted > _CHEAP else 0.0)
        self._counted[kind] = (fresh_until_s, holders)
        return holders

    def _count(self, kind: ObjectKind, now_s: float) -> tuple[tuple[Holder, ...], int]:
        held: dict[ClientId, dict[int, int]] = {}
        since: dict[ClientId, float] = {}
        num_counted = 0
        for (client, _), item, since_s in self._objects.held_since():
            num_counted += 1
            if item.kind is kind:
                held.setdefault(client, {})[item.handle.generation] = item.block_nbytes
                since[client] = min(since_s, since.get(client, since_s))
        reserved = self._objects.budget.reserved_by_client_of(kind)
        clients = {number: self._clients.get(number) for number in held.keys() | reserved.keys()}
        found = [
            Holder(
                client=number,
                name=client.name if client else "",
                pid=client.pid if client else 0,
                held_nbytes=sum(held.get(number, {}).values()),
                reserved_nbytes=reserved.get(number, 0),
                held_s=now_s - since.get(number, now_s),
            )
            for number, client in clients.items()
        ]
        found.sort(key=lambda holder: (-holder.held_nbytes - holder.reserved_nbytes, holder.client))
        return tuple(found[:_MOST_HOLDERS]), num_counted
