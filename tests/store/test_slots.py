"""Places in slots: in order of arrival, never more than the limit, and each given back once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from afferent.errors import NotPermitted, SlotTaken
from afferent.store import messages as m
from afferent.store.ledger import Lease
from afferent.store.slots import MAX_QUEUED, Entry, Slots, Work
from tests.examples import examples
from tests.store.pure_store import FRONTEND, KEY, KEY_2, OTHER, SECOND, WORKER, Store

GATE, TENANT = "preprocess", "tenant/anna"


def entry(number: int, *, client: int = 1, slot: str = GATE, limit: int = 2) -> Entry:
    return Entry((client, number), (client, f"r{number}"), slot, limit)


def enter(slots: Slots, *entries: Entry, queue: bool = True) -> list[bool]:
    found = [slots.enter(one, queue=queue) for one in entries]
    slots.validate()
    return found


def settle(slots: Slots, running: set[Work] | None = None) -> list[int]:
    """The numbers of those who have got a place now."""
    entered = slots.settle((running or set()).__contains__)
    slots.validate()
    return [one.ticket[1] for one in entered]


def test_as_many_as_the_limit_and_the_rest_in_order() -> None:
    slots = Slots()
    assert enter(slots, *map(entry, range(5))) == [True, True, False, False, False]
    assert settle(slots) == []
    assert slots.leave((1, "r1"), GATE) is None
    assert settle(slots) == [2]
    assert slots.leave((1, "r3"), GATE) == (1, 3), "the call of one that was still waiting"
    assert slots.leave((1, "r0"), GATE) is None
    assert settle(slots) == [4]
    assert slots.leave((1, "r0"), GATE) is None, "it has left"
    assert slots.statistics() == {GATE: m.SlotStatistics(2, 0)}


def test_who_does_not_queue_is_refused() -> None:
    slots = Slots()
    enter(slots, entry(0, slot=TENANT, limit=1), queue=False)
    with pytest.raises(SlotTaken):
        enter(slots, entry(1, slot=TENANT, limit=1), queue=False)
    enter(slots, entry(2, slot="tenant/bob", limit=1), queue=False)
    assert slots.statistics() == {"tenant": m.SlotStatistics(2, 0)}
    enter(slots, entry(3, slot=TENANT, limit=2), entry(4, slot=TENANT, limit=2))
    slots.leave((1, "r0"), TENANT)
    with pytest.raises(SlotTaken):
        enter(slots, entry(5, slot=TENANT, limit=2), queue=False)
    assert settle(slots) == [4]


def test_a_request_enters_once_and_the_queue_is_bounded() -> None:
    slots = Slots()
    enter(slots, entry(0, limit=1), entry(1, limit=1))
    for again in (0, 1):
        with pytest.raises(NotPermitted):
            slots.enter(entry(again, limit=1), queue=True)
    for number in range(2, MAX_QUEUED + 1):
        slots.enter(entry(number, limit=1), queue=True)
    with pytest.raises(SlotTaken, match="too many"):
        slots.enter(entry(MAX_QUEUED + 1, limit=1), queue=True)
    for number in range(MAX_QUEUED + 1):
        slots.retire((1, f"r{number}"), ())
    assert settle(slots) == []
    assert slots.statistics() == {}


def test_a_place_outlasts_its_request_while_its_work_runs() -> None:
    slots = Slots()
    enter(slots, entry(0, limit=1), entry(0, slot=TENANT), entry(1, limit=1), entry(2, limit=1))
    work = {(7, 3), (8, 4)}
    assert slots.retire((1, "r0"), work) == []
    assert (1, "r0") not in slots
    assert settle(slots, work) == []
    assert settle(slots, {(8, 4)}) == []
    assert slots.statistics()["tenant"].num_taken == 1
    assert settle(slots) == [1]
    assert "tenant" not in slots.statistics()
    assert slots.retire((1, "r2"), work) == [(1, 2)], "who has no place leaves none behind"
    assert slots.retire((1, "r1"), ()) == []
    assert slots.statistics() == {}


class Model(RuleBasedStateMachine):
    """Against a list of who is inside, and one of who waits."""

    LIMIT = 2

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots()
        self.next = 0
        self.inside: list[Lease] = []
        self.queue: list[Lease] = []
        self.lingering: list[set[Work]] = []
        self.running: set[Work] = set()

    def settle(self) -> None:
        expected = []
        self.lingering = [left for work in self.lingering if (left := work & self.running)]
        while self.queue and len(self.inside) + len(self.lingering) < self.LIMIT:
            expected.append(self.queue.pop(0))
            self.inside.append(expected[-1])
        entered = self.slots.settle(self.running.__contains__)
        assert [one.lease for one in entered] == expected

    @rule(client=st.integers(1, 3), queue=st.booleans())
    def enter(self, client: int, queue: bool) -> None:
        one = entry(self.next, client=client, limit=self.LIMIT)
        self.next += 1
        is_free = not self.queue and len(self.inside) + len(self.lingering) < self.LIMIT
        if is_free or queue:
            assert self.slots.enter(one, queue=queue) == is_free
            (self.inside if is_free else self.queue).append(one.lease)
        else:
            with pytest.raises(SlotTaken):
                self.slots.enter(one, queue=queue)
        self.settle()

    def anyone(self, which: int) -> Lease:
        leases = [*self.inside, *self.queue]
        return leases[which % len(leases)]

    @precondition(lambda self: self.inside or self.queue)
    @rule(which=st.integers(0, 9))
    def leave(self, which: int) -> None:
        lease = self.anyone(which)
        assert (self.slots.leave(lease, GATE) is not None) == (lease in self.queue)
        (self.inside if lease in self.inside else self.queue).remove(lease)
        self.settle()

    @precondition(lambda self: self.inside or self.queue)
    @rule(which=st.integers(0, 9), work=st.sets(st.tuples(st.integers(0, 5), st.integers(8, 9))))
    def retire(self, which: int, work: set[Work]) -> None:
        lease = self.anyone(which)
        self.running |= work
        self.slots.retire(lease, work)
        if lease in self.inside:
            self.inside.remove(lease)
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
        self.slots.validate()
        taken, queued = len(self.inside) + len(self.lingering), len(self.queue)
        expected = {GATE: m.SlotStatistics(taken, queued)} if taken or queued else {}
        assert self.slots.statistics() == expected
        assert taken <= self.LIMIT


TestModel = Model.TestCase
TestModel.settings = examples(40, storm=400, stateful_step_count=40)


# With jobs


def take_place(store: Store, client: int, request: str, limit: int = 1) -> int:
    return store.send(client, m.Enter, request, GATE, limit, True)


def is_waiting(store: Store, client: int, seq: int) -> bool:
    return store.answer(client, seq) is None


def taken(store: Store) -> Any:
    return store.state.statistics().slots.get(GATE)


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
    assert taken(store) == m.SlotStatistics(1, 1)
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
    assert store.acquire(SECOND, "s", KEY).state == "busy"
    order = store.take(WORKER)
    store.release(FRONTEND, "r")
    assert taken(store).num_taken == 2, "the job is the other's now"
    store.release(FRONTEND, "q")
    assert taken(store).num_taken == 1, "nobody has begun it"
    store.release(SECOND, "s")
    assert taken(store).num_taken == 1
    store.finish(WORKER, order)
    assert taken(store) is None


def test_two_requests_of_a_process_that_dies_for_one_job() -> None:
    """One place stands for it, not two."""
    store = Store()
    for request in ("r", "q"):
        store.result(FRONTEND, take_place(store, FRONTEND, request, 2))
        store.acquire(FRONTEND, request)
    order = store.take(WORKER)
    store.die(FRONTEND)
    assert taken(store) == m.SlotStatistics(1, 0)
    store.finish(WORKER, order)
    assert taken(store) is None


def test_requests_that_come_and_go_while_one_job_runs_take_one_place() -> None:
    """A client that gives up and tries again must not close the gate for all."""
    store = Store()
    for request in ("r", "q", "p"):
        store.result(FRONTEND, take_place(store, FRONTEND, request, 2))
        store.acquire(FRONTEND, request)
        if request == "r":
            order = store.take(WORKER)
        store.release(FRONTEND, request)
        assert taken(store) == m.SlotStatistics(1, 0)
    store.finish(WORKER, order)
    assert taken(store) is None


def test_who_leaves_or_is_released_stops_waiting() -> None:
    store = Store()
    store.result(FRONTEND, take_place(store, FRONTEND, "r"))
    left, released = take_place(store, OTHER, "s"), take_place(store, SECOND, "t")
    store.call(OTHER, m.Leave, "s", GATE)
    assert store.failure(OTHER, left) == "store_error"
    store.release(SECOND, "t")
    assert store.failure(SECOND, released) == "store_error"
    last = take_place(store, OTHER, "u")
    store.call(FRONTEND, m.Leave, "r", GATE)
    store.result(OTHER, last)
