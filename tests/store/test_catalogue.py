"""Catalogue of items: a reader that lists them once and follows the changes knows them all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afferent.store.protocol import requests
from afferent.store.protocol.items import Claim, ItemLabel, SealItem
from afferent.store.protocol.results import (
    ItemChanges,
    ItemPage,
    Outcome,
    Owner,
    RemovedItem,
    StoredItem,
)
from afferent.store.state.catalogue import Catalogue
from afferent.store.state.object import ObjectState, StoredObject
from afferent.types import ContentKey, Handle, Modality, ObjectKind
from tests.store.pure_store import FEATURES, FRONTEND, KEY, KEY_2, OTHER, RAW, WORKER, Store

PLACED = ItemLabel(Modality.IMAGE, b"p" * 32)
STORED = StoredItem(KEY, FEATURES, 900, Modality.IMAGE, b"p" * 32, "")


def make(
    store: Store, key: bytes = KEY, *, label: ItemLabel | None = PLACED, kind=FEATURES
) -> None:
    wanted = [Claim(key, kind, 1000, label)]
    (outcome,) = store.call(FRONTEND, requests.Acquire, "r", wanted, returns=list[Outcome])
    assert isinstance(outcome, Owner)
    store.call(FRONTEND, requests.Seal, "r", [SealItem(outcome.handle, 900)])
    store.release(FRONTEND, "r")


def changes(store: Store, seq: int) -> ItemChanges:
    return store.result(OTHER, seq, ItemChanges)


def test_watch_reports_stored_and_removed_items() -> None:
    store = Store()
    watch = store.send(OTHER, requests.WatchItems, 0)
    assert store.answer(OTHER, watch) is None
    make(store)
    assert changes(store, watch) == ItemChanges(1, [STORED])
    again = store.send(OTHER, requests.WatchItems, 1)
    assert store.answer(OTHER, again) is None
    store.call(FRONTEND, requests.Delete, [KEY])
    assert changes(store, again) == ItemChanges(2, [RemovedItem(KEY, FEATURES)])
    assert changes(store, store.send(OTHER, requests.WatchItems, 0)).seq == 2


def test_watch_of_a_client_replaces_its_former_one() -> None:
    store = Store()
    former, watch = (store.send(OTHER, requests.WatchItems, 0) for _ in range(2))
    make(store)
    assert store.answer(OTHER, former) is None
    assert changes(store, watch).seq == 1


def test_watch_after_another_epoch_is_incomplete() -> None:
    store = Store()
    watch = store.send(OTHER, requests.WatchItems, 7)
    assert changes(store, watch) == ItemChanges(0, [], is_complete=False)


def test_watch_of_a_lost_client_ends() -> None:
    store = Store()
    store.send(OTHER, requests.WatchItems, 0)
    store.state.disconnect(OTHER, now_s=0.0)
    make(store)
    assert not store.inbox[OTHER]


def test_raw_bytes_and_records_are_not_listed() -> None:
    store = Store(shares={RAW: 0.5, ObjectKind.RECORDS: 0.5})
    for key, kind in ((KEY, RAW), (KEY_2, ObjectKind.RECORDS)):
        make(store, key, kind=kind)
    assert store.call(OTHER, requests.ListItems, 0, returns=ItemPage) == ItemPage(0, [], 0)


def test_find_returns_the_items_that_are_stored_by_name() -> None:
    store = Store()
    make(store)
    make(store, KEY_2, label=ItemLabel(name=b"other name"))
    found = store.call(
        WORKER, requests.FindItems, [KEY, KEY_2, b"other name"], returns=list[StoredItem]
    )
    assert found == [STORED, StoredItem(b"other name", FEATURES, 900, None, b"", "")]
    assert not store.state.holds_anything(WORKER)


def test_page_lists_all_items_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("afferent.store.state.catalogue.MAX_ITEMS", 2)
    catalogue = Catalogue()
    for number in range(5):
        catalogue.store(sealed(number))
    listed, after, pages = [], 0, 0
    while pages == 0 or after:
        page = catalogue.page(after)
        listed += [item.name for item in page.items]
        after, pages = page.after, pages + 1
    assert (pages, listed) == (3, [bytes([number]) * 32 for number in range(5)])


def sealed(number: int, generation: int | None = None) -> StoredObject:
    key = ContentKey(bytes([number]) * 32)
    handle = Handle(1, 64 * number, 64, number + 1 if generation is None else generation)
    return StoredObject(handle, 64, FEATURES, ObjectState.SEALED, key)


class Reader:
    """Follow a catalogue as a program outside the store does."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue, self.names, self.seq, self.num_lists = catalogue, set[bytes](), 0, 0

    def read(self, *, between: Callable[[], None] = lambda: None) -> None:
        found = self.catalogue.changes_after(self.seq)
        while not found.is_complete:
            self.num_lists += 1
            page = self.catalogue.page(0)
            self.names = {item.name for item in page.items}
            between()
            found = self.catalogue.changes_after(page.seq)
        for change in found.changes:
            (self.names.discard if isinstance(change, RemovedItem) else self.names.add)(change.name)
        self.seq = found.seq


@given(st.lists(st.integers(0, 12), max_size=60), st.lists(st.integers(0, 7), max_size=6))
def test_reader_knows_all_items_however_slow_it_is(steps: list[int], between: list[int]) -> None:
    """Steps below 8 store or remove an item, others read; ``between`` changes items in a read."""
    catalogue = Catalogue(max_log=8)
    items: dict[int, StoredObject] = {}
    reader = Reader(catalogue)

    def change(number: int) -> None:
        if (item := items.pop(number, None)) is not None:
            catalogue.remove(item)
        else:
            items[number] = sealed(number, generation=catalogue.seq + 1)
            catalogue.store(items[number])

    def change_between() -> None:
        for number in between:
            change(number)

    for step in [*steps, 8]:
        if step < 8:
            change(step)
        else:
            reader.read(between=change_between)
    reader.read()
    assert reader.names == {bytes([number]) * 32 for number in items}
    assert reader.seq == catalogue.seq
    assert reader.num_lists == 0 or len(steps) + len(between) > 8
