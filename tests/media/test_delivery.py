"""The bytes of a download, within the limit of its item and of its request."""

from __future__ import annotations

import asyncio

import pytest

from afferent.errors import MediaTooLarge
from afferent.media.fetch.delivery import Budget, Delivery


def test_an_item_may_have_exactly_its_limit() -> None:
    got = bytearray()
    budget = Budget(1000)
    with Delivery(got.extend, max_nbytes=100, budget=budget) as delivery:
        delivery.announce(100)
        delivery.write(b"x" * 60)
        delivery.write(b"y" * 40)
        with pytest.raises(MediaTooLarge, match="more than 100 bytes"):
            delivery.write(b"z")
    assert got == b"x" * 60 + b"y" * 40
    assert budget.taken_nbytes == 100


def test_a_request_may_have_exactly_its_limit() -> None:
    budget = Budget(100)
    budget.take(60)
    with pytest.raises(MediaTooLarge, match="in all"):
        budget.take(41)
    assert budget.taken_nbytes == 60
    budget.take(40)
    budget.give_back(100)
    assert budget.taken_nbytes == 0


def test_what_is_announced_is_taken_once_and_at_once() -> None:
    budget = Budget(100)
    with Delivery(lambda _: None, max_nbytes=100, budget=budget) as delivery:
        delivery.announce(70)
        delivery.announce(70)
        delivery.announce(10)
        assert budget.taken_nbytes == 70
        delivery.write(b"x" * 70)
        assert budget.taken_nbytes == 70
        with pytest.raises(MediaTooLarge, match="in all"):
            budget.take(31)


def test_what_did_not_come_is_given_back() -> None:
    budget = Budget(100)
    with Delivery(lambda _: None, max_nbytes=100, budget=budget) as delivery:
        delivery.announce(70)
        delivery.write(b"x" * 20)
    assert budget.taken_nbytes == 20


def test_an_error_gives_everything_back() -> None:
    budget = Budget(100)

    def fail() -> None:
        with Delivery(lambda _: None, max_nbytes=100, budget=budget) as delivery:
            delivery.announce(70)
            delivery.write(b"x" * 20)
            raise ConnectionError

    with pytest.raises(ConnectionError):
        fail()
    assert budget.taken_nbytes == 0


def test_room_is_made_for_what_is_let_in() -> None:
    asked: list[int] = []

    async def make_room(nbytes: int) -> None:
        asked.append(nbytes)

    async def main() -> None:
        budget = Budget(100)
        with Delivery(lambda _: None, max_nbytes=90, budget=budget, make_room=make_room) as each:
            await each.prepare(80)
            with pytest.raises(MediaTooLarge):
                await each.prepare(91)

    asyncio.run(main())
    assert asked == [80]
