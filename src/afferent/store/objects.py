"""The life of an object: created, sealed, evicted or doomed. A pure state machine.

    create ──► CREATED ──seal──► SEALED ──evict / delete──► gone
                  │                 │
                  │ doom            │ doom
                  └──► DOOMED ◄─────┘
                         └──last writer and reader gone──► gone

A *lease* is (client, request): what a request of a client holds. A lease that pins an object keeps
it unevictable; whoever seals an object has it pinned. The block of an object is given back to the
allocator only when nobody can still write or read it: delete and a lost connection only doom it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from afferent.errors import ArenaTooSmall, NotPermitted, StaleHandle, StoreError, StoreFull
from afferent.store.allocator import Allocator, round_up
from afferent.types import ContentKey, Handle, ObjectKind

ClientId = int
Lease = tuple[ClientId, str]


class ObjectState(Enum):
    CREATED = "created"
    SEALED = "sealed"
    DOOMED = "doomed"


@dataclass(slots=True, eq=False)
class StoredObject:
    """One object and who holds it; ``nbytes`` is what was asked for, or used once sealed."""

    handle: Handle
    kind: ObjectKind
    state: ObjectState
    key: ContentKey | None = None
    writer: Lease | None = None
    pins: dict[Lease, int] = field(default_factory=dict)

    @property
    def held(self) -> bool:
        return self.writer is not None or bool(self.pins)


class ObjectTable:
    """All objects of one arena epoch. Every method either does all of its work or raises."""

    def __init__(self, capacity_nbytes: int, *, segment: int) -> None:
        self._allocator = Allocator(capacity_nbytes)
        self._segment = segment
        self._next_generation = 1
        self._by_generation: dict[int, StoredObject] = {}
        self._by_key: dict[ContentKey, StoredObject] = {}
        self._leases: dict[Lease, set[int]] = {}
        # Sealed, keyed, unpinned: what may be evicted, least recently used first.
        self._evictable: OrderedDict[int, StoredObject] = OrderedDict()
        self.num_evicted = 0

    # Questions

    @property
    def capacity_nbytes(self) -> int:
        return self._allocator.capacity_nbytes

    @property
    def used_nbytes(self) -> int:
        return self._allocator.capacity_nbytes - self._allocator.free_nbytes

    @property
    def pinned_nbytes(self) -> int:
        return sum(round_up(o.handle.nbytes) for o in self if o.held)

    @property
    def largest_free_nbytes(self) -> int:
        return self._allocator.largest_free_nbytes

    def __len__(self) -> int:
        return len(self._by_generation)

    def __iter__(self) -> Iterator[StoredObject]:
        return iter(self._by_generation.values())

    def find(self, key: ContentKey) -> StoredObject | None:
        """The object under ``key``, created or sealed."""
        return self._by_key.get(key)

    def resolve(self, handle: Handle) -> StoredObject:
        """The object behind a handle.

        Raises:
            StaleHandle: It is gone, or of another epoch.
        """
        found = self._by_generation.get(handle.generation)
        if found is None or handle.segment != self._segment or handle.offset != found.handle.offset:
            raise StaleHandle("the object behind this handle is gone")
        return found

    # Changes

    def create(
        self, lease: Lease, *, kind: ObjectKind, nbytes: int, key: ContentKey | None = None
    ) -> StoredObject:
        """A new object that ``lease`` may write; evicts the least recently used to make room.

        Raises:
            StoreFull: What is pinned leaves no run of that length.
            ArenaTooSmall: Nor would an empty arena.
            StoreError: ``key`` is taken.
        """
        if key is not None and key in self._by_key:
            raise StoreError("an object with this key exists")
        offset = self._allocate(nbytes)
        handle = Handle(self._segment, offset, nbytes, self._next_generation)
        self._next_generation += 1
        created = StoredObject(handle, kind, ObjectState.CREATED, key=key, writer=lease)
        self._by_generation[handle.generation] = created
        if key is not None:
            self._by_key[key] = created
        self._hold(lease, created)
        return created

    def _allocate(self, nbytes: int) -> int:
        if round_up(nbytes) > self._allocator.capacity_nbytes:
            raise ArenaTooSmall(
                f"an object of {nbytes} bytes is larger than the arena of "
                f"{self._allocator.capacity_nbytes}"
            )
        while (offset := self._allocator.allocate(nbytes)) is None:
            if not self._evictable:
                raise StoreFull("no room: everything in the arena is in use")
            _, victim = self._evictable.popitem(last=False)
            self.num_evicted += 1
            self._remove(victim)
        return offset

    def hand_over(self, item: StoredObject, lease: Lease) -> None:
        """Make ``lease`` the one that may write a created object."""
        if item.state is not ObjectState.CREATED or item.writer is None:
            raise NotPermitted("only an object that is being written has a writer")
        previous, item.writer = item.writer, lease
        self._let_go(previous, item)
        self._hold(lease, item)

    def seal(self, lease: Lease, item: StoredObject, *, used_nbytes: int) -> StoredObject:
        """End the writing: the bytes never change again, and the writer has them pinned.

        The tail that was not used goes back to the allocator.

        Raises:
            NotPermitted: ``lease`` is not the writer.
        """
        if item.state is not ObjectState.CREATED or item.writer != lease:
            raise NotPermitted("only the writer seals an object")
        if not 0 < used_nbytes <= item.handle.nbytes:
            raise NotPermitted("an object can't be sealed larger than it was created")
        kept, taken = round_up(used_nbytes), round_up(item.handle.nbytes)
        if kept < taken:
            self._allocator.free(item.handle.offset + kept, taken - kept)
        item.handle = Handle(
            item.handle.segment, item.handle.offset, used_nbytes, item.handle.generation
        )
        item.state = ObjectState.SEALED
        item.writer = None
        item.pins[lease] = 1
        return item

    def abort(self, lease: Lease, item: StoredObject) -> None:
        """Give up the writing.

        Raises:
            NotPermitted: ``lease`` is not the writer.
        """
        if item.writer != lease:
            raise NotPermitted("only the writer aborts an object")
        self.doom(item)
        item.writer = None
        self._let_go(lease, item)
        self._settle(item)

    def doom(self, item: StoredObject) -> None:
        """Take an object's key away and remove it: at once, or when its last holder lets go."""
        item.state = ObjectState.DOOMED
        if item.key is not None and self._by_key.get(item.key) is item:
            del self._by_key[item.key]
        self._settle(item)

    def pin(self, lease: Lease, item: StoredObject) -> None:
        """Keep a sealed object where it is until ``lease`` lets go."""
        if item.state is not ObjectState.SEALED:
            raise StaleHandle("the object is not sealed")
        item.pins[lease] = item.pins.get(lease, 0) + 1
        self._evictable.pop(item.handle.generation, None)
        self._hold(lease, item)

    def unpin(self, lease: Lease, item: StoredObject) -> None:
        """Take back one `pin`."""
        count = item.pins.get(lease, 0)
        if count == 0:
            raise NotPermitted("this lease does not hold the object")
        if count > 1:
            item.pins[lease] = count - 1
            return
        del item.pins[lease]
        self._let_go(lease, item)
        self._settle(item)

    def drop_lease(self, lease: Lease) -> None:
        """Drop all that one request of one client holds."""
        for generation in list(self._leases.get(lease, ())):
            item = self._by_generation[generation]
            item.pins.pop(lease, None)
            if item.writer == lease:
                self.abort(lease, item)
                continue
            self._let_go(lease, item)
            self._settle(item)

    def doom_written_by(self, client: ClientId) -> None:
        """Nobody may find, or wait for, what a lost connection was writing."""
        for lease in [lease for lease in self._leases if lease[0] == client]:
            for generation in list(self._leases[lease]):
                item = self._by_generation[generation]
                if item.writer == lease:
                    self.doom(item)

    def drop_client(self, client: ClientId) -> None:
        """Drop all that a dead process holds."""
        for lease in [lease for lease in self._leases if lease[0] == client]:
            self.drop_lease(lease)

    def validate(self) -> None:
        """Check every rule of this class; for tests."""
        self._allocator.validate()
        taken = sum(round_up(o.handle.nbytes) for o in self)
        if taken != self.used_nbytes:
            raise StoreError(f"objects take {taken} bytes, the allocator says {self.used_nbytes}")
        blocks = sorted((o.handle.offset, round_up(o.handle.nbytes)) for o in self)
        for (start, size), (next_start, _) in pairwise(blocks):
            if start + size > next_start:
                raise StoreError("two objects overlap")
        for item in self:
            if item.state is ObjectState.CREATED and item.writer is None:
                raise StoreError("an object that is being written has no writer")
            if item.state is ObjectState.SEALED and item.writer is not None:
                raise StoreError("a sealed object has a writer")
            if item.pins and item.state is ObjectState.CREATED:
                raise StoreError("an object is pinned before it is sealed")
            if item.state is ObjectState.DOOMED and not item.held:
                raise StoreError("a doomed object that nobody holds is still here")
            evictable = item.state is ObjectState.SEALED and not item.held
            if evictable != (item.handle.generation in self._evictable):
                raise StoreError("the eviction list is wrong")
            if item.key is not None:
                found = self._by_key.get(item.key) is item
                if found != (item.state is not ObjectState.DOOMED):
                    raise StoreError("a key leads to the wrong object")
            held_by = set(item.pins) | ({item.writer} if item.writer else set())
            listed = {k for k, held in self._leases.items() if item.handle.generation in held}
            if held_by != listed:
                raise StoreError("leases and pins disagree")

    # Inner steps

    def _hold(self, lease: Lease, item: StoredObject) -> None:
        self._leases.setdefault(lease, set()).add(item.handle.generation)

    def _let_go(self, lease: Lease, item: StoredObject) -> None:
        if item.writer == lease or lease in item.pins:
            return
        held = self._leases.get(lease)
        if held is not None:
            held.discard(item.handle.generation)
            if not held:
                del self._leases[lease]

    def _settle(self, item: StoredObject) -> None:
        """Put an object that may have lost its last holder where it belongs."""
        if item.held or item.handle.generation not in self._by_generation:
            return
        if item.state is ObjectState.SEALED and item.key is not None:
            self._evictable[item.handle.generation] = item
            self._evictable.move_to_end(item.handle.generation)
        else:  # doomed, or without a key: nobody could ever find it again
            self._remove(item)

    def _remove(self, item: StoredObject) -> None:
        del self._by_generation[item.handle.generation]
        self._evictable.pop(item.handle.generation, None)
        if item.key is not None and self._by_key.get(item.key) is item:
            del self._by_key[item.key]
        self._allocator.free(item.handle.offset, item.handle.nbytes)
