"""Random operations on the objects of a small arena, compared with a naive model."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from afferent.errors import ArenaTooSmall, NotPermitted, StaleHandle, StoreFull
from afferent.store.state.allocator import round_up
from afferent.store.state.object import NewObject, ObjectState, StoredObject
from afferent.store.state.object_table import ObjectTable
from afferent.types import ContentKey, Handle, Lease, ObjectKind
from tests.examples import examples

RAW, FEATURES = ObjectKind.RAW, ObjectKind.FEATURES
SHARES = {RAW: 0.5, FEATURES: 0.5}
LEASES = st.tuples(st.integers(1, 3), st.sampled_from("xy"))
KINDS = st.sampled_from([RAW, FEATURES])
SIZES = st.one_of(st.integers(1, 200), st.integers(200, 1100))


class Life(RuleBasedStateMachine):
    """Random operations on a small arena; the model has pins and writers in plain dictionaries."""

    items: Bundle[StoredObject] = Bundle("items")

    def __init__(self) -> None:
        super().__init__()
        self.table = self.empty_table()
        self.pins: dict[tuple[Lease, int], int] = {}
        self.writers: dict[int, Lease] = {}
        self.reserved: dict[tuple[Lease, ObjectKind], int] = {}
        self.names = 0

    def empty_table(self) -> ObjectTable:
        return ObjectTable(2048, segment=1, shares=SHARES)

    # Queries of the model

    def holders(self, item: StoredObject) -> bool:
        generation = item.handle.generation
        return generation in self.writers or any(g == generation for _, g in self.pins)

    def alive(self, item: StoredObject) -> bool:
        return any(item is other for other in self.table)

    def unpromised(self, kind: ObjectKind) -> int:
        held = sum(
            round_up(item.handle.nbytes)
            for item in self.table
            if item.kind is kind and self.holders(item)
        )
        return 1024 - held - sum(n for (_, k), n in self.reserved.items() if k is kind)

    def has_run(self, kind: ObjectKind, nbytes: int) -> bool:
        """Return whether an extent between pinned and unsealed blocks is long enough."""
        start = at = 0 if kind is RAW else 1024
        held = [
            (item.handle.offset, item.handle.offset + round_up(item.handle.nbytes))
            for item in self.table
            if item.kind is kind and self.holders(item)
        ]
        for begin, end in [*sorted(held), (start + 1024, 0)]:
            if begin - at >= nbytes:
                return True
            at = end
        return False

    def spend(self, lease: Lease, kind: ObjectKind, nbytes: int) -> None:
        left = self.reserved.get((lease, kind), 0)
        self.reserved[lease, kind] = max(0, left - nbytes)

    def may_hold(self, lease: Lease, kind: ObjectKind, nbytes: int) -> bool:
        return nbytes <= self.reserved.get((lease, kind), 0) + self.unpromised(kind)

    # Steps

    @rule(target=items, lease=LEASES, kind=KINDS, nbytes=SIZES, named=st.booleans())
    def create(self, lease: Lease, kind: ObjectKind, nbytes: int, named: bool) -> Any:
        self.names += 1
        key = ContentKey(self.names.to_bytes(32, "big")) if named else None
        size = round_up(nbytes)
        may, has_run = self.may_hold(lease, kind, size), self.has_run(kind, size)
        try:
            item = self.table.create(lease, NewObject(kind, nbytes, key))
        except ArenaTooSmall:
            assert size > 1024
            return make_dead()
        except StoreFull:
            assert not may
            assert size <= 1024
            return make_dead()
        assert may
        assert (item is not None) == has_run
        if item is None:
            return make_dead()
        self.spend(lease, kind, size)
        self.writers[item.handle.generation] = lease
        return item

    @rule(lease=LEASES, news=st.lists(st.tuples(KINDS, SIZES), max_size=4))
    def create_all(self, lease: Lease, news: list[tuple[ObjectKind, int]]) -> None:
        needed = dict.fromkeys((RAW, FEATURES), 0)
        for kind, nbytes in news:
            needed[kind] += round_up(nbytes)
        may = all(self.may_hold(lease, kind, nbytes) for kind, nbytes in needed.items())
        held = {item.handle.generation for item in self.table if item.held}
        try:
            created = self.table.create_all(lease, [NewObject(*new) for new in news])
        except (StoreFull, ArenaTooSmall):
            assert not may
            return
        if created is None:
            assert held == {item.handle.generation for item in self.table if item.held}
            return
        assert may
        for kind, nbytes in needed.items():
            self.spend(lease, kind, nbytes)
        self.writers |= {item.handle.generation: lease for item in created}

    @rule(item=items, lease=LEASES, part=st.floats(0.01, 1.0))
    def seal(self, item: StoredObject, lease: Lease, part: float) -> None:
        generation = item.handle.generation
        may = self.writers.get(generation) == lease and item.state is ObjectState.CREATED
        try:
            self.table.seal(lease, item, used_nbytes=max(1, int(item.handle.nbytes * part)))
        except NotPermitted:
            assert not may
        else:
            assert may
            del self.writers[generation]
            self.pins[lease, generation] = 1

    @rule(item=items, lease=LEASES)
    def pin(self, item: StoredObject, lease: Lease) -> None:
        if not self.alive(item):
            return
        size, held = round_up(item.handle.nbytes), self.holders(item)
        may = held or self.may_hold(lease, item.kind, size)
        try:
            self.table.pin(lease, item)
        except StaleHandle:
            assert item.state is not ObjectState.SEALED
        except StoreFull:
            assert not may
        else:
            assert may
            if not held:
                self.spend(lease, item.kind, size)
            pin = lease, item.handle.generation
            self.pins[pin] = self.pins.get(pin, 0) + 1

    @rule(item=items, lease=LEASES)
    def unpin(self, item: StoredObject, lease: Lease) -> None:
        held = lease, item.handle.generation
        try:
            self.table.unpin(lease, item)
        except NotPermitted:
            assert held not in self.pins
        else:
            self.pins[held] -= 1
            if not self.pins[held]:
                del self.pins[held]

    @rule(lease=LEASES, kind=KINDS, nbytes=SIZES)
    def reserve(self, lease: Lease, kind: ObjectKind, nbytes: int) -> None:
        may = round_up(nbytes) <= self.unpromised(kind)
        try:
            self.table.budget.reserve(lease, {kind: round_up(nbytes)})
        except (StoreFull, ArenaTooSmall):
            assert not may
        else:
            assert may
            self.reserved[lease, kind] = self.reserved.get((lease, kind), 0) + round_up(nbytes)

    @rule(item=consumes(items))
    def delete(self, item: StoredObject) -> None:
        if self.alive(item):
            self.table.delete(item)
            assert self.alive(item) == self.holders(item)

    @rule(kind=KINDS, nbytes=st.none() | SIZES)
    def evict(self, kind: ObjectKind, nbytes: int | None) -> None:
        self.table.evict(kind, nbytes)

    @rule(source=LEASES, to=LEASES)
    def move(self, source: Lease, to: Lease) -> None:
        if source == to:
            return
        self.table.move_lease(source, to)
        self.writers = {g: to if o == source else o for g, o in self.writers.items()}
        for (lease, generation), count in list(self.pins.items()):
            if lease == source:
                del self.pins[lease, generation]
                moved = to, generation
                self.pins[moved] = self.pins.get(moved, 0) + count

    @rule(lease=LEASES)
    def drop_lease(self, lease: Lease) -> None:
        self.table.drop_lease(lease)
        self.forget(lambda other: other == lease)

    @rule(client=st.integers(1, 3))
    def die(self, client: int) -> None:
        self.table.drop_client(client)
        self.forget(lambda other: other[0] == client)

    def forget(self, is_gone: Any) -> None:
        self.pins = {held: n for held, n in self.pins.items() if not is_gone(held[0])}
        self.writers = {g: owner for g, owner in self.writers.items() if not is_gone(owner)}
        self.reserved = {held: n for held, n in self.reserved.items() if not is_gone(held[0])}

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.table.validate()
        held = {g for _, g in self.pins} | set(self.writers)
        assert held == {item.handle.generation for item in self.table if item.held}
        for kind in (RAW, FEATURES):
            budget = self.table.budget
            to_come = budget.capacity_nbytes(kind) - budget.backed_nbytes(kind)
            assert budget.unpromised_nbytes(kind) + to_come == self.unpromised(kind)
        for item in self.table:
            pins = {lease: n for (lease, g), n in self.pins.items() if g == item.handle.generation}
            assert item.pins == pins
            assert item.writer == self.writers.get(item.handle.generation)


def make_dead() -> StoredObject:
    """Return an object that was never in the table."""
    return StoredObject(Handle(1, 0, 64, 0), 64, RAW, ObjectState.PENDING_DELETION)


class LifeOfAGrowingArena(Life):
    """An arena that gets its memory piece by piece behaves like one that has all of it."""

    def empty_table(self) -> ObjectTable:
        return ObjectTable(2048, segment=1, shares=SHARES, back=lambda _, end: end + 255 & -256)

    @invariant()
    def nothing_is_where_there_is_no_memory(self) -> None:
        ends = {RAW: 0, FEATURES: 1024}
        for item in self.table:
            backed = ends[item.kind] + self.table.budget.backed_nbytes(item.kind)
            assert item.handle.offset + item.block_nbytes <= backed


TestLife = Life.TestCase
TestLife.settings = examples(40, storm=400, stateful_step_count=40)
TestLifeOfAGrowingArena = LifeOfAGrowingArena.TestCase
TestLifeOfAGrowingArena.settings = TestLife.settings
