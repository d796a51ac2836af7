"""Permits are granted in order of arrival, up to the limit, and each is released once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from afferent.admission.permits import MAX_QUEUED, PermitRequest, PermitStatistics, Semaphores, Work
from afferent.admission.shares import Share
from afferent.errors import NoPermitLeft, NotPermitted
from afferent.store.protocol import requests
from afferent.store.protocol.results import InFlight
from afferent.types import CreateItem, Lease, ObjectKind
from tests.examples import examples
from tests.store.pure_store import FRONTEND, KEY, KEY_2, OTHER, SECOND, WORKER, Store

GATE, TENANT = "preprocess", "tenant/anna"


def entry(number: int, *, client: int = 1, semaphore: str = GATE, limit: int = 2) -> PermitRequest:
    return PermitRequest((client, number), (client, f"r{number}"), semaphore, limit)


def enter(semaphores: Semaphores, *entries: PermitRequest, queue: bool = True) -> list[bool]:
    found = [semaphores.acquire(one, queue=queue) for one in entries]
    semaphores.validate()
    return found


def settle(semaphores: Semaphores, running: set[Work] | None = None) -> list[int]:
    """Return the numbers of the requests that have been granted a permit now."""
    entered = semaphores.settle((running or set()).__contains__)
    semaphores.validate()
    return [one.ticket[1] for one in entered]


def test_as_many_as_the_limit_and_the_rest_in_order() -> None:
    semaphores = Semaphores()
    assert enter(semaphores, *map(entry, range(5))) == [True, True, False, False, False]
    assert settle(semaphores) == []
    assert semaphores.release((1, "r1"), GATE) is None
    assert settle(semaphores) == [2]
    assert semaphores.release((1, "r3"), GATE) == (1, 3), "the call of one that was still waiting"
    assert semaphores.release((1, "r0"), GATE) is None
    assert settle(semaphores) == [4]
    assert semaphores.release((1, "r0"), GATE) is None, "it has left"
    assert semaphores.statistics() == {GATE: PermitStatistics(2, 0)}


def test_who_is_next_at_once_and_wants_what_is_free_does_not_wait() -> None:
    semaphores = Semaphores()
    large = replace(entry(1), number=2)
    small = replace(entry(2), number=1)
    assert enter(semaphores, entry(0), large, small) == [True, False, False]
    assert settle(semaphores) == [2]
    assert semaphores.statistics() == {GATE: PermitStatistics(2, 1)}


def test_an_engine_gives_back_the_permits_of_a_request_that_is_there() -> None:
    """The engine is another client and names only the request; calls for permits go on waiting."""
    store = Store()
    store.call(FRONTEND, requests.Create, "r", [CreateItem(ObjectKind.RAW, 100)])
    store.call(FRONTEND, requests.AcquirePermit, "r", GATE, 1, True)
    store.call(FRONTEND, requests.AcquirePermit, "r", TENANT, 1, True)
    waits = store.send(FRONTEND, requests.AcquirePermit, "s", GATE, 1, True)
    assert store.call(OTHER, requests.Accept, "s", (GATE,)) is False, "it holds nothing yet"
    assert store.call(OTHER, requests.Accept, "r", ()) is True
    assert store.state.semaphores.statistics()[GATE] == PermitStatistics(1, 1)
    assert store.call(OTHER, requests.Accept, "r", (GATE, "forwarded")) is True
    assert store.result(FRONTEND, waits) == 0, "none is left"
    held = store.state.semaphores.statistics()
    assert (held[GATE], held["tenant"]) == (PermitStatistics(1, 0), PermitStatistics(1, 0))
    store.call(OTHER, requests.Accept, "r", (GATE,))  # a second release changes nothing
    assert store.state.semaphores.statistics()[GATE] == PermitStatistics(1, 0)
    store.call(FRONTEND, requests.Release, "r", None)
    assert store.call(OTHER, requests.Accept, "r", (GATE,)) is False, "it has ended"


def test_to_give_up_a_call_that_was_refused_gives_nothing_back() -> None:
    store = Store()
    store.call(FRONTEND, requests.AcquirePermit, "r", GATE, 1, True)
    again = store.send(FRONTEND, requests.AcquirePermit, "r", GATE, 1, True)
    assert store.failure(FRONTEND, again) == "not_permitted"
    store.call(FRONTEND, requests.ReleasePermit, "r", GATE, again)
    assert store.state.semaphores.statistics() == {GATE: PermitStatistics(1, 0)}
    store.call(FRONTEND, requests.ReleasePermit, "r", GATE, again - 1)
    assert store.state.semaphores.statistics() == {}


def test_who_does_not_queue_is_refused() -> None:
    semaphores = Semaphores()
    enter(semaphores, entry(0, semaphore=TENANT, limit=1), queue=False)
    with pytest.raises(NoPermitLeft):
        enter(semaphores, entry(1, semaphore=TENANT, limit=1), queue=False)
    enter(semaphores, entry(2, semaphore="tenant/bob", limit=1), queue=False)
    assert semaphores.statistics() == {"tenant": PermitStatistics(2, 0)}
    enter(semaphores, entry(3, semaphore=TENANT, limit=2), entry(4, semaphore=TENANT, limit=2))
    semaphores.release((1, "r0"), TENANT)
    with pytest.raises(NoPermitLeft):
        enter(semaphores, entry(5, semaphore=TENANT, limit=2), queue=False)
    assert settle(semaphores) == [4]


def test_a_request_enters_once_and_the_queue_is_bounded() -> None:
    semaphores = Semaphores()
    enter(semaphores, entry(0, limit=1), entry(1, limit=1))
    for again in (0, 1):
        with pytest.raises(NotPermitted):
            semaphores.acquire(entry(again, limit=1), queue=True)
    most = MAX_QUEUED // 2
    for number in range(2, most + 1):
        semaphores.acquire(entry(number, limit=1), queue=True)
    with pytest.raises(NoPermitLeft, match="too many"):
        semaphores.acquire(entry(most + 1, limit=1), queue=True)
    other = replace(entry(most + 1, limit=1), share=Share("another"))
    assert not semaphores.acquire(other, queue=True)
    for number in range(most + 2):
        semaphores.retire((1, f"r{number}"), ())
    assert settle(semaphores) == []
    assert semaphores.statistics() == {}


def test_a_place_outlasts_its_request_while_its_work_runs() -> None:
    semaphores = Semaphores()
    enter(
        semaphores,
        entry(0, limit=1),
        entry(0, semaphore=TENANT),
        entry(1, limit=1),
        entry(2, limit=1),
    )
    work = {(7, 3), (8, 4)}
    assert semaphores.retire((1, "r0"), work) == []
    assert (1, "r0") not in semaphores
    assert settle(semaphores, work) == []
    assert settle(semaphores, {(8, 4)}) == []
    assert semaphores.statistics()["tenant"].num_held == 1
    assert settle(semaphores) == [1]
    assert "tenant" not in semaphores.statistics()
    assert semaphores.retire((1, "r2"), work) == [(1, 2)], "who has no permit leaves none behind"
    assert semaphores.retire((1, "r1"), ()) == []
    assert semaphores.statistics() == {}


class Model(RuleBasedStateMachine):
    """Compare semaphores with a list of holders and a queue."""

    LIMIT = 2

    def __init__(self) -> None:
        super().__init__()
        self.semaphores = Semaphores()
        self.next = 0
        self.holders: list[Lease] = []
        self.queue: list[Lease] = []
        self.lingering: list[set[Work]] = []
        self.running: set[Work] = set()

    def settle(self) -> None:
        expected = []
        self.lingering = [left for work in self.lingering if (left := work & self.running)]
        while self.queue and len(self.holders) + len(self.lingering) < self.LIMIT:
            expected.append(self.queue.pop(0))
            self.holders.append(expected[-1])
        entered = self.semaphores.settle(self.running.__contains__)
        assert [one.lease for one in entered] == expected

    @rule(client=st.integers(1, 3), queue=st.booleans())
    def enter(self, client: int, queue: bool) -> None:
        one = entry(self.next, client=client, limit=self.LIMIT)
        self.next += 1
        is_free = not self.queue and len(self.holders) + len(self.lingering) < self.LIMIT
        if is_free or queue:
            assert self.semaphores.acquire(one, queue=queue) == is_free
            (self.holders if is_free else self.queue).append(one.lease)
        else:
            with pytest.raises(NoPermitLeft):
                self.semaphores.acquire(one, queue=queue)
        self.settle()

    def anyone(self, which: int) -> Lease:
        leases = [*self.holders, *self.queue]
        return leases[which % len(leases)]

    @precondition(lambda self: self.holders or self.queue)
    @rule(which=st.integers(0, 9))
    def leave(self, which: int) -> None:
        lease = self.anyone(which)
        assert (self.semaphores.release(lease, GATE) is not None) == (lease in self.queue)
        (self.holders if lease in self.holders else self.queue).remove(lease)
        self.settle()

    @precondition(lambda self: self.holders or self.queue)
    @rule(which=st.integers(0, 9), work=st.sets(st.tuples(st.integers(0, 5), st.integers(8, 9))))
    def retire(self, which: int, work: set[Work]) -> None:
        lease = self.anyone(which)
        self.running |= work
        self.semaphores.retire(lease, work)
        if lease in self.holders:
            self.holders.remove(lease)
            if left := work.difference(*self.lingering):
                self.lingering.append(left)
        else:
            self.queue.remove(lease)
        self.settle()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 9))
    def end(self, which: int) -> None:
        self.running.remove(sorted(self.running)[which % len(self.running)])
        self.settle()

    @invariant()
    def is_valid(self) -> None:
        self.semaphores.validate()
        taken, queued = len(self.holders) + len(self.lingering), len(self.queue)
        expected = {GATE: PermitStatistics(taken, queued)} if taken or queued else {}
        assert self.semaphores.statistics() == expected
        assert taken <= self.LIMIT


TestModel = Model.TestCase
TestModel.settings = examples(40, storm=400, stateful_step_count=40)


# With jobs


def take_place(store: Store, client: int, request: str, limit: int = 1) -> int:
    return store.send(client, requests.AcquirePermit, request, GATE, limit, True)


def is_waiting(store: Store, client: int, seq: int) -> bool:
    return store.answer(client, seq) is None


def taken(store: Store) -> Any:
    return store.state.statistics().permits.get(GATE)


@pytest.mark.parametrize("how", ["release", "disconnect", "die"])
def test_a_place_is_free_when_the_job_in_the_worker_has_ended(how: str) -> None:
    store = Store()
    store.result(FRONTEND, take_place(store, FRONTEND, "r"))
    store.acquire(FRONTEND, "r")
    order = store.take(WORKER)
    waiting = take_place(store, OTHER, "s")
    if how == "release":
        store.release(FRONTEND, "r")
    else:
        getattr(store, how)(FRONTEND)
    assert is_waiting(store, OTHER, waiting)
    assert taken(store) == PermitStatistics(1, 1)
    store.finish(WORKER, order)
    store.result(OTHER, waiting)
    store.release(OTHER, "s")
    assert taken(store) is None


def test_a_place_is_free_when_the_worker_dies() -> None:
    store = Store()
    store.result(FRONTEND, take_place(store, FRONTEND, "r"))
    store.acquire(FRONTEND, "r")
    store.take(WORKER)
    waiting = take_place(store, OTHER, "s")
    store.release(FRONTEND, "r")
    store.disconnect(WORKER)
    assert is_waiting(store, OTHER, waiting), "it may still be at work"
    store.die(WORKER)
    store.result(OTHER, waiting)


def test_a_job_that_was_not_taken_or_that_others_want_holds_no_place() -> None:
    store = Store()
    store.result(FRONTEND, take_place(store, FRONTEND, "r", 3))
    store.acquire(FRONTEND, "r", KEY)
    store.result(FRONTEND, take_place(store, FRONTEND, "q", 3))
    store.acquire(FRONTEND, "q", KEY_2)
    store.result(SECOND, take_place(store, SECOND, "s", 3))
    assert isinstance(store.acquire(SECOND, "s", KEY), InFlight)
    order = store.take(WORKER)
    store.release(FRONTEND, "r")
    assert taken(store).num_held == 2, "the job is the other's now"
    store.release(FRONTEND, "q")
    assert taken(store).num_held == 1, "nobody has begun it"
    store.release(SECOND, "s")
    assert taken(store).num_held == 1
    store.finish(WORKER, order)
    assert taken(store) is None


def test_two_requests_of_a_process_that_dies_for_one_job() -> None:
    """The job occupies one permit, not two."""
    store = Store()
    for request in ("r", "q"):
        store.result(FRONTEND, take_place(store, FRONTEND, request, 2))
        store.acquire(FRONTEND, request)
    order = store.take(WORKER)
    store.die(FRONTEND)
    assert taken(store) == PermitStatistics(1, 0)
    store.finish(WORKER, order)
    assert taken(store) is None


def test_requests_that_come_and_go_while_one_job_runs_take_one_place() -> None:
    """A client that repeatedly gives up and tries again must not use up all permits."""
    store = Store()
    for request in ("r", "q", "p"):
        store.result(FRONTEND, take_place(store, FRONTEND, request, 2))
        store.acquire(FRONTEND, request)
        if request == "r":
            order = store.take(WORKER)
        store.release(FRONTEND, request)
        assert taken(store) == PermitStatistics(1, 0)
    store.finish(WORKER, order)
    assert taken(store) is None


def test_who_leaves_or_is_released_stops_waiting() -> None:
    store = Store()
    store.result(FRONTEND, take_place(store, FRONTEND, "r"))
    left, released = take_place(store, OTHER, "s"), take_place(store, SECOND, "t")
    store.call(OTHER, requests.ReleasePermit, "s", GATE)
    assert store.failure(OTHER, left) == "store_error"
    store.release(SECOND, "t")
    assert store.failure(SECOND, released) == "store_error"
    last = take_place(store, OTHER, "u")
    store.call(FRONTEND, requests.ReleasePermit, "r", GATE)
    store.result(OTHER, last)
