"""The states of an object, rule by rule."""

from __future__ import annotations

from typing import Any

import pytest

from afferent.errors import (
    ArenaTooSmall,
    ConfigError,
    NotPermitted,
    StaleHandle,
    StoreError,
    StoreFull,
    StoreRestarted,
)
from afferent.store.state.object import NewObject, StoredObject
from afferent.store.state.object_table import ObjectTable
from afferent.store.state.region import DEFAULT_SHARES, Region, Shares, divide
from afferent.types import ContentKey, Handle, Lease, ObjectKind

RAW, FEATURES = ObjectKind.RAW, ObjectKind.FEATURES
ALL_RAW: Shares = {RAW: 1.0}
ONE: Lease = (1, "a")
TWO: Lease = (2, "b")


def table_of(nbytes: int, shares: Shares = ALL_RAW) -> ObjectTable:
    return ObjectTable(nbytes, segment=1, shares=shares)


def key(name: str) -> ContentKey:
    return ContentKey(name.encode().ljust(32, b"."))


def new(name: str | None, nbytes: int = 64, kind: ObjectKind = RAW) -> NewObject:
    return NewObject(kind, nbytes, key(name) if name else None)


def make(table: ObjectTable, name: str | None, nbytes: int = 64, lease: Lease = ONE) -> Any:
    return table.create(lease, new(name, nbytes))


def sealed(table: ObjectTable, name: str, nbytes: int = 64) -> StoredObject:
    """Return a sealed object that is not pinned."""
    item: StoredObject = make(table, name, nbytes)
    table.seal(ONE, item, used_nbytes=nbytes)
    table.drop_lease(ONE)
    return item


def names(table: ObjectTable, wanted: str) -> str:
    """Return those of these names that are stored."""
    return "".join(name for name in wanted if table.find(key(name)))


def test_the_least_recently_used_is_evicted_first() -> None:
    table = table_of(256)
    items = {name: sealed(table, name) for name in "abcd"}
    table.pin(TWO, items["a"])
    table.unpin(TWO, items["a"])
    make(table, "e")
    assert names(table, "abcde") == "acde"
    table.validate()


def test_victims_are_chosen_for_their_place() -> None:
    """Space for two lines needs two adjacent blocks, even if blocks that are apart are older."""
    table = table_of(256)
    items = {name: sealed(table, name) for name in "abcd"}
    for name in "bd":
        table.pin(TWO, items[name])
        table.unpin(TWO, items[name])
    make(table, "e", 128)
    assert names(table, "abcde") == "cde"
    assert table.num_evicted[RAW] == 2


def test_pinned_objects_stay() -> None:
    table = table_of(128)
    items = [sealed(table, name) for name in "ab"]
    for item in items:
        table.pin(TWO, item)
    with pytest.raises(StoreFull):
        make(table, "c")
    table.drop_lease(TWO)
    make(table, "c", 128)
    assert table.num_evicted[RAW] == 2
    table.validate()


def test_larger_than_its_share_evicts_nothing() -> None:
    table = table_of(512, {RAW: 0.5, FEATURES: 0.5})
    sealed(table, "a")
    with pytest.raises(ArenaTooSmall, match="share of the arena"):
        make(table, "b", 320)
    assert names(table, "a") == "a"


def test_kinds_do_not_take_each_others_share() -> None:
    table = table_of(512, {RAW: 0.5, FEATURES: 0.5})
    make(table, None, 256)
    with pytest.raises(StoreFull):
        make(table, None, 64)
    features = table.create(ONE, new("f", 256, FEATURES))
    assert features is not None
    assert features.handle.offset == 256
    table.validate()


@pytest.mark.parametrize("shares", [{RAW: -0.1}, {RAW: 0.6, FEATURES: 0.5}])
def test_wrong_shares_are_refused(shares: Shares) -> None:
    with pytest.raises(ConfigError):
        divide(1024, shares)


def test_shares_are_whole_cache_lines() -> None:
    regions = divide(1000, {RAW: 1 / 3, FEATURES: 2 / 3})
    places = [(r.allocator.start, r.allocator.capacity_nbytes) for r in regions.values()]
    assert places == [(0, 320), (320, 640), (960, 0), (960, 0)]


def test_no_run_is_not_the_same_as_no_room() -> None:
    """Enough bytes are evictable, but pinned blocks lie between them: nothing is evicted."""
    table = table_of(256)
    items = {name: sealed(table, name) for name in "abcd"}
    for name in "bd":
        table.pin(TWO, items[name])
    table.budget.reserve(ONE, {RAW: 128})
    assert make(table, "e", 128) is None
    assert table.budget.reservation_of(ONE, RAW) == 128
    assert names(table, "abcd") == "abcd"
    table.validate()


def test_sealing_trims() -> None:
    table = table_of(256)
    item = make(table, "a", 256)
    table.take_freed()
    table.seal(ONE, item, used_nbytes=70)
    assert item.handle.nbytes == 70
    assert table.used_nbytes == table.held_nbytes == 128
    assert table.take_freed()
    assert not table.take_freed()
    table.validate()


def test_a_handle_of_another_life_is_stale() -> None:
    table = ObjectTable(64, segment=7, shares=ALL_RAW)
    old = sealed(table, "a").handle
    sealed(table, "b")
    with pytest.raises(StaleHandle):
        table.resolve(old)
    found = table.find(key("b"))
    assert found is not None
    there = found.handle
    assert there.offset == old.offset
    for epoch in (6, 8):  # the epoch before this one, and the one after it
        with pytest.raises(StoreRestarted):
            table.resolve(Handle(epoch, there.offset, 64, there.generation))
    with pytest.raises(StaleHandle):
        table.resolve(Handle(7, there.offset + 64, 64, there.generation))
    assert table.resolve_sealed([there]) == [found]
    with pytest.raises(StaleHandle):
        table.resolve_sealed([there, old])


def test_a_block_pending_deletion_waits_for_its_last_holder() -> None:
    """No lookup finds it, but its bytes are not reused."""
    table = table_of(64)
    item = sealed(table, "a")
    table.pin(ONE, item)
    table.pin(TWO, item)
    table.delete(item)
    assert table.find(key("a")) is None
    for other in (None, 3):
        with pytest.raises(StaleHandle):
            table.resolve_sealed([item.handle], holder=other)
    assert table.resolve_sealed([item.handle], holder=TWO[0]) == [item]
    table.pin(TWO, item)
    table.unpin(ONE, item)
    table.unpin(TWO, item)
    with pytest.raises(StoreFull):
        make(table, "a")
    table.drop_client(2)
    make(table, "a")
    table.validate()


def test_a_deleted_object_that_nobody_holds_is_gone() -> None:
    table = table_of(64)
    table.delete(sealed(table, "a"))
    assert len(table) == table.used_nbytes == 0
    assert table.take_orphaned() == []
    table.validate()


def test_a_lost_writer_keeps_its_block_until_it_is_dead() -> None:
    table = table_of(128)
    lost = make(table, "a")
    assert table.written_by(1) == [lost]
    table.delete(lost)
    assert table.take_orphaned() == [key("a")]
    again = make(table, "a", lease=TWO)
    assert again.handle.offset != lost.handle.offset
    table.drop_client(1)
    assert len(table) == 1
    assert table.take_orphaned() == []
    table.validate()


def test_only_the_writer_writes() -> None:
    table = table_of(256)
    item = make(table, "a")
    for forbidden in (
        lambda: table.seal(TWO, item, used_nbytes=64),
        lambda: table.seal(ONE, item, used_nbytes=65),
        lambda: table.seal(ONE, item, used_nbytes=0),
        lambda: table.abort(TWO, item),
        lambda: table.unpin(ONE, item),
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
    """Raw media have no key: an object lives as long as it is pinned."""
    table = table_of(256)
    item = make(table, None)
    table.seal(ONE, item, used_nbytes=64)
    table.pin(TWO, item)
    table.drop_lease(ONE)
    assert len(table) == 1
    table.drop_lease(TWO)
    assert len(table) == 0
    assert table.used_nbytes == 0


def test_what_is_pinned_is_not_promised_to_others() -> None:
    table = table_of(128)
    item = sealed(table, "a", 128)
    table.budget.reserve(TWO, {RAW: 64})
    with pytest.raises(StoreFull):
        table.pin(ONE, item)
    table.budget.reserve(ONE, {RAW: 64})
    with pytest.raises(StoreFull):
        table.pin(ONE, item)
    table.budget.drop(TWO)
    table.pin(ONE, item)
    assert table.budget.reservation_of(ONE, RAW) == 0
    table.pin(TWO, item)  # it is pinned already, and counted once
    assert table.held_nbytes == 128
    table.validate()


def test_pinning_all_is_all_or_none() -> None:
    table = table_of(192)
    items = [sealed(table, name) for name in "abc"]
    table.budget.reserve(ONE, {RAW: 64})
    table.budget.reserve(TWO, {RAW: 64})
    with pytest.raises(StoreFull):
        table.pin_all(ONE, items)
    assert table.budget.reservation_of(ONE, RAW) == 64
    assert table.held_nbytes == 0
    table.pin_all(ONE, [items[0], items[1], items[0]])
    assert items[0].pins == {ONE: 2}
    table.validate()


def test_creating_all_is_all_or_none() -> None:
    table = table_of(512, {RAW: 0.5, FEATURES: 0.5})
    table.budget.reserve(ONE, {RAW: 128})
    for refused in (
        [new("a", 192), new("b", 128)],
        [new("a"), new("f", 256, FEATURES), new("g", 64, FEATURES)],
    ):
        with pytest.raises((StoreFull, ArenaTooSmall)):
            table.create_all(ONE, refused)
    with pytest.raises(StoreError, match="exists"):
        table.create_all(ONE, [new("a"), new("b"), new("a")])
    assert len(table) == 0
    assert table.budget.reservation_of(ONE, RAW) == 128
    assert table.take_orphaned() == []
    created = table.create_all(ONE, [new("a"), new("f", 64, FEATURES)])
    assert created is not None
    assert [item.kind for item in created] == [RAW, FEATURES]
    assert table.create_all(ONE, []) == []
    table.validate()


def test_what_is_created_together_lies_side_by_side() -> None:
    table = table_of(1024)
    blocks = [make(table, None, 64, lease) for lease in (TWO, ONE, TWO)]
    table.drop_lease(ONE)  # leaves an extent of 64 bytes, enough for one of them
    created = table.create_all(ONE, [new(name, 50) for name in "abc"])
    assert created is not None
    first = blocks[-1].handle.offset + 64
    assert [item.handle.offset for item in created] == [first, first + 64, first + 128]
    table.validate()
    table.abort(ONE, created[1])
    table.validate()


def test_without_a_run_for_all_each_finds_its_own() -> None:
    table = table_of(320)
    blocks = [make(table, None, 64, lease) for lease in (ONE, TWO, ONE, TWO, ONE)]
    table.drop_lease(ONE)
    assert table.create_all(ONE, [new("a", 128), new("b")]) is None
    assert table.held_nbytes == 128
    created = table.create_all(ONE, [new("a"), new("b")])
    assert created is not None
    assert {item.handle.offset for item in created} < {item.handle.offset for item in blocks}
    table.validate()


def test_a_lease_is_moved_whole() -> None:
    table = table_of(512)
    source, target = make(table, "a"), make(table, "b")
    table.seal(ONE, source, used_nbytes=64)
    table.pin(TWO, source)
    table.pin(ONE, source)
    table.delete(source)  # no other pin is possible from here on
    table.move_lease(ONE, TWO)
    assert source.pins == {TWO: 3}
    assert target.writer == TWO
    table.validate()
    table.drop_lease(ONE)
    assert len(table) == 2
    table.drop_lease(TWO)
    assert len(table) == 0
    table.move_lease(ONE, TWO)
    table.validate()


def test_a_pin_is_moved_to_who_has_none() -> None:
    table = table_of(512)
    item = sealed(table, "a", 64)
    table.pin(ONE, item)
    table.move_lease(ONE, TWO)
    assert item.pins == {TWO: 1}
    table.unpin(TWO, item)
    assert not item.held
    table.validate()


def test_many_small_ones_cost_the_oldest_and_not_an_extent() -> None:
    table = table_of(1024)
    items = [sealed(table, f"{n:02}") for n in range(16)]
    for n, item in enumerate(items):  # the oldest four are not adjacent
        if n % 4:
            table.pin(TWO, item)
    table.drop_lease(TWO)
    created = table.create_all(ONE, [new(f"new{n}") for n in range(4)])
    assert created is not None
    assert {item.handle.offset for item in created} == {
        items[n].handle.offset for n in (0, 4, 8, 12)
    }
    table.validate()


def test_as_little_as_a_byte_is_sealed() -> None:
    table = table_of(512)
    item = make(table, "a", 100)
    with pytest.raises(NotPermitted):
        table.seal(ONE, item, used_nbytes=0)
    assert table.seal(ONE, item, used_nbytes=1).handle.nbytes == 1
    table.validate()


def test_room_for_many_is_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one would take longer; a single extent would cost recently used objects."""
    table = table_of(64 * 64)
    asked: list[int] = []
    choose = Region.choose_victims

    def count(region: Region, nbytes: int) -> object:
        asked.append(nbytes)
        return choose(region, nbytes)

    for n in range(64):
        sealed(table, f"{n}")
    table.drop_lease(TWO)
    monkeypatch.setattr(Region, "choose_victims", count)
    created = table.create_all(ONE, [new(f"new{n}") for n in range(8)])
    assert created is not None
    assert sorted(item.handle.offset for item in created) == [64 * n for n in range(8)]
    assert asked == [128] * 4
    monkeypatch.undo()
    assert table.create_all(ONE, [new("large", 512), *(new(f"more{n}") for n in range(3))])
    table.validate()


def test_shares_are_parts_of_one_whole() -> None:
    assert sum(DEFAULT_SHARES.values()) == pytest.approx(1.0)
    assert min(DEFAULT_SHARES.values()) > 0
    assert set(DEFAULT_SHARES) == set(ObjectKind)


def test_evicting_on_request() -> None:
    table = table_of(512)
    for name in "abc":
        sealed(table, name, 100)
    table.pin(TWO, sealed(table, "d", 100))
    assert table.evict(RAW, 100) == (1, 128)
    assert names(table, "abcd") == "bcd"
    assert table.evict(RAW, 129) == (2, 256)
    assert table.evict(RAW, None) == (0, 0)
    assert table.evict(FEATURES, None) == (0, 0)
    assert names(table, "abcd") == "d"
    table.validate()


def test_objects_are_released_in_the_order_they_were_taken() -> None:
    """Then the first object of a request is also the first to be evicted."""
    table = table_of(64 * 40)
    created = table.create_all(ONE, [new(f"{n}") for n in range(40)])
    assert created is not None
    for item in created:
        table.seal(ONE, item, used_nbytes=64)
    table.drop_lease(ONE)
    assert list(table.regions[RAW].evictable.values()) == created


def test_create_all_that_finds_no_extent_evicts_nothing() -> None:
    """The first of two objects finds space, the second does not: the first is undone."""
    table = table_of(320)
    items = {name: sealed(table, name) for name in "abcde"}
    for name in "bd":
        table.pin(TWO, items[name])
    assert table.create_all(ONE, [new("f"), new("g", 128)]) is None  # no 128 contiguous bytes
    assert names(table, "abcdefg") == "abcde"
    assert table.num_evicted[RAW] == 0
    table.validate()
    make(table, "f")
    assert names(table, "acef") == "cef"  # the least recently used object is still evicted first


def test_create_all_that_is_refused_a_kind_evicts_nothing_of_another() -> None:
    table = table_of(256, {RAW: 0.5, FEATURES: 0.5})
    before = [sealed(table, name) for name in "ab"]
    table.create(TWO, new("held", 128, FEATURES))
    with pytest.raises(StoreFull):
        table.create_all(ONE, [new("c"), new("d", 64, FEATURES)])
    assert [table.resolve(item.handle) for item in before] == before
    table.validate()
