"""Reserved and pinned bytes together never exceed the share."""

from __future__ import annotations

import pytest

from afferent.admission.shares import Share
from afferent.errors import ArenaTooSmall, NotPermitted, StoreFull
from afferent.store.state.budget import MAX_QUEUED, Budget, QueuedReservation
from afferent.types import Lease, ObjectKind

RAW, FEATURES = ObjectKind.RAW, ObjectKind.FEATURES
ONE: Lease = (1, "a")
TWO: Lease = (2, "b")
JOB: Lease = (0, 1)


def budget() -> Budget:
    return Budget({RAW: 1000, FEATURES: 1000})


def queue(book: Budget, number: int, lease: Lease, **amounts: int) -> QueuedReservation:
    kinds = {ObjectKind(kind): nbytes for kind, nbytes in amounts.items()}
    reservation = QueuedReservation((lease[0], number), lease, kinds)
    book.enqueue(reservation)
    book.validate()
    return reservation


def test_a_reservation_is_added_to_what_there_is() -> None:
    book = budget()
    book.reserve(ONE, {RAW: 300, FEATURES: 100})
    book.reserve(ONE, {RAW: 200})
    assert book.reservation_of(ONE, RAW) == book.reserved_nbytes(RAW) == 500
    assert book.unpromised_nbytes(RAW) == 500
    assert book.reserved_by_client() == {1: 600}
    book.validate()


def test_a_reservation_is_all_or_nothing() -> None:
    book = budget()
    book.reserve(ONE, {RAW: 600})
    with pytest.raises(StoreFull):
        book.reserve(TWO, {FEATURES: 10, RAW: 401})
    assert book.reserved_nbytes(FEATURES) == 0
    book.reserve(TWO, {FEATURES: 10, RAW: 400})


def test_what_nobody_could_ever_have_is_another_error() -> None:
    book = budget()
    with pytest.raises(ArenaTooSmall, match="1001 bytes of raw"):
        book.reserve(ONE, {RAW: 1001})
    book.reserve(ONE, {RAW: 600})
    with pytest.raises(ArenaTooSmall):
        book.reserve(ONE, {RAW: 401})
    with pytest.raises(ArenaTooSmall):
        book.hold(TWO, RAW, 1001)


def test_holding_spends_the_reservation_first() -> None:
    book = budget()
    book.reserve(ONE, {RAW: 300})
    assert book.hold(ONE, RAW, 400) == 300
    assert (book.held_nbytes(RAW), book.reserved_nbytes(RAW)) == (400, 0)
    book.unhold(ONE, RAW, 400, spent=300)
    assert (book.held_nbytes(RAW), book.reservation_of(ONE, RAW)) == (0, 300)
    book.validate()


def test_a_reservation_can_not_be_taken_by_others() -> None:
    book = budget()
    book.reserve(ONE, {RAW: 800})
    with pytest.raises(StoreFull):
        book.hold(TWO, RAW, 201)
    assert book.hold(TWO, RAW, 200) == 0
    assert book.hold(ONE, RAW, 800) == 800
    book.release(RAW, 1000)
    book.validate()


def test_those_who_queue_go_first() -> None:
    book = budget()
    book.hold(ONE, RAW, 500)
    waiting = queue(book, 1, ONE, raw=600)
    assert book.reserve_queued() == []
    for refused in (lambda: book.reserve(TWO, {RAW: 1}), lambda: book.hold(TWO, RAW, 1)):
        with pytest.raises(StoreFull):
            refused()
    book.reserve(TWO, {FEATURES: 1})
    assert book.hold(TWO, FEATURES, 2) == 1
    book.release(RAW, 100)
    assert book.reserve_queued() == [waiting]
    assert book.hold(ONE, RAW, 600) == 600
    assert not book.is_awaited(RAW)
    book.validate()


def test_a_reservation_is_spent_though_others_queue() -> None:
    book = budget()
    book.reserve(ONE, {RAW: 500})
    queue(book, 1, TWO, raw=600)
    assert book.hold(ONE, RAW, 500) == 500


def test_each_kind_is_granted_in_order_of_arrival() -> None:
    book = budget()
    book.hold(ONE, RAW, 900)
    both = queue(book, 1, ONE, raw=200, features=200)
    small = queue(book, 2, TWO, raw=50)
    features = queue(book, 3, TWO, features=50)
    assert book.reserve_queued() == []  # `both` was queued first; `small` waits for the same kind
    assert book.num_queued == 3
    book.release(RAW, 100)
    assert book.reserve_queued() == [both, features]
    book.release(RAW, 50)
    assert book.reserve_queued() == [small]
    assert book.num_queued == 0
    book.validate()


def test_other_kinds_pass_who_is_blocked() -> None:
    book = budget()
    book.hold(ONE, RAW, 900)
    queue(book, 1, ONE, raw=200)
    features = queue(book, 2, TWO, features=50)
    assert book.reserve_queued() == [features]
    assert book.num_queued == 1


@pytest.mark.parametrize("gone", ["cancel", "drop", "give_back", "let_go"])
def test_whatever_makes_room_lets_the_queue_go_on(gone: str) -> None:
    book = budget()
    book.reserve(ONE, {RAW: 500})
    book.hold(ONE, FEATURES, 600)
    book.hold(TWO, RAW, 100)
    first = queue(book, 1, ONE, raw=500, features=400)
    second = queue(book, 2, TWO, raw=400)
    assert book.reserve_queued() == []
    match gone:
        case "cancel":
            assert book.cancel(first.ticket)
            assert not book.cancel(first.ticket)
            assert book.reserve_queued() == [second]
        case "drop":
            assert book.drop(ONE) == [first.ticket]
            assert book.drop(ONE) == []
            assert book.reservation_of(ONE, RAW) == 0
            assert book.reserve_queued() == [second]
        case "give_back":
            book.give_back(ONE, {RAW: 100, FEATURES: 10})
            assert book.reservation_of(ONE, RAW) == 400
            assert book.reserve_queued() == [first]
        case "let_go":
            book.release(RAW, 100)
            assert book.reserve_queued() == [first]
    book.validate()


def test_giving_back_more_than_is_left() -> None:
    book = budget()
    book.reserve(ONE, {RAW: 300})
    book.hold(ONE, RAW, 200)
    book.give_back(ONE, {RAW: 300, FEATURES: 100})
    book.give_back(TWO, {RAW: 300})
    assert book.reserved_nbytes(RAW) == 0
    assert book.leases_of(1) == []
    book.validate()


def test_a_reservation_is_handed_over() -> None:
    book = budget()
    book.reserve(ONE, {RAW: 300})
    assert book.hand_over(ONE, JOB, RAW, 200) == 200
    assert book.hand_over(ONE, JOB, RAW, 200) == 100
    assert book.hand_over(ONE, JOB, RAW, 200) == 0
    assert (book.reservation_of(ONE, RAW), book.reservation_of(JOB, RAW)) == (0, 300)
    book.validate()


def test_the_leases_of_a_client_are_those_with_reservations_and_those_that_queue() -> None:
    book = budget()
    book.reserve(ONE, {RAW: 300})
    queue(book, 1, (1, "c"), raw=900)
    queue(book, 2, ONE, raw=900)
    queue(book, 3, TWO, raw=900)
    assert book.leases_of(1) == [ONE, (1, "c")]


def test_the_queue_is_bounded_and_a_ticket_is_used_once() -> None:
    book = budget()
    book.hold(ONE, RAW, 1000)
    queue(book, 0, ONE, raw=1)
    with pytest.raises(NotPermitted):
        queue(book, 0, ONE, raw=1)
    for number in range(1, MAX_QUEUED // 2):
        book.enqueue(QueuedReservation((1, number), ONE, {RAW: 1}))
    with pytest.raises(StoreFull, match="too many"):
        queue(book, MAX_QUEUED, ONE, raw=1)
    book.enqueue(QueuedReservation((1, MAX_QUEUED), TWO, {RAW: 1}, Share("another")))
    assert len(book.drop(ONE)) == MAX_QUEUED // 2
    book.validate()


def test_a_reservation_of_nothing_leaves_nothing() -> None:
    book = budget()
    nothing = queue(book, 1, ONE)
    assert book.reserve_queued() == [nothing]
    book.reserve(TWO, {})
    assert book.leases_of(1) == book.leases_of(2) == []
    book.validate()
