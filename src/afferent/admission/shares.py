"""Weighted fair queue, for work in any unit. Pure.

- **Tenants** get work in proportion to their weights (start-time fair queueing). Work that one
  tenant leaves unused goes to the others.
- **Requests of one tenant** get equal amounts, and the one that would finish first is served first
  (self-clocked fair queueing), so that a small request does not wait behind all items of a large
  one.
- **Many items.** While many items of a request wait, each of them is charged as several, so that a
  request with few items waits less.
- **Order.** The items of a request stay in order.
- **No starvation.** Each served item brings every request nearer to service.

Costs are estimates given in advance; `FairQueue.charge` corrects them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Generic, TypeVar

from msgspec import Meta, Struct

from afferent.admission.earliest import Earliest
from afferent.errors import StoreError

H = TypeVar("H", bound=Hashable)

_KEPT_IDLE = 64
_MOST_CHARGED = 8
"""Largest number of waiting items of a request that one of its items is charged for."""


class Share(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Payer of work; twice the ``weight`` gets twice the work.

    Requests without a tenant are paid by the ``address`` of their client, so that one client does
    not take the share of all others. All requests without an address have one payer.
    """

    tenant: Annotated[str, Meta(max_length=128)] = ""
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    address: Annotated[str, Meta(max_length=64)] = ""

    @property
    def payer(self) -> tuple[str, str]:
        """Identity of the payer: the address counts only without a tenant."""
        return self.tenant, "" if self.tenant else self.address


NAMELESS = Share()


@dataclass(slots=True, eq=False)
class _Flow(Generic[H]):
    """Waiting items of one request.

    ``done`` is the virtual time of its tenant at which its first item would be done.
    """

    name: Hashable
    costs: dict[H, float]
    done: float

    @property
    def tag(self) -> float:
        """Rank among the requests of the tenant: later with each item that waits."""
        num_more = min(len(self.costs), _MOST_CHARGED) - 1
        return self.done + num_more * next(iter(self.costs.values()))


@dataclass(slots=True, eq=False)
class _Tenant(Generic[H]):
    """Tenant with queued requests.

    ``start`` is the virtual time of the queue at which its next item begins: work by weight.
    ``ready`` contains its requests by `_Flow.tag`.
    """

    weight: float
    start: float
    now: float = 0.0
    num_waiting: int = 0
    flows: dict[Hashable, _Flow[H]] = field(default_factory=dict)
    ready: Earliest[float, _Flow[H]] = field(default_factory=Earliest)


class FairQueue(Generic[H]):
    """Fair queue of hashable items, each of which is in the queue at most once.

    Invariants:
        - A tenant is in ``_ready`` exactly if it has items, with its ``start`` as the tag.
        - ``start`` of a tenant with items is never before the queue's virtual time.
        - A request without items is forgotten.
    """

    def __init__(self) -> None:
        self._where: dict[H, tuple[_Tenant[H], _Flow[H]]] = {}  # in order of arrival
        self._tenants: dict[tuple[str, str], _Tenant[H]] = {}
        self._ready: Earliest[float, _Tenant[H]] = Earliest()  # tenants with items, by `start`
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[H]:
        """Iterate in order of arrival."""
        return iter(self._where)

    def __contains__(self, item: H) -> bool:
        return item in self._where

    def has_place(self, share: Share, limit: int) -> bool:
        """Return whether one more item may queue, if the limit is ``limit`` items.

        A tenant may use at most as many slots as remain free: alone it has half of them. However
        many slots other tenants use, a new tenant finds some.
        """
        tenant = self._tenants.get(share.payer)
        num_waiting = tenant.num_waiting if tenant is not None else 0
        return num_waiting < limit - len(self)

    def push(self, item: H, *, share: Share = NAMELESS, flow: Hashable, cost: float) -> None:
        """Add an item.

        Args:
            item: Must not be in the queue.
            share: The tenant that pays for it.
            flow: The request that it belongs to.
            cost: Its work, more than 0; in the same unit for all.

        Raises:
            StoreError: The item is in the queue already.
        """
        if item in self._where:
            raise StoreError("what is queued waits once")
        tenant = self._tenant(share)
        waits = tenant.flows.get(flow)
        if waits is None:
            waits = tenant.flows[flow] = _Flow(flow, {item: cost}, tenant.now + cost)
            tenant.ready.put(waits, waits.tag)
            if len(tenant.flows) == 1:
                tenant.start = max(tenant.start, self._now)
                self._ready.put(tenant, tenant.start)
        else:
            waits.costs[item] = cost
            if len(waits.costs) <= _MOST_CHARGED:
                tenant.ready.put(waits, waits.tag)
        tenant.num_waiting += 1
        self._where[item] = (tenant, waits)

    def peek(self) -> H | None:
        """Return the item that `pop` would return."""
        found = self._first()
        return next(iter(found[1].costs)) if found is not None else None

    def pop(self) -> H | None:
        """Remove and return the next item; ``None`` if the queue is empty."""
        found = self._first()
        if found is None:
            return None
        tenant, flow = found
        item, cost = next(iter(flow.costs.items()))
        self._now, tenant.now = tenant.start, max(tenant.now, flow.done)
        tenant.start += cost / tenant.weight
        self._remove(item)
        if tenant.flows:
            self._ready.put(tenant, tenant.start)
        return item

    def discard(self, item: H) -> bool:
        """Remove an item that is not served, at no cost; return whether it was in the queue."""
        is_queued = item in self._where
        if is_queued:
            self._remove(item)
        return is_queued

    def charge(self, share: Share, cost: float) -> None:
        """Correct the cost of served work by the difference from its estimate.

        A tenant never gets credit: unused work is not saved up.
        """
        tenant = self._tenant(share)
        tenant.start = max(tenant.start + cost / tenant.weight, self._now)
        if tenant.flows:
            self._ready.put(tenant, tenant.start)

    def validate(self) -> None:
        """Check all invariants of this class; for tests."""
        queued = [
            (item, tenant, flow)
            for tenant in self._tenants.values()
            for flow in tenant.flows.values()
            for item in flow.costs
        ]
        if {item: (tenant, flow) for item, tenant, flow in queued} != self._where:
            raise StoreError("the list of what is queued is wrong")
        for name, tenant in self._tenants.items():
            if tenant.num_waiting != sum(len(flow.costs) for flow in tenant.flows.values()):
                raise StoreError(f"what tenant {name!r} waits for does not add up")
            if any(not flow.costs for flow in tenant.flows.values()):
                raise StoreError("a request that queues for nothing is remembered")
            if self._ready.tag(tenant) != (tenant.start if tenant.flows else None):
                raise StoreError(f"tenant {name!r} is never served")
            if tenant.flows and tenant.start < self._now:
                raise StoreError(f"tenant {name!r} has saved up work")

    # Inner steps

    def _tenant(self, share: Share) -> _Tenant[H]:
        tenant = self._tenants.get(share.payer)
        if tenant is None:
            if len(self._tenants) >= 2 * len(self._ready) + _KEPT_IDLE:
                self._forget_idle()
            tenant = self._tenants[share.payer] = _Tenant(share.weight, self._now)
        tenant.weight = share.weight
        return tenant

    def _forget_idle(self) -> None:
        """Forget tenants that have nothing queued and no work served in advance of the others."""
        self._tenants = {
            name: tenant
            for name, tenant in self._tenants.items()
            if tenant.flows or tenant.start > self._now
        }

    def _first(self) -> tuple[_Tenant[H], _Flow[H]] | None:
        tenant = self._ready.first()
        flow = tenant.ready.first() if tenant is not None else None
        return (tenant, flow) if tenant is not None and flow is not None else None

    def _remove(self, item: H) -> None:
        tenant, flow = self._where.pop(item)
        is_first = next(iter(flow.costs)) == item
        del flow.costs[item]
        tenant.num_waiting -= 1
        if not flow.costs:
            del tenant.flows[flow.name]
            tenant.ready.remove(flow)
        else:
            if is_first:  # the next item takes the position of one that is removed unserved
                flow.done = tenant.now + next(iter(flow.costs.values()))
            tenant.ready.put(flow, flow.tag)
        if not tenant.flows:
            self._ready.remove(tenant)
        if not self._where:  # no tenant has unserved work
            self._tenants.clear()
            self._now = 0.0
