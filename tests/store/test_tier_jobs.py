"""An idle tier process gets a job first, and the write-behind queue gets finished objects."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from afferent.admission.shares import Share
from afferent.store.protocol import requests
from afferent.store.protocol.items import Claim, Fetch, Find, Queue, SealItem
from afferent.store.protocol.results import (
    Absent,
    Fetching,
    InFlight,
    Keeping,
    Made,
    ObjectInfo,
    Order,
    Outcome,
    Owner,
    Scheduled,
)
from afferent.store.state import keeping
from afferent.types import Failure, Handle, ObjectKind
from tests.store.outcomes import states
from tests.store.pure_store import (
    BAD,
    FEATURES,
    FRONTEND,
    KEY,
    KEY_2,
    OTHER,
    RAW,
    SECOND,
    WORKER,
    Store,
)

TIER, RECORDS = SECOND, ObjectKind.RECORDS
ABSENT = Failure("absent", "not there")


def fetcher(store: Store) -> int:
    """Send the call with which a tier waits for something to fetch."""
    return store.send(TIER, requests.Take, "fetch")


def order_of(store: Store, client: int, seq: int) -> Order | None:
    return None if store.answer(client, seq) is None else store.result(client, seq, Order)


def given(store: Store, client: int, seq: int) -> Order:
    order = order_of(store, client, seq)
    assert order is not None
    return order


def kept(order: Order) -> Keeping:
    return msgspec.msgpack.decode(order.payload, type=Keeping)


def object_states(store: Store) -> list[str]:
    listed: list[ObjectInfo] = store.call(
        FRONTEND, requests.List, FEATURES, 10, returns=list[ObjectInfo]
    )
    return [item.state for item in listed]


def test_who_fetches_is_asked_before_a_worker() -> None:
    store = Store()
    take, worker = fetcher(store), store.send(WORKER, requests.Take)
    store.acquire(FRONTEND, "r")
    order = given(store, TIER, take)
    assert order_of(store, WORKER, worker) is None
    fetching = msgspec.msgpack.decode(order.payload, type=Fetching)
    assert fetching == Fetching(KEY, FEATURES, 1000, 1000)
    assert object_states(store) == ["fetching"]
    wait = store.wait(FRONTEND, "r")
    store.finish(TIER, order)
    assert isinstance(store.outcome(FRONTEND, wait), Made)
    statistics = store.state.statistics()
    assert (statistics.num_jobs_fetched, statistics.num_jobs_made) == (1, 0)
    assert order_of(store, WORKER, worker) is None


def test_what_is_absent_is_made_once_all_wait_for_it() -> None:
    store = Store()
    take = fetcher(store)
    store.acquire(FRONTEND, "r1")
    assert isinstance(store.acquire(OTHER, "r2"), InFlight)
    waits = [(FRONTEND, store.wait(FRONTEND, "r1")), (OTHER, store.wait(OTHER, "r2"))]
    order = given(store, TIER, take)
    store.finish(TIER, order, ABSENT)
    made = store.take(WORKER)
    assert (made.job, made.payload, made.target) == (order.job, b"how", order.target)
    assert store.refusal(TIER, requests.Finish, order.job, 900, None, []) == "not_permitted"
    store.finish(WORKER, made)
    assert set(states(store.outcome(*wait) for wait in waits)) == {"made"}
    statistics = store.state.statistics()
    assert (statistics.num_jobs_fetched, statistics.num_jobs_made) == (0, 1)


def test_nothing_waits_for_a_tier_that_has_no_time() -> None:
    store = Store()
    store.acquire(FRONTEND, "r")
    assert store.take(WORKER).payload == b"how"
    take = fetcher(store)
    store.acquire(FRONTEND, "r", KEY_2)
    assert order_of(store, TIER, take) is not None
    store.acquire(FRONTEND, "r", b"m" * 32)
    assert store.take(WORKER).payload == b"how", "it is at one job, and takes no other"


def test_a_tier_that_dies_is_no_maker_that_died() -> None:
    store = Store()
    for number in range(3):  # more deaths than a key may cause
        take = fetcher(store)
        assert isinstance(store.acquire(FRONTEND, f"r{number}"), Scheduled)
        given(store, TIER, take)
        store.release(FRONTEND, f"r{number}")
        store.die(TIER)
        store.state.connect(TIER)
    store.acquire(FRONTEND, "r")
    store.finish(WORKER, store.take(WORKER))
    assert isinstance(store.outcome(FRONTEND, store.wait(FRONTEND, "r")), Made)


def test_a_lost_tier_writes_until_it_is_dead() -> None:
    store = Store()
    take = fetcher(store)
    store.acquire(FRONTEND, "r")
    given(store, TIER, take)
    worker = store.send(WORKER, requests.Take)
    store.disconnect(TIER)
    assert order_of(store, WORKER, worker) is None
    store.die(TIER)
    assert given(store, WORKER, worker).payload == b"how"


def test_what_waits_for_a_tier_that_goes_is_made() -> None:
    store = Store()
    take = fetcher(store)
    items = [Queue(key, FEATURES, 1000, [], b"how") for key in (KEY, KEY_2)]
    outcomes = store.call(FRONTEND, requests.Acquire, "r", items, returns=list[Outcome])
    assert states(outcomes) == ["scheduled", "scheduled"]
    given(store, TIER, take)
    store.die(TIER)
    for _ in items:
        store.finish(WORKER, store.take(WORKER))
    for key in (KEY, KEY_2):
        assert isinstance(store.outcome(FRONTEND, store.wait(FRONTEND, "r", key)), Made)


def test_who_takes_no_jobs_any_more_gets_none() -> None:
    store = Store()
    fetcher(store)
    store.disconnect(TIER)
    store.acquire(FRONTEND, "r")
    assert store.take(WORKER).payload == b"how"


def test_what_nobody_waits_for_is_not_made_after_a_miss() -> None:
    store = Store()
    take = fetcher(store)
    store.acquire(FRONTEND, "r")
    order = given(store, TIER, take)
    store.release(FRONTEND, "r")
    store.finish(TIER, order, ABSENT)
    assert store.state.statistics().num_jobs_queued == 0
    assert store.state.statistics().num_objects == 0


def test_a_fetch_alone_is_absent_where_nobody_has_it() -> None:
    store = Store()
    item = Fetch(KEY, FEATURES, 1000)
    (outcome,) = store.call(FRONTEND, requests.Acquire, "r", [item], returns=list[Outcome])
    assert isinstance(outcome, Absent)
    take = fetcher(store)
    (outcome,) = store.call(FRONTEND, requests.Acquire, "r", [item], returns=list[Outcome])
    assert isinstance(outcome, Scheduled)
    wait = store.wait(FRONTEND, "r")
    store.finish(TIER, given(store, TIER, take), ABSENT)
    assert isinstance(store.outcome(FRONTEND, wait), Absent)
    assert store.state.statistics().num_objects == 0


def test_who_would_make_it_does_when_the_fetch_brings_nothing() -> None:
    store = Store()
    take = fetcher(store)
    item = Fetch(KEY, FEATURES, 1000)
    store.call(FRONTEND, requests.Acquire, "r", [item])
    (claim,) = store.claim(OTHER, "r2")
    assert isinstance(claim, InFlight)
    waits = store.wait(FRONTEND, "r"), store.wait(OTHER, "r2")
    store.finish(TIER, given(store, TIER, take), ABSENT)
    assert isinstance(store.outcome(FRONTEND, waits[0]), Absent)
    assert isinstance(store.outcome(OTHER, waits[1]), Owner)


def test_a_fetch_never_takes_room_that_is_not_there() -> None:
    store = Store()
    fetcher(store)
    item = Fetch(KEY, FEATURES, 1 << 30)
    (outcome,) = store.call(FRONTEND, requests.Acquire, "r", [item], returns=list[Outcome])
    assert isinstance(outcome, Absent)


def test_a_fetch_that_takes_too_long_is_overdue_sooner_than_a_making() -> None:
    store = Store()
    take = fetcher(store)
    store.acquire(FRONTEND, "r")
    given(store, TIER, take)
    store.acquire(FRONTEND, "r", KEY_2)
    store.take(WORKER)
    jobs = store.state.flights.jobs
    assert jobs.overdue(now_s=5.0, timeout_s=60.0, fetch_timeout_s=4.0) == [TIER]
    assert jobs.overdue(now_s=5.0, timeout_s=4.0, fetch_timeout_s=60.0) == [WORKER]


def test_renew_of_a_fetch_begins_its_time_anew() -> None:
    store = Store()
    take = fetcher(store)
    store.acquire(FRONTEND, "r")
    order = given(store, TIER, take)
    jobs, limits = store.state.flights.jobs, {"timeout_s": 60.0, "fetch_timeout_s": 4.0}
    assert jobs.next_overdue_s(**limits) == store.now_s + 4.0
    store.now_s += 3.0
    store.send(TIER, requests.Renew, order.job)
    assert jobs.next_overdue_s(**limits) == store.now_s + 4.0
    assert jobs.overdue(now_s=store.now_s + 3.9, **limits) == []
    assert jobs.overdue(now_s=store.now_s + 4.1, **limits) == [TIER]


def test_renew_of_what_is_made_or_of_another_changes_nothing() -> None:
    """Only the process that fetches may renew: a worker decodes untrusted media."""
    store = Store()
    take = fetcher(store)
    store.acquire(FRONTEND, "r")
    fetched = given(store, TIER, take)
    store.acquire(FRONTEND, "r", KEY_2)
    made = store.take(WORKER)
    begun_s = store.now_s
    store.now_s += 3.0
    for client, job in ((WORKER, made.job), (WORKER, fetched.job), (OTHER, fetched.job), (TIER, 9)):
        assert store.send(client, requests.Renew, job)
    jobs = store.state.flights.jobs
    assert jobs.next_overdue_s(timeout_s=5.0, fetch_timeout_s=60.0) == begun_s + 5.0
    assert jobs.next_overdue_s(timeout_s=60.0, fetch_timeout_s=5.0) == begun_s + 5.0


def test_next_overdue_without_a_job_is_never() -> None:
    jobs = Store().state.flights.jobs
    assert jobs.next_overdue_s(timeout_s=60.0, fetch_timeout_s=5.0) == float("inf")


# The write-behind queue


def make(store: Store, request: str, key: bytes = KEY) -> None:
    """Have a worker make an object; no request pins it at the end."""
    store.acquire(FRONTEND, request, key)
    store.finish(WORKER, store.take(WORKER))
    store.release(FRONTEND, request)


def test_what_was_made_is_handed_to_who_keeps_it() -> None:
    store = Store()
    take = store.send(TIER, requests.Take, "keep")
    store.acquire(FRONTEND, "r")
    order = store.take(WORKER)
    store.now_s = 2.5
    store.finish(WORKER, order)
    store.release(FRONTEND, "r")
    keep = given(store, TIER, take)
    what = kept(keep)
    assert (what.key, what.kind, what.cost_us, what.made_us) == (KEY, FEATURES, 1000, 2_500_000)
    assert object_states(store) == ["demoting"]
    assert store.state.statistics().held_nbytes > 0
    store.release(TIER, what.request)
    assert object_states(store) == ["sealed"]
    assert store.state.statistics().held_nbytes == 0


def test_what_is_pinned_for_another_reason_is_not_being_kept() -> None:
    store = Store()
    store.send(TIER, requests.Take, "keep")
    store.acquire(FRONTEND, "r")
    order = store.take(WORKER)
    for client, request in ((FRONTEND, "keep-1"), (TIER, "another"), (TIER, 7)):
        store.finish(WORKER, order) if client == FRONTEND else None
        store.call(client, requests.Acquire, request, [Find(KEY)], returns=list[Outcome])
    keeper = [o for o in store.inbox[TIER] if o.seq]
    assert keeper
    states = object_states(store)
    store.die(TIER)
    assert (states, object_states(store)) == (["demoting"], ["sealed"])


def test_those_who_fetch_are_asked_in_turn() -> None:
    store = Store()
    first, second = fetcher(store), store.send(OTHER, requests.Take, "fetch")
    store.acquire(FRONTEND, "r")
    order = given(store, TIER, first)
    assert order_of(store, OTHER, second) is None
    store.finish(TIER, order)
    assert store.state.statistics().num_jobs_fetched == 1


def test_what_came_from_the_tier_does_not_go_back() -> None:
    store = Store()
    take, keep = fetcher(store), store.send(TIER, requests.Take, "keep")
    store.acquire(FRONTEND, "r")
    store.finish(TIER, given(store, TIER, take))
    assert order_of(store, TIER, keep) is None


def test_what_failed_and_what_is_raw_are_not_kept() -> None:
    store = Store()
    keep = store.send(TIER, requests.Take, "keep")
    store.acquire(FRONTEND, "r")
    store.finish(WORKER, store.take(WORKER), BAD)
    assert order_of(store, TIER, keep) is None


def test_what_a_request_made_itself_is_kept_too() -> None:
    store = Store()
    keep = store.send(TIER, requests.Take, "keep")
    (claim,) = store.claim(FRONTEND, "r")
    store.seal(FRONTEND, "r", claim.handle)
    assert kept(given(store, TIER, keep)).made_us == 0


def test_while_nobody_keeps_nothing_is_remembered() -> None:
    store = Store()
    make(store, "r")
    keep = store.send(TIER, requests.Take, "keep")
    assert order_of(store, TIER, keep) is None
    store.disconnect(TIER)
    make(store, "r", KEY_2)
    assert len(store.state.flights.keeping) == 0


@pytest.mark.parametrize("ends", [Store.disconnect, Store.die])
def test_keep_queue_of_a_process_that_is_gone_is_dropped(
    ends: Callable[[Store, int], object],
) -> None:
    """A successor would copy objects that may be in the tier already, or are no longer used."""
    store = Store()
    first = store.send(TIER, requests.Take, "keep")
    for number, key in enumerate((KEY, KEY_2, b"m" * 32)):
        make(store, f"r{number}", key)
    given(store, TIER, first)
    assert len(store.state.flights.keeping) == 2
    ends(store, TIER)
    assert len(store.state.flights.keeping) == 0
    second = store.send(OTHER, requests.Take, "keep")
    assert order_of(store, OTHER, second) is None
    make(store, "later", b"z" * 32)
    assert kept(given(store, OTHER, second)).key == b"z" * 32


def test_keep_queue_is_kept_while_another_process_keeps() -> None:
    store = Store()
    first, other = (store.send(client, requests.Take, "keep") for client in (TIER, OTHER))
    for number, key in enumerate((KEY, KEY_2, b"m" * 32)):
        make(store, f"r{number}", key)
    given(store, TIER, first)
    given(store, OTHER, other)
    store.die(TIER)
    assert len(store.state.flights.keeping) == 1


def test_what_is_gone_by_then_is_dropped_and_counted() -> None:
    store = Store()
    first = store.send(TIER, requests.Take, "keep")
    make(store, "r1")
    make(store, "r2", KEY_2)
    make(store, "r3", b"m" * 32)
    assert kept(given(store, TIER, first)).num_dropped == 0
    store.call(FRONTEND, requests.Delete, [KEY_2])
    second = kept(given(store, TIER, store.send(TIER, requests.Take, "keep")))
    assert (second.key, second.num_dropped) == (b"m" * 32, 1)


def test_what_others_want_the_room_of_is_dropped_first() -> None:
    store = Store(1 << 16)
    given_up = store.send(TIER, requests.Take, "keep")
    make(store, "r0", b"z" * 32)
    store.release(TIER, kept(given(store, TIER, given_up)).request)
    make(store, "r1")
    store.reserve(FRONTEND, "large", (1 << 15) - 64, kind=FEATURES)
    waits = store.reserve(OTHER, "also", (1 << 15) - 64, kind=FEATURES)
    assert store.answer(OTHER, waits) is None
    keep = store.send(TIER, requests.Take, "keep")
    assert order_of(store, TIER, keep) is None
    assert len(store.state.flights.keeping) == 0


def test_too_many_are_dropped_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert keeping.MAX_WAITING == 1024
    monkeypatch.setattr(keeping, "MAX_WAITING", 300)
    store = Store()
    first = store.send(TIER, requests.Take, "keep")
    keys = [bytes([index % 256, index // 256]) * 16 for index in range(303)]
    for index, key in enumerate(keys):
        (claim,) = store.claim(FRONTEND, f"r{index}", key, nbytes=64)
        store.seal(FRONTEND, f"r{index}", claim.handle)
        store.release(FRONTEND, f"r{index}")
    assert kept(given(store, TIER, first)).key == keys[0]
    assert len(store.state.flights.keeping) == 300
    second = kept(given(store, TIER, store.send(TIER, requests.Take, "keep")))
    assert (second.key, second.num_dropped) == (keys[3], 2)


def test_who_keeps_and_dies_holds_nothing() -> None:
    store = Store()
    store.send(TIER, requests.Take, "keep")
    make(store, "r")
    assert store.state.statistics().held_nbytes > 0
    store.die(TIER)
    assert store.state.statistics().held_nbytes == 0


def test_plans_and_media_never_go_to_a_tier() -> None:
    store = Store()
    take = fetcher(store)
    item = Queue(KEY, RAW, 1000, [], b"how")
    store.call(FRONTEND, requests.Acquire, "r", [item])
    assert order_of(store, TIER, take) is None
    assert store.take(WORKER).payload == b"how"


def test_media_and_records_go_there_if_it_is_said_what_they_cost() -> None:
    store = Store(shares={RAW: 0.5, RECORDS: 0.5})
    keep = store.send(TIER, requests.Take, "keep")
    for number, (kind, made_us) in enumerate(((RAW, 0), (RECORDS, 0), (RAW, 5), (RECORDS, 7))):
        request, key = f"r{number}", bytes([number]) * 32
        item = Claim(key, kind, 64)
        (claim,) = store.call(FRONTEND, requests.Acquire, request, [item], returns=list[Outcome])
        assert claim.handle is not None
        sealed = [SealItem(claim.handle, 64, [], made_us)]
        store.call(FRONTEND, requests.Seal, request, sealed, returns=list[Handle])
        order = order_of(store, TIER, keep)
        assert (order is not None) == (made_us > 0)
        if order is not None:
            assert (kept(order).kind, kept(order).made_us) == (kind, made_us)
            keep = store.send(TIER, requests.Take, "keep")


def test_what_is_only_fetched_may_be_of_any_kind() -> None:
    store = Store(shares={RECORDS: 1.0})
    take = fetcher(store)
    item = Fetch(KEY, RECORDS, 900)
    (outcome,) = store.call(FRONTEND, requests.Acquire, "r", [item], returns=list[Outcome])
    assert isinstance(outcome, Scheduled)
    wait = store.wait(FRONTEND, "r")
    store.finish(TIER, given(store, TIER, take))
    assert isinstance(store.outcome(FRONTEND, wait), Made)


def test_who_keeps_hears_whose_it_is() -> None:
    """The tenant is also known for objects that were computed from a tenant's features."""
    store = Store()
    first = store.send(TIER, requests.Take, "keep")
    store.call(FRONTEND, requests.Introduce, "r", Share("anna"))
    store.acquire(FRONTEND, "r")
    store.finish(WORKER, store.take(WORKER))
    assert kept(given(store, TIER, first)).tenant == "anna"
    second = store.send(TIER, requests.Take, "keep")
    (found,) = store.call(OTHER, requests.Acquire, "e", [Find(KEY)], returns=list[Outcome])
    (claim,) = store.claim(OTHER, "e", KEY_2)
    assert found.handle is not None
    assert claim.handle is not None
    sealed = [SealItem(claim.handle, 64, [found.handle], 9)]
    store.call(OTHER, requests.Seal, "e", sealed, returns=list[Handle])
    what = kept(given(store, TIER, second))
    assert (what.key, what.tenant, what.made_us) == (KEY_2, "anna", 9)
    third = store.send(TIER, requests.Take, "keep")
    make(store, "nameless", b"n" * 32)
    assert kept(given(store, TIER, third)).tenant == ""
