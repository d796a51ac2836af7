"""Whose work goes on next, where it can be interrupted at any time: the steps of an engine. Pure.

Tenants get work in proportion to their weights: the one that has had least goes first. Of one
tenant's requests that one does which would be done first if all of them got as much at a time
(fair queueing as Demers, Keshav and Shenker have it), so that a small request is not behind a large
one, and a large one waits for no more work than if all went on at once.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from afferent.quota.earliest import Earliest
from afferent.quota.shares import Share

H = TypeVar("H", bound=Hashable)

Rank = tuple[float, float, int]
"""Who has the least goes first; between two of them the number of their arrival says."""

_KEPT_IDLE = 64


@dataclass(slots=True, eq=False)
class _Tenant(Generic[H]):
    """``had`` is its work by weight; ``now``, the work that each of its requests would have had by
    now if all got as much at a time.
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
    """Items with work to be done: those that have begun, and those that wait to begin."""

    def __init__(self) -> None:
        self._turns: dict[H, _Turn[H]] = {}
        self._tenants: dict[tuple[str, str], _Tenant[H]] = {}
        self._ready: Earliest[float, _Tenant[H]] = Earliest()  # those that have items that wait
        self._now = 0.0
        self._num_arrivals = 0

    def __contains__(self, item: H) -> bool:
        return item in self._turns

    @property
    def first(self) -> H | None:
        """Who is next of those that wait to begin."""
        tenant = self._ready.first()
        return tenant.waiting.first() if tenant is not None else None

    def rank(self, item: H) -> Rank:
        """The least one goes first, whether it has begun or not."""
        turn = self._turns[item]
        return turn.tenant.had, *turn.tag

    def enter(self, item: H, *, share: Share, cost: float) -> None:
        """An item waits to begin.

        Args:
            cost: All its work, as far as it is known; 0 for one that has had its turn before.
        """
        tenant = self._tenant(share)
        if not tenant.num_items:
            tenant.had = max(tenant.had, self._now)
        tenant.num_items += 1
        self._num_arrivals += 1
        self._turns[item] = turn = _Turn(tenant, (tenant.now + cost, self._num_arrivals))
        self._wait(item, turn)

    def begin(self, item: H) -> None:
        """It waits no more."""
        tenant = self._turns[item].tenant
        tenant.waiting.remove(item)
        if not tenant.waiting:
            self._ready.remove(tenant)

    def put_back(self, item: H) -> None:
        """It has not begun after all."""
        self._wait(item, self._turns[item])

    def charge(self, item: H, work: float) -> None:
        """Some of an item's work was done."""
        tenant = self._turns[item].tenant
        self._now = max(self._now, tenant.had)
        tenant.had += work / tenant.weight
        tenant.now += work / tenant.num_items
        if tenant.waiting:
            self._ready.put(tenant, tenant.had)

    def leave(self, item: H) -> None:
        """Its work is done, or nobody wants it any more."""
        turn = self._turns[item]
        if item in turn.tenant.waiting:
            self.begin(item)
        del self._turns[item]
        turn.tenant.num_items -= 1
        if not self._turns:  # nobody has had less than it wanted
            self._tenants.clear()
            self._now = 0.0

    # Inner steps

    def _wait(self, item: H, turn: _Turn[H]) -> None:
        turn.tenant.waiting.put(item, turn.tag)
        self._ready.put(turn.tenant, turn.tenant.had)

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
