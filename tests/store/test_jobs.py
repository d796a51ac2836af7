"""Jobs: run once, given to another worker if one dies, refused after two dead workers."""

from __future__ import annotations

import pytest

from afferent.store.protocol import requests
from afferent.store.protocol.items import Join, Queue
from afferent.store.protocol.results import Absent, Hit, InFlight, Made, Order, Outcome, Scheduled
from afferent.types import ContentKey, Handle
from tests.store.outcomes import failure_of, states
from tests.store.pure_store import (
    BAD,
    FEATURES,
    FRONTEND,
    KEY,
    KEY_2,
    OTHER,
    SECOND,
    WORKER,
    Store,
    code,
)


def test_miss_then_made_then_hit() -> None:
    store = Store()
    assert isinstance(store.acquire(FRONTEND, "r1"), Scheduled)
    wait = store.wait(FRONTEND, "r1")
    assert store.answer(FRONTEND, wait) is None
    order = store.take(WORKER)
    assert order.payload == b"how"
    store.finish(WORKER, order)
    made = store.outcome(FRONTEND, wait)
    assert isinstance(made, Made)
    assert made.handle.nbytes == 900
    hit = store.acquire(OTHER, "r2")
    assert hit == Hit(made.handle)
    for client, request in ((FRONTEND, "r1"), (OTHER, "r2")):
        store.release(client, request)
    statistics = store.state.statistics()
    assert statistics.held_nbytes == 0
    assert (statistics.num_misses, statistics.num_hits, statistics.num_objects) == (1, 1, 1)


def test_single_flight() -> None:
    """All requests for an object that is being made get the same object, each with its own pin."""
    store = Store()
    assert isinstance(store.acquire(FRONTEND, "r1"), Scheduled)
    order = store.take(WORKER)
    assert isinstance(store.acquire(FRONTEND, "r2"), InFlight)
    assert isinstance(store.acquire(OTHER, "r1"), InFlight)
    asked = ((FRONTEND, "r1"), (FRONTEND, "r2"), (OTHER, "r1"))
    waits = [(client, store.wait(client, request)) for client, request in asked]
    store.finish(WORKER, order)
    outcomes = [store.outcome(client, seq) for client, seq in waits]
    assert set(states(outcomes)) == {"made"}
    assert len({outcome.handle for outcome in outcomes}) == 1
    (item,) = store.state.objects
    assert set(item.pins) == {(FRONTEND, "r1"), (FRONTEND, "r2"), (OTHER, "r1")}


def test_a_wait_for_several_is_answered_once_all_have_an_end() -> None:
    store = Store()
    for key in (KEY, KEY_2):
        store.acquire(FRONTEND, "r", key)
    wait = store.wait(FRONTEND, "r", KEY, KEY_2)
    store.finish(WORKER, store.take(WORKER))
    assert store.answer(FRONTEND, wait) is None
    store.finish(WORKER, store.take(WORKER), BAD)
    good, bad = store.outcomes(FRONTEND, wait)
    assert isinstance(good, Made)
    assert failure_of(bad) == BAD


def test_several_calls_wait_for_the_same() -> None:
    store = Store()
    for key in (KEY, KEY_2):
        store.acquire(FRONTEND, "r", key)
    one, both = store.wait(FRONTEND, "r", KEY), store.wait(FRONTEND, "r", KEY, KEY_2, KEY)
    store.finish(WORKER, store.take(WORKER))
    assert isinstance(store.outcome(FRONTEND, one), Made)
    store.finish(WORKER, store.take(WORKER))
    assert states(store.outcomes(FRONTEND, both)) == ["made"] * 3
    assert len(store.state.flights.waiters) == 0


def test_what_was_told_is_not_told_again() -> None:
    store = Store()
    store.acquire(FRONTEND, "r")
    store.finish(WORKER, store.take(WORKER))
    assert isinstance(store.outcome(FRONTEND, store.wait(FRONTEND, "r")), Made)
    assert store.failure(FRONTEND, store.wait(FRONTEND, "r")) == "not_permitted"


def test_who_asks_again_is_told_what_became_of_it() -> None:
    store = Store()
    store.acquire(FRONTEND, "r")
    store.finish(WORKER, store.take(WORKER))
    assert isinstance(store.claim(FRONTEND, "r")[0], Made)
    (item,) = store.state.objects
    assert item.pins == {(FRONTEND, "r"): 1}
    assert isinstance(store.claim(FRONTEND, "r")[0], Hit)
    assert item.pins == {(FRONTEND, "r"): 2}


def test_a_bad_item_fails_all_and_is_not_kept() -> None:
    store = Store()
    store.acquire(FRONTEND, "r1")
    store.acquire(OTHER, "r2")
    waits = [(FRONTEND, store.wait(FRONTEND, "r1")), (OTHER, store.wait(OTHER, "r2"))]
    store.finish(WORKER, store.take(WORKER), BAD)
    for client, seq in waits:
        assert store.outcome(client, seq).failure == BAD
    assert store.state.statistics().num_objects == 0
    assert isinstance(store.acquire(FRONTEND, "r3"), Scheduled)


def test_a_dead_workers_job_is_handed_to_another() -> None:
    """The second worker gets the same inputs, which no request has pinned any more."""
    store = Store()
    store.acquire(FRONTEND, "r1", KEY)
    store.acquire(FRONTEND, "r1", KEY_2)
    wait = store.wait(FRONTEND, "r1")
    order = store.take(WORKER)
    store.die(WORKER)
    assert store.answer(FRONTEND, wait) is None
    again = store.take(SECOND)  # before the job that was queued after it
    assert (again.job, again.target, again.inputs) == (order.job, order.target, order.inputs)
    store.finish(SECOND, again)
    assert isinstance(store.outcome(FRONTEND, wait), Made)


def test_a_worker_that_waits_gets_the_job_of_a_dead_one() -> None:
    store = Store()
    store.acquire(FRONTEND, "r1")
    store.take(WORKER)
    waiting = store.send(SECOND, requests.Take)
    store.die(WORKER)
    assert store.result(SECOND, waiting, Order).payload == b"how"


def test_a_key_that_killed_two_workers_is_refused_for_a_minute() -> None:
    store = Store()
    assert isinstance(store.acquire(FRONTEND, "r"), Scheduled)
    wait = store.wait(FRONTEND, "r")
    store.take(WORKER)
    store.die(WORKER)
    store.now_s = 30.0
    store.take(SECOND)
    assert store.answer(FRONTEND, wait) is None
    store.die(SECOND)
    assert code(store.outcome(FRONTEND, wait)) == "worker_died"
    assert store.state.statistics().num_objects == 0
    assert code(store.acquire(FRONTEND, "r")) == "quarantined"
    assert code(store.claim(FRONTEND, "r")[0]) == "quarantined"
    assert isinstance(store.acquire(FRONTEND, "other", KEY_2), Scheduled)
    store.now_s = 90.0
    assert code(store.acquire(FRONTEND, "r")) == "quarantined"
    store.now_s = 90.5
    assert isinstance(store.acquire(FRONTEND, "r"), Scheduled)


def test_job_that_takes_each_worker_longer_than_crashes_are_known_ends() -> None:
    """Each worker is killed at the job's timeout: a minute by default, or more."""
    store = Store()
    store.acquire(FRONTEND, "r")
    wait = store.wait(FRONTEND, "r")
    for worker in (WORKER, SECOND):
        assert store.answer(FRONTEND, wait) is None
        store.take(worker)
        store.now_s += 300.0
        store.die(worker)
    assert code(store.outcome(FRONTEND, wait)) == "worker_died"
    assert code(store.acquire(FRONTEND, "r")) == "quarantined"


@pytest.mark.parametrize("event", ["made", "time"])
def test_a_crashes_is_not_remembered_for_ever(event: str) -> None:
    store = Store()
    store.acquire(FRONTEND, "r")
    store.take(WORKER)
    store.die(WORKER)
    if event == "made":
        store.finish(SECOND, store.take(SECOND))
        store.release(FRONTEND, "r")
        store.call(FRONTEND, requests.Delete, [KEY])
        store.acquire(FRONTEND, "r")
    if event == "time":
        store.release(FRONTEND, "r")
        store.acquire(FRONTEND, "r")
    store.now_s = 61.0 if event == "time" else 1.0
    store.take(SECOND)
    wait = store.wait(FRONTEND, "r")
    store.die(SECOND)
    assert store.answer(FRONTEND, wait) is None
    assert store.state.statistics().num_jobs_queued == 1


def test_a_lost_worker_keeps_its_job_until_it_is_dead() -> None:
    """The process may still write: its block is not reused before its pidfd reports the death."""
    store = Store()
    store.acquire(FRONTEND, "r1")
    order = store.take(WORKER)
    store.disconnect(WORKER)
    waiting = store.send(SECOND, requests.Take)
    assert store.answer(SECOND, waiting) is None
    assert isinstance(store.acquire(FRONTEND, "r2"), InFlight)
    store.die(WORKER)
    assert store.result(SECOND, waiting, Order).target == order.target


def test_a_lost_worker_gets_no_more_jobs() -> None:
    store = Store()
    store.send(WORKER, requests.Take)
    store.disconnect(WORKER)
    assert store.state.statistics().num_workers == 0
    store.acquire(FRONTEND, "r1")
    assert store.state.statistics().num_jobs_queued == 1


def test_a_job_whose_maker_died_is_dropped_if_nobody_awaits_it() -> None:
    store = Store()
    store.acquire(FRONTEND, "r1")
    store.take(WORKER)
    store.die(FRONTEND)
    assert store.state.statistics().num_jobs_running == 1
    store.die(WORKER)
    statistics = store.state.statistics()
    assert (statistics.num_jobs_queued, statistics.num_jobs_running) == (0, 0)
    assert statistics.used_nbytes == 0


def test_a_job_that_nobody_awaits_is_dropped_if_nobody_works_on_it() -> None:
    store = Store()
    store.acquire(FRONTEND, "r1")
    store.acquire(OTHER, "r2")
    store.die(FRONTEND)
    assert store.state.statistics().num_jobs_queued == 1
    store.release(OTHER, "r2")
    statistics = store.state.statistics()
    assert (statistics.num_jobs_queued, statistics.num_objects) == (0, 0)


def test_a_job_under_way_is_finished_though_nobody_awaits_it() -> None:
    store = Store()
    store.acquire(FRONTEND, "r1")
    order = store.take(WORKER)
    store.release(FRONTEND, "r1")
    store.finish(WORKER, order)
    assert isinstance(store.acquire(OTHER, "r2"), Hit)


def test_a_job_keeps_its_inputs_though_they_are_deleted() -> None:
    """The job keeps them while it is queued, while it runs, and when it moves to another worker."""
    store = Store()
    (raw,) = store.claim(FRONTEND, "r", KEY_2)
    store.seal(FRONTEND, "r", raw.handle)
    item = Queue(KEY, FEATURES, 1000, [raw.handle], b"how")
    store.call(FRONTEND, requests.Acquire, "r", [item])
    store.call(FRONTEND, requests.Release, "r", [raw.handle])
    assert store.call(OTHER, requests.Delete, [KEY_2]) == [True]
    for worker in (WORKER, SECOND):
        order = store.take(worker)
        assert order.inputs == [raw.handle]
        if worker == WORKER:
            store.die(worker)
    assert store.state.statistics().num_objects == 2
    store.finish(SECOND, order)
    assert store.state.statistics().num_objects == 1


@pytest.mark.parametrize("reserved", [0, 1024])
def test_space_for_a_job_is_not_made_by_evicting_its_input(reserved: int) -> None:
    """The input is the only evictable object: of the target's kind, and pinned by no request."""
    store = Store(4096, shares={FEATURES: 1.0})
    (source,) = store.claim(FRONTEND, "source", KEY_2)
    store.seal(FRONTEND, "source", source.handle)
    (rest,) = store.create(OTHER, "rest", 4096 - 1024 - reserved, kind=FEATURES)
    store.release(FRONTEND, "source")
    if reserved:
        store.reserve(FRONTEND, "r", reserved, kind=FEATURES)
    item = Queue(KEY, FEATURES, 1000, [source.handle], b"how")
    asked = store.send(FRONTEND, requests.Acquire, "r", [item])
    (outcome,) = store.outcomes(FRONTEND, asked)
    if not reserved:
        assert code(outcome) == "store_full"
        assert store.state.objects.find(ContentKey(KEY_2)) is not None
        store.call(OTHER, requests.Abort, "rest", [rest])  # then there is space beside the input
        (outcome,) = store.call(FRONTEND, requests.Acquire, "r", [item], returns=list[Outcome])
    assert isinstance(outcome, Scheduled)
    order = store.take(WORKER)
    assert order.inputs == [source.handle]
    input_end = source.handle.offset + 1024
    assert not source.handle.offset < order.target.offset + 1024 <= input_end
    store.finish(WORKER, order)


def test_a_job_whose_input_finds_no_space_leaves_the_reservation_as_it_was() -> None:
    """The reservation is for the target alone: the input is not charged to it."""
    store = Store(4096, shares={FEATURES: 1.0})
    (source,) = store.claim(FRONTEND, "source", KEY_2)
    store.seal(FRONTEND, "source", source.handle)
    store.create(OTHER, "rest", 2048, kind=FEATURES)
    store.reserve(FRONTEND, "r", 1024, kind=FEATURES)
    store.release(FRONTEND, "source")
    assert store.answer(OTHER, store.reserve(OTHER, "next", 2048, kind=FEATURES)) is None
    item = Queue(KEY, FEATURES, 1000, [source.handle], b"how")
    (outcome,) = store.outcomes(FRONTEND, store.send(FRONTEND, requests.Acquire, "r", [item]))
    assert code(outcome) == "store_full"  # the queued reservation comes before the pin of the input
    assert store.state.objects.budget.reservation_of((FRONTEND, "r"), FEATURES) == 1024


def test_workers_wait_for_jobs_in_turn() -> None:
    store = Store()
    takes = [(worker, store.send(worker, requests.Take)) for worker in (WORKER, SECOND)]
    store.acquire(FRONTEND, "r", KEY)
    assert [store.answer(worker, seq) is not None for worker, seq in takes] == [True, False]
    store.acquire(FRONTEND, "r", KEY_2)
    assert all(store.answer(worker, seq) is not None for worker, seq in takes)


def test_jobs_are_taken_in_turn() -> None:
    store = Store()
    keys = [bytes([n]) * 32 for n in range(5)]
    for key in keys:
        store.acquire(FRONTEND, "r", key)
    targets = [store.take(WORKER).target for _ in keys]
    found = [store.state.objects.resolve(target).key for target in targets]
    assert found == keys
    assert store.state.statistics().num_jobs_running == 5


def test_who_works_for_too_long_is_found() -> None:
    store = Store()
    store.acquire(FRONTEND, "r", KEY)
    store.acquire(FRONTEND, "r", KEY_2)
    store.take(WORKER)
    store.now_s = 5.0
    store.take(SECOND)
    jobs = store.state.flights.jobs
    assert jobs.overdue(now_s=10.0, timeout_s=10.0) == []
    assert jobs.overdue(now_s=10.1, timeout_s=10.0) == [WORKER]
    assert jobs.overdue(now_s=15.1, timeout_s=10.0) == [WORKER, SECOND]


def test_only_the_worker_that_took_a_job_finishes_it_and_once() -> None:
    store = Store()
    store.acquire(FRONTEND, "r")
    order = store.take(WORKER)
    assert store.refusal(SECOND, requests.Finish, order.job, 900, None, []) == "not_permitted"
    assert store.refusal(WORKER, requests.Finish, order.job, 1001, None, []) == "not_permitted"
    store.finish(WORKER, order)
    assert store.refusal(WORKER, requests.Finish, order.job, 900, None, []) == "not_permitted"


def test_a_hit_is_pinned_before_room_is_made_for_a_miss() -> None:
    """The hit is pinned first, in whichever order the call names the two."""
    store = Store(capacity_nbytes=2048)
    (made,) = store.claim(FRONTEND, "r", KEY, nbytes=1024)
    store.seal(FRONTEND, "r", made.handle)
    store.release(FRONTEND, "r")
    missing, hit = store.claim(FRONTEND, "r", KEY_2, KEY, nbytes=1024)
    assert (code(missing), hit.handle) == ("store_full", made.handle)


def test_a_question_makes_nothing() -> None:
    store = Store()
    item = Join(KEY)
    (outcome,) = store.call(FRONTEND, requests.Acquire, "r", [item], returns=list[Outcome])
    assert isinstance(outcome, Absent)
    assert store.state.statistics().num_objects == 0
    store.acquire(OTHER, "r")
    (outcome,) = store.call(FRONTEND, requests.Acquire, "r", [item], returns=list[Outcome])
    assert isinstance(outcome, InFlight)


def test_a_hit_needs_no_room() -> None:
    """A hit is found in an arena that has no space for the raw media."""
    store = Store(capacity_nbytes=2048)
    store.acquire(FRONTEND, "r1")
    store.finish(WORKER, store.take(WORKER))
    store.release(FRONTEND, "r1")
    store.create(OTHER, "rest", 1024)
    item = Join(KEY)
    (outcome,) = store.call(FRONTEND, requests.Acquire, "r2", [item], returns=list[Outcome])
    assert isinstance(outcome, Hit)


def test_no_room_fails_the_item_and_leaves_nothing() -> None:
    store = Store(capacity_nbytes=2048)
    store.create(OTHER, "rest", 512, kind=FEATURES)
    assert code(store.acquire(FRONTEND, "r1")) == "store_full"
    store.release(OTHER, "rest")
    assert store.state.statistics().num_objects == 0


def test_a_stale_input_fails_the_item_and_gives_its_reservation_back() -> None:
    store = Store()
    store.reserve(FRONTEND, "r", 1000, kind=FEATURES)
    item = Queue(KEY, FEATURES, 1000, [Handle(1, 0, 64, 99)], b"how")
    (outcome,) = store.call(FRONTEND, requests.Acquire, "r", [item], returns=list[Outcome])
    assert code(outcome) == "stale_handle"
    assert store.state.objects.budget.reservation_of((FRONTEND, "r"), FEATURES) == 1024


def test_the_reservation_of_a_request_pays_for_its_job() -> None:
    """The reservation pays for the target of the job, but not for its inputs."""
    store = Store(capacity_nbytes=4096)
    (source,) = store.claim(OTHER, "o", KEY_2, nbytes=512)
    store.seal(OTHER, "o", source.handle)
    store.release(OTHER, "o")
    store.reserve(FRONTEND, "r", 1024, kind=FEATURES)
    store.reserve(OTHER, "o", 512, kind=FEATURES)
    item = Queue(KEY, FEATURES, 1024, [source.handle], b"")
    (outcome,) = store.call(FRONTEND, requests.Acquire, "r", [item], returns=list[Outcome])
    assert isinstance(outcome, Scheduled)
    assert store.state.statistics().reserved_nbytes == 512
    assert store.state.statistics().held_nbytes == 1536
