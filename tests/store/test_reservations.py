"""Reservations, and calls that wait for a free extent under a reservation."""

from __future__ import annotations

import pytest

from afferent.admission.shares import Share
from afferent.store.protocol import requests
from afferent.store.protocol.items import Queue, SealItem
from afferent.store.protocol.results import InFlight, Made, Order, Outcome, Owner, Scheduled
from afferent.types import CreateItem, Handle, ReserveItem
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

# Grants


def test_what_is_granted_can_be_had_and_by_nobody_else() -> None:
    store = Store(capacity_nbytes=2048)
    assert store.result(FRONTEND, store.reserve(FRONTEND, "r", 1000, queue=False)) is None
    assert store.refusal(OTHER, requests.Create, "r", [CreateItem(RAW, 64)]) == "store_full"
    assert store.failure(OTHER, store.reserve(OTHER, "r", 64, queue=False)) == "store_full"
    store.create(FRONTEND, "r", 500, 500)
    assert store.state.statistics().reserved_nbytes == 0
    assert store.failure(FRONTEND, store.reserve(FRONTEND, "r", 1025)) == "arena_too_small"


def test_reservations_are_queued_for() -> None:
    """Equal ones are granted in order of arrival, and no other call takes the bytes."""
    store = Store(capacity_nbytes=2048)
    for request, nbytes in (("a", 512), ("b", 448)):
        store.create(FRONTEND, request, nbytes)
    first, second = store.reserve(OTHER, "first", 576), store.reserve(OTHER, "second", 576)
    features = store.reserve(OTHER, "features", 64, kind=FEATURES)
    assert store.result(OTHER, features) is None
    assert store.answer(OTHER, first) is store.answer(OTHER, second) is None
    assert store.refusal(SECOND, requests.Create, "r", [CreateItem(RAW, 64)]) == "store_full"
    store.release(FRONTEND, "a")
    assert store.result(OTHER, first) is None
    assert store.answer(OTHER, second) is None
    store.release(FRONTEND, "b")
    assert store.answer(OTHER, second) is None
    store.release(OTHER, "first")
    assert store.result(OTHER, second) is None


def test_small_ones_do_not_wait_for_a_large_one() -> None:
    """Small reservations pass a large one until they have taken as many bytes as it needs."""
    store = Store(capacity_nbytes=2048)
    store.create(FRONTEND, "a", 512)
    large, passed = store.reserve(OTHER, "large", 768), 0
    while store.answer(SECOND, store.reserve(SECOND, f"small {passed}", 128)) is not None:
        store.state.validate()
        store.release(SECOND, f"small {passed}")
        passed += 1
    assert 0 < passed <= 768 // 128
    store.release(FRONTEND, "a")
    assert store.result(OTHER, large) is None


def test_what_is_short_is_shared_by_tenants() -> None:
    """A tenant with many requests gets no more than one with a few."""
    store = Store(capacity_nbytes=2048)
    store.create(FRONTEND, "all", 1024)
    flood = [f"flood {number}" for number in range(20)]
    honest = [f"honest {number}" for number in range(4)]
    waits = {}
    for request in (*flood, *honest):
        share = Share(request.partition(" ")[0])
        store.send(OTHER, requests.Introduce, request, share)
        waits[request] = store.reserve(OTHER, request, 128)
    store.release(FRONTEND, "all")
    got = [request for request, seq in waits.items() if store.answer(OTHER, seq) is not None]
    assert got == [*flood[:4], *honest]


def test_a_reservation_of_several_kinds_is_all_or_nothing() -> None:
    store = Store(capacity_nbytes=2048)
    store.create(FRONTEND, "r", 1024)
    both = [ReserveItem(FEATURES, 500), ReserveItem(RAW, 1), ReserveItem(FEATURES, 500)]
    wait = store.send(OTHER, requests.Reserve, "r", both, True)
    assert store.state.statistics().reserved_nbytes == 0
    store.release(FRONTEND, "r")
    assert store.result(OTHER, wait) is None
    reserved = store.state.objects.budget.reserved_nbytes
    assert (reserved(RAW), reserved(FEATURES)) == (64, 1024)


def test_unreserving_what_is_waited_for_ends_the_wait() -> None:
    store = Store(capacity_nbytes=2048)
    store.create(FRONTEND, "r", 1024)
    items = [ReserveItem(RAW, 100)]
    first, second = store.reserve(OTHER, "r", 100), store.reserve(OTHER, "r", 100)
    store.call(OTHER, requests.Unreserve, "r", items, first)
    assert store.failure(OTHER, first) == "store_error"
    store.call(SECOND, requests.Unreserve, "r", items, second)  # the ticket of another client
    store.release(FRONTEND, "r")
    assert store.result(OTHER, second) is None
    assert store.state.statistics().reserved_nbytes == 128


def test_unreserving_what_was_granted_returns_what_is_left() -> None:
    store = Store(capacity_nbytes=2048)
    ticket = store.reserve(OTHER, "r", 1024)
    store.create(OTHER, "r", 256)
    waiting = store.reserve(FRONTEND, "r", 512)
    store.call(OTHER, requests.Unreserve, "r", [ReserveItem(RAW, 512)], ticket)
    assert store.result(FRONTEND, waiting) is None
    store.call(OTHER, requests.Unreserve, "r", [ReserveItem(RAW, 1024)], ticket)
    assert store.state.statistics().reserved_nbytes == 512


def test_unreserving_what_was_refused_takes_nothing_of_what_another_call_was_given() -> None:
    store = Store(capacity_nbytes=2048)
    store.reserve(FRONTEND, "r", 768)
    refused = store.reserve(FRONTEND, "r", 768)
    assert store.failure(FRONTEND, refused) == "arena_too_small"
    for never_given in (refused, 1000):  # the second ticket does not exist
        store.call(FRONTEND, requests.Unreserve, "r", [ReserveItem(RAW, 768)], never_given)
        assert store.state.statistics().reserved_nbytes == 768


@pytest.mark.parametrize("how", ["release", "disconnect", "die"])
def test_reservations_go_with_their_lease(how: str) -> None:
    store = Store(capacity_nbytes=2048)
    store.reserve(FRONTEND, "r", 1024)
    store.reserve(FRONTEND, "r", 1024, kind=FEATURES)
    queued = store.reserve(FRONTEND, "s", 1024)
    waiting = store.reserve(OTHER, "r", 1024)
    match how:
        case "release":
            store.release(FRONTEND, "r")
            assert store.result(FRONTEND, queued) is None
            store.release(FRONTEND, "s")
        case "disconnect":
            store.disconnect(FRONTEND)
        case "die":
            store.die(FRONTEND)
    assert store.result(OTHER, waiting) is None
    assert store.state.statistics().reserved_nbytes == 1024


# Extents


def divided(store: Store) -> Handle:
    """Return an object in the middle of 2 KiB of features, with 704 free bytes on each side."""
    store.create(OTHER, "left", 704, kind=FEATURES)
    (middle,) = store.create(OTHER, "middle", 640, kind=FEATURES)
    store.create(OTHER, "right", 704, kind=FEATURES)
    for request in ("left", "right"):
        store.release(OTHER, request)
    return middle


WIDE = [CreateItem(FEATURES, 1000)]


def test_without_a_reservation_no_run_is_an_error() -> None:
    store = Store(capacity_nbytes=4096)
    divided(store)
    assert store.refusal(FRONTEND, requests.Create, "r", WIDE) == "store_full"
    assert code(store.claim(FRONTEND, "r")[0]) == "store_full"
    assert code(store.acquire(FRONTEND, "r")) == "store_full"
    store.reserve(FRONTEND, "r", 500, kind=FEATURES)
    assert store.refusal(FRONTEND, requests.Create, "r", WIDE) == "store_full"
    assert code(store.acquire(FRONTEND, "r")) == "store_full"
    assert store.state.statistics().reserved_nbytes == 512


def test_under_a_reservation_a_create_waits_for_a_run() -> None:
    store = Store(capacity_nbytes=4096)
    middle = divided(store)
    store.reserve(FRONTEND, "r", 1000, kind=FEATURES)
    waiting = store.send(FRONTEND, requests.Create, "r", WIDE)
    store.raw(SECOND, "r")
    assert store.answer(FRONTEND, waiting) is None
    store.call(OTHER, requests.Abort, "middle", [middle])
    (handle,) = store.result(FRONTEND, waiting, list[Handle])
    assert handle.nbytes == 1000
    assert store.state.statistics().reserved_nbytes == 0


@pytest.mark.parametrize("how", ["seal", "unpin"])
def test_room_that_was_trimmed_or_unpinned_ends_the_wait_for_a_run(how: str) -> None:
    store = Store(capacity_nbytes=4096)
    middle = divided(store)
    store.reserve(FRONTEND, "r", 1000, kind=FEATURES)
    waiting = store.send(FRONTEND, requests.Create, "r", WIDE)
    if how == "seal":
        store.call(OTHER, requests.Seal, "middle", [SealItem(middle, 300)])
    else:
        store.seal(OTHER, "middle", middle)
        assert store.answer(FRONTEND, waiting) is None
        store.call(OTHER, requests.Release, "middle", [middle])
    assert len(store.result(FRONTEND, waiting)) == 1


@pytest.mark.parametrize("how", ["release", "disconnect", "unreserve"])
def test_a_create_that_waits_ends_with_its_lease_and_its_reservation(how: str) -> None:
    store = Store(capacity_nbytes=4096)
    middle = divided(store)
    ticket = store.reserve(FRONTEND, "r", 1000, kind=FEATURES)
    waiting = store.send(FRONTEND, requests.Create, "r", WIDE)
    match how:
        case "release":
            store.release(FRONTEND, "r")
            assert store.failure(FRONTEND, waiting) == "store_error"
        case "disconnect":
            store.disconnect(FRONTEND)
        case "unreserve":
            items = [ReserveItem(FEATURES, 1000)]
            store.call(FRONTEND, requests.Unreserve, "r", items, ticket)
            store.reserve(SECOND, "r", 1000, kind=FEATURES)
    store.call(OTHER, requests.Abort, "middle", [middle])
    if how == "unreserve":
        assert store.result(FRONTEND, waiting)
    assert store.state.statistics().num_objects == (how == "unreserve")


@pytest.mark.parametrize("other", [(FRONTEND, "a"), (FRONTEND, "s"), (SECOND, "r")])
def test_a_create_that_waits_is_its_own_requests(other: tuple[int, str]) -> None:
    store = Store(capacity_nbytes=4096)
    middle = divided(store)
    store.reserve(*other, 1000, kind=FEATURES)
    waiting = store.send(other[0], requests.Create, other[1], WIDE)
    store.release(FRONTEND, "r")
    assert store.answer(other[0], waiting) is None
    store.call(OTHER, requests.Abort, "middle", [middle])
    assert store.result(other[0], waiting)


def test_a_create_that_waits_fails_when_its_room_is_promised_to_others() -> None:
    store = Store(capacity_nbytes=4096)
    middle = divided(store)
    ticket = store.reserve(FRONTEND, "r", 1000, kind=FEATURES)
    waiting = store.send(FRONTEND, requests.Create, "r", WIDE)
    store.call(FRONTEND, requests.Unreserve, "r", [ReserveItem(FEATURES, 1000)], ticket)
    store.reserve(SECOND, "r", 1400, kind=FEATURES)
    store.call(OTHER, requests.Abort, "middle", [middle])
    assert store.failure(FRONTEND, waiting) == "store_full"


def test_who_has_reserved_more_than_it_creates_waits_too() -> None:
    store = Store(capacity_nbytes=4096)
    middle = divided(store)
    store.reserve(FRONTEND, "r", 1000, kind=FEATURES)
    store.reserve(FRONTEND, "r", 64, kind=FEATURES)
    waiting = store.send(FRONTEND, requests.Create, "r", WIDE)
    assert store.answer(FRONTEND, waiting) is None
    store.call(OTHER, requests.Abort, "middle", [middle])
    assert store.result(FRONTEND, waiting)


def test_what_is_not_needed_after_all_is_returned() -> None:
    """Unused bytes are returned, even if several calls reserved them."""
    store = Store(capacity_nbytes=4096)
    for _ in range(2):
        store.reserve(FRONTEND, "r", 640)
    item = [ReserveItem(RAW, 1000)]
    store.call(FRONTEND, requests.Unreserve, "r", item, requests.NO_REPLY)
    assert store.state.statistics().reserved_nbytes == 1280 - 1024


def test_under_a_reservation_a_job_waits_for_a_run() -> None:
    store = Store(capacity_nbytes=4096)
    middle = divided(store)
    store.reserve(FRONTEND, "r", 1000, kind=FEATURES)
    assert isinstance(store.acquire(FRONTEND, "r"), Scheduled)
    assert isinstance(store.acquire(SECOND, "r"), InFlight)
    taking = store.send(WORKER, requests.Take)
    store.release(FRONTEND, "r")  # the job has the reservation now, and a waiter
    assert store.state.statistics().reserved_nbytes == 1024
    assert store.answer(WORKER, taking) is None
    store.call(OTHER, requests.Abort, "middle", [middle])
    order = store.result(WORKER, taking, Order)
    wait = store.wait(SECOND, "r")
    store.finish(WORKER, order)
    assert isinstance(store.outcome(SECOND, wait), Made)


def test_the_reservation_of_a_job_is_not_spent_on_what_it_reads() -> None:
    """If its input used up the reservation, the job would fail instead of waiting for an extent."""
    store = Store(capacity_nbytes=4096)
    divided(store)
    (source,) = store.claim(SECOND, "r", KEY_2, nbytes=64)
    store.seal(SECOND, "r", source.handle)
    store.release(SECOND, "r")
    store.reserve(FRONTEND, "r", 1000, kind=FEATURES)
    item = Queue(KEY, FEATURES, 1000, [source.handle], b"")
    (outcome,) = store.call(FRONTEND, requests.Acquire, "r", [item], returns=list[Outcome])
    assert isinstance(outcome, Scheduled)


def test_a_job_that_waits_for_a_run_and_is_not_awaited_gives_its_reservation_back() -> None:
    store = Store(capacity_nbytes=4096)
    middle = divided(store)
    store.reserve(FRONTEND, "r", 1000, kind=FEATURES)
    store.acquire(FRONTEND, "r")
    store.release(FRONTEND, "r")
    statistics = store.state.statistics()
    assert (statistics.reserved_nbytes, statistics.num_jobs_queued) == (0, 0)
    store.call(OTHER, requests.Abort, "middle", [middle])
    assert store.state.statistics().num_objects == 0


def test_under_a_reservation_a_claim_waits_for_a_run() -> None:
    store = Store(capacity_nbytes=4096)
    middle = divided(store)
    store.reserve(FRONTEND, "r", 1000, kind=FEATURES)
    assert states(store.claim(FRONTEND, "r")) == ["in_flight"]
    assert states(store.claim(SECOND, "r")) == ["in_flight"]
    waits = store.wait(FRONTEND, "r"), store.wait(SECOND, "r")
    store.call(OTHER, requests.Abort, "middle", [middle])
    yours = store.outcome(FRONTEND, waits[0])
    assert isinstance(yours, Owner)
    assert store.answer(SECOND, waits[1]) is None
    store.seal(FRONTEND, "r", yours.handle)
    assert isinstance(store.outcome(SECOND, waits[1]), Made)


def test_a_claim_that_waits_for_a_run_is_handed_on() -> None:
    """The next request with a reservation becomes the owner; one without a reservation fails."""
    store = Store(capacity_nbytes=4096)
    middle = divided(store)
    store.reserve(FRONTEND, "r", 1000, kind=FEATURES)
    store.claim(FRONTEND, "r")
    store.claim(WORKER, "r", nbytes=1500)
    store.claim(SECOND, "r")
    waits = store.wait(WORKER, "r"), store.wait(SECOND, "r")
    store.release(FRONTEND, "r")
    store.reserve(SECOND, "r", 1000, kind=FEATURES)
    store.call(OTHER, requests.Abort, "middle", [middle])
    assert code(store.outcome(WORKER, waits[0])) == "store_full"
    assert isinstance(store.outcome(SECOND, waits[1]), Owner)


def test_who_is_handed_a_key_waits_for_a_run_only_under_a_reservation() -> None:
    store = Store(capacity_nbytes=4096)
    middle = divided(store)
    (mine,) = store.claim(FRONTEND, "r", nbytes=704)
    store.claim(WORKER, "r", nbytes=1000)
    store.reserve(SECOND, "r", 704, kind=FEATURES)
    store.claim(SECOND, "r", nbytes=704)
    waits = store.wait(WORKER, "r"), store.wait(SECOND, "r")
    store.call(FRONTEND, requests.Abort, "r", [mine.handle])
    assert code(store.outcome(WORKER, waits[0])) == "store_full"
    assert isinstance(store.outcome(SECOND, waits[1]), Owner)
    assert store.state.objects.resolve(middle)
