"""Fair scheduling of work that can be interrupted at any time: an engine's steps. Pure.

Tenants get work in proportion to their weights: the tenant with the least work goes first. Of one
tenant's requests, the one goes first that would finish first if all of them progressed equally
(fair queueing as by Demers, Keshav and Shenker). So a small request does not wait behind a large
one, and a large one waits for no more work than if all progressed at once.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from afferent.admission.earliest import Earliest
from afferent.admission.shares import Share

H = TypeVar("H", bound=Hashable)

Rank = tuple[float, float, int]
"""Rank of an item: the least one goes first; the arrival number breaks ties."""

_KEPT_IDLE = 64


@dataclass(slots=True, eq=False)
class _Tenant(Generic[H]):
    """Tenant with items.

    ``had`` is its work by weight. ``now`` is the work that each of its requests would have had by
    now if all progressed equally.
    """

    weight: float
    had: float
    now: float = 0.0
    num_items: int = 0
    waiting: Earliest[tuple[float, int], H] = field(default_factory=Earliest)


@dataclass(slots=True, eq=False)
class _Turn(Generic[H]):
    tenant: _Tenant[H]
    tag: tuple[float, int]


class Turns(Generic[H]):
    """Fair scheduler of items with work to do: those that have begun, and those that wait.

    Invariants: a tenant is in ``_ready`` exactly if one of its items waits to begin, with the rank
    of the first of these. So `first` depends on nothing but the ranks.
    """

    def __init__(self) -> None:
        self._turns: dict[H, _Turn[H]] = {}
        self._tenants: dict[tuple[str, str], _Tenant[H]] = {}
        self._ready: Earliest[Rank, _Tenant[H]] = Earliest()  # tenants with waiting items
        self._now = 0.0
        self._num_arrivals = 0

    def __contains__(self, item: H) -> bool:
        return item in self._turns

    @property
    def first(self) -> H | None:
        """The next of the waiting items."""
        tenant = self._ready.first()
        return tenant.waiting.first() if tenant is not None else None

    def rank(self, item: H) -> Rank:
        """Return the rank of an item, begun or waiting; the least one goes first."""
        turn = self._turns[item]
        return turn.tenant.had, *turn.tag

    def enter(self, item: H, *, share: Share, cost: float) -> None:
        """Add an item that waits to begin.

        Args:
            cost: All its work, as far as it is known; 0 for one that has begun before.
        """
        tenant = self._tenant(share)
        if not tenant.num_items:
            tenant.had = max(tenant.had, self._now)
        tenant.num_items += 1
        self._num_arrivals += 1
        self._turns[item] = turn = _Turn(tenant, (tenant.now + cost, self._num_arrivals))
        self._wait(item, turn)

    def begin(self, item: H) -> None:
        """Mark an item as begun: it waits no more."""
        tenant = self._turns[item].tenant
        tenant.waiting.remove(item)
        self._place(tenant)

    def put_back(self, item: H) -> None:
        """Return an item that has not begun after all to the waiting ones."""
        self._wait(item, self._turns[item])

    def charge(self, item: H, work: float) -> None:
        """Record work that was done for an item."""
        tenant = self._turns[item].tenant
        self._now = max(self._now, tenant.had)
        tenant.had += work / tenant.weight
        tenant.now += work / tenant.num_items
        self._place(tenant)

    def leave(self, item: H) -> None:
        """Remove an item whose work is done or cancelled."""
        turn = self._turns[item]
        if item in turn.tenant.waiting:
            self.begin(item)
        del self._turns[item]
        turn.tenant.num_items -= 1
        if not self._turns:  # no tenant has unserved work
            self._tenants.clear()
            self._now = 0.0

    # Inner steps

    def _wait(self, item: H, turn: _Turn[H]) -> None:
        turn.tenant.waiting.put(item, turn.tag)
        self._place(turn.tenant)

    def _place(self, tenant: _Tenant[H]) -> None:
        """Give a tenant its place among those with waiting items."""
        first = tenant.waiting.first()
        if first is not None:
            self._ready.put(tenant, self.rank(first))
        elif tenant in self._ready:
            self._ready.remove(tenant)

    def _tenant(self, share: Share) -> _Tenant[H]:
        tenant = self._tenants.get(share.payer)
        if tenant is None:
            if len(self._tenants) >= 2 * len(self._turns) + _KEPT_IDLE:
                self._tenants = {
                    name: each
                    for name, each in self._tenants.items()
                    if each.num_items or each.had > self._now
                }
            tenant = self._tenants[share.payer] = _Tenant(share.weight, self._now)
        tenant.weight = share.weight
        return tenant
