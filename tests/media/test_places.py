"""Connection slots: limited, shared fairly, and never lost."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from afferent.admission.shares import NAMELESS, Share
from afferent.media.fetch.places import FairPlaces, PlacesByName, User


def test_a_request_with_one_is_not_behind_all_of_a_request_with_many() -> None:
    asyncio.run(_one_behind_many())


async def _one_behind_many() -> None:
    places, order = FairPlaces(1), []

    async def use(name: str, user: User) -> None:
        async with places.at(user):
            order.append(name)
            await asyncio.sleep(0)

    many, one = User(NAMELESS, "many"), User(NAMELESS, "one")
    tasks = [asyncio.create_task(use(f"many {n}", many)) for n in range(50)]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(use("one", one)))
    await asyncio.gather(*tasks)
    assert order.index("one") <= 4
    assert len(order) == 51


def test_tenants_have_places_by_weight() -> None:
    asyncio.run(_by_weight())


async def _by_weight() -> None:
    places, had = FairPlaces(2), Counter[str]()
    shares = {"light": Share("light", 1.0), "heavy": Share("heavy", 3.0)}
    is_over = asyncio.Event()

    async def use(name: str, number: int) -> None:
        async with places.at(User(shares[name], (name, number))):
            had[name] += 1
            if had.total() == 40:
                is_over.set()
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(use(name, n)) for name in shares for n in range(100)]
    await is_over.wait()
    assert had["heavy"] == pytest.approx(3 * had["light"], abs=4)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_who_leaves_as_a_place_is_given_takes_it_to_nobodys_cost() -> None:
    asyncio.run(_leave_as_it_is_given())


async def _leave_as_it_is_given() -> None:
    places, user = FairPlaces(1), User(NAMELESS, 1)

    async def use() -> None:
        async with places.at(user):
            pytest.fail("it was cancelled")

    async with places.at(user):
        waiting = asyncio.create_task(use())
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    async with asyncio.timeout(5), places.at(user):
        pass


@pytest.mark.parametrize("seed", range(10))
def test_whoever_leaves_however_no_place_is_lost(seed: int) -> None:
    asyncio.run(_leave_at_random(random.Random(seed)))


async def _leave_at_random(random_: random.Random) -> None:
    named, inside, highest = PlacesByName(3), 0, 0

    async def use(number: int) -> None:
        nonlocal inside, highest
        async with named.at("host", User(NAMELESS, number % 7)):
            inside += 1
            highest = max(highest, inside)
            try:
                for _ in range(random_.randint(0, 3)):
                    await asyncio.sleep(0)
            finally:
                inside -= 1

    tasks = []
    for number in range(200):
        tasks.append(asyncio.create_task(use(number)))
        if random_.random() < 0.5:
            await asyncio.sleep(0)
        if random_.random() < 0.4:
            random_.choice(tasks).cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert highest == 3
    assert inside == 0
    assert len(named) == 0
