"""Who is next where many queue: fair shares of the work, whatever it is counted in. Pure.

Tenants get work in proportion to their weights (start-time fair queueing); what one leaves, the
others have. Of one tenant's requests each gets as much, and the one that would be done first goes
first (self-clocked fair queueing), so that a small request is not behind all items of a large one.
While many items of a request wait, each of them is charged as several, so that a request with few
items waits less. The items of a request keep their order. No request starves: each comes nearer
with each item that is served.

Work is told beforehand, and `FairQueue.charge` corrects it by what it was.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Generic, TypeVar

from msgspec import Meta, Struct

from afferent.errors import StoreError
from afferent.quota.earliest import Earliest

H = TypeVar("H", bound=Hashable)

_KEPT_IDLE = 64
_MOST_CHARGED = 8
"""Items of a request that an item is charged for, while so many of them wait."""


class Share(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The payer of work; twice the ``weight`` is twice the work.

    Requests without a tenant are paid by the ``address`` of their client, so that one client does
    not take the share of all others. Those without an address, too, have one payer.
    """

    tenant: Annotated[str, Meta(max_length=128)] = ""
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    address: Annotated[str, Meta(max_length=64)] = ""

    @property
    def payer(self) -> tuple[str, str]:
        """What distinguishes payers: the address counts only where there is no tenant."""
        return self.tenant, "" if self.tenant else self.address


NAMELESS = Share()


@dataclass(slots=True, eq=False)
class _Flow(Generic[H]):
    """Items of one request, which wait; ``done`` is when the first of them would be done, in the
    time of its tenant.
    """

    name: Hashable
    costs: dict[H, float]
    done: float

    @property
    def tag(self) -> float:
        """The place among the requests of the tenant: later with each item that waits."""
        num_more = min(len(self.costs), _MOST_CHARGED) - 1
        return self.done + num_more * next(iter(self.costs.values()))


@dataclass(slots=True, eq=False)
class _Tenant(Generic[H]):
    """``start`` is when its next item begins, in the time of the queue: work by weight.

    ``ready`` has its requests by `_Flow.tag`.
    """

    weight: float
    start: float
    now: float = 0.0
    num_waiting: int = 0
    flows: dict[Hashable, _Flow[H]] = field(default_factory=dict)
    ready: Earliest[float, _Flow[H]] = field(default_factory=Earliest)


class FairQueue(Generic[H]):
    """Items are whatever can be told apart; each is in the queue once."""

    def __init__(self) -> None:
        self._where: dict[H, tuple[_Tenant[H], _Flow[H]]] = {}  # in order of arrival
        self._tenants: dict[tuple[str, str], _Tenant[H]] = {}
        self._ready: Earliest[float, _Tenant[H]] = Earliest()  # those that wait, by their `start`
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[H]:
        """In order of arrival."""
        return iter(self._where)

    def __contains__(self, item: H) -> bool:
        return item in self._where

    def has_place(self, share: Share, limit: int) -> bool:
        """Whether one more may queue where ``limit`` items do at most.

        A tenant has at most as many places as are left free: alone it has half of them, and however
        many others queue with all they have, one that comes new finds some.
        """
        tenant = self._tenants.get(share.payer)
        num_waiting = tenant.num_waiting if tenant is not None else 0
        return num_waiting < limit - len(self)

    def push(self, item: H, *, share: Share = NAMELESS, flow: Hashable, cost: float) -> None:
        """
        Args:
            item: Is not in the queue.
            share: Whose it is.
            flow: The request that it is of.
            cost: Its work, more than 0; in the same unit for all.
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
        """What `pop` would give."""
        found = self._first()
        return next(iter(found[1].costs)) if found is not None else None

    def pop(self) -> H | None:
        """The next item, which is served now; ``None`` if none waits."""
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
        """Nobody waits for it any more; whether it was in the queue. Its tenant pays nothing."""
        is_queued = item in self._where
        if is_queued:
            self._remove(item)
        return is_queued

    def charge(self, share: Share, cost: float) -> None:
        """What was served took this much more than was told, or less.

        A tenant is never in credit for it: nobody saves up work.
        """
        tenant = self._tenant(share)
        tenant.start = max(tenant.start + cost / tenant.weight, self._now)
        if tenant.flows:
            self._ready.put(tenant, tenant.start)

    def validate(self) -> None:
        """Check every rule of this class; for tests."""
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
        """Tenants that have nothing in the queue, and no work that was served ahead of others'."""
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
            if is_first:  # of what is taken out unserved, the next one has the place
                flow.done = tenant.now + next(iter(flow.costs.values()))
            tenant.ready.put(flow, flow.tag)
        if not tenant.flows:
            self._ready.remove(tenant)
        if not self._where:  # nobody has had less than it wanted
            self._tenants.clear()
            self._now = 0.0
