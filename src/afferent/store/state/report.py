"""Statistics and listings of the store. Queries only."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

from afferent.admission.permits import Semaphores
from afferent.admission.shares import Share
from afferent.store.protocol.results import (
    ClientInfo,
    KindStatistics,
    ObjectInfo,
    StateName,
    Statistics,
    TenantInfo,
)
from afferent.store.state.holders import Client
from afferent.store.state.object import ObjectState, StoredObject
from afferent.store.state.object_table import ObjectTable
from afferent.store.state.single_flight import SingleFlight
from afferent.types import ClientId, Lease, ObjectKind


class Report:
    """Reads the state of a store for its statistics and listings."""

    def __init__(
        self,
        objects: ObjectTable,
        flights: SingleFlight,
        semaphores: Semaphores,
        clients: Mapping[ClientId, Client],
    ) -> None:
        self._objects, self._flights = objects, flights
        self._semaphores, self._clients = semaphores, clients

    def statistics(self) -> Statistics:
        """Return statistics at constant cost, however many objects there are."""
        kinds = {kind: self._kind(kind) for kind in self._objects.regions}
        flights, jobs = self._flights, self._flights.jobs
        connected = [client for client in self._clients.values() if client.connected]
        return Statistics(
            segment=self._objects.segment,
            capacity_nbytes=self._objects.capacity_nbytes,
            backed_nbytes=sum(kind.backed_nbytes for kind in kinds.values()),
            used_nbytes=self._objects.used_nbytes,
            held_nbytes=self._objects.held_nbytes,
            reserved_nbytes=sum(kind.reserved_nbytes for kind in kinds.values()),
            kinds=kinds,
            num_objects=len(self._objects),
            num_evicted=sum(kind.num_evicted for kind in kinds.values()),
            num_jobs_queued=jobs.num_queued,
            num_jobs_running=len(jobs) - jobs.num_queued,
            num_jobs_made=flights.num_jobs_made,
            num_jobs_failed=flights.num_jobs_failed,
            num_jobs_fetched=flights.num_jobs_fetched,
            num_workers=sum(client.is_worker for client in connected),
            num_clients=len(connected),
            num_reservations_queued=self._objects.budget.num_queued,
            num_hits=flights.num_hits,
            num_misses=flights.num_misses,
            num_joined=flights.num_joined,
            permits=self._semaphores.statistics(),
        )

    def objects(self, kind: ObjectKind | None, *, limit: int) -> list[ObjectInfo]:
        """Return the largest objects first."""
        wanted = (item for item in self._objects if kind in (None, item.kind))
        return [
            self._describe(item)
            for item in heapq.nlargest(limit, wanted, key=lambda item: item.handle.nbytes)
        ]

    def clients(self) -> list[ClientInfo]:
        held: dict[ClientId, list[int]] = {client: [] for client in self._clients}
        for item in self._objects:
            for client in _holders(item):
                if client in held:
                    held[client].append(item.block_nbytes)
        reserved = self._objects.budget.reserved_by_client()
        return [
            ClientInfo(
                client=number,
                name=client.name,
                pid=client.pid,
                connected=client.connected,
                num_held=len(held[number]),
                held_nbytes=sum(held[number]),
                reserved_nbytes=reserved.get(number, 0),
            )
            for number, client in self._clients.items()
        ]

    def tenants(self, share_of: Callable[[Lease], Share]) -> list[TenantInfo]:
        """Return the tenants with waiting work. The cost depends only on waiting requests."""
        budget, found = self._objects.budget, dict[str, TenantInfo]()

        def of(share: Share) -> TenantInfo:
            info = found.setdefault(share.tenant, TenantInfo(share.tenant, share.weight))
            info.weight = share.weight
            return info

        for lease, nbytes in budget.reserved_by_lease().items():
            of(share_of(lease)).reserved_nbytes += nbytes
        for queued in budget.queued:
            info = of(queued.share)
            info.num_reservations_queued += 1
            info.queued_nbytes += sum(queued.amounts.values())
        for share in self._semaphores.queued_shares():
            of(share).num_permits_queued += 1
        for job in self._flights.jobs:
            of(job.share).num_jobs += 1
        return sorted(found.values(), key=lambda info: info.tenant)

    def _describe(self, item: StoredObject) -> ObjectInfo:
        return ObjectInfo(
            handle=item.handle,
            kind=item.kind,
            state=self._state(item),
            key=item.key,
            writer=item.writer[0] if item.writer is not None else None,
            pins=sorted({lease[0] for lease in item.pins}),
        )

    def _state(self, item: StoredObject) -> StateName:
        job = self._flights.jobs.find(item.key) if item.key is not None else None
        if job is not None and job.is_fetch and job.target is item:
            return "fetching"
        if item.state is ObjectState.SEALED and self._flights.keeping.is_demoting(item):
            return "demoting"
        return item.state.value

    def _kind(self, kind: ObjectKind) -> KindStatistics:
        region, budget = self._objects.regions[kind], self._objects.budget
        allocator = region.allocator
        return KindStatistics(
            capacity_nbytes=region.capacity_nbytes,
            backed_nbytes=region.backed_nbytes,
            used_nbytes=allocator.capacity_nbytes - allocator.free_nbytes,
            held_nbytes=budget.held_nbytes(kind),
            reserved_nbytes=budget.reserved_nbytes(kind),
            largest_free_nbytes=region.largest_free_nbytes,
            num_free_extents=allocator.num_free_extents,
            num_objects=allocator.num_blocks,
            num_held=allocator.num_blocks - len(region.evictable),
            num_evicted=self._objects.num_evicted[kind],
        )


def _holders(item: StoredObject) -> set[ClientId]:
    holders = {lease[0] for lease in item.pins}
    if item.writer is not None:
        holders.add(item.writer[0])
    return holders
