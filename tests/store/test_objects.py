"""The life of an object, rule by rule, and against a naive model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from afferent.errors import ArenaTooSmall, NotPermitted, StaleHandle, StoreError, StoreFull
from afferent.store.objects import Lease, ObjectState, ObjectTable, StoredObject
from afferent.types import ContentKey, Handle, ObjectKind

ONE: Lease = (1, "a")
TWO: Lease = (2, "b")


def key(name: str) -> ContentKey:
    return ContentKey(name.encode().ljust(32, b"."))


def make(table: ObjectTable, name: str | None, nbytes: int = 64, lease: Lease = ONE) -> Any:
    return table.create(
        lease, kind=ObjectKind.FEATURES, nbytes=nbytes, key=key(name) if name else None
    )


def sealed(table: ObjectTable, name: str, nbytes: int = 64) -> StoredObject:
    """Sealed and held by nobody."""
    item: StoredObject = make(table, name, nbytes)
    table.seal(ONE, item, used_nbytes=nbytes)
    table.drop_lease(ONE)
    return item


def test_the_least_recently_used_is_evicted_first() -> None:
    table = ObjectTable(256, segment=1)
    items = {name: sealed(table, name) for name in "abcd"}
    table.pin(TWO, items["a"])
    table.unpin(TWO, items["a"])
    make(table, "e")
    assert table.find(key("b")) is None
    assert table.find(key("a")) is items["a"]
    table.validate()


def test_pinned_objects_stay() -> None:
    table = ObjectTable(128, segment=1)
    items = [sealed(table, name) for name in "ab"]
    for item in items:
        table.pin(TWO, item)
    with pytest.raises(StoreFull):
        make(table, "c")
    table.drop_lease(TWO)
    make(table, "c", 128)
    assert table.num_evicted == 2
    table.validate()


def test_larger_than_the_arena_evicts_nothing() -> None:
    table = ObjectTable(256, segment=1)
    sealed(table, "a")
    with pytest.raises(ArenaTooSmall, match="larger than the arena"):
        make(table, "b", 512)
    assert table.num_evicted == 0


def test_sealing_trims() -> None:
    table = ObjectTable(256, segment=1)
    item = make(table, "a", 256)
    table.seal(ONE, item, used_nbytes=70)
    assert item.handle.nbytes == 70
    assert table.used_nbytes == 128
    table.validate()


def test_a_handle_of_another_life_is_stale() -> None:
    table = ObjectTable(64, segment=7)
    old = sealed(table, "a").handle
    sealed(table, "b")
    with pytest.raises(StaleHandle):
        table.resolve(old)
    new = table.find(key("b"))
    assert new is not None
    assert new.handle.offset == old.offset
    for wrong in (
        Handle(8, new.handle.offset, 64, new.handle.generation),
        Handle(7, new.handle.offset + 64, 64, new.handle.generation),
    ):
        with pytest.raises(StaleHandle):
            table.resolve(wrong)


def test_a_doomed_block_waits_for_its_last_holder() -> None:
    """Nobody can find it, but its bytes are not given to anybody else."""
    table = ObjectTable(64, segment=1)
    item = sealed(table, "a")
    table.pin(ONE, item)
    table.pin(TWO, item)
    table.doom(item)
    assert table.find(key("a")) is None
    table.unpin(ONE, item)
    with pytest.raises(StoreFull):
        make(table, "a")
    table.drop_client(2)
    make(table, "a")
    table.validate()


def test_a_lost_writer_keeps_its_block_until_it_is_dead() -> None:
    table = ObjectTable(128, segment=1)
    lost = make(table, "a")
    table.doom_written_by(1)
    again = make(table, "a", lease=TWO)
    assert again.handle.offset != lost.handle.offset
    table.drop_client(1)
    assert len(table) == 1
    table.validate()


def test_only_the_writer_writes() -> None:
    table = ObjectTable(256, segment=1)
    item = make(table, "a")
    for forbidden in (
        lambda: table.seal(TWO, item, used_nbytes=64),
        lambda: table.seal(ONE, item, used_nbytes=65),
        lambda: table.seal(ONE, item, used_nbytes=0),
        lambda: table.abort(TWO, item),
    ):
        with pytest.raises(NotPermitted):
            forbidden()
    with pytest.raises(StaleHandle):
        table.pin(TWO, item)
    with pytest.raises(StoreError, match="exists"):
        make(table, "a")
    table.seal(ONE, item, used_nbytes=64)
    with pytest.raises(NotPermitted):
        table.seal(ONE, item, used_nbytes=64)
    table.validate()


def test_what_nobody_can_find_does_not_stay() -> None:
    """Raw media has no key: it lives as long as somebody holds it."""
    table = ObjectTable(256, segment=1)
    item = make(table, None)
    table.seal(ONE, item, used_nbytes=64)
    table.pin(TWO, item)
    table.drop_lease(ONE)
    assert len(table) == 1
    table.drop_lease(TWO)
    assert len(table) == 0
    assert table.used_nbytes == 0


LEASES = st.tuples(st.integers(1, 3), st.sampled_from("xy"))


class Life(RuleBasedStateMachine):
    """Random lives in a small arena; the model is who holds what, in plain sets."""

    items: Bundle[StoredObject] = Bundle("items")

    def __init__(self) -> None:
        super().__init__()
        self.table = ObjectTable(2048, segment=1)
        self.pins: dict[tuple[Lease, int], int] = {}
        self.writers: dict[int, Lease] = {}
        self.names = 0

    def holders(self, item: StoredObject) -> bool:
        generation = item.handle.generation
        return generation in self.writers or any(g == generation for _, g in self.pins)

    def alive(self, item: StoredObject) -> bool:
        return any(item is other for other in self.table)

    @rule(target=items, lease=LEASES, nbytes=st.integers(1, 900), named=st.booleans())
    def create(self, lease: Lease, nbytes: int, named: bool) -> Any:
        self.names += 1
        try:
            item = make(self.table, f"{self.names}" if named else None, nbytes, lease)
        except StoreFull:
            held = sum(1 for item in self.table if self.holders(item))
            assert held, "an arena that nobody holds anything in is never full"
            return make_dead()
        self.writers[item.handle.generation] = lease
        return item

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
        try:
            self.table.pin(lease, item)
        except StaleHandle:
            assert item.state is not ObjectState.SEALED
        else:
            held = lease, item.handle.generation
            self.pins[held] = self.pins.get(held, 0) + 1

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

    @rule(item=consumes(items))
    def doom(self, item: StoredObject) -> None:
        if self.alive(item):
            self.table.doom(item)
            assert self.alive(item) == self.holders(item)

    @rule(lease=LEASES)
    def drop_lease(self, lease: Lease) -> None:
        self.table.drop_lease(lease)
        self.pins = {held: n for held, n in self.pins.items() if held[0] != lease}
        self.writers = {g: owner for g, owner in self.writers.items() if owner != lease}

    @rule(client=st.integers(1, 3))
    def lose(self, client: int) -> None:
        self.table.doom_written_by(client)

    @rule(client=st.integers(1, 3))
    def die(self, client: int) -> None:
        self.table.drop_client(client)
        self.pins = {held: n for held, n in self.pins.items() if held[0][0] != client}
        self.writers = {g: owner for g, owner in self.writers.items() if owner[0] != client}

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.table.validate()
        held = {g for _, g in self.pins} | set(self.writers)
        assert held == {item.handle.generation for item in self.table if item.held}


def make_dead() -> StoredObject:
    """An object that was never in the table."""
    return StoredObject(Handle(1, 0, 64, 0), ObjectKind.RAW, ObjectState.DOOMED)


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
