"""`SingleFlight` alone: events go in, and answers and orders are taken out."""

from __future__ import annotations

from afferent.store.protocol.items import Claim, Find, Join, Queue
from afferent.store.protocol.results import Made, Order, Scheduled
from afferent.store.state.object_table import ObjectTable
from afferent.store.state.single_flight import SingleFlight
from afferent.store.state.waiters import Answer
from afferent.types import ContentKey, ObjectKind
from tests.store.outcomes import states

KEY = ContentKey(b"k" * 32)
FEATURES = ObjectKind.FEATURES
ONE, TWO, WORKER = (1, "r"), (2, "r"), 3


def flight_of(nbytes: int = 4096) -> SingleFlight:
    return SingleFlight(ObjectTable(nbytes, segment=1, shares={FEATURES: 1.0}))


def test_who_waits_is_answered_once() -> None:
    flight = flight_of()
    (mine,) = flight.acquire(ONE, [Claim(KEY, FEATURES, 100)], now_s=0.0)
    (theirs,) = flight.acquire(TWO, [Claim(KEY, FEATURES, 100)], now_s=0.0)
    assert states([mine, theirs]) == ["owner", "in_flight"]
    flight.waiters.wait(7, TWO, [KEY])
    assert flight.take_answers() == []
    item = flight.objects.find(KEY)
    assert item is not None
    flight.objects.seal(ONE, item, used_nbytes=100)
    flight.sealed(item, lease=ONE, made_us=0)
    assert flight.take_answers() == [Answer(2, 7, [Made(item.handle)])]
    assert flight.take_answers() == []


def test_an_idle_worker_is_given_a_job() -> None:
    flight = flight_of()
    flight.worker_idle(WORKER, 5, now_s=0.0)
    (outcome,) = flight.acquire(ONE, [Queue(KEY, FEATURES, 100, [], b"how")], now_s=0.0)
    assert isinstance(outcome, Scheduled)
    item = flight.objects.find(KEY)
    assert item is not None
    (job,) = flight.jobs
    order = Order(job.id, item.handle, [], b"how")
    assert flight.take_answers() == [Answer(WORKER, 5, order)]


def test_what_an_item_says_of_its_being_missing() -> None:
    flight = flight_of()
    found = flight.acquire(ONE, [Find(KEY), Join(KEY)], now_s=0.0)
    assert states(found) == ["absent", "absent"]
    flight.acquire(TWO, [Claim(KEY, FEATURES, 100)], now_s=0.0)
    found = flight.acquire(ONE, [Find(KEY), Join(KEY)], now_s=0.0)
    assert states(found) == ["absent", "in_flight"]


def test_room_has_changed_only_when_something_was_freed() -> None:
    flight = flight_of()
    flight.acquire(ONE, [Claim(KEY, FEATURES, 100)], now_s=0.0)
    assert not flight.objects.take_freed()
    item = flight.objects.find(KEY)
    assert item is not None
    flight.objects.abort(ONE, item)
    assert flight.objects.take_orphaned() == [KEY]
    assert flight.objects.take_freed()
    assert not flight.objects.take_freed()
