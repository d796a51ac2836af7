"""Invariants of the objects of an arena; for tests. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from afferent.errors import StoreError
from afferent.store.state.allocator import round_up
from afferent.store.state.budget import Budget
from afferent.store.state.catalogue import LISTED_KINDS, Catalogue
from afferent.store.state.leases import LeaseIndex
from afferent.store.state.object import ObjectState, StoredObject
from afferent.store.state.region import Region
from afferent.types import ContentKey, ObjectKind


def check(
    objects: Iterable[StoredObject],
    by_key: Mapping[ContentKey, StoredObject],
    leases: LeaseIndex,
    regions: Mapping[ObjectKind, Region],
    budget: Budget,
    catalogue: Catalogue,
) -> None:
    """Check every invariant.

    Raises:
        StoreError: One is broken.
    """
    objects = list(objects)
    budget.validate()
    for kind, region in regions.items():
        region.allocator.validate()
        if budget.backed_nbytes(kind) != region.backed_nbytes:
            raise StoreError(f"the memory of {kind} does not add up")
        _check_region([item for item in objects if item.kind is kind], region)
        held = sum(item.block_nbytes for item in objects if item.kind is kind and item.held)
        if held != budget.held_nbytes(kind):
            raise StoreError(f"the held bytes of {kind} do not add up")
    blocks = sorted((item.handle.offset, item.block_nbytes) for item in objects)
    for (start, size), (next_start, _) in pairwise(blocks):
        if start + size > next_start:
            raise StoreError("two objects overlap")
    for item in objects:
        _check_object(item)
        if {lease for lease in leases if item in leases.items(lease)} != _holders(item):
            raise StoreError("leases and pins disagree")
    if not all(leases.items(lease) for lease in leases):
        raise StoreError("a lease that holds nothing is remembered")
    found = {item.key: item for item in objects if item.state is not ObjectState.PENDING_DELETION}
    found.pop(None, None)
    if found != by_key:
        raise StoreError("a key leads to the wrong object")
    sealed = [item for item in found.values() if item.state is ObjectState.SEALED]
    listed = [item for item in sealed if item.kind in LISTED_KINDS]
    if len(listed) != len(catalogue) or not all(item in catalogue for item in listed):
        raise StoreError("the catalogue does not have exactly the items that are stored")


def _check_region(items: list[StoredObject], region: Region) -> None:
    if region.backed_nbytes > region.capacity_nbytes:
        raise StoreError("a region has more memory than its share")
    taken = sum(region.allocator.size_of(item.handle.offset) for item in items)
    if taken != region.allocator.capacity_nbytes - region.allocator.free_nbytes:
        raise StoreError("a block belongs to no object")
    if {item.handle.offset: item for item in items if not item.held} != region.evictable:
        raise StoreError("the eviction list is wrong")


def _check_object(item: StoredObject) -> None:
    if item.block_nbytes != round_up(item.handle.nbytes):
        raise StoreError("an object has too large a block")
    if item.state is ObjectState.CREATED and item.writer is None:
        raise StoreError("an object that is being written has no writer")
    if item.state is ObjectState.SEALED and item.writer is not None:
        raise StoreError("a sealed object has a writer")
    if item.pins and item.state is ObjectState.CREATED:
        raise StoreError("an object is pinned before it is sealed")
    if not item.held and (item.state is not ObjectState.SEALED or item.key is None):
        raise StoreError("an object that nobody can find or holds is still here")


def _holders(item: StoredObject) -> set[object]:
    return {*item.pins, *([item.writer] if item.writer is not None else [])}
