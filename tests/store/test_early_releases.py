"""Pins that end with the report of an engine."""

from __future__ import annotations

from typing import Any

from afferent.errors import StaleHandle
from afferent.store.protocol import requests
from afferent.types import Handle, ObjectKind
from tests.store.pure_store import FRONTEND, KEY, KEY_2, OTHER, WORKER, Store


def made(store: Store, key: bytes = KEY) -> Handle:
    """Have an object made, and release it."""
    store.acquire(FRONTEND, "maker", key)
    order = store.take(WORKER)
    store.finish(WORKER, order)
    handle = store.acquire(FRONTEND, "maker", key).handle
    store.release(FRONTEND, "maker")
    return handle


def hold(store: Store, client: int, request: str, handle: Handle, *, early: bool = True) -> None:
    store.call(client, requests.Get, request, [handle])
    if early:
        store.call(client, requests.ReleaseEarly, request, [handle])


def report(store: Store, *keys: bytes) -> None:
    store.call(WORKER, requests.ReportEncoded, list(keys))


def is_valid(store: Store, client: int, request: str, handle: Handle) -> bool:
    return store.call(client, requests.CheckPins, request, [handle])


def pins(store: Store) -> dict[Any, int]:
    return {lease: count for item in store.state.objects for lease, count in item.pins.items()}


def test_report_ends_a_pin_that_may_end() -> None:
    store = Store()
    handle = made(store)
    hold(store, FRONTEND, "r", handle)
    store.call(FRONTEND, requests.Get, "r", [handle])
    assert is_valid(store, FRONTEND, "r", handle)
    report(store, KEY)
    assert pins(store) == {}
    assert is_valid(store, FRONTEND, "r", handle)
    store.call(OTHER, requests.Evict, ObjectKind.FEATURES, None)
    assert is_valid(store, FRONTEND, "r", handle)
    store.release(FRONTEND, "r")
    assert not is_valid(store, FRONTEND, "r", handle)


def test_a_request_whose_pins_have_ended_early_is_still_there() -> None:
    """Another engine may get it: the first has failed, or the report was for another request."""
    store = Store()
    handle = made(store)
    hold(store, FRONTEND, "r", handle)
    report(store, KEY)
    assert store.call(WORKER, requests.Accept, "r", [])
    store.release(FRONTEND, "r")
    assert not store.call(WORKER, requests.Accept, "r", [])


def test_report_ends_the_oldest_pin_alone() -> None:
    store = Store()
    handle = made(store)
    hold(store, OTHER, "first", handle, early=False)
    for request in ("second", "third"):
        hold(store, FRONTEND, request, handle)
    report(store, KEY, KEY_2)
    assert set(pins(store)) == {(OTHER, "first"), (FRONTEND, "third")}
    report(store, KEY, KEY)
    assert set(pins(store)) == {(OTHER, "first")}


def test_pin_that_has_ended_ends_no_second_time() -> None:
    store = Store()
    handle = made(store)
    hold(store, FRONTEND, "r", handle)
    report(store, KEY)
    hold(store, FRONTEND, "r", handle)
    report(store, KEY)
    assert set(pins(store)) == {(FRONTEND, "r")}


def test_release_of_a_request_or_of_a_handle_forgets_it() -> None:
    store = Store()
    handle = made(store)
    for request, handles in (("one", None), ("two", [handle])):
        hold(store, FRONTEND, request, handle)
        store.call(FRONTEND, requests.Release, request, handles)
    hold(store, FRONTEND, "three", handle)
    report(store, KEY)
    assert pins(store) == {}
    assert not is_valid(store, FRONTEND, "two", handle)


def test_lost_client_is_forgotten() -> None:
    store = Store()
    handle = made(store)
    hold(store, FRONTEND, "r", handle)
    hold(store, OTHER, "r", handle)
    store.state.client_died(FRONTEND, now_s=1.0)
    report(store, KEY)
    assert pins(store) == {}


def test_check_of_a_deleted_or_foreign_object_fails() -> None:
    store = Store()
    handle = made(store)
    hold(store, FRONTEND, "r", handle)
    assert not is_valid(store, FRONTEND, "other", handle)
    other = Handle(handle.segment + 1, handle.offset, handle.nbytes, handle.generation)
    assert not is_valid(store, FRONTEND, "r", other)
    store.call(OTHER, requests.Delete, [KEY])
    assert not is_valid(store, FRONTEND, "r", handle)
    report(store, KEY)
    assert set(pins(store)) == {(FRONTEND, "r")}


def test_objects_that_are_not_pinned_or_gone_are_not_released_early() -> None:
    store = Store()
    handle = made(store)
    store.call(FRONTEND, requests.ReleaseEarly, "r", [handle])
    store.call(FRONTEND, requests.Get, "r", [handle])
    report(store, KEY)
    assert set(pins(store)) == {(FRONTEND, "r")}
    store.call(OTHER, requests.Delete, [KEY])
    store.release(FRONTEND, "r")
    assert store.refusal(FRONTEND, requests.ReleaseEarly, "r", [handle]) == StaleHandle.code
