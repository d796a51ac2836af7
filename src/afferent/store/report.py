"""What the store says of itself. Questions only."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from afferent.store import messages as m
from afferent.store.ledger import ClientId
from afferent.store.making import Making
from afferent.store.objects import ObjectTable
from afferent.store.slots import Slots
from afferent.store.stored import StoredObject
from afferent.types import ObjectKind


@dataclass(slots=True)
class Client:
    """What is known of a client."""

    name: str
    pid: int
    connected: bool = True
    is_worker: bool = False


class Report:
    def __init__(
        self,
        objects: ObjectTable,
        making: Making,
        slots: Slots,
        clients: Mapping[ClientId, Client],
    ) -> None:
        self._objects, self._making = objects, making
        self._slots, self._clients = slots, clients

    def statistics(self) -> m.Statistics:
        """Figures that cost nothing to have, however many objects there are."""
        kinds = {kind: self._kind(kind) for kind in self._objects.regions}
        making, jobs = self._making, self._making.jobs
        connected = [client for client in self._clients.values() if client.connected]
        return m.Statistics(
            segment=self._objects.segment,
            capacity_nbytes=self._objects.capacity_nbytes,
            used_nbytes=self._objects.used_nbytes,
            held_nbytes=self._objects.held_nbytes,
            granted_nbytes=sum(kind.granted_nbytes for kind in kinds.values()),
            kinds=kinds,
            num_objects=len(self._objects),
            num_evicted=sum(kind.num_evicted for kind in kinds.values()),
            num_jobs_queued=jobs.num_queued,
            num_jobs_running=len(jobs) - jobs.num_queued,
            num_workers=sum(client.is_worker for client in connected),
            num_clients=len(connected),
            num_reservations_queued=self._objects.ledger.num_queued,
            num_hits=making.num_hits,
            num_misses=making.num_misses,
            num_joined=making.num_joined,
            slots=self._slots.statistics(),
        )

    def objects(self, kind: ObjectKind | None, *, limit: int) -> list[m.ObjectInfo]:
        """The largest objects first."""
        wanted = (item for item in self._objects if kind in (None, item.kind))
        return [
            _describe(item)
            for item in heapq.nlargest(limit, wanted, key=lambda item: item.handle.nbytes)
        ]

    def clients(self) -> list[m.ClientInfo]:
        held: dict[ClientId, list[int]] = {client: [] for client in self._clients}
        for item in self._objects:
            for client in _holders(item):
                if client in held:
                    held[client].append(item.block_nbytes)
        granted = self._objects.ledger.granted_by_client()
        return [
            m.ClientInfo(
                client=number,
                name=client.name,
                pid=client.pid,
                connected=client.connected,
                num_held=len(held[number]),
                held_nbytes=sum(held[number]),
                granted_nbytes=granted.get(number, 0),
            )
            for number, client in self._clients.items()
        ]

    def _kind(self, kind: ObjectKind) -> m.KindStatistics:
        allocator, ledger = self._objects.regions[kind].allocator, self._objects.ledger
        return m.KindStatistics(
            capacity_nbytes=allocator.capacity_nbytes,
            used_nbytes=allocator.capacity_nbytes - allocator.free_nbytes,
            held_nbytes=ledger.held_nbytes(kind),
            granted_nbytes=ledger.granted_nbytes(kind),
            largest_free_nbytes=allocator.largest_free_nbytes,
            num_free_runs=allocator.num_free_runs,
            num_objects=allocator.num_blocks,
            num_held=allocator.num_blocks - len(self._objects.regions[kind].evictable),
            num_evicted=self._objects.num_evicted[kind],
        )


def _holders(item: StoredObject) -> set[ClientId]:
    holders = {lease[0] for lease in item.pins}
    if item.writer is not None:
        holders.add(item.writer[0])
    return holders


def _describe(item: StoredObject) -> m.ObjectInfo:
    return m.ObjectInfo(
        handle=item.handle,
        kind=item.kind,
        state=item.state.value,
        key=item.key,
        writer=item.writer[0] if item.writer is not None else None,
        pins=sorted({lease[0] for lease in item.pins}),
    )
