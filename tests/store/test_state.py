"""Leases and waiting calls of clients, and each verb on handles."""

from __future__ import annotations

import msgspec

from afferent.admission.shares import Share
from afferent.store.protocol import requests
from afferent.store.protocol.items import SealItem
from afferent.store.protocol.results import (
    ClientInfo,
    Evicted,
    ObjectInfo,
    Order,
    Scheduled,
    Statistics,
    TenantInfo,
)
from afferent.types import CreateItem, Handle, ObjectKind
from tests.store.outcomes import states
from tests.store.pure_store import (
    FEATURES,
    FRONTEND,
    KEY,
    KEY_2,
    OTHER,
    RAW,
    SECOND,
    WORKER,
    Store,
    code,
)


def test_each_kind_has_figures_of_its_own() -> None:
    store = Store(1 << 12)
    store.create(FRONTEND, "r", 100, 65)
    raw, features = (store.state.statistics().kinds[kind] for kind in (RAW, FEATURES))
    assert (raw.capacity_nbytes, raw.backed_nbytes, raw.used_nbytes) == (2048, 2048, 256)
    assert (raw.held_nbytes, raw.num_held, raw.largest_free_nbytes) == (256, 2, 2048 - 256)
    assert (features.used_nbytes, features.num_objects) == (0, 0)


def test_a_new_store_has_counted_nothing() -> None:
    statistics = Store(1 << 12).state.statistics()
    told = [(statistics, "whole"), *((each, kind) for kind, each in statistics.kinds.items())]
    counts = {
        (of, name): value
        for figures, of in told
        for name, value in msgspec.structs.asdict(figures).items()
        if name.startswith("num_") and name not in ("num_clients", "num_free_extents")
    }
    assert len(counts) > 20
    assert not any(counts.values()), counts


# Leases and waiting


def test_what_a_lost_client_still_says_is_not_done() -> None:
    store = Store()
    store.disconnect(FRONTEND)
    store.send(FRONTEND, requests.Create, "r", [CreateItem(RAW, 100)])
    assert store.inbox[FRONTEND] == []
    assert store.state.statistics().num_objects == 0


def test_a_lost_connection_is_not_yet_a_death() -> None:
    """The process may still read its pinned objects; no lookup finds its unsealed ones."""
    store = Store()
    read = store.raw(FRONTEND, "r")
    (mine,) = store.claim(FRONTEND, "r")
    store.reserve(FRONTEND, "r", 100)
    store.disconnect(FRONTEND)
    statistics = store.state.statistics()
    assert (statistics.num_objects, statistics.reserved_nbytes) == (2, 0)
    (again,) = store.claim(OTHER, "r")
    assert again.handle is not None
    assert again.handle.offset != mine.handle.offset  # type: ignore[union-attr]
    store.release(OTHER, "r")
    (client,) = (
        c
        for c in store.call(OTHER, requests.Clients, returns=list[ClientInfo])
        if c.client == FRONTEND
    )
    assert (client.connected, client.num_held, client.pid) == (False, 2, 1001)
    assert store.state.objects.resolve(read).pins
    store.die(FRONTEND)
    assert store.state.statistics().used_nbytes == 0
    assert len(store.call(OTHER, requests.Clients)) == 3


def test_who_is_lost_is_not_answered() -> None:
    store = Store(capacity_nbytes=4096)
    store.create(OTHER, "rest", 1000)
    store.acquire(FRONTEND, "r")
    store.wait(FRONTEND, "r")
    store.reserve(FRONTEND, "r", 1500)
    replies = len(store.inbox[FRONTEND])
    store.disconnect(FRONTEND)
    store.die(FRONTEND)
    assert len(store.inbox[FRONTEND]) == replies


def test_a_wait_for_nothing_is_answered() -> None:
    store = Store()
    assert store.outcomes(FRONTEND, store.send(FRONTEND, requests.Wait, "nobody", [])) == []


def test_one_waits_only_for_what_one_acquired() -> None:
    store = Store()
    store.acquire(FRONTEND, "r")
    assert store.failure(OTHER, store.wait(OTHER, "r")) == "not_permitted"
    assert store.failure(FRONTEND, store.wait(FRONTEND, "s")) == "not_permitted"
    assert store.failure(FRONTEND, store.wait(FRONTEND, "r", KEY, KEY_2)) == "not_permitted"


def test_releasing_a_request_ends_its_calls() -> None:
    store = Store(capacity_nbytes=2048)
    store.create(OTHER, "rest", 64)
    store.acquire(FRONTEND, "r")
    waits = store.wait(FRONTEND, "r"), store.wait(FRONTEND, "r")
    reserve = store.reserve(FRONTEND, "r", 1000)
    other = store.reserve(FRONTEND, "other", 1000)
    store.release(FRONTEND, "r")
    for wait in waits:
        assert code(store.outcome(FRONTEND, wait)) == "store_error"
    assert store.failure(FRONTEND, reserve) == "store_error"
    assert store.answer(FRONTEND, other) is None
    statistics = store.state.statistics()
    assert (statistics.num_jobs_queued, statistics.num_reservations_queued) == (0, 1)


# Verbs on handles


def test_create_is_all_or_nothing() -> None:
    store = Store(capacity_nbytes=1024)
    items = [CreateItem(RAW, 300), CreateItem(RAW, 300)]
    assert store.refusal(FRONTEND, requests.Create, "r", items) == "arena_too_small"
    store.create(OTHER, "r", 128)
    items = [CreateItem(FEATURES, 64), CreateItem(RAW, 300), CreateItem(RAW, 128)]
    assert store.refusal(FRONTEND, requests.Create, "r", items) == "store_full"
    assert store.state.statistics().num_objects == 1


def test_a_key_that_is_being_made_is_not_created_beside() -> None:
    store = Store(capacity_nbytes=4096)
    named = [CreateItem(FEATURES, 64, KEY)]
    store.claim(FRONTEND, "r")
    assert store.refusal(OTHER, requests.Create, "r", named) == "store_error"
    store.release(FRONTEND, "r")
    # a job with a reservation that waits for an extent
    store.create(OTHER, "a", 704, kind=FEATURES)
    middle = store.create(OTHER, "m", 640, kind=FEATURES)
    store.create(OTHER, "b", 704, kind=FEATURES)
    store.release(OTHER, "a")
    store.release(OTHER, "b")
    store.reserve(FRONTEND, "r", 1000, kind=FEATURES)
    assert isinstance(store.acquire(FRONTEND, "r"), Scheduled)
    assert store.refusal(OTHER, requests.Create, "r", named) == "store_error"
    waiting = store.send(WORKER, requests.Take)
    assert store.answer(WORKER, waiting) is None
    assert store.call(OTHER, requests.Abort, "m", middle) is None
    store.result(WORKER, waiting, Order)


def test_seal_is_all_or_nothing() -> None:
    store = Store()
    first, second = store.create(FRONTEND, "r", 100, 200)
    good = SealItem(first, 100)
    for bad in (
        SealItem(second, 201),
        SealItem(first, 50),
        SealItem(Handle(1, 0, 100, 99), 100),
        SealItem(second, 200, [first]),
    ):
        assert store.refusal(FRONTEND, requests.Seal, "r", [good, bad]) in (
            "not_permitted",
            "stale_handle",
        )
        assert {item.state.value for item in store.state.objects} == {"created"}
    assert store.refusal(OTHER, requests.Seal, "r", [good]) == "not_permitted"
    sealed = store.call(
        FRONTEND, requests.Seal, "r", [good, SealItem(second, 20)], returns=list[Handle]
    )
    assert sealed == [first, Handle(1, second.offset, 20, second.generation)]


def test_nothing_is_sealed_when_what_it_was_computed_from_is_gone() -> None:
    store = Store()
    source = store.raw(FRONTEND, "source")
    (target,) = store.create(FRONTEND, "r", 100)
    item = SealItem(target, 100, [source])
    assert store.refusal(FRONTEND, requests.Seal, "r", [item]) == "stale_handle"
    store.call(FRONTEND, requests.Get, "r", [source])
    store.call(FRONTEND, requests.Seal, "r", [item])


def test_abort_is_all_or_nothing() -> None:
    store = Store()
    (mine,) = store.create(FRONTEND, "r", 100)
    sealed = store.raw(FRONTEND, "r")
    assert store.refusal(FRONTEND, requests.Abort, "r", [mine, sealed]) == "not_permitted"
    assert store.refusal(OTHER, requests.Abort, "r", [mine]) == "not_permitted"
    assert store.state.statistics().num_objects == 2
    store.call(FRONTEND, requests.Abort, "r", [mine, mine])
    assert store.state.statistics().num_objects == 1


def test_get_is_all_or_nothing() -> None:
    store = Store()
    handle = store.raw(FRONTEND, "r")
    (unsealed,) = store.create(FRONTEND, "r", 100)
    for wrong in (Handle(1, 4096, 100, 99), unsealed):
        assert store.refusal(OTHER, requests.Get, "r", [handle, wrong]) == "stale_handle"
    item = store.state.objects.resolve(handle)
    assert item.pins == {(FRONTEND, "r"): 1}
    store.call(OTHER, requests.Get, "r", [handle, handle])
    assert item.pins == {(FRONTEND, "r"): 1, (OTHER, "r"): 2}


def test_get_for_others_is_all_or_nothing() -> None:
    store = Store()
    first, second = store.raw(FRONTEND, "r"), store.raw(FRONTEND, "r")
    store.disconnect(SECOND)
    stale = Handle(1, 4096, 100, 99)
    for gone in (SECOND, 77, 0):
        refusal = store.refusal(OTHER, requests.Get, "r", [first], [WORKER, gone])
        assert refusal == "client_gone"
    assert store.refusal(OTHER, requests.Get, "r", [first, stale], [WORKER]) == "stale_handle"
    item = store.state.objects.resolve(first)
    assert item.pins == {(FRONTEND, "r"): 1}
    store.call(OTHER, requests.Get, "r", [first, second], [WORKER, OTHER])
    assert item.pins == {(FRONTEND, "r"): 1, (OTHER, "r"): 2, (WORKER, "r"): 1}


def test_pins_for_others_are_theirs() -> None:
    """They outlive the client that took them, and end with the other client's release or death."""
    store = Store()
    handle = store.raw(FRONTEND, "r")
    store.call(FRONTEND, requests.Get, "s", [handle], [WORKER, OTHER])
    for request in ("r", "s"):
        store.release(FRONTEND, request)
    store.die(FRONTEND)
    assert store.state.objects.resolve(handle).pins == {(WORKER, "s"): 1, (OTHER, "s"): 1}
    store.call(WORKER, requests.Release, "s", [handle])
    store.disconnect(OTHER)
    assert store.state.statistics().num_objects == 1
    store.die(OTHER)
    assert store.state.statistics().num_objects == 0


def test_pins_for_others_spend_one_promise() -> None:
    """An object that was not pinned is charged once, to the reservation of the caller."""
    store = Store(capacity_nbytes=4096)
    (mine,) = store.claim(FRONTEND, "r")
    store.seal(FRONTEND, "r", mine.handle)
    store.release(FRONTEND, "r")
    store.reserve(OTHER, "r", 1024, kind=FEATURES)
    store.call(OTHER, requests.Get, "r", [mine.handle], [WORKER, SECOND])
    statistics = store.state.statistics()
    assert (statistics.held_nbytes, statistics.reserved_nbytes) == (1024, 0)


def test_release_is_all_or_nothing() -> None:
    store = Store()
    first, second = store.raw(FRONTEND, "r"), store.raw(FRONTEND, "r")
    store.call(OTHER, requests.Get, "r", [first])
    for wrong in ([first, first], [first, second]):
        assert store.refusal(OTHER, requests.Release, "r", wrong) == "not_permitted"
    assert store.state.objects.resolve(first).pins == {(FRONTEND, "r"): 1, (OTHER, "r"): 1}
    store.call(FRONTEND, requests.Release, "r", [second, first])
    assert store.refusal(OTHER, requests.Get, "r", [second]) == "stale_handle"


def test_what_is_deleted_is_made_anew() -> None:
    store = Store()
    first, second = store.claim(FRONTEND, "r", KEY, KEY_2)
    assert store.call(OTHER, requests.Delete, [KEY, bytes(32)]) == [False, False]
    store.seal(FRONTEND, "r", first.handle, second.handle)
    assert store.call(OTHER, requests.Delete, [KEY, KEY]) == [True, False]
    assert states(store.claim(OTHER, "r", KEY, KEY_2)) == ["owner", "hit"]
    store.call(FRONTEND, requests.Get, "s", [second.handle])
    store.call(FRONTEND, requests.Get, "s", [first.handle])  # which it pins already
    assert store.refusal(OTHER, requests.Get, "s", [first.handle]) == "stale_handle"


def test_whose_requests_wait_and_for_what() -> None:
    store = Store(capacity_nbytes=4096)
    store.acquire(OTHER, "job")
    for request, share in (("a 1", Share("a", 2.0)), ("a 2", Share("a", 2.0)), ("b", Share("b"))):
        store.send(FRONTEND, requests.Introduce, request, share)
    store.reserve(FRONTEND, "a 1", 1500)
    store.reserve(FRONTEND, "a 2", 1000)
    for request in ("b", "nameless"):
        store.send(FRONTEND, requests.AcquirePermit, request, "preprocess", 1, True)
    found = store.call(SECOND, requests.Tenants, returns=list[TenantInfo])
    assert found == [
        TenantInfo("", 1.0, num_permits_queued=1, num_jobs=1),
        TenantInfo("a", 2.0, 1536, num_reservations_queued=1, queued_nbytes=1024),
    ]
    store.release(FRONTEND, "a 1")
    store.release(FRONTEND, "a 2")
    store.release(FRONTEND, "b")
    found = store.call(SECOND, requests.Tenants, returns=list[TenantInfo])
    assert found == [TenantInfo("", 1.0, num_jobs=1)]


def test_what_the_store_says_of_itself() -> None:
    store = Store()
    mine, _ = store.claim(FRONTEND, "r", KEY, KEY_2)
    store.seal(FRONTEND, "r", mine.handle)
    store.call(OTHER, requests.Get, "r", [mine.handle])
    store.release(FRONTEND, "r")
    store.reserve(FRONTEND, "r", 100)
    store.reserve(FRONTEND, "s", 100, kind=FEATURES)
    store.send(WORKER, requests.Take)
    small = store.raw(SECOND, "r")
    big, little = store.call(SECOND, requests.List, None, 10, returns=list[ObjectInfo])
    assert (big.handle, big.key, big.state) == (mine.handle, KEY, "sealed")
    assert (big.pins, big.writer, little.handle) == ([OTHER], None, small)
    for kind, limit, number in ((RAW, 10, 1), (None, 1, 1), (ObjectKind.EMBEDDINGS, 1, 0)):
        assert len(store.call(SECOND, requests.List, kind, limit)) == number
    clients = store.call(SECOND, requests.Clients, returns=list[ClientInfo])
    held = [(c.client, c.name, c.num_held, c.held_nbytes, c.reserved_nbytes) for c in clients]
    assert held == [
        (1, "client 1", 0, 0, 256),
        (2, "client 2", 1, 1024, 0),
        (3, "client 3", 0, 0, 0),
        (4, "client 4", 1, 128, 0),
    ]
    found = store.call(SECOND, requests.Stat, returns=Statistics)
    assert (found.used_nbytes, found.held_nbytes, found.reserved_nbytes) == (1152, 1152, 256)
    assert (found.num_clients, found.num_workers, found.num_objects) == (4, 1, 2)
    features = found.kinds[FEATURES]
    assert (features.num_objects, features.num_free_extents) == (1, 1)
    assert features.largest_free_nbytes == features.capacity_nbytes - 1024
    store.release(OTHER, "r")
    evicted = store.call(SECOND, requests.Evict, FEATURES, None, returns=Evicted)
    assert (evicted.num_objects, evicted.nbytes) == (1, 1024)
    assert store.state.statistics().num_evicted == 1
