"""Life of an object: created, sealed, evicted or deleted. A pure state machine.

    create ──► CREATED ──seal──► SEALED ──evict / delete──► gone
                  │                 │
                  │ delete          │ delete
                  └►PENDING_DELETION◄┘
                         └──last writer and reader gone──► gone

A *lease* is (client, request): the pins and writes of one request of a client. A pinned object is
not evictable; sealing an object pins it for its writer. The block of an object returns to the
allocator when the last writer or reader has released it; until then it is pending deletion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter

from afferent.errors import ArenaTooSmall, NotPermitted, StaleHandle, StoreError, StoreFull
from afferent.store.state.allocator import round_up
from afferent.store.state.budget import Amounts, Budget
from afferent.store.state.index import ObjectIndex
from afferent.store.state.leases import LeaseIndex
from afferent.store.state.object import NewObject, ObjectState, StoredObject
from afferent.store.state.region import DEFAULT_SHARES, Back, Region, Shares, divide
from afferent.store.state.rules import check
from afferent.types import ClientId, ContentKey, Handle, Lease, ObjectKind

_MAX_MADE_PART = 32
"""Objects that are created together evict at most 1/32 of a region for one extent."""


class ObjectTable(ObjectIndex):
    """Objects with their regions, leases and budget. Each method does all of its work or raises.

    Invariants:
        - Blocks of objects do not overlap, and every allocated block belongs to an object.
        - A region's eviction list has exactly the objects without writer and pins.
        - The budget's held bytes are the blocks of all objects with a writer or a pin.
        - The lease index agrees with the writers and pins of the objects.
    """

    def __init__(
        self,
        capacity_nbytes: int,
        *,
        segment: int,
        shares: Shares = DEFAULT_SHARES,
        back: Back | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        super().__init__(segment)
        self.regions = divide(capacity_nbytes, shares, back)
        self.budget = Budget(
            {kind: region.capacity_nbytes for kind, region in self.regions.items()},
            more=None if back is None else self._grow,
        )
        self.capacity_nbytes = capacity_nbytes
        self.num_evicted = dict.fromkeys(self.regions, 0)
        self._orphaned: list[ContentKey] = []
        self._has_freed = False
        self._leases = LeaseIndex(clock)
        # Objects evicted by a `create_all` that is still in progress; `_undo` restores them.
        self._evicted: list[StoredObject] | None = None

    # Queries

    @property
    def used_nbytes(self) -> int:
        regions = self.regions.values()
        return sum(r.allocator.capacity_nbytes - r.allocator.free_nbytes for r in regions)

    @property
    def held_nbytes(self) -> int:
        return sum(map(self.budget.held_nbytes, self.regions))

    def no_extent(self, needed: Amounts) -> StoreFull:
        """Return the error for a `create` that found no extent and may not wait for one."""
        kind, nbytes = max(needed.items(), key=lambda amount: amount[1])
        shortage = self.budget.shortage(kind, nbytes)
        return StoreFull(
            "no room: nothing between what is in use is long enough", shortage=shortage
        )

    def held_since(self) -> Iterator[tuple[Lease, StoredObject, float]]:
        """Yield each lease, object and the time since when the lease has it."""
        return self._leases.held_since()

    def holds(self, lease: Lease) -> bool:
        """Whether a request writes or pins an object."""
        return bool(self._leases.items(lease))

    def holds_anything(self, client: ClientId) -> bool:
        """Whether a client writes or pins an object."""
        return bool(self._leases.of_client(client))

    # Changes

    def create(self, lease: Lease, new: NewObject) -> StoredObject | None:
        """Create an object that ``lease`` may write; evicts others to make space.

        Returns:
            The object, or ``None`` if there are enough bytes, but no extent between the blocks in
            use is long enough.

        Raises:
            StoreFull: The bytes are held, reserved or awaited by other requests.
            ArenaTooSmall: The object exceeds the share of its kind.
            StoreError: ``key`` exists.
        """
        if new.key is not None and new.key in self._by_key:
            raise StoreError("an object with this key exists")
        nbytes = round_up(new.nbytes)
        offset = self._allocate(lease, new.kind, nbytes)
        return None if offset is None else self._place(lease, [new], [offset], [nbytes])[0]

    def create_all(self, lease: Lease, news: Sequence[NewObject]) -> list[StoredObject] | None:
        """Call `create` for each: all or none.

        Returns:
            The objects; ``None`` if one of them has no extent.
        """
        together = self._create_together(lease, news)
        if together is not None:
            return together
        before = self.budget.reservations_of(lease, (new.kind for new in news))
        created: list[StoredObject] = []
        self._evicted = []
        try:
            for part in self._parts(news):
                together = self._create_together(lease, part) if len(part) < len(news) else None
                if together is not None:
                    created += together
                    continue
                for new in part:
                    if (made := self.create(lease, new)) is None:
                        return None
                    created.append(made)
            return created
        finally:
            evicted, self._evicted = self._evicted, None
            if len(created) < len(news):
                self._undo(lease, created, before, evicted)

    def move_lease(self, source: Lease, target: Lease) -> None:
        """Move all objects of one lease to another, without a release in between."""
        self._leases.move(source, target)

    def seal(self, lease: Lease, item: StoredObject, *, used_nbytes: int) -> StoredObject:
        """End the writing: the bytes never change again, and the object is pinned for its writer.

        The unused tail goes back to the allocator.

        Raises:
            NotPermitted: ``lease`` is not the writer.
        """
        self.check_seal(lease, item, used_nbytes=used_nbytes)
        old = item.handle
        if used_nbytes != old.nbytes:
            item.handle = Handle(old.segment, old.offset, used_nbytes, old.generation)
            freed = self.regions[item.kind].allocator.shrink(old.offset, used_nbytes)
            item.block_nbytes -= freed
            self.budget.release(item.kind, freed)
            self._has_freed = True
        item.state = ObjectState.SEALED
        item.writer = None
        item.pins[lease] = 1
        self.catalogue.store(item)
        return item

    def check_seal(self, lease: Lease, item: StoredObject, *, used_nbytes: int) -> None:
        """Check whether `seal` is permitted.

        Raises:
            NotPermitted: It is not.
        """
        if item.state is not ObjectState.CREATED:
            raise NotPermitted("the object is sealed already")
        if item.writer != lease:
            raise NotPermitted("only the request that created an object seals it")
        if not 0 < used_nbytes <= item.handle.nbytes:
            raise NotPermitted(
                f"used_nbytes is {used_nbytes}, and {item.handle.nbytes} were created"
            )

    def abort(self, lease: Lease, item: StoredObject) -> None:
        """Abandon the writing.

        Raises:
            NotPermitted: ``lease`` is not the writer.
        """
        self.abort_all(lease, [item])

    def abort_all(self, lease: Lease, items: Sequence[StoredObject]) -> None:
        """Call `abort` for each, all or none. No item occurs twice."""
        if any(item.writer != lease for item in items):
            raise NotPermitted("only the request that created an object aborts it")
        for item in items:
            self._leases.remove(lease, item)
            self._give_up(item)
        self._settle_all(items)

    def delete(self, item: StoredObject) -> None:
        """Remove an object's key, and the object at once or with its last writer or pin."""
        was_evictable = item.state is ObjectState.SEALED and not item.held
        if item.state is ObjectState.CREATED and item.key is not None:
            self._orphaned.append(item.key)
        item.state = ObjectState.PENDING_DELETION
        self._take_key(item)
        if was_evictable:
            self.regions[item.kind].keep(item)
            self._remove(item)

    def pin(self, lease: Lease, item: StoredObject) -> None:
        """Make a sealed object unevictable until ``lease`` unpins it.

        Raises:
            StaleHandle: It is not sealed.
            StoreFull: It is evictable, and its bytes are reserved for other requests.
        """
        if item.state is not ObjectState.SEALED and not item.pins:  # one with pins has been sealed
            raise StaleHandle("the object is not sealed")
        if not item.held:
            self.budget.hold(lease, item.kind, item.block_nbytes)
            self.regions[item.kind].keep(item)
        count = item.pins.get(lease, 0)
        item.pins[lease] = count + 1
        if not count:
            self._leases.add(lease, item)

    def pin_all(self, lease: Lease, items: Sequence[StoredObject]) -> None:
        """Call `pin` for each: all or none."""
        before = self.budget.reservations_of(lease, (item.kind for item in items))
        pinned: list[StoredObject] = []
        try:
            for item in items:
                self.pin(lease, item)
                pinned.append(item)
        except (StaleHandle, StoreFull, ArenaTooSmall):
            for item in pinned:
                self.unpin(lease, item)
            self.budget.restore_all(lease, before)
            raise

    def unpin(self, lease: Lease, item: StoredObject) -> None:
        """Undo one `pin`."""
        count = item.pins.get(lease, 0)
        if count == 0:
            raise NotPermitted("the request does not hold the object")
        if count > 1:
            item.pins[lease] = count - 1
            return
        del item.pins[lease]
        self._leases.remove(lease, item)
        self._settle(item)

    def evict(self, kind: ObjectKind, nbytes: int | None) -> tuple[int, int]:
        """Evict the least recently used objects of a kind until ``nbytes`` are gone, or all.

        Returns:
            The number of objects, and of bytes.
        """
        region = self.regions[kind]
        oldest, freed = [], 0
        for item in region.evictable.values():
            if nbytes is not None and freed >= nbytes:
                break
            oldest.append(item)
            freed += item.block_nbytes
        self._evict(region, sorted(oldest, key=_offset))
        return len(oldest), freed

    def drop_lease(self, lease: Lease) -> None:
        """Release all writes, pins and reservations of one request of one client."""
        self.budget.drop(lease)
        held = self._leases.drop(lease)
        for item in held:
            if item.writer == lease:
                self._give_up(item)
            else:
                del item.pins[lease]
        self._settle_all(held)

    def written_by(self, client: ClientId) -> list[StoredObject]:
        """Return the objects that a client is writing."""
        return [
            item
            for lease in self._leases.of_client(client)
            for item in self._leases.items(lease)
            if item.writer == lease
        ]

    def drop_client(self, client: ClientId) -> None:
        """Release all leases of a dead process."""
        for lease in (*self._leases.of_client(client), *self.budget.leases_of(client)):
            self.drop_lease(lease)

    # Effects of an event on waiting requests

    def take_orphaned(self) -> list[ContentKey]:
        """Return the keys of objects that were deleted while written, since the last call."""
        orphaned, self._orphaned = self._orphaned, []
        return orphaned

    def look_again(self) -> None:
        """Retry: memory that was refused may be available now."""
        self.budget.look_again()
        self._has_freed = True

    def take_freed(self) -> bool:
        """Whether blocks were freed or became evictable since the last call.

        An extent may have become long enough.
        """
        has_freed, self._has_freed = self._has_freed, False
        return has_freed

    def validate(self) -> None:
        """Check every invariant; for tests."""
        objects, by_key = self._by_generation.values(), self._by_key
        check(objects, by_key, self._leases, self.regions, self.budget, self.catalogue)

    # Inner steps

    def _grow(self, kind: ObjectKind, nbytes: int) -> int:
        """Get memory for a region, whose last extent then grows; return how much it got."""
        grown = self.regions[kind].grow(nbytes)
        self._has_freed = self._has_freed or grown > 0
        return grown

    def _create_together(
        self, lease: Lease, news: Sequence[NewObject]
    ) -> list[StoredObject] | None:
        """Create adjacent objects: one search, and one extent when they are evicted.

        Returns:
            ``None`` if they have to be created one by one.
        """
        kinds, keys = {new.kind for new in news}, [new.key for new in news if new.key is not None]
        if (
            len(kinds) != 1
            or len(set(keys)) < len(keys)
            or not self._by_key.keys().isdisjoint(keys)
        ):
            return None
        (kind,) = kinds
        sizes = [round_up(new.nbytes) for new in news]
        offset = self._allocate(lease, kind, sum(sizes), is_for_many=True)
        if offset is None:
            return None
        offsets = self.regions[kind].allocator.split(offset, sizes)
        return self._place(lease, news, offsets, sizes)

    def _parts(self, news: Iterable[NewObject]) -> Iterator[list[NewObject]]:
        """Split objects into groups of neighbours; each group may evict for one extent."""
        part: list[NewObject] = []
        nbytes = 0
        for new in news:
            size = round_up(new.nbytes)
            limit_nbytes = self.regions[new.kind].capacity_nbytes // _MAX_MADE_PART
            if part and (new.kind is not part[0].kind or nbytes + size > limit_nbytes):
                yield part
                part, nbytes = [], 0
            part.append(new)
            nbytes += size
        if part:
            yield part

    def _allocate(
        self, lease: Lease, kind: ObjectKind, nbytes: int, *, is_for_many: bool = False
    ) -> int | None:
        """Allocate a block that counts as held; ``None`` if there is no extent for it."""
        spent = self.budget.hold(lease, kind, nbytes)
        region = self.regions[kind]
        offset = region.allocator.allocate(nbytes)
        if offset is None and self.budget.grow(kind, region.missing_nbytes(nbytes)):
            offset = region.allocator.allocate(nbytes)
        # A large extent would evict recently used objects; several small extents might not.
        if offset is None and not (
            is_for_many and nbytes * _MAX_MADE_PART > region.capacity_nbytes
        ):
            offset = self._make_room(kind, nbytes)
        if offset is None:
            self.budget.unhold(lease, kind, nbytes, spent=spent)
        return offset

    def _make_room(self, kind: ObjectKind, nbytes: int) -> int | None:
        region = self.regions[kind]
        victims = region.choose_victims(nbytes)
        # An extent may include the end of the region, which has no memory yet.
        if victims is None and self.budget.grow(kind, nbytes):
            victims = region.choose_victims(nbytes)
        if victims is None:
            return None
        self._evict(region, victims)
        return region.allocator.allocate(nbytes)

    def _place(
        self,
        lease: Lease,
        news: Sequence[NewObject],
        offsets: Iterable[int],
        sizes: Iterable[int],
    ) -> list[StoredObject]:
        """Add objects for allocated blocks."""
        created = self._add(lease, news, offsets, sizes)
        self._leases.add(lease, *created)
        return created

    def _evict(self, region: Region, items: Sequence[StoredObject]) -> None:
        """Remove evictable objects, given in order of address."""
        for item in items:
            self.num_evicted[item.kind] += 1
            region.keep(item)
            self._forget(item)
        if self._evicted is not None:
            self._evicted += items
        region.allocator.free_all(item.handle.offset for item in items)

    def _undo(
        self,
        lease: Lease,
        created: list[StoredObject],
        reservations: Amounts,
        evicted: list[StoredObject],
    ) -> None:
        """Undo a part of `create_all`.

        Restores the lease's reservations, and the evicted objects, whose bytes are not overwritten
        yet.
        """
        for item in created:
            self.abort(lease, item)
            if item.key is not None:
                self._orphaned.remove(item.key)
        self.budget.restore_all(lease, reservations)
        for item in reversed(evicted):
            self._remember(item)
            self.num_evicted[item.kind] -= 1
            region = self.regions[item.kind]
            region.allocator.take_again(item.handle.offset, item.block_nbytes)
            region.put_evictable(item, is_next=True)

    def _give_up(self, item: StoredObject) -> None:
        """Delete an object and remove its writer."""
        self.delete(item)
        item.writer = None

    def _settle(self, item: StoredObject) -> None:
        """Make an object evictable or remove it, if it has lost its last writer or pin."""
        if item.held:
            return
        self._has_freed = True
        self.budget.release(item.kind, item.block_nbytes)
        if item.state is ObjectState.SEALED and item.key is not None:
            self.regions[item.kind].put_evictable(item)
        else:  # deleted, or without a key: it can't be found again
            self._remove(item)

    def _settle_all(self, items: Sequence[StoredObject]) -> None:
        """Call `_settle` for each, in batches: tens of thousands would delay all clients."""
        unheld = [item for item in items if item.writer is None and not item.pins]
        for kind, group in groupby(unheld, key=_kind):
            found, region, sealed = list(group), self.regions[kind], ObjectState.SEALED
            evictable, removed = region.evictable, []
            for item in found:
                if item.state is sealed and item.key is not None:
                    evictable[item.handle.offset] = item
                else:
                    self._forget(item)
                    removed.append(item.handle.offset)
            self._has_freed = True
            self.budget.release(kind, sum(item.block_nbytes for item in found))
            region.allocator.free_all(sorted(removed))

    def _remove(self, item: StoredObject) -> None:
        self._forget(item)
        self.regions[item.kind].allocator.free(item.handle.offset)


_kind, _offset = attrgetter("kind"), attrgetter("handle.offset")
