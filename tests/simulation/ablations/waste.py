"""Safeguards against needless evictions."""

from __future__ import annotations

from typing import Any

from afferent.store.state.object_table import ObjectTable
from afferent.store.state.region import Region
from tests.simulation.ablations.table import Replace, ablation


@ablation("nothing is evicted but what makes way")
def _needed_victims(replace: Replace) -> None:
    choose = Region.choose_victims

    def with_the_oldest(self: Any, nbytes: int) -> Any:
        chosen = choose(self, nbytes)
        if chosen is None:
            return None
        oldest = next(iter(self.evictable.values()), None)
        more = [] if oldest is None or oldest in chosen else [oldest]
        return sorted([*chosen, *more], key=lambda item: item.handle.offset)

    replace(Region, "choose_victims", with_the_oldest)


@ablation("nothing is evicted where something is free")
def _free_first(replace: Replace) -> None:
    allocate = ObjectTable._allocate

    def evicts_first(self: Any, lease: Any, kind: Any, nbytes: int, **how: Any) -> Any:
        region = self.regions[kind]
        if region.evictable and self.budget.reservation_of(lease, kind) >= nbytes:
            self._evict(region, [next(iter(region.evictable.values()))])
        return allocate(self, lease, kind, nbytes, **how)

    replace(ObjectTable, "_allocate", evicts_first)


@ablation("nothing is evicted for what is then refused")
def _refused_first(replace: Replace) -> None:
    allocate = ObjectTable._allocate

    def evicts_first(self: Any, lease: Any, kind: Any, nbytes: int, **how: Any) -> Any:
        region = self.regions[kind]
        victims = region.choose_victims(nbytes)
        if region.allocator.largest_free_nbytes < nbytes and victims:
            self._evict(region, victims)
        return allocate(self, lease, kind, nbytes, **how)

    replace(ObjectTable, "_allocate", evicts_first)
